"""Keys for multi-head attention on expanded rows: every head has a part of its own, and all share the rope part.

out[s, h] = nope[s, h] followed by rope[s]
"""

from __future__ import annotations

import torch

from sglang_dsa_plugin import support
from sglang_dsa_plugin.ops import _check

_OP = "mha_keys"


def join(nope: torch.Tensor, rope: torch.Tensor, impl: str | None = None) -> torch.Tensor:
    """nope [S, H, Dn], rope [S, Dr] of one float dtype -> [S, H, Dn + Dr], contiguous; tokens and heads may be strided.

    Raises ValueError for arguments that do not fit each other, or an `impl` that cannot run here.
    """
    _check.tensor(_OP, "nope", nope, (None, None, None), _check.FLOATS)
    _check.tensor(_OP, "rope", rope, (nope.shape[0], None), (nope.dtype,), nope.device, "nope")
    for name, part in (("nope", nope), ("rope", rope)):
        if not part.shape[-1]:
            _check.fail(_OP, name, "at least 1 wide", part)
    return support.resolve(_OP, device=nope.device, impl=impl)(nope, rope)


def reference(nope: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
    """The same, a head at a time."""
    tokens, heads, width = nope.shape
    out = torch.empty(tokens, heads, width + rope.shape[1], dtype=nope.dtype, device=nope.device)
    for head in range(heads):
        out[:, head, :width] = nope[:, head]
        out[:, head, width:] = rope
    return out
