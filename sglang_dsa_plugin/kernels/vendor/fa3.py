"""Dense causal attention by FlashAttention 3, as sgl-kernel builds it (arXiv:2407.08608).

Its causal mask is aligned to the end of the keys, as the contract's. It wants the longest lengths on the host for its
schedule: the totals stand in, which are never too small.
"""

from __future__ import annotations

import math

import torch


def dense_mha(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    scale: float,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`ops.dense_mha.dense_mha` for bf16 on SM 9.0."""
    tokens, heads, _ = q.shape
    if out is None:
        out = torch.empty(tokens, heads, v.shape[2], dtype=q.dtype, device=q.device)
    if not tokens or not k.shape[0]:
        return out.zero_(), torch.full((tokens, heads), -math.inf, dtype=torch.float32, device=q.device)
    from sgl_kernel.flash_attn import flash_attn_varlen_func

    result, lse, *_ = flash_attn_varlen_func(
        q,
        k,
        v,
        cu_q.to(torch.int32),
        cu_k.to(torch.int32),
        max_seqlen_q=tokens,
        max_seqlen_k=k.shape[0],
        softmax_scale=scale,
        causal=True,
        return_softmax_lse=True,
    )
    out.copy_(result)
    # [H, T]; a query without keys has lse +inf or -inf by version, and an output of zeros.
    lse = lse.transpose(0, 1)
    return out, torch.where(torch.isinf(lse), -math.inf, lse)
