"""Hadamard rotation of index queries and keys.

    y[..., i] = 128^-1/2 * sum_j (-1)^popcount(i & j) * x[..., j]          i, j in 0 .. 127

The Sylvester-ordered Hadamard matrix, scaled to be orthonormal; it is symmetric, so the rotation is its own inverse and
leaves q . k unchanged when both sides get it. It spreads outliers over the 128 values before fp8 quantisation.

x [..., 128] float32, bfloat16 or float16; computed in fp32; the result has x's shape and dtype.
Source: J. J. Sylvester, Phil. Mag. 34 (1867); its use before quantisation: QuaRot, arXiv:2404.00456.
"""

from __future__ import annotations

import torch

from .. import support
from ..cache.layouts import INDEX_DIM
from . import _check

_OP = "hadamard.rotate"


def rotate(x: torch.Tensor, *, impl: str | None = None) -> torch.Tensor:
    """Rotate the last dimension: x [..., 128] -> [..., 128] in x's dtype.

    Raises ValueError when x is not a f32/bf16/f16 tensor of last size 128 (at least one dimension), contiguous in it.
    """
    if not isinstance(x, torch.Tensor) or x.dim() == 0:
        _check.fail(_OP, "x", f"a tensor of shape [..., {INDEX_DIM}]", x)
    _check.tensor(_OP, "x", x, (*(None,) * (x.dim() - 1), INDEX_DIM), _check.FLOATS)
    return support.resolve("hadamard", device=x.device, impl=impl)(x)


def reference(x: torch.Tensor) -> torch.Tensor:
    """The sum above term by term: x [..., 128] -> float64 [..., 128]."""
    signs = torch.tensor(
        [[1.0 - 2.0 * ((i & j).bit_count() & 1) for j in range(INDEX_DIM)] for i in range(INDEX_DIM)],
        dtype=torch.float64,
        device=x.device,
    )
    return (x.double().unsqueeze(-2) * signs).sum(-1) / INDEX_DIM**0.5
