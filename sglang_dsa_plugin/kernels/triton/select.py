"""Exact top-k in Triton, one pass over the scores; see ops/select.py for the order.

    1. A row not longer than k: the identity, written without looking at a score.
    2. A sample of the row gives a threshold that somewhat more than k scores pass.
    3. The row is streamed once; what passes goes, in position order, to a short list. A list that fills up is cut to
       its k best and the threshold rises, so no data can overflow it.
    4. The k-th key of the list is found by counting, and the picks leave in position order by one prefix sum.

Steps 2 and 3 decide only how long the list is: if too few scores passed, the row is streamed again with no threshold.
So the result is exact and the same on every run, whatever the sample says. With few rows, several programs stream one
row, and the last to finish does step 4 on all their lists; an integer ticket tells it that it is the last.

Slots or offsets are applied as the picks are written (`topk_slots`, `topk_ragged`), and slots can be written beside the
positions.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import index_tables
from .select_parts import (
    copy_row,
    join_lists,
    sampled_threshold,
    slot_of,
    stream,
    write,
    write_best,
)

_SLOTS_BLOCK = 1024
_GROUP = 32  # scores that a vector load reads together


@triton.jit
def _window(row, scores, stride, lengths, starts, width, STARTS: tl.constexpr):
    """(pointer to the row's window, its length), cut to the columns that exist: before int64 becomes int32."""
    line = scores + row.to(tl.int64) * stride
    length = tl.maximum(tl.minimum(tl.load(lengths + row), width), 0).to(tl.int32)
    if STARTS:
        start = tl.maximum(tl.minimum(tl.load(starts + row), width), -width).to(tl.int32)
        first = tl.maximum(start, 0)
        line += first
        length = tl.maximum(tl.minimum(start + length, width) - first, 0)
    return line, length


@triton.jit
def _write_fixed(
    out_row,
    slots_row,
    length,
    k,
    init,
    local,
    table_row,
    offset,
    WRITE: tl.constexpr,
    PAGE: tl.constexpr,
    HALF: tl.constexpr,
):
    """The picks that no score decides: all of a row not longer than k, else the forced ones. k <= HALF."""
    i = tl.arange(0, HALF)
    if length <= k:
        write(out_row + i, slots_row + i, i, i < length, i < k, table_row, offset, WRITE, PAGE)
    else:
        if init + local > 0:
            forced = (i < k) & ((i < init) | (i >= k - local))
            p = tl.where(i < init, i, length - k + i)
            write(out_row + i, slots_row + i, p, forced, forced, table_row, offset, WRITE, PAGE)


@triton.jit(do_not_specialize=["list_stride", "table_stride", "rows"])
def _rows_kernel(
    scores,
    stride,
    lengths,
    starts,
    out,
    slots_out,
    lists,
    list_stride,
    table,
    table_stride,
    requests,
    offsets,
    rows,
    width,
    k,
    init,
    local,
    C: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    SAMPLE: tl.constexpr,
    WIDE_READ: tl.constexpr,
    STARTS: tl.constexpr,
    WRITE: tl.constexpr,
    OFFSETS: tl.constexpr,
    PAGE: tl.constexpr,
):
    """Whole rows, one after another. lists: int64 [programs, C]."""
    own = lists + tl.program_id(0).to(tl.int64) * list_stride
    want = k - init - local
    for turn in range(tl.cdiv(rows - tl.program_id(0), tl.num_programs(0))):
        row = tl.program_id(0) + turn * tl.num_programs(0)
        line, length = _window(row, scores, stride, lengths, starts, width, STARTS)
        out_row = out + row.to(tl.int64) * k
        slots_row = slots_out + row.to(tl.int64) * k
        table_row = table
        if WRITE != "positions":
            table_row += tl.load(requests + row).to(tl.int64) * table_stride
        offset = row * 0
        if OFFSETS:
            offset = tl.load(offsets + row).to(tl.int32)
        _write_fixed(out_row, slots_row, length, k, init, local, table_row, offset, WRITE, PAGE, C // 2)
        if (length > k) & (want > 0):
            n = length - init - local
            high = length - local
            count = n * 0
            if n > C:
                threshold = sampled_threshold(line, init, n, want, SAMPLE)
                while count < want:  # twice at most: without a threshold all pass
                    count = stream(line, n * 0, high, init, high, threshold, own, want, C, TILE, BLOCK, WIDE_READ)
                    threshold = float("nan")
            else:
                copy_row(line, init, n, own, C)
                count = n
            best, slots = out_row + init, slots_row + init
            write_best(best, slots, own, count, want, table_row, offset, WRITE, PAGE, C, BLOCK)
            tl.debug_barrier()  # the next row overwrites the list


@triton.jit(do_not_specialize=["list_stride", "table_stride"])
def _split_kernel(
    scores,
    stride,
    lengths,
    starts,
    out,
    slots_out,
    lists,
    list_stride,
    table,
    table_stride,
    requests,
    offsets,
    counts,
    tickets,
    width,
    k,
    init,
    local,
    CHUNKS: tl.constexpr,
    C: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    SAMPLE: tl.constexpr,
    WIDE_READ: tl.constexpr,
    STARTS: tl.constexpr,
    WRITE: tl.constexpr,
    OFFSETS: tl.constexpr,
    PAGE: tl.constexpr,
):
    """CHUNKS programs per row. lists: int64 [rows, CHUNKS + 1, C]; counts: int32 [rows, CHUNKS]; tickets: [rows], 0."""
    row = tl.program_id(0) // CHUNKS
    chunk = tl.program_id(0) % CHUNKS
    want = k - init - local
    line, length = _window(row, scores, stride, lengths, starts, width, STARTS)
    n = length - init - local
    tiles = tl.cdiv(length, TILE)
    per_chunk = tl.cdiv(tiles, CHUNKS)
    active = tl.cdiv(tiles, tl.maximum(per_chunk, 1))
    if (length <= k) | (n <= C) | (want == 0):
        active = active * 0 + 1
    if chunk >= active:
        return
    out_row = out + row.to(tl.int64) * k
    slots_row = slots_out + row.to(tl.int64) * k
    table_row = table
    if WRITE != "positions":
        table_row += tl.load(requests + row).to(tl.int64) * table_stride
    offset = row * 0
    if OFFSETS:
        offset = tl.load(offsets + row).to(tl.int32)
    if chunk == 0:
        _write_fixed(out_row, slots_row, length, k, init, local, table_row, offset, WRITE, PAGE, C // 2)
    if (length <= k) | (want == 0):
        return
    lists += row.to(tl.int64) * (CHUNKS + 1) * list_stride
    own = lists + chunk * list_stride
    counts += row * CHUNKS
    high = length - local
    count = n * 0
    if n > C:
        threshold = sampled_threshold(line, init, n, want, SAMPLE)
        begin = chunk * per_chunk * TILE
        end = tl.minimum(begin + per_chunk * TILE, high)
        count = stream(line, begin, end, init, high, threshold, own, want, C, TILE, BLOCK, WIDE_READ)
        if active > 1:
            tl.store(counts + chunk, count)
            tl.debug_barrier()
            if tl.atomic_add(tickets + row, 1, sem="acq_rel") == active - 1:
                c = tl.arange(0, CHUNKS)
                found = tl.load(counts + c, mask=c < active, other=0, cache_modifier=".cg")
                count = tl.sum(found, 0)
                own = lists + CHUNKS * list_stride
                if (count >= want) & (count <= C):
                    tl.debug_barrier()
                    tl.store(counts + c, tl.cumsum(found, 0) - found)
                    tl.debug_barrier()
                    join_lists(lists, list_stride, counts, count, own, CHUNKS, C)
            else:
                count = count * 0 - 1
        if (count >= 0) & ((count < want) | (count > C)):
            # The sample misjudged the row, or more scores tie with the threshold than a list holds.
            if count < want:
                threshold = float("nan")
            count = stream(line, n * 0, high, init, high, threshold, own, want, C, TILE, BLOCK, WIDE_READ)
    else:
        copy_row(line, init, n, own, C)
        count = n
    if count >= 0:
        best, slots = out_row + init, slots_row + init
        write_best(best, slots, own, count, want, table_row, offset, WRITE, PAGE, C, BLOCK)


@triton.jit(do_not_specialize=["table_stride"])
def _slots_kernel(
    positions,
    positions_stride,
    table,
    table_stride,
    requests,
    slots,
    k,
    covered,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    p = tl.load(positions + row.to(tl.int64) * positions_stride + i, mask=i < k, other=-1).to(tl.int32)
    valid = (p >= 0) & (p < covered)
    table_row = table + tl.load(requests + row).to(tl.int64) * table_stride
    tl.store(slots + row.to(tl.int64) * k + i, slot_of(p, valid, table_row, PAGE), mask=i < k)


def positions_to_slots(
    positions: torch.Tensor,
    page_table: torch.Tensor,
    row_to_request: torch.Tensor,
    page_size: int,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`ops.select.positions_to_slots` in one launch; a position that the table does not cover gives -1. out: contiguous
    int32 [R, k].
    """
    rows, k = positions.shape
    slots = torch.empty((rows, k), dtype=torch.int32, device=positions.device) if out is None else out
    if slots.numel():
        _slots_kernel[(rows, -(-k // _SLOTS_BLOCK))](
            positions,
            positions.stride(0),
            page_table,
            page_table.stride(0),
            row_to_request,
            slots,
            k,
            page_table.shape[1] * page_size,
            PAGE=page_size,
            BLOCK=_SLOTS_BLOCK,
            num_warps=4,
        )
    return slots


def topk(
    scores: torch.Tensor,
    lengths: torch.Tensor,
    k: int,
    starts: torch.Tensor | None,
    init_tokens: int,
    local_tokens: int,
) -> torch.Tensor:
    """`ops.select.topk`; k up to 4096."""
    return select_rows(scores, lengths, k, starts, init_tokens, local_tokens)


def topk_slots(
    scores: torch.Tensor,
    lengths: torch.Tensor,
    k: int,
    page_table: torch.Tensor,
    row_to_request: torch.Tensor,
    page_size: int,
    starts: torch.Tensor | None,
    init_tokens: int,
    local_tokens: int,
) -> torch.Tensor:
    """`ops.select.topk_slots` in the same pass."""
    return select_rows(
        scores, lengths, k, starts, init_tokens, local_tokens, slots=(page_table, row_to_request, page_size)
    )


def topk_ragged(
    scores: torch.Tensor,
    lengths: torch.Tensor,
    k: int,
    offsets: torch.Tensor,
    starts: torch.Tensor | None,
    init_tokens: int,
    local_tokens: int,
) -> torch.Tensor:
    """`ops.select.topk_ragged` in the same pass."""
    return select_rows(scores, lengths, k, starts, init_tokens, local_tokens, offsets=offsets)


def select_rows(
    scores: torch.Tensor,
    lengths: torch.Tensor,
    k: int,
    starts: torch.Tensor | None,
    init_tokens: int,
    local_tokens: int,
    *,
    slots: tuple[torch.Tensor, torch.Tensor, int] | None = None,
    offsets: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    slots_out: torch.Tensor | None = None,
    tickets: torch.Tensor | None = None,
    tiles: index_tables.SelectTiles | None = None,
) -> torch.Tensor:
    """All forms of the selection. slots: (page_table, row_to_request, page_size); out: contiguous int32 [R, k].
    slots_out: the same, where slots go while positions are returned.

    Reads nothing on the host. tickets: int32 [R], zeros, where the caller has them at no cost. tiles: for tests.
    """
    rows, width = scores.shape
    if out is None:
        out = torch.empty((rows, k), dtype=torch.int32, device=scores.device)
    if rows == 0:
        return out
    init = min(init_tokens, k)
    local = min(local_tokens, k - init)
    if tiles is None:
        tiles = index_tables.select_tiles(index_tables.gpu_of(scores.device), rows, width, k)
    table, requests, page_size = slots if slots is not None else (out, out, 1)
    lists = torch.empty((tiles.lists, tiles.capacity), dtype=torch.int64, device=scores.device)
    common = {
        "C": tiles.capacity,
        "TILE": tiles.tile,
        "BLOCK": tiles.block,
        "SAMPLE": tiles.sample,
        "WIDE_READ": _may_read_whole_groups(scores) and starts is None,
        "STARTS": starts is not None,
        "WRITE": "positions" if slots is None else "slots" if slots_out is None else "both",
        "OFFSETS": offsets is not None,
        "PAGE": page_size,
        "num_warps": tiles.warps,
    }
    if tiles.registers is not None:
        common["maxnreg"] = tiles.registers
    first = (
        scores,
        scores.stride(0),
        lengths,
        lengths if starts is None else starts,
        out,
        out if slots_out is None else slots_out,
        lists,
        tiles.capacity,
        table,
        table.stride(0),
        requests,
        lengths if offsets is None else offsets,
    )
    if tiles.chunks == 1:
        _rows_kernel[(tiles.programs,)](*first, rows, width, k, init, local, **common)
    else:
        if tickets is None:
            tickets = torch.zeros(rows, dtype=torch.int32, device=scores.device)
        counts = torch.empty((rows, tiles.chunks), dtype=torch.int32, device=scores.device)
        _split_kernel[(rows * tiles.chunks,)](
            *first, counts, tickets, width, k, init, local, CHUNKS=tiles.chunks, **common
        )
    return out


def tickets_for(scores: torch.Tensor, k: int) -> torch.Tensor | None:
    """Uninitialised tickets, if a selection of k from these scores wants any."""
    rows, width = scores.shape
    if index_tables.select_tiles(index_tables.gpu_of(scores.device), rows, width, k).chunks == 1:
        return None
    return torch.empty(rows, dtype=torch.int32, device=scores.device)


def _may_read_whole_groups(scores: torch.Tensor) -> bool:
    """Whether the last row, too, has memory behind it up to a whole group of columns."""
    rows, width = scores.shape
    whole = (rows - 1) * scores.stride(0) + -(-width // _GROUP) * _GROUP
    have = scores.untyped_storage().nbytes() // scores.element_size() - scores.storage_offset()
    return scores.stride(0) >= width and whole <= have
