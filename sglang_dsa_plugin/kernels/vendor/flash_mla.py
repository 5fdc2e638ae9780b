"""Sparse MLA by FlashMLA (github.com/deepseek-ai/FlashMLA): bf16 rows of 576 values, and packed fp8 rows of 656 bytes.

Both live in the package's legacy library. What they need and how it is met:
- 64 or 128 heads and queries in one piece: `whole_queries` joins their parts and adds heads of zeros, whose output is
  dropped;
- bf16 (`sparse_mla`, its prefill kernel): picks in multiples of 128, padded with -1, which it skips, as it does slots
  past the last row; slots int32 [R, 1, K], rows [N, 1, 576];
- fp8 (`sparse_mla_packed`, its decode kernel): picks in multiples of 64; exactly -1 is "none" and everything else is
  read, so slots are masked before where they are not promised to be a `prefix`; rows in pages of 64; scales that are
  powers of two, as this package writes them (with others its lse was off by 6e-2 on an H200);
- a row without a valid pick comes back with output 0 and lse +inf, which becomes -inf where lse is asked for;
- a schedule for its split over the keys, made on the device by the first call for a shape. It depends on the shape
  alone as long as no lengths are handed over, so short rows are padded with -1 instead. See `_schedule`.
"""

from __future__ import annotations

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
    q_rope: torch.Tensor | None = None,
    prefix: bool = False,
    with_lse: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`ops.sparse_mla.sparse_mla` for bf16 q and rows `bf16_1152`, 1 to 128 heads, on SM 9.0."""
    empty = attention.nothing(q, slots, kv_rows, out)
    if empty is not None:
        return empty
    from flash_mla import flash_mla_sparse_fwd

    from sglang_dsa_plugin.kernels.triton.query_rows import whole_queries

    heads = q.shape[1]
    counts = None
    if lengths is not None or slots.shape[1] % _PICKS or slots.dtype != torch.int32 or not slots.is_contiguous():
        slots, counts = attention.picks_in_front(slots, kv_rows.shape[0], lengths, prefix, multiple=_PICKS)
    padded = _padded(heads)
    result, _, lse = flash_mla_sparse_fwd(
        whole_queries(q, q_rope, padded),
        kv_rows.unsqueeze(1),
        slots.unsqueeze(1),
        scale,
        attn_sink=_padded_sink(sink, padded),
        # It stops at a row's last pick then; what is behind is -1.
        topk_length=counts,
        use_legacy=True,
        return_log2_lse=None if with_lse else False,  # natural log, or not even written
    )
    return attention.finished(result[:, :heads], lse[:, :heads] if with_lse else None, out=out)


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
    q_rope: torch.Tensor | None = None,
    prefix: bool = False,
    with_lse: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`ops.sparse_mla.sparse_mla` for bf16 q and rows `fp8_656`, 1 to 128 heads, on SM 9.0 and 10.x."""
    empty = attention.nothing(q, slots, kv_rows, out)
    if empty is not None:
        return empty
    from flash_mla import flash_mla_with_kvcache

    from sglang_dsa_plugin.kernels.triton.query_rows import whole_queries

    rows, heads, _ = q.shape
    picked, _ = attention.picks_in_front(slots, kv_rows.shape[0], lengths, prefix, multiple=_PACKED_PICKS)
    padded = _padded(heads)
    result, lse = flash_mla_with_kvcache(
        whole_queries(q, q_rope, padded).unsqueeze(1),
        attention.whole_pages(kv_rows).unsqueeze(2),
        None,
        None,
        LATENT_DIM,
        _schedule(q.device, rows, padded, picked.shape[1]),
        softmax_scale=scale,
        is_fp8_kvcache=True,
        indices=picked.unsqueeze(1),
        attn_sink=_padded_sink(sink, padded),
        use_legacy=True,
    )
    # [R, 1, heads, 512] and [R, heads, 1]
    return attention.finished(result[:, 0, :heads], lse[:, :heads, 0] if with_lse else None, out=out)


def _padded(heads: int) -> int:
    """Heads that the kernels compute for this many."""
    return 64 if heads <= 64 else 128


def _padded_sink(sink: torch.Tensor | None, heads: int) -> torch.Tensor | None:
    """sink f32 [H] for `heads` heads, those of the padding 0."""
    if sink is None or sink.shape[0] == heads:
        return sink
    return pad(sink, (0, heads - sink.shape[0]))


_Shape = tuple[torch.device, int, int, int]
_schedules: dict[_Shape, Any] = {}
_prefill_schedules: OrderedDict[_Shape, Any] = OrderedDict()


def _schedule(device: torch.device, rows: int, heads: int, picks: int) -> Any:
    """The kernel's split over processors for a shape, which its first call fills in, on the device.

    Kept for the shapes of decode steps, so that layers and steps share one. A CUDA graph replays with the memory it was
    recorded with: what an eager call left is used in a graph and never dropped from then on, and one that is made
    during a recording belongs to that graph alone. Of prefills, whose shapes are many and of which a server records
    those of whole graphs alone, the last few are kept: the layers of a step follow each other.
    """
    key = (device, rows, heads, picks)
    recording = torch.cuda.is_current_stream_capturing()
    few = rows <= _SCHEDULED_ROWS
    if recording and key in _prefill_schedules:
        _schedules[key] = _prefill_schedules.pop(key)
    if key in _schedules:
        return _schedules[key]
    kept: dict[_Shape, Any] = _schedules if few else _prefill_schedules
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
