"""The kernels of the exact selection (select.py says how it works): rows that a program has to itself, rows that
several share, and positions turned into slots.
"""

import triton
import triton.language as tl

from .select_parts import copy_row, join_lists, slot_of, write, write_best
from .select_stream import sampled_threshold, stream


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
def rows_kernel(
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
def split_kernel(
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
def slots_kernel(
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
