"""Index scores in fp8 by DeepGEMM (github.com/deepseek-ai/DeepGEMM), as the sgl-deep-gemm wheel builds it.

Its pages are this package's (64 keys of 128 e4m3, then 64 f32 scales), and its weights are the gate with every scale
but the key's folded in. What it needs and how the operator's rules are met:
- 32 or 64 heads: fewer are padded with heads of zeros and a gate of zero;
- lengths of at least 1, a page table a row, at most so many rows a call: see deep_gemm_plan.py; windows that are empty
  are scored as one key, and its column replaced;
- windows inside the keys, pages inside the cache: both are clamped, so padding rows may hold anything;
- columns outside a row's window are left as they are, junk or not: they are replaced with -inf;
- keys and scales at an address that is a multiple of 16, as whole tensors have it: others are copied.
Keys in one piece are scored in two forms of `ragged_scores`: a column a key of the buffer, or a column a key of the
row's window, for which it compares each score's place with the window's ends.
It compiles a kernel at its first call for a number of heads, and one for the schedule of every 32 rows more, which
takes seconds and must not fall into the recording of a CUDA graph; SGLang runs every shape once before it records it.
Decode outside of graphs takes those that deep_gemm_load.py had compiled. `ragged` has one kernel for all shapes of a
model, which the warm-up's first long prompt brings (adapter/hooks/warmup.py).
"""

from __future__ import annotations

import math

import torch
from torch.nn.functional import pad

from sglang_dsa_plugin.cache.layouts import INDEX_DIM, PAGE_SIZE
from sglang_dsa_plugin.kernels.triton.index_scores import capturing, fill_past

from . import deep_gemm_plan
from .deep_gemm_plan import Plan

_KEY_BYTES = INDEX_DIM + 4
_ROWS_AND_HEADS = 128
_COLUMNS = 256
ROW_ALIGN = 4


def ragged(
    q: torch.Tensor,
    k: torch.Tensor,
    k_scale: torch.Tensor | None,
    gate: torch.Tensor,
    start: torch.Tensor | None,
    end: torch.Tensor,
    width: int | None,
) -> torch.Tensor:
    """`ops.index_scores.ragged` for e4m3 q and k. Without `width` it reads the widest window on the host or, where a
    CUDA graph is being recorded, takes the number of keys.
    """
    keys, lengths = k.shape[0], end if start is None else end - start
    if width is None:
        width = keys if capturing(q.device) or not len(q) else max(0, int(lengths.max()))
    if not q.shape[0] or not width or not keys:
        return _nothing(q, width)
    if start is not None:
        lengths = lengths.clamp(min=0, max=width)
        return fill_past(ragged_scores(q, k, k_scale, gate, *windows(start, lengths, keys), width), lengths)
    used = min(width, keys)
    window = torch.zeros_like(end, dtype=torch.int32), end.clamp(min=1, max=used).to(torch.int32)
    scores = ragged_scores(q, k[:used], k_scale[:used], gate, *window, None)
    return fill_past(scores if used == width else pad(scores, (0, width - used)), lengths)


def windows(start: torch.Tensor, lengths: torch.Tensor, keys: int) -> tuple[torch.Tensor, torch.Tensor]:
    """First key and the one after the last, int32 [R] each, as DeepGEMM takes them: inside the keys, never empty."""
    first = start.clamp(min=0, max=keys - 1).to(torch.int32)
    return first, (first + lengths.clamp(min=1)).clamp(max=keys).to(torch.int32)


def ragged_scores(
    q: torch.Tensor,
    k: torch.Tensor,
    k_scale: torch.Tensor,
    gate: torch.Tensor,
    first: torch.Tensor,
    last: torch.Tensor,
    width: int | None,
) -> torch.Tensor:
    """f32 [R, width], column 0 the first key of a row's window; without a width f32 [R, keys], column 0 the first key.
    Columns outside a row's window hold anything; first, last: of `windows`. Reads nothing on the host. At least one
    row, key and column; its rows take `score_row_bytes` of memory each, and their number is rounded up to ROW_ALIGN.
    """
    import deep_gemm

    q, gate = _padded(q, gate)
    more = {} if width is None else {"max_seqlen_k": width}
    return deep_gemm.fp8_mqa_logits(q, (_aligned(k), _aligned(k_scale)), gate, first, last, clean_logits=False, **more)


