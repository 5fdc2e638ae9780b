"""Rotary position embedding of 64 values.

    angle i of position p:  c = cos_sin[p, i],  s = cos_sin[p, 32 + i]          i in 0 .. 31
    (a, b) -> (a * c - b * s,  b * c + a * s)

where the pair (a, b) of angle i is (x[i], x[i + 32]) in layout "half" and (x[2i], x[2i + 1]) in layout "interleaved".
Each value goes back to where it came from. DeepSeek-V3.2's indexer uses "half", its MLA and GLM-5's indexer
"interleaved".

x [..., 64] float32, bfloat16 or float16: the caller slices the rope part (the first 64 of an index head's 128, the last
64 of an MLA head). positions: int32/int64, their shape a prefix of x.shape[:-1]; one position serves all heads after.
cos_sin [max, 64]: 32 cosines, then 32 sines, a float dtype. Computed in fp32; the result has x's shape and dtype.
Source: RoFormer, arXiv:2104.09864.
"""

from __future__ import annotations

import torch

from .. import support
from ..cache.layouts import ROPE_DIM
from . import _check

_OP = "rope.apply"
LAYOUTS = ("half", "interleaved")


def apply(
    x: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, layout: str, *, impl: str | None = None
) -> torch.Tensor:
    """Rotate x [..., 64] by its positions -> a new tensor of x's shape and dtype.

    Raises ValueError for a wrong dtype, size, device or layout, and for positions whose shape is no prefix of
    x.shape[:-1]. A position outside [0, max) is an error of the caller (on a GPU it is not read on the host).
    """
    _check.one_of(_OP, "layout", layout, LAYOUTS)
    if not isinstance(x, torch.Tensor) or x.dim() == 0:
        _check.fail(_OP, "x", f"a tensor of shape [..., {ROPE_DIM}]", x)
    _check.tensor(_OP, "x", x, (*(None,) * (x.dim() - 1), ROPE_DIM), _check.FLOATS)
    if not isinstance(positions, torch.Tensor) or positions.shape != x.shape[:-1][: positions.dim()]:
        _check.fail(
            _OP, "positions", f"an int32/int64 tensor whose shape is a prefix of {list(x.shape[:-1])}", positions
        )
    _check.index_tensor(_OP, "positions", positions, tuple(positions.shape), x.device)
    _check.tensor(_OP, "cos_sin", cos_sin, (None, ROPE_DIM), (*_check.FLOATS, torch.float64), x.device)
    return support.resolve("rope", device=x.device, impl=impl)(x, positions, cos_sin, layout)


def reference(x: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, layout: str) -> torch.Tensor:
    """Each pair as a complex number times cos + i sin: x [..., 64] -> float64 [..., 64]."""
    table = cos_sin.double()
    turn = torch.complex(table[:, : ROPE_DIM // 2], table[:, ROPE_DIM // 2 :])[positions.long()]
    turn = turn.reshape(*positions.shape, *(1,) * (x.dim() - 1 - positions.dim()), ROPE_DIM // 2)
    v = x.double()
    if layout == "half":
        z = torch.complex(v[..., : ROPE_DIM // 2], v[..., ROPE_DIM // 2 :]) * turn
        return torch.cat((z.real, z.imag), dim=-1)
    z = torch.complex(v[..., 0::2], v[..., 1::2]) * turn
    return torch.view_as_real(z).flatten(-2)
