"""Sparse MLA by FlashMLA (github.com/deepseek-ai/FlashMLA): bf16 rows of 576 values, and packed fp8 rows of 656 bytes.

Both live in the package's legacy library. What they need and how it is met:
- 64 or 128 heads: others are padded with heads of zeros, whose output is dropped;
- bf16 (`sparse_mla`, its prefill kernel): picks in multiples of 128, padded with -1, which it skips, as it does slots
  past the last row; slots int32 [R, 1, K], rows [N, 1, 576]; a row without a valid pick comes back with lse +inf;
- fp8 (`sparse_mla_packed`, its decode kernel): picks in multiples of 64; exactly -1 is "none" and everything else is
  read, so slots are masked before; rows in pages of 64; scales that are powers of two, as this package writes them
  (with others its lse was off by 6e-2 on an H200);
- a schedule for its split over the keys, made on the device by the first call for a shape. It depends on the shape
  alone as long as no lengths are handed over, so short rows are padded with -1 instead. See `_schedule`.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Any

import torch
from torch.nn.functional import pad

from sglang_dsa_plugin.cache.layouts import LATENT_DIM

from . import attention

_PICKS = 128
_PACKED_PICKS = 64
_SCHEDULED_ROWS = 512
_PREFILLS_KEPT = 4


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

    from sglang_dsa_plugin.kernels.triton.empty_rows import clear_empty_rows

    picks = slots.shape[1]
    slots = slots.to(torch.int32)
    if lengths is not None:
        slots = torch.where(torch.arange(picks, device=slots.device) < lengths.unsqueeze(1), slots, -1)
    if picks % _PICKS:
        slots = pad(slots, (0, -picks % _PICKS), value=-1)
    padded = 64 if heads <= 64 else 128
    result, _, lse = flash_mla_sparse_fwd(
        attention.padded_heads(q, padded),
        kv_rows.unsqueeze(1),
        slots.unsqueeze(1).contiguous(),
        scale,
        attn_sink=None if sink is None else pad(sink, (0, padded - heads)),
        use_legacy=True,
    )
    result, lse = result[:, :heads], lse[:, :heads].float()
    out = result.contiguous() if out is None else out.copy_(result)
    # The kernel's own tensors where nothing had to be converted: a prefill's output is large, one pass over it is felt.
    clear_empty_rows(out, lse)
    return out, lse


def sparse_mla_packed(
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
    """`ops.sparse_mla.sparse_mla` for bf16 q and rows `fp8_656`, 1 to 128 heads, on SM 9.0 and 10.x."""
    empty = attention.nothing(q, slots, kv_rows, out)
    if empty is not None:
        return empty
    from flash_mla import flash_mla_with_kvcache

    from sglang_dsa_plugin.kernels.triton.slot_prefix import slot_prefix

    rows, heads, _ = q.shape
    picked, counts = slot_prefix(slots, kv_rows.shape[0], lengths, multiple=_PACKED_PICKS)
    padded = 64 if heads <= 64 else 128
    result, lse = flash_mla_with_kvcache(
        attention.padded_heads(q, padded).unsqueeze(1),
        attention.whole_pages(kv_rows).unsqueeze(2),
        None,
        None,
        LATENT_DIM,
        _schedule(q.device, rows, padded, picked.shape[1]),
        softmax_scale=scale,
        is_fp8_kvcache=True,
        indices=picked.unsqueeze(1),
        use_legacy=True,
    )
    # [R, 1, heads, 512] and [R, heads, 1]
    return attention.finished(result[:, 0, :heads], lse[:, :heads, 0], counts, q.dtype, sink, out)


_Shape = tuple[torch.device, int, int, int]
_schedules: dict[_Shape, Any] = {}
_prefill_schedules: OrderedDict[_Shape, Any] = OrderedDict()


def _schedule(device: torch.device, rows: int, heads: int, picks: int) -> Any:
    """The kernel's split over processors for a shape, which its first call fills in, on the device.

    Kept for the shapes of decode steps, so that layers and steps share one. A CUDA graph replays with the memory it was
    recorded with: what an eager call left is used in a graph and never dropped, and one that is made during a recording
    belongs to that graph alone. Of prefills, whose shapes are many and which no graph records, the last few are kept:
    the layers of a step follow each other.
    """
    key = (device, rows, heads, picks)
    recording = torch.cuda.is_current_stream_capturing()
    few = rows <= _SCHEDULED_ROWS
    kept: dict[_Shape, Any] = _schedules if few or recording else _prefill_schedules
    if key in kept:
        return kept[key]
    from flash_mla import get_mla_metadata

    made, _ = get_mla_metadata()
    if recording:
        return made
    kept[key] = made
    if not few and len(kept) > _PREFILLS_KEPT:
        _prefill_schedules.popitem(last=False)
    return made
