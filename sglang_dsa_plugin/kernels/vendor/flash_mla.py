"""Sparse MLA of a prefill by FlashMLA's kernel for bf16 rows of 576 values (github.com/deepseek-ai/FlashMLA).

What it needs and how it is met:
- 64 or 128 heads: others are padded with heads of zeros, whose output is dropped;
- picks in multiples of 128: padded with -1, which it skips, as it does slots past the last row;
- slots int32 [R, 1, K], rows [N, 1, 576].
Its rows of 576 values live in the package's legacy library. A row without a valid pick comes back with lse +inf.
"""

from __future__ import annotations

import math

import torch
from torch.nn.functional import pad

_PICKS = 128


def sparse_mla(
    q: torch.Tensor,
    kv_rows: torch.Tensor,
    slots: torch.Tensor,
    scale: float,
    layout: str,
    kv_scale: float = 1.0,
    sink: torch.Tensor | None = None,
    lengths: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`ops.sparse_mla.sparse_mla` for bf16 q and rows `bf16_1152`, 1 to 128 heads, on SM 9.0."""
    rows, heads, _ = q.shape
    if not rows or not slots.shape[1] or not kv_rows.shape[0]:
        out = q.new_zeros(rows, heads, 512) if out is None else out.zero_()
        return out, torch.full((rows, heads), -math.inf, dtype=torch.float32, device=q.device)
    from flash_mla import flash_mla_sparse_fwd

    picks = slots.shape[1]
    slots = slots.to(torch.int32)
    if lengths is not None:
        past = torch.arange(picks, device=slots.device) >= lengths.unsqueeze(1)
        slots = slots.masked_fill(past, -1)
    padded = 64 if heads <= 64 else 128
    result, _, lse = flash_mla_sparse_fwd(
        (q if heads == padded else pad(q, (0, 0, 0, padded - heads))).contiguous(),
        kv_rows.unsqueeze(1),
        pad(slots, (0, -picks % _PICKS), value=-1).unsqueeze(1).contiguous(),
        scale,
        attn_sink=None if sink is None else pad(sink, (0, padded - heads)),
        use_legacy=True,
    )
    result, lse = result[:, :heads], lse[:, :heads].float()
    none = torch.isinf(lse)
    lse = torch.where(none, -math.inf, lse)
    result = result.masked_fill(none.unsqueeze(2), 0)
    if out is None:
        return result.to(q.dtype).contiguous(), lse
    return out.copy_(result), lse
