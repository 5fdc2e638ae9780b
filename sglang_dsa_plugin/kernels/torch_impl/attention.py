"""The two steps of attention that sparse and dense share, in f32."""

from __future__ import annotations

import torch


def scaled_scores(q: torch.Tensor, k_t: torch.Tensor, scale: float) -> torch.Tensor:
    """scale * q @ k_t for q [B, M, D] and k_t [B, D, N], f32.

    The scale is applied to the product, not to q: then bf16 inputs reach the multiplier unchanged, and a reduced f32
    matmul precision set by the process (TF32 keeps 11 bits) does not touch them.
    """
    unread = q.new_empty(1, 1, 1).expand(q.shape[0], q.shape[1], k_t.shape[2])
    return torch.baddbmm(unread, q, k_t, beta=0, alpha=scale)


def softmax_and_lse(scores: torch.Tensor, out: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax over the last dimension and its natural log-sum-exp.

    The largest score s has weight w = exp(s - lse), so lse = s - log w: two reductions instead of another exp pass.
    """
    weights = torch.softmax(scores, dim=-1) if out is None else torch.softmax(scores, dim=-1, out=out)
    return weights, scores.amax(dim=-1).sub_(weights.amax(dim=-1).log_())
