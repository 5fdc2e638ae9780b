"""Matrix products with fp32 products and sums, whatever precision switches the process has set.

`torch.set_float32_matmul_precision` and its kin let f32 matmuls round their inputs to TF32 or bf16. bf16 and e4m3
values survive that; f32 and f16 values do not, and a score that is off by 1e-3 picks other keys.

On the CPU a row of a product depends on that row alone, not on how many rows come with it, as long as there are at
least MIN_ROWS of them (fewer take another path of the library, with other rounding) and columns come in 64s.
Tests of index_scores and hadamard hold this; cuBLAS makes no such promise.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from ...cache.layouts import FP8

MIN_ROWS = 16


def plain_f32(device: torch.device) -> bool:
    """False when a switch of the process lets f32 matmuls on this device round their inputs."""
    backend = torch.backends.mkldnn if device.type == "cpu" else torch.backends.cuda
    precision = backend.matmul.fp32_precision
    return (torch.backends.fp32_precision if precision == "none" else precision) in ("none", "ieee")


def multiply(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor, dtype: torch.dtype) -> None:
    """out f32 [b, n, m] = left [b, n, k] @ right [b, k, m]; `dtype` is what the values of both came from."""
    if left.dtype != torch.float32:
        torch.bmm(left, right, out_dtype=torch.float32, out=out)
    elif dtype in (FP8, torch.bfloat16) or plain_f32(left.device):
        torch.bmm(left, right, out=out)
    else:
        out.copy_(torch.bmm(left.double(), right.double()))


def pad_rows(x: torch.Tensor) -> torch.Tensor:
    """x [n, k] with rows of zeros up to MIN_ROWS."""
    return x if len(x) >= MIN_ROWS else pad(x, (0, 0, 0, MIN_ROWS - len(x)))
