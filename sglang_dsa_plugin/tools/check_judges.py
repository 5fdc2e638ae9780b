"""How `sglang-dsa check` judges an answer: the worst error as a share of the bound of docs/operators.md.

Up to 1 is right; inf means that something that must be equal bit for bit, or of the same kind, is not.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from sglang_dsa_plugin.cache.layouts import LATENT_DIM
from sglang_dsa_plugin.ops import quant

Tensors = tuple[torch.Tensor | None, ...]
Judge = Callable[[Tensors, Tensors], float]
# Kernels of other packages round the weights of attention to bf16 (docs/operators.md).
ROUNDS_WEIGHTS = ("flash_mla", "flash_mla_kv", "fa3", "trtllm")


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

    def share(self, device: torch.device, implementation: str) -> float:
        """The worst error of an implementation as a share of its bound; NaN counts as wrong."""
        got = tuple(None if t is None else t.cpu() for t in self.run(device, implementation))
        rounds = implementation in ROUNDS_WEIGHTS and self.judge_rounded is not None
        share = (self.judge_rounded if rounds else self.judge)(got, self.want)
        return math.inf if math.isnan(share) else share


def equal(got: Tensors, want: Tensors) -> float:
    """Every value counts; NaN equals NaN, and zero equals minus zero."""
    for a, b in zip(got, want, strict=True):
        if a is None or b is None:
            if a is not b:
                return math.inf
        elif not torch.equal(_finite(a), _finite(b)) or not _same_kind(a, b):
            return math.inf
    return 0.0


def _same_kind(a: torch.Tensor, b: torch.Tensor) -> bool:
    """The same shape, with NaN, inf and -inf in the same places."""
    a, b = a.double(), b.double()
    return a.shape == b.shape and all(
        torch.equal(kind(a), kind(b)) for kind in (torch.isnan, torch.isposinf, torch.isneginf)
    )


def _finite(x: torch.Tensor) -> torch.Tensor:
    return torch.nan_to_num(x.double(), nan=0, posinf=0, neginf=0)


def close(relative: float, absolute: float = 0.0) -> Judge:
    """Worst |error| / (absolute + relative * largest |value| of its row)."""

    def judge(got: Tensors, want: Tensors) -> float:
        worst = 0.0
        for a, b in zip(got, want, strict=True):
            if a is None or b is None:
                continue
            if not _same_kind(a, b):
                return math.inf
            a, b = _finite(a), _finite(b)
            bound = absolute + relative * b.abs().amax(dim=-1, keepdim=True).clamp_min(1e-30)
            worst = max(worst, float(((a - b).abs() / bound).amax())) if a.numel() else worst
        return worst

    return judge


def attention(got: Tensors, want: Tensors) -> float:
    """Output within 1e-3 of the row's largest value (or 2/128 of itself), lse within 1e-5 + 2e-6 |lse|."""
    out, want_out = got[0].double(), want[0].double()
    largest = want_out.abs().amax(dim=-1, keepdim=True).clamp(min=1)
    return _attention(got, want, torch.maximum(1e-3 * largest, 2 / 128 * want_out.abs()), (out - want_out).abs())


def _attention(got: Tensors, want: Tensors, bound: torch.Tensor, error: torch.Tensor) -> float:
    out, lse, want_lse = got[0], got[1].double(), want[1].double()
    none = torch.isneginf(want_lse)
    if not all(_same_kind(a, b) for a, b in zip(got[:2], want[:2])) or (out[none] != 0).any():
        return math.inf
    of_lse = (_finite(lse) - _finite(want_lse)).abs() / (1e-5 + 2e-6 * _finite(want_lse).abs())
    return max(float(of_lse.amax()), float((error / bound).amax()))


def rounded_attention(got: Tensors, want: Tensors, rounded: int = 1) -> float:
    """Output within 2^-8 of (sum of weight * |value| + |output|), lse as above: want is (out, lse, that sum).

    rounded: how many times the output is rounded; twice where a sink is brought in after the kernel.
    """
    out, want_out, spread = got[0].double(), want[0].double(), want[2].double()
    return _attention(got, want, 2**-8 * (spread + rounded * want_out.abs()) + 1e-5, (out - want_out).abs())


def spread_of(
    q: torch.Tensor,
    kv_rows: torch.Tensor,
    slots: torch.Tensor,
    scale: float,
    layout: str,
    kv_scale: float = 1.0,
    lengths: torch.Tensor | None = None,
) -> torch.Tensor:
    """The sum of weight * |value| of `ops.sparse_mla` without a sink, fp64 [R, H, 512]: what the error of a kernel that
    rounds its weights is relative to. Slots count as there: those within the row's length that name a cached row.
    """
    values = quant.reference_dequantize_latent(kv_rows, layout, kv_scale)
    spread = torch.zeros(*q.shape[:2], LATENT_DIM, dtype=torch.float64, device=q.device)
    for r in range(q.shape[0]):
        mine = slots[r] if lengths is None else slots[r, : lengths[r]]
        rows = values[mine[(mine >= 0) & (mine < kv_rows.shape[0])].long()]
        if len(rows):
            spread[r] = torch.softmax(scale * q[r].double() @ rows.T, dim=1) @ rows[:, :LATENT_DIM].abs()
    return spread
