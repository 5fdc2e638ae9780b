"""Kernels of the index scores: relu(q . k) times gate, summed over heads in registers, one f32 stored per (row, key).

`rows_kernel` holds a tile of keys and walks many rows over it: prefill, where rows of a request share their keys.
`keys_kernel` holds the queries of a few rows and streams their keys: decode and verify, where keys are the traffic; a
single row has a kernel of its own (index_scores_row.py). What they are made of, PERIOD and KIND among it, is in
index_scores_parts.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .index_scores_parts import head_sum, load_keys, load_queries, window_of
from .index_tables import FILLED_COLUMNS, STREAM_FEW_ROWS
from .pdl import let_next_start, wait_for_earlier

NEVER = tl.constexpr(2**31 - 1)
# When rows let the next kernel start (pdl.py). H200, decode steps of 16 rows of 8K / 32K / 128K tokens, microseconds:
# at once 47.2 / 63.1 / 125.8, as here 45.3 / 59.2 / 121.8.
FEW_ROWS = tl.constexpr(STREAM_FEW_ROWS)
SELECTED_BY_FEW_BLOCKS = tl.constexpr(4)
FILLED = tl.constexpr(FILLED_COLUMNS)


@triton.jit(do_not_specialize=["table_stride", "rows", "key_tiles"])  # they change from batch to batch
def rows_kernel(
    q,
    k,
    scales,
    gate,
    first,
    last,
    table,
    out,
    page_stride,
    table_stride,
    out_stride,
    rows,
    keys,
    width,
    skip,
    key_tiles,
    H: tl.constexpr,
    HP: tl.constexpr,
    G: tl.constexpr,
    BN: tl.constexpr,
    ROWS: tl.constexpr,
    KIND: tl.constexpr,
    PAGED: tl.constexpr,
    STAGES: tl.constexpr,
    PERIOD: tl.constexpr,
):
    """ROWS rows against BN keys. paged: first is row_to_request, last the lengths; ragged: the windows' ends."""
    tile = tl.program_id(0) % key_tiles
    top = (tl.program_id(0) // key_tiles) * ROWS
    n = tile * BN + tl.arange(0, BN)
    group, length = window_of(top + tl.arange(0, ROWS), rows, first, last, skip, PAGED)
    longest = tl.minimum(tl.max(length, 0), width)
    if tile * BN >= longest:
        return
    lowest = tl.min(tl.where(length > 0, group, NEVER), 0)
    highest = tl.max(tl.where(length > 0, group, -1), 0)
    lane = tl.arange(0, G)
    if lowest == highest:
        table_row = table + lowest.to(tl.int64) * table_stride
        x, scale = load_keys(k, scales, page_stride, keys, table_row, lowest, n, longest, KIND, PAGED)
        for i in tl.range(0, ROWS, G, num_stages=STAGES):
            queries, weight = load_queries(q, gate, top + i, rows, H, HP, G)
            row = top + i + lane
            _, size = window_of(row, rows, first, last, skip, PAGED)
            part = head_sum(x, scale, queries, weight, BN, HP, G, PERIOD)
            where = out + row.to(tl.int64)[None, :] * out_stride + n[:, None]
            tl.store(where, part, mask=n[:, None] < tl.minimum(size, width)[None, :])
    else:
        # Where two requests meet: each row with its own keys, in the same product, so with the same rounding.
        for i in range(ROWS):
            row = top + i + lane
            start, size = window_of(top + i, rows, first, last, skip, PAGED)
            size = tl.minimum(size, width)
            if tile * BN < size:
                table_row = table + start.to(tl.int64) * table_stride
                x, scale = load_keys(k, scales, page_stride, keys, table_row, start, n, size, KIND, PAGED)
                queries, weight = load_queries(q, gate, top + i, rows, H, HP, G)
                part = head_sum(x, scale, queries, weight, BN, HP, G, PERIOD)
                where = out + row.to(tl.int64)[None, :] * out_stride + n[:, None]
                tl.store(where, part, mask=(n[:, None] < size) & (lane == 0)[None, :])


@triton.jit
def fill_rows(out, out_stride, size, row, rows, width):
    """-inf in the columns from size [ROWS] on of every row; their blocks, in a line, are shared out to the programs."""
    if tl.min(tl.where(row < rows, size, width), 0) < width:
        blocks = tl.where(row < rows, (width + FILLED - 1) // FILLED - size // FILLED, 0)
        done = tl.cumsum(blocks, 0)
        total = tl.max(done, 0)
        item = tl.program_id(0)
        while item < total:
            r = tl.sum((done <= item).to(tl.int32), 0)
            length = tl.sum(tl.where(row == r, size, 0), 0)
            begun = tl.sum(tl.where(row == r, done - blocks, 0), 0)
            n = (length // FILLED + item - begun) * FILLED + tl.arange(0, FILLED)
            tl.store(out + r.to(tl.int64) * out_stride + n, float("-inf"), mask=(n >= length) & (n < width))
            item += tl.num_programs(0)


@triton.jit(do_not_specialize=["table_stride", "rows"])
def keys_kernel(
    q,
    k,
    scales,
    gate,
    requests,
    lengths,
    table,
    out,
    tickets,
    page_stride,
    table_stride,
    out_stride,
    rows,
    width,
    skip,
    H: tl.constexpr,
    HP: tl.constexpr,
    G: tl.constexpr,
    BN: tl.constexpr,
    ROWS: tl.constexpr,
    KIND: tl.constexpr,
    STAGES: tl.constexpr,
    PERIOD: tl.constexpr,
    FILL: tl.constexpr,
    PDL: tl.constexpr,
):
    """Rows in bundles of G; the tiles of all bundles, in a line, are shared out evenly. rows <= ROWS, a power of two.

    The rows of a bundle share one read of the keys when they are of one request; else each gets its own.
    tickets int32 [rows] become 0, for a selection that follows. FILL: columns past a row's length become -inf, shared
    out likewise.
    """
    wait_for_earlier(PDL)
    # Of few rows the blocks of a selection, waiting, take more from these than their start is worth.
    let_next_start(PDL and ROWS > FEW_ROWS)
    row = tl.arange(0, ROWS)
    tl.store(tickets + row, row * 0, mask=(row < rows) & (tl.program_id(0) == 0))
    bundle = row // G * G
    request, size = window_of(row, rows, requests, lengths, skip, True)
    size = tl.minimum(size, width)
    if FILL:
        fill_rows(out, out_stride, size, row, rows, width)
    if tl.max(size, 0) == 0:
        let_next_start(PDL)
        return
    lowest = row * 0 + NEVER
    highest = row * 0 - 1
    longest = row * 0
    for j in tl.static_range(G):
        other, length = window_of(bundle + j, rows, requests, lengths, skip, True)
        lowest = tl.minimum(lowest, tl.where(length > 0, other, NEVER))
        highest = tl.maximum(highest, tl.where(length > 0, other, -1))
        longest = tl.maximum(longest, tl.minimum(length, width))
    together = lowest == highest
    covered = tl.where(together, tl.where(row == bundle, longest, 0), size)
    owner = tl.where(together, lowest, request)
    tiles = (covered + BN - 1) // BN
    done = tl.cumsum(tiles, 0)
    total = tl.max(done, 0)
    each = (total + tl.num_programs(0) - 1) // tl.num_programs(0)
    if each == 1:
        let_next_start(PDL)
    item = tl.program_id(0) * each
    end = tl.minimum(item + each, total)
    lane = tl.arange(0, G)
    while item < end:
        r = tl.sum((done <= item).to(tl.int32), 0)
        mine = row == r
        stop = tl.sum(tl.where(mine, done, 0), 0)
        tile = item - (stop - tl.sum(tl.where(mine, tiles, 0), 0))
        steps = tl.minimum(stop, end) - item
        count = tl.sum(tl.where(mine, covered, 0), 0)
        alone = tl.sum(tl.where(mine & (lowest != highest), 1, 0), 0)
        table_row = table + tl.sum(tl.where(mine, owner, 0), 0).to(tl.int64) * table_stride
        queries, weight = load_queries(q, gate, r, rows, H, HP, G)
        _, sizes = window_of(r + lane, rows, requests, lengths, skip, True)
        sizes = tl.where((alone == 0) | (lane == 0), tl.minimum(sizes, width), 0)
        lines = out + (r + lane).to(tl.int64)[None, :] * out_stride
        for t in tl.range(tile, tile + steps, num_stages=STAGES):
            n = t * BN + tl.arange(0, BN)
            x, scale = load_keys(k, scales, page_stride, 0, table_row, 0, n, count, KIND, True)
            part = head_sum(x, scale, queries, weight, BN, HP, G, PERIOD)
            tl.store(lines + n[:, None], part, mask=n[:, None] < sizes[None, :])
        item += steps
    let_next_start(PDL and ROWS <= SELECTED_BY_FEW_BLOCKS)


@triton.jit(do_not_specialize=["rows"])
def fill_kernel(first, last, out, out_stride, rows, width, PAGED: tl.constexpr, PDL: tl.constexpr):
    """-inf in the columns outside each row's window, programs of a row taking turns."""
    wait_for_earlier(PDL)
    row = tl.program_id(0)
    _, length = window_of(row, rows, first, last, 0, PAGED)
    column = (length // FILLED + tl.program_id(1)) * FILLED
    while column < width:
        n = column + tl.arange(0, FILLED)
        tl.store(out + row.to(tl.int64) * out_stride + n, float("-inf"), mask=(n >= length) & (n < width))
        column += FILLED * tl.num_programs(1)
