"""Index scores in fp8 by DeepGEMM (github.com/deepseek-ai/DeepGEMM), as the sgl-deep-gemm wheel builds it.

Its pages are this package's (64 keys of 128 e4m3, then 64 f32 scales), and its weights are the gate with every scale
but the key's folded in. What it needs and how the operator's rules are met:
- 32 or 64 heads: fewer are padded with heads of zeros and a gate of zero;
- lengths of at least 1: its schedule reads out of bounds when all are zero (deepseek-ai/DeepGEMM#354), so an empty
  window is scored as one key, and its column replaced;
- windows inside the keys, pages inside the cache: both are clamped, so padding rows may hold anything;
- a page table a row: rows of the same request get copies of its row;
- rows a call: its schedule keeps a number a row in shared memory (DeepGEMM#322), and on SM 10.x a call takes no more
  rows than there are processors; more are worked off in groups;
- columns outside a row's window are left as they are, junk or not: they are replaced with -inf;
- keys at an address that is a multiple of 16, as whole tensors have it.
It compiles a kernel at its first call for a number of heads, which takes seconds and must not fall into the recording
of a CUDA graph; SGLang runs every shape once before it records it. `ragged` has one kernel for all shapes of a model,
which the warm-up's first long prompt brings (adapter/hooks/warmup.py).
"""

from __future__ import annotations

import math

import torch
from torch.nn.functional import pad

from sglang_dsa_plugin.cache.layouts import INDEX_DIM, PAGE_SIZE
from sglang_dsa_plugin.kernels.triton.index_scores import capturing, fill_past

_ROWS = 2048
_ROWS_PER_PROCESSOR_FROM = 10  # major compute capability
_KEY_BYTES = INDEX_DIM + 4
_ROWS_AND_HEADS = 128
_COLUMNS = 256


def ragged(
    q: torch.Tensor,
    k: torch.Tensor,
    k_scale: torch.Tensor | None,
    gate: torch.Tensor,
    start: torch.Tensor,
    end: torch.Tensor,
    width: int | None,
) -> torch.Tensor:
    """`ops.index_scores.ragged` for e4m3 q and k. Without `width` it reads the widest window on the host or, where a
    CUDA graph is being recorded, takes the number of keys.
    """
    if width is None:
        width = k.shape[0] if capturing(q.device) or not len(q) else max(0, int((end - start).max()))
    if not q.shape[0] or not width or not k.shape[0]:
        return _nothing(q, width)
    lengths = (end - start).clamp(min=0, max=width)
    scores = ragged_scores(q, k, k_scale, gate, *windows(start, lengths, k.shape[0]), width)
    return fill_past(scores, lengths)


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
    width: int,
) -> torch.Tensor:
    """f32 [R, width] whose columns past a row's window hold anything; first, last: of `windows`. Reads nothing on the
    host. At least one row, key and column; its rows take `score_row_bytes` of memory each.
    """
    import deep_gemm

    q, gate = _padded(q, gate)
    # With a largest length given, column 0 of a row is the first key of its window, as here.
    scores = deep_gemm.fp8_mqa_logits(
        q, (k.contiguous(), k_scale.contiguous()), gate, first, last, clean_logits=False, max_seqlen_k=width
    )
    return scores[:, :width]


def score_row_bytes(width: int) -> int:
    """Memory of a row of `ragged_scores`: its columns are a multiple of 256."""
    return 4 * -(-width // _COLUMNS) * _COLUMNS


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
    if width is None:
        covered = page_table.shape[1] * PAGE_SIZE
        width = covered if capturing(q.device) or not len(q) else max(0, int(lengths.max()))
    scores = paged_scores(q, pages, gate, lengths, page_table, row_to_request, width)
    return fill_past(scores, lengths)


def paged_scores(
    q: torch.Tensor,
    pages: torch.Tensor,
    gate: torch.Tensor,
    lengths: torch.Tensor,
    page_table: torch.Tensor,
    row_to_request: torch.Tensor,
    width: int,
) -> torch.Tensor:
    """f32 [R, width] whose columns past a row's length hold anything. Reads nothing on the host."""
    if not q.shape[0] or not width or not pages.shape[0] or not page_table.shape[1]:
        return _nothing(q, width)
    import deep_gemm

    q, gate = _padded(q, gate)
    covered = min(-(-width // PAGE_SIZE), page_table.shape[1])
    table = page_table[:, :covered].clamp(min=0, max=pages.shape[0] - 1).to(torch.int32)
    table = table.index_select(0, row_to_request.long())
    sizes = lengths.clamp(min=1, max=min(width, covered * PAGE_SIZE)).to(torch.int32).unsqueeze(1)
    cache = pages.view(-1, PAGE_SIZE, 1, _KEY_BYTES)
    processors = deep_gemm.get_num_sms()
    step = processors if torch.cuda.get_device_capability(q.device)[0] >= _ROWS_PER_PROCESSOR_FROM else _ROWS
    parts = []
    for top in range(0, q.shape[0], step):
        rows = slice(top, top + step)
        schedule = deep_gemm.get_paged_mqa_logits_metadata(sizes[rows], PAGE_SIZE, processors)
        parts.append(
            deep_gemm.fp8_paged_mqa_logits(
                q[rows].unsqueeze(1),
                cache,
                gate[rows],
                sizes[rows],
                table[rows],
                schedule,
                covered * PAGE_SIZE,
                clean_logits=False,
            )
        )
    scores = parts[0] if len(parts) == 1 else torch.cat(parts)
    if scores.shape[1] < width:  # more columns were asked for than the page table covers
        return pad(scores, (0, width - scores.shape[1]), value=-math.inf)
    return scores[:, :width]


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
