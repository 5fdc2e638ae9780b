"""How `sglang-dsa check` judges an answer: the worst error as a share of the bound of docs/operators.md.

Up to 1 is right; inf means that something that must be equal bit for bit, or of the same kind, is not.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

Tensors = tuple[torch.Tensor | None, ...]
Judge = Callable[[Tensors, Tensors], float]
# Kernels of other packages round the weights of attention to bf16 (docs/operators.md).
ROUNDS_WEIGHTS = ("flash_mla", "fa3")


@dataclass(frozen=True)
class Case:
    """One problem of one operator. features: what `support.choose` is told. run: (device, impl) -> answer."""

    operator: str
    label: str
    features: dict[str, object]
    run: Callable[[torch.device, str], Tensors]
    want: Tensors
    judge: Judge
    judge_rounded: Judge | None = None


def equal(got: Tensors, want: Tensors) -> float:
    """Every bit counts; NaN equals NaN."""
    for a, b in zip(got, want, strict=True):
        if a is None or b is None:
            if a is not b:
                return math.inf
        elif a.shape != b.shape or not torch.equal(torch.nan_to_num(a.double()), torch.nan_to_num(b.double())):
            return math.inf
    return 0.0


def close(relative: float, absolute: float = 0.0) -> Judge:
    """Worst |error| / (absolute + relative * largest |value| of its row)."""

    def judge(got: Tensors, want: Tensors) -> float:
        worst = 0.0
        for a, b in zip(got, want, strict=True):
            if a is None or b is None:
                continue
            a, b = a.double(), b.double()
            if not torch.equal(torch.isinf(a), torch.isinf(b)):
                return math.inf
            a, b = torch.nan_to_num(a, posinf=0, neginf=0), torch.nan_to_num(b, posinf=0, neginf=0)
            bound = absolute + relative * b.abs().amax(dim=-1, keepdim=True).clamp_min(1e-30)
            worst = max(worst, float(((a - b).abs() / bound).amax())) if a.numel() else worst
        return worst

    return judge


def attention(got: Tensors, want: Tensors) -> float:
    """Output within 1e-3 of the row's largest value (or 2/128 of itself), lse within 1e-5 + 2e-6 |lse|."""
    (out, lse), (want_out, want_lse) = (tuple(t.double() for t in pair) for pair in (got[:2], want[:2]))
    none = torch.isinf(want_lse)
    if not torch.equal(torch.isinf(lse), none) or (out[none] != 0).any():
        return math.inf
    of_lse = ((lse - want_lse).abs() / (1e-5 + 2e-6 * want_lse.abs()))[~none]
    largest = want_out.abs().amax(dim=-1, keepdim=True).clamp(min=1)
    of_out = (out - want_out).abs() / torch.maximum(1e-3 * largest, 2 / 128 * want_out.abs())
    return max(float(of_lse.amax()), float(of_out.amax()))


def rounded_attention(got: Tensors, want: Tensors) -> float:
    """Output within 2^-8 of (sum of weight * |value| + |output|): want is (out, lse, that sum)."""
    out, want_out, spread = got[0].double(), want[0].double(), want[2].double()
    return float(((out - want_out).abs() / (2**-8 * (spread + want_out.abs()) + 1e-5)).amax())
