"""Index scores of a single row: decode of one request, where what counts is how soon its keys are on their way.

The tiles of the row's keys are shared out evenly to the programs. Products are those of `keys_kernel`
(index_scores_kernels.py), so a score has the same bits as among other rows.

A CUDA graph holds one launch for short rows, which need no scores, and long ones, and only the device knows which it
is. Where the kernel ahead still runs (pdl.py), a program looks at the length that is in memory then. It may be out of
date and decides only what is done in advance: the first keys of a long row are fetched, or where there are many what
names their pages; of a short one the selection, which is all that is left to do, is let in at once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .index_scores_kernels import FILLED
from .index_scores_parts import DIM, PAGE, head_sum, load_keys, load_page_keys, load_queries
from .pdl import let_next_start, prefetch, prefetch_whole, wait_for_earlier

FETCHED = tl.constexpr(2)  # pages that a program fetches ahead
LINES = tl.constexpr(32)  # of 32 bytes of the page table that it does
ENTRIES = tl.constexpr(32)  # of the page table that a program holds at a time


@triton.jit
def look_ahead(
    k,
    requests,
    lengths,
    table,
    page_stride,
    table_stride,
    pages,
    tables,
    columns,
    width,
    skip,
    BN: tl.constexpr,
    KIND: tl.constexpr,
):
    """Whether the row seems to be longer than `skip`, and what it needs fetched to the L2 cache.

    What is read here may be being written, so it passes the L1 cache by, and nothing outside the page table [tables,
    columns] and the pages is touched. H200, microseconds with / without it: decode steps of 1K 12.5 / 12.7, 8K 19.9 /
    20.3, 32K 21.1 / 20.9, 128K 25.7 / 25.8; with no kernel ahead scores of 8K 2.8 / 3.1, 32K 3.8 / 4.1, 128K 8.8 / 8.4
    (8.0 with it since a long row lets the next kernel start at once).
    """
    size = tl.maximum(tl.minimum(tl.load(lengths, cache_modifier=".cg"), width), 0).to(tl.int32)
    request = tl.load(requests, cache_modifier=".cg").to(tl.int64)
    known = (request >= 0) & (request < tables)
    long = size > skip
    entries = table + request * table_stride
    filled = tl.minimum(tl.cdiv(size, PAGE), columns)
    LINE: tl.constexpr = 32 * 8 // table.dtype.element_ty.primitive_bitwidth
    if long:
        each = tl.cdiv(tl.cdiv(size, BN), tl.num_programs(0))
        first = tl.program_id(0) * each * BN // PAGE
        if each == 1:
            # Not more, since keys keep the kernel ahead from its own input.
            page = first + tl.arange(0, LINES)
            inside = (tl.arange(0, LINES) < FETCHED) & (page < filled) & known
            found = tl.load(entries + page, mask=inside, other=-1, cache_modifier=".cg").to(tl.int64)
            inside &= (found >= 0) & (found < pages)
            KEY_BYTES: tl.constexpr = DIM * k.dtype.element_ty.primitive_bitwidth // 8
            SCALE_BYTES: tl.constexpr = 4 if KIND == "fp8" else 0
            prefetch_whole(
                tl.where(inside, (k + found * page_stride).to(tl.uint64), 0), PAGE * (KEY_BYTES + SCALE_BYTES)
            )
        else:
            page = first + tl.arange(0, LINES) * LINE
            inside = (page < tl.minimum(filled, first + tl.cdiv(each * BN, PAGE))) & known
            prefetch(tl.where(inside, (entries + page).to(tl.uint64), 0))
    elif tl.program_id(0) == 0:
        # All that selection is going to read.
        page = tl.arange(0, LINES) * LINE
        prefetch(tl.where((page < filled) & known, (entries + page).to(tl.uint64), 0))
    return long


@triton.jit(do_not_specialize=["table_stride", "pages", "tables", "columns"])  # they change from batch to batch
def row_kernel(
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
    pages,
    tables,
    columns,
    width,
    skip,
    H: tl.constexpr,
    HP: tl.constexpr,
    BN: tl.constexpr,
    KIND: tl.constexpr,
    STAGES: tl.constexpr,
    PERIOD: tl.constexpr,
    FILL: tl.constexpr,
    PDL: tl.constexpr,
):
    """As `keys_kernel` with one row."""
    long = True
    if PDL:
        long = look_ahead(
            k, requests, lengths, table, page_stride, table_stride, pages, tables, columns, width, skip, BN, KIND
        )
    wait_for_earlier(PDL)
    if not long:
        let_next_start(PDL)
    # Together with the length, wanted or not: asked for behind it they come 0.3 to 0.4 us later, and a short row's end
    # comes no sooner.
    queries, weight = load_queries(q, gate, 0, 1, H, HP, 1)
    size = tl.maximum(tl.minimum(tl.load(lengths), width), 0).to(tl.int32)
    request = tl.load(requests).to(tl.int64)
    if tl.program_id(0) == 0:
        tl.store(tickets, 0)
    if FILL:
        column = (size // FILLED + tl.program_id(0)) * FILLED
        while column < width:
            n = column + tl.arange(0, FILLED)
            tl.store(out + n, float("-inf"), mask=(n >= size) & (n < width))
            column += FILLED * tl.num_programs(0)
    if size <= skip:
        let_next_start(PDL)
        return
    table_row = table + request * table_stride
    tiles = tl.cdiv(size, BN)
    each = tl.cdiv(tiles, tl.num_programs(0))
    first = tl.program_id(0) * each
    # Also of a long row at once: what the next kernel does ahead of its wait is done while the last tiles are. Two
    # programs at work fill a processor's shared memory (index_tables._row_stages), so no block of that kernel comes
    # beside them. H200, microseconds at the end / here: scores of 64K 6.5 / 5.5, 128K 9.0 / 8.0; a decode step of 128K
    # 25.5 / 24.9, with less shared memory (78 KB) 25.5 / 25.6.
    let_next_start(PDL)
    if each == 1:
        # A tile at most: without what a pipeline does ahead of its first one.
        if first < tiles:
            n = first * BN + tl.arange(0, BN)
            x, scale = load_keys(k, scales, page_stride, 0, table_row, 0, n, size, KIND, True)
            tl.store(out + n[:, None], head_sum(x, scale, queries, weight, BN, HP, 1, PERIOD), mask=n[:, None] < size)
    else:
        last = tl.minimum(first + each, tiles)
        # The pipeline holds keys alone. With the page table in it entries come in line behind the keys of tiles before:
        # the fourth tile of a program was asked for when the first had come.
        lane = tl.arange(0, ENTRIES)
        # A page less than there are entries, since the first tile may begin inside one.
        MANY: tl.constexpr = (ENTRIES - 1) * PAGE // BN
        for begin in tl.range(first, last, MANY, num_stages=1):
            page = begin * BN // PAGE
            entries = tl.load(table_row + page + lane, mask=(page + lane) * PAGE < size, other=0).to(tl.int32)
            for tile in tl.range(begin, tl.minimum(begin + MANY, last), num_stages=STAGES):
                n = tile * BN + tl.arange(0, BN)
                # The pipeline looks further than the last tile, though it does not fetch what it finds there.
                own = tl.gather(entries, tl.minimum(n // PAGE - page, ENTRIES - 1), 0)
                x, scale = load_page_keys(k, scales, page_stride, own, n, KIND)
                scores = head_sum(x, scale, queries, weight, BN, HP, 1, PERIOD)
                tl.store(out + n[:, None], scores, mask=n[:, None] < size)
