"""Kernels of the index scores: relu(q . k) times gate, summed over heads in registers, one f32 stored per (row, key).

`rows_kernel` holds a tile of keys and walks many rows over it: prefill, where rows of a request share their keys.
`keys_kernel` holds the queries of a few rows and streams their keys: decode and verify, where keys are the traffic; a
single row has a kernel of its own (index_scores_row.py). All multiply [keys, 128] by [128, heads], keys outermost, so a
thread holds many heads of a score and the sum over them costs it no exchange until the last steps. `head_sum` says
itself which head is added to which and where it is rounded, so a score does not depend on which kernel, tile or
neighbour it was computed with. Left to the compiler, both follow from where the tile's products lie, and of two
products that are added either may be the one that is rounded.

PERIOD says where they lie: heads h and h + PERIOD of a score are of the same thread (index_tables.head_period).

KIND says what the matrix unit is fed: "fp8" e4m3 as stored; "bytes" e4m3 keys decoded to f16 here (GPUs whose compiler
takes no e4m3), the query widened to f16 before; "plain" 16-bit values; "f32" f32 values without rounding to TF32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .index_tables import STREAM_FEW_ROWS
from .pdl import let_next_start, wait_for_earlier

DIM = tl.constexpr(128)
PAGE = tl.constexpr(64)
NEVER = tl.constexpr(2**31 - 1)
# When rows let the next kernel start (pdl.py). H200, decode steps of 16 rows of 8K / 32K / 128K tokens, microseconds:
# at once 47.2 / 63.1 / 125.8, as here 45.3 / 59.2 / 121.8.
FEW_ROWS = tl.constexpr(STREAM_FEW_ROWS)
SELECTED_BY_FEW_BLOCKS = tl.constexpr(4)
FILLED = tl.constexpr(1024)  # columns that are filled at a time


@triton.jit
def half_of_e4m3(codes):
    """uint8 e4m3 codes -> f16, 2^-8 times their value, exact; NaN codes become NaN.

    e4m3's bits moved up by 7 are the f16 bits of that number (the exponent biases are 7 and 15), subnormals included.
    """
    wide = codes.to(tl.uint16)
    bits = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
    return tl.where((wide & 0x7F) == 0x7F, 0x7E00, bits).to(tl.uint16).to(tl.float16, bitcast=True)


@triton.jit
def load_keys(
    k, scales, page_stride, keys, table_row, start, n, count, BN: tl.constexpr, KIND: tl.constexpr, PAGED: tl.constexpr
):
    """Keys n [BN] of a window, as the dot takes them [BN, 128], and their scales f32 [BN].

    A key at or past `count` is some key of the buffer: what becomes of it is never stored, and a load without a mask is
    a vector.
    """
    if PAGED:
        page = tl.load(table_row + n // PAGE, mask=n < count, other=0)
        x, scale = load_page_keys(k, scales, page_stride, page, n, KIND)
    else:
        at = tl.minimum(start + n, keys - 1).to(tl.int64)
        x, scale = load_keys_at(k, scales, at * DIM, at, KIND)
    return x, scale


@triton.jit
def load_page_keys(k, scales, page_stride, page, n, KIND: tl.constexpr):
    """Keys n of a request, each in the page given for it, and their scales."""
    page = page.to(tl.int64)
    at = page * page_stride + (n % PAGE) * DIM
    return load_keys_at(k, scales, at, page * (page_stride // 4) + PAGE * DIM // 4 + n % PAGE, KIND)


@triton.jit
def load_keys_at(k, scales, at, scale_at, KIND: tl.constexpr):
    """Keys and scales that begin `at` and `scale_at` (elements of either), as the dot takes them."""
    x = tl.load(k + at[:, None] + tl.arange(0, DIM)[None, :])
    if KIND == "bytes":
        scale = tl.load(scales + scale_at) * 256.0
        x = half_of_e4m3(x)
    elif KIND == "fp8":
        scale = tl.load(scales + scale_at)
    else:
        scale = tl.full(at.shape, 1.0, tl.float32)
    return x, scale


@triton.jit
def load_queries(q, gate, row, rows, H: tl.constexpr, HP: tl.constexpr, G: tl.constexpr):
    """Queries [G * HP, 128] and gates [G * HP] of rows row .. row + G - 1, heads padded to HP with gates of 0."""
    c = tl.arange(0, G * HP)
    head = c % HP
    line = tl.minimum(row + c // HP, rows - 1).to(tl.int64) * H + tl.minimum(head, H - 1)
    x = tl.load(q + line[:, None] * DIM + tl.arange(0, DIM)[None, :])
    weight = tl.load(gate + line)
    if HP != H:
        weight = tl.where(head < H, weight, 0.0)
        # 0 times a NaN of the copied head would be NaN.
        x = tl.where((head < H)[:, None], x, 0.0)
    return x, weight


@triton.jit
def heads_of_threads(x, BN: tl.constexpr, G: tl.constexpr, HP: tl.constexpr, PERIOD: tl.constexpr):
    """[BN, G * HP] -> [BN, G, PERIOD // 2, 2 * HP // PERIOD], last the heads of one thread: h, h + 1, h + PERIOD, .."""
    x = tl.permute(tl.reshape(x, [BN, G, HP // PERIOD, PERIOD // 2, 2]), [0, 1, 3, 2, 4])
    return tl.reshape(x, [BN, G, PERIOD // 2, 2 * HP // PERIOD])


@triton.jit
def add_products(total, dots, weight, BN: tl.constexpr, G: tl.constexpr, T: tl.constexpr, N: tl.constexpr):
    """total [BN, G, T] plus dots times weight, both [BN, G, T, N], one after the other, each by one fused operation."""
    if N == 1:
        total = tl.fma(tl.reshape(dots, [BN, G, T]), tl.reshape(weight, [BN, G, T]), total)
    else:
        dots = tl.permute(tl.reshape(dots, [BN, G, T, 2, N // 2]), [0, 1, 2, 4, 3])
        weight = tl.permute(tl.reshape(weight, [BN, G, T, 2, N // 2]), [0, 1, 2, 4, 3])
        early, late = tl.split(dots)
        early_weight, late_weight = tl.split(weight)
        total = add_products(total, early, early_weight, BN, G, T, N // 2)
        total = add_products(total, late, late_weight, BN, G, T, N // 2)
    return total


@triton.jit
def sum_of_threads(x, BN: tl.constexpr, G: tl.constexpr, T: tl.constexpr):
    """[BN, G, T] -> [BN, G], neighbours first. Two numbers have one sum, wherever they lie; more than two do not."""
    if T == 1:
        x = tl.reshape(x, [BN, G])
    else:
        x = sum_of_threads(tl.sum(tl.reshape(x, [BN, G, T // 2, 2]), 3), BN, G, T // 2)
    return x


@triton.jit
def head_sum(keys, scale, queries, weight, BN: tl.constexpr, HP: tl.constexpr, G: tl.constexpr, PERIOD: tl.constexpr):
    """keys [BN, 128], queries [G * HP, 128] -> scores [BN, G]."""
    dots = tl.dot(keys, tl.trans(queries), input_precision="ieee")  # says something of f32 only: no TF32
    dots = heads_of_threads(tl.maximum(dots, 0.0, propagate_nan=tl.PropagateNan.ALL), BN, G, HP, PERIOD)
    weight = heads_of_threads(tl.broadcast_to(weight[None, :], [BN, G * HP]), BN, G, HP, PERIOD)
    total = tl.zeros([BN, G, PERIOD // 2], tl.float32)
    total = add_products(total, dots, weight, BN, G, PERIOD // 2, 2 * HP // PERIOD)
    return sum_of_threads(total, BN, G, PERIOD // 2) * scale[:, None]


@triton.jit
def window_of(row, rows, first, last, skip, PAGED: tl.constexpr):
    """(what rows with the same keys share, window length) of rows; 0 keys past the rows and up to `skip` keys."""
    inside = row < rows
    length = tl.load(last + row, mask=inside, other=0)
    if last.dtype.element_ty == tl.int64:
        length = tl.minimum(length, 2147483647)  # a longer window is cut to the keys, not to what is left in 32 bits
    length = length.to(tl.int32)
    group = tl.load(first + row, mask=inside, other=0).to(tl.int32)
    if not PAGED:
        length -= group
    return group, tl.where(length > skip, length, 0)


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
        x, scale = load_keys(k, scales, page_stride, keys, table_row, lowest, n, longest, BN, KIND, PAGED)
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
                x, scale = load_keys(k, scales, page_stride, keys, table_row, start, n, size, BN, KIND, PAGED)
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
            x, scale = load_keys(k, scales, page_stride, 0, table_row, 0, n, count, BN, KIND, True)
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