def _aligned(x: torch.Tensor) -> torch.Tensor:
    """x in one piece, at an address from which the kernel's bulk copies may read; a copy where it is not."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % 16 else x


def score_row_bytes(width: int) -> int:
    """Memory of a row of `ragged_scores` with a width: its columns are a multiple of 256."""
    return 4 * -(-width // _COLUMNS) * _COLUMNS


def key_row_bytes(keys: int) -> int:
    """Memory of a row of `ragged_scores` without a width: room for as many keys as are scored together."""
    return score_row_bytes(keys + _COLUMNS)


def rows_at_once(heads: int) -> int:
    """Rows that `ragged_scores` works on at a time: a processor takes 128 / heads of them, with all their keys."""
    import deep_gemm

    return _ROWS_AND_HEADS // _padded_heads(heads) * deep_gemm.get_num_sms()


def paged(
    q: torch.Tensor,
    pages: torch.Tensor,
    gate: torch.Tensor,
    lengths: torch.Tensor,
    page_table: torch.Tensor,
    row_to_request: torch.Tensor,
    width: int | None,
) -> torch.Tensor:
    """`ops.index_scores.paged` for e4m3 q and pages u8 [P, 8448]. Without `width` it reads the longest window on the
    host or, where a CUDA graph is being recorded, takes the tokens that the page table covers.
    """
    covered = page_table.shape[1] * PAGE_SIZE
    if width is None:
        width = covered if capturing(q.device) or not len(q) else max(0, int(lengths.max()))
    if not q.shape[0] or not width or not pages.shape[0] or not covered:
        return _nothing(q, width)
    plan = deep_gemm_plan.make(lengths, page_table, row_to_request, len(pages), min(width, covered), 0)
    parts = [
        paged_scores(q[top : top + plan.group], pages, gate[top : top + plan.group], plan, number)
        for number, top in enumerate(range(0, len(q), plan.group))
    ]
    scores = parts[0] if len(parts) == 1 else torch.cat(parts)
    # More columns may be asked for than the page table covers.
    scores = scores[:, :width] if scores.shape[1] >= width else pad(scores, (0, width - scores.shape[1]))
    return fill_past(scores, lengths)


def paged_scores(q: torch.Tensor, pages: torch.Tensor, gate: torch.Tensor, plan: Plan, number: int) -> torch.Tensor:
    """f32 [rows, columns of the plan's pages] of the plan's group of that number, whose columns past a row's size hold
    anything. Reads nothing on the host. A row takes `page_row_bytes` of memory.
    """
    import deep_gemm

    q, gate = _padded(q, gate)
    rows = slice(number * plan.group, number * plan.group + len(q))
    scores = deep_gemm.fp8_paged_mqa_logits(
        q.unsqueeze(1),
        pages.view(-1, PAGE_SIZE, 1, _KEY_BYTES),
        gate,
        plan.sizes[rows],
        plan.table[rows],
        plan.schedules[number],
        plan.table.shape[1] * PAGE_SIZE,
        clean_logits=False,
    )
    # A single row comes with a stride of 1, which says nothing of how it is aligned.
    return scores.as_strided(scores.shape, (page_row_bytes(scores.shape[1]) // 4, 1)) if len(q) == 1 else scores


def page_row_bytes(width: int) -> int:
    """Memory of a row of `paged_scores`: its columns are a multiple of 256."""
    return score_row_bytes(width)


def _padded(q: torch.Tensor, gate: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """q [R, H, 128] and gate [R, H] with 32 or 64 heads, contiguous."""
    more = _padded_heads(q.shape[1]) - q.shape[1]
    if more:
        # Padding is not defined for fp8; its zero is the zero byte.
        q = pad(q.view(torch.uint8), (0, 0, 0, more)).view(q.dtype)
        gate = pad(gate, (0, more))
    return q.contiguous(), gate.contiguous()


def _padded_heads(heads: int) -> int:
    return 32 if heads <= 32 else 64


def _nothing(q: torch.Tensor, width: int) -> torch.Tensor:
    return torch.full((q.shape[0], width), -math.inf, dtype=torch.float32, device=q.device)
