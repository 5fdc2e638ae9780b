"""Dense causal attention in torch: one request and one tile of queries at a time, products in f32."""

from __future__ import annotations

import math

import torch

# Scores alive at once, in f32 values.
_TILE_VALUES = 16 << 20


def dense_mha(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    scale: float,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`ops.dense_mha.dense_mha`; on a GPU the two length vectors are read once by the host."""
    tokens, heads, _ = q.shape
    if out is None:
        out = torch.empty(tokens, heads, v.shape[2], dtype=q.dtype, device=q.device)
    lse = torch.empty(tokens, heads, dtype=torch.float32, device=q.device)
    starts_q, starts_k = torch.stack((cu_q.long(), cu_k.long())).tolist()
    for q0, q1, k0, k1 in zip(starts_q, starts_q[1:], starts_k, starts_k[1:]):
        ahead = (k1 - k0) - (q1 - q0)
        step = max(1, min(256, _TILE_VALUES // (heads * max(1, k1 - k0))))
        for at in range(q0, q1, step):
            end = min(at + step, q1)
            seen = max(0, ahead + end - q0)
            part = slice(at, end)
            _tile(q[part], k[k0 : k0 + seen], v[k0 : k0 + seen], ahead + at - q0, scale, out[part], lse[part])
    return out, lse


def _tile(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    ahead: int,
    scale: float,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    """Query i of the tile sees keys 0 .. ahead + i."""
    if not k.shape[0]:
        out.zero_()
        lse.fill_(-math.inf)
        return
    scores = torch.bmm(q.transpose(0, 1).float(), k.permute(1, 2, 0).float()).mul_(scale)
    hidden = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).triu_(ahead + 1)
    scores.masked_fill_(hidden, -math.inf)
    total = torch.logsumexp(scores, dim=2)
    weights = torch.exp(scores - total.unsqueeze(2)).masked_fill_(hidden, 0)
    out.copy_(torch.bmm(weights, v.transpose(0, 1).float()).transpose(0, 1))
    lse.copy_(total.transpose(0, 1))
