"""Scores and exact selection in one, within a budget of score memory; see ops/index_select.py.

Rows are worked off in groups whose scores fit the budget, in one buffer that is used again. Nothing is read on the
host: the buffer is as wide as the longest row can be, and rows not longer than `topk` are skipped on the device.

A row that does not fit alone is scored in stretches of keys. What was best so far lies right before the new scores, in
ascending position, so the selection's own tie rule (lowest position first) stays right across stretches.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from sglang_dsa_plugin.cache.layouts import FP8, INDEX_DIM, PAGE_SIZE
from sglang_dsa_plugin.kernels.cuda import select as cuda_select
from sglang_dsa_plugin.kernels.torch_impl.select import add_offsets

from . import index_scores, index_tables
from .select import positions_to_slots, select_rows, tickets_for

_ALIGNED_ROWS = (16, 4)  # lengths of 4 rows are 16 bytes, which is what Triton means by aligned
ANY_BUDGET = 1 << 40  # bytes: rows without keys take hardly any

# (buffer f32 [n, columns], rows, first column, row lengths from there on, skip, tickets): writes the scores of rows
# longer than skip, and zeros to tickets int32 [n] where they are given.
Score = Callable[[torch.Tensor, slice, int, torch.Tensor, int, torch.Tensor | None], None]


def ragged(
    q: torch.Tensor,
    k: torch.Tensor,
    k_scale: torch.Tensor | None,
    gate: torch.Tensor,
    start: torch.Tensor,
    end: torch.Tensor,
    topk: int,
    init_tokens: int,
    local_tokens: int,
    budget_bytes: int,
    offsets: torch.Tensor | None = None,
) -> torch.Tensor:
    """`ops.index_select.ragged`: positions int32 [R, topk], plus `offsets` in the same pass."""
    lengths = (end - start).clamp(min=0, max=k.shape[0]).to(torch.int32)

    def score(
        buffer: torch.Tensor, rows: slice, column: int, sizes: torch.Tensor, skip: int, tickets: torch.Tensor | None
    ) -> None:
        if tickets is not None:
            tickets.zero_()
        first, last = start[rows], end[rows]
        if column:
            first = first + column
            last = first + sizes
        index_scores.score_ragged(buffer, q[rows], k, k_scale, gate[rows], first, last, skip)

    return _select(score, lengths, k.shape[0], topk, init_tokens, local_tokens, budget_bytes, None, offsets)


def paged(
    q: torch.Tensor,
    pages: torch.Tensor,
    gate: torch.Tensor,
    lengths: torch.Tensor,
    page_table: torch.Tensor,
    row_to_request: torch.Tensor,
    topk: int,
    init_tokens: int,
    local_tokens: int,
    budget_bytes: int,
    slots: bool = False,
    slots_out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`ops.index_select.paged`: positions int32 [R, topk], or slots in the same pass; or both, slots to `slots_out`,
    contiguous int32 [R, topk].
    """
    rows_in_all, requests_in_all = q.shape[0], page_table.shape[0]

    def score(
        buffer: torch.Tensor, rows: slice, column: int, sizes: torch.Tensor, skip: int, tickets: torch.Tensor | None
    ) -> None:
        taken = page_table[:, column // PAGE_SIZE : -(-(column + buffer.shape[1]) // PAGE_SIZE)]
        requests = max(1, requests_in_all * buffer.shape[0] // rows_in_all)
        index_scores.score_paged(
            buffer, q[rows], pages, gate[rows], sizes, taken, row_to_request[rows], skip, requests, tickets
        )

    width = page_table.shape[1] * PAGE_SIZE
    where = (page_table, row_to_request) if slots or slots_out is not None else None
    return _select(score, lengths, width, topk, init_tokens, local_tokens, budget_bytes, where, None, slots_out)


def without_keys(
    pages: torch.Tensor, heads: int, topk: int, rows: int, each: int = 1
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(q, gate, lengths, page_table, row_to_request) of rows that have no key, `each` of every request, in a table of
    more than `topk` tokens: to have kernels compiled with. pages: index pages of any layer.
    """

    def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=pages.device)

    if pages.dtype == torch.uint8:
        q = zeros(rows, heads, INDEX_DIM, dtype=torch.uint8).view(FP8)
    else:
        q = zeros(rows, heads, INDEX_DIM, dtype=pages.dtype)
    owner = torch.arange(rows, dtype=torch.int32, device=pages.device) // each
    return q, zeros(rows, heads, dtype=torch.float32), zeros(rows), zeros(rows // each, topk // PAGE_SIZE + 2), owner


def load(pages: torch.Tensor, heads: int, topk: int, rows: int, each: int = 1, *, selection: bool = True) -> None:
    """Have the kernels of `paged` compiled for so many rows, `each` of every request, none of which has a key.
    pages: index pages of any layer. selection: without it those of the scores alone.
    """
    q, gate, *of_rows = without_keys(pages, heads, topk, rows, each)
    if selection:
        slots = torch.zeros((rows, topk), dtype=torch.int32, device=pages.device)
        paged(q, pages, gate, *of_rows, topk, 0, 0, ANY_BUDGET, slots_out=slots)
    else:
        scores = index_scores.new_scores(rows, of_rows[1].shape[1] * PAGE_SIZE, pages.device)
        index_scores.score_paged(scores, q, pages, gate, *of_rows)


def _select(
    score: Score,
    lengths: torch.Tensor,
    width: int,
    topk: int,
    init_tokens: int,
    local_tokens: int,
    budget_bytes: int,
    slots: tuple[torch.Tensor, torch.Tensor] | None,
    offsets: torch.Tensor | None,
    slots_out: torch.Tensor | None = None,
) -> torch.Tensor:
    count = lengths.shape[0]
    picks = torch.empty((count, topk), dtype=torch.int32, device=lengths.device)
    if not count:
        return picks
    gpu, short = index_tables.gpu_of(lengths.device), width <= topk
    row_bytes = 4 * index_scores.new_scores(0, width, lengths.device).stride(0)
    group = count
    if not short:
        # The lists of the selection in Triton are scores that are alive, too.
        in_cuda = cuda_select.preferred(lengths.device, count, width, topk, PAGE_SIZE)
        group = index_tables.rows_in_budget(gpu, count, width, topk, row_bytes, budget_bytes, _whole, in_cuda)
    fits, group = group > 0, max(1, group)
    buffer = index_scores.new_scores(group if fits and not short else 1, width if fits else 1, lengths.device)
    for top in range(0, count, group):
        rows = slice(top, min(top + group, count))
        sizes = lengths[rows]
        table = None if slots is None else (slots[0], slots[1][rows], PAGE_SIZE)
        shift = None if offsets is None else offsets[rows]
        beside = None if slots_out is None else slots_out[rows]
        if fits:
            part = buffer.expand(sizes.shape[0], width) if short else buffer[: sizes.shape[0]]
            tickets, select = None, select_rows
            if not short:
                # The last group may have few rows where the others have many.
                if cuda_select.preferred(lengths.device, len(part), width, topk, PAGE_SIZE):
                    select = cuda_select.select_rows
                else:
                    tickets = tickets_for(part, topk)
                score(part, rows, 0, sizes, topk, tickets)
            select(
                part,
                sizes,
                topk,
                None,
                init_tokens,
                local_tokens,
                slots=table,
                offsets=shift,
                out=picks[rows],
                slots_out=beside,
                tickets=tickets,
            )
        else:
            lists = index_tables.select_tiles(gpu, 1, width, topk).list_bytes
            floats = (budget_bytes - lists if budget_bytes > 4 * lists else budget_bytes) // 4
            found = _select_long_row(score, rows, sizes, width, topk, init_tokens, local_tokens, floats)
            if beside is not None:
                positions_to_slots(found, *table, out=beside)
            elif table is not None:
                found = positions_to_slots(found, *table)
            picks[rows] = found if shift is None else add_offsets(found, shift)
    return picks


def _whole(rows: int) -> int:
    """Rounded down, so that what belongs to a row is as aligned in every group as in the first: one kernel for all.
    Fewer than 4 rows are as many as they may be.
    """
    return next((rows - rows % unit for unit in _ALIGNED_ROWS if rows >= unit), rows)


def _select_long_row(
    score: Score,
    row: slice,
    size: torch.Tensor,
    width: int,
    topk: int,
    init_tokens: int,
    local_tokens: int,
    floats: int,
) -> torch.Tensor:
    """One row in stretches of keys: positions int32 [1, topk]. size: int [1], its length, on the device."""
    init = min(init_tokens, topk)
    local = min(local_tokens, topk - init)
    middle = topk - init - local
    device = size.device
    stretch = (floats - 2 * topk) // PAGE_SIZE * PAGE_SIZE
    stop = torch.where(size > topk, size.to(torch.int32) - local, 0)
    # Scores, and the positions they belong to: topk kept ones at the end of the first topk columns, then the new ones.
    pool = torch.empty((1, topk + stretch), dtype=torch.float32, device=device)
    place = torch.zeros((1, topk + stretch), dtype=torch.int32, device=device)
    column = torch.arange(topk, dtype=torch.int32, device=device).unsqueeze(0)
    kept = torch.zeros_like(stop)
    for begin in range(0, width if middle else 0, stretch):
        end = min(begin + stretch, width)
        fresh = stop.clamp(max=end) - begin
        score(pool[:, topk : topk + end - begin], row, begin, fresh.clamp(min=0), 0, None)
        place[:, topk : topk + end - begin] = torch.arange(begin, end, dtype=torch.int32, device=device)
        skip = min(max(0, init - begin), stretch)  # nothing is kept yet where this is not 0
        first = topk - kept + skip
        count = (fresh - skip).clamp(min=0) + kept
        best = select_rows(pool, count, middle, first, 0, 0)
        kept = count.clamp(max=middle)
        source = (column - (topk - kept)).clamp(0, middle - 1).long()
        at = (first.unsqueeze(1) + best.gather(1, source)).clamp(min=0).long()
        pool[:, :topk], place[:, :topk] = pool.gather(1, at), place.gather(1, at)
    found = torch.cat((column[:, :init], place[:, init + local : topk], stop.unsqueeze(1) + column[:, :local]), dim=1)
    whole = torch.where(column < size.unsqueeze(1), column, -1)
    return torch.where(size.unsqueeze(1) > topk, found, whole)
