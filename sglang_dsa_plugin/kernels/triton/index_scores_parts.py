"""What the kernels of the index scores are made of: loads of keys and queries, windows, and the sum over heads.

All multiply [keys, 128] by [128, heads], keys outermost, so a thread holds many heads of a score and the sum over them
costs it no exchange until the last steps. `head_sum` says itself which head is added to which and where it is rounded,
so a score does not depend on which kernel, tile or neighbour it was computed with. Left to the compiler, both follow
from where the tile's products lie, and of two products that are added either may be the one that is rounded.

PERIOD says where they lie: heads h and h + PERIOD of a score are of the same thread (index_tables.head_period).

KIND says what the matrix unit is fed: "fp8" e4m3 as stored; "bytes" e4m3 keys decoded to f16 here (GPUs whose compiler
takes no e4m3), the query widened to f16 before; "plain" 16-bit values; "f32" f32 values without rounding to TF32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .e4m3 import half_of_e4m3

DIM = tl.constexpr(128)
PAGE = tl.constexpr(64)


@triton.jit
def load_keys(k, scales, page_stride, keys, table_row, start, n, count, KIND: tl.constexpr, PAGED: tl.constexpr):
    """Keys n of a window, as the dot takes them [n, 128], and their scales f32 [n].

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
