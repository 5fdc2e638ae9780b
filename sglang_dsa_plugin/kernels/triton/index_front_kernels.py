"""Kernels from projections to index keys in their page and to index queries with a gate; index_front.py launches them.

A program holds 16 vectors of 128, each in three parts: the first values of the pairs that rope turns, the second ones,
and the rest, so that no value has to move between threads. The Hadamard rotation is a product with the matrix of signs
on the matrix unit, part by part: an f32 value is the sum of three bf16 values, 8 bits of it each, and a sign times any
of them is exact.

A vector depends on its own input alone, not on how many come with it: tiles have one size whatever the number of rows,
sums run in one order, and multiply and add are not fused.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .e4m3 import encode, inverse_of, scale_bits, scale_of
from .pdl import let_next_start, prefetch_rows, wait_for_earlier


@triton.jit
def _columns(HALF: tl.constexpr, DIM: tl.constexpr, ROPE: tl.constexpr):
    """Where a vector's parts are: the first and the second values of the 32 pairs that rope turns, and the rest."""
    pair, rest = tl.arange(0, ROPE // 2), ROPE + tl.arange(0, DIM - ROPE)
    if HALF:
        first, second = pair, pair + ROPE // 2
    else:
        first, second = 2 * pair, 2 * pair + 1
    return first, second, rest


@triton.jit
def _load(start, valid, columns):
    """f32 [n, columns] of the vectors at pointers start [n]; 0 where not valid."""
    return tl.load(start[:, None] + columns[None, :], mask=valid[:, None], other=0.0).to(tl.float32)


@triton.jit
def _cos_sin(cos_sin, cos_sin_stride, positions, max_position, valid, ROPE: tl.constexpr):
    """(cos, sin) of positions [n], f32 [n, 32] each. A position outside the table is not read; it has zeros."""
    inside = (valid & (positions >= 0) & (positions < max_position))[:, None]
    at = cos_sin + positions[:, None] * cos_sin_stride + tl.arange(0, ROPE // 2)[None, :]
    return tl.load(at, mask=inside, other=0.0), tl.load(at + ROPE // 2, mask=inside, other=0.0)


@triton.jit
def _signs(rows, DIM: tl.constexpr):
    """Rows of the matrix (-1)^popcount(i & j), bf16 [rows, 128]. 0x6996 holds the parities of 0 .. 15."""
    both = rows[:, None] & tl.arange(0, DIM)[None, :]
    odd = (0x6996 >> ((both ^ (both >> 4)) & 15)) & 1
    return (0x3F80 | odd << 15).to(tl.uint16).to(tl.bfloat16, bitcast=True)  # 1 with a sign


@triton.jit
def _upper(x):
    """x without its lower 16 bits: what bf16 holds of it, cut off, since rounding up could overflow."""
    return (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _split(x):
    """f32 as a sum of three bf16 values; infinities have the first alone."""
    high = _upper(x)
    rest = tl.where((x.to(tl.int32, bitcast=True) & 0x7FFFFFFF) == 0x7F800000, 0.0, x - high)
    middle = _upper(rest)
    return high.to(tl.bfloat16), middle.to(tl.bfloat16), (rest - middle).to(tl.bfloat16)


@triton.jit
def _rotate(a, b, rest, signs_a, signs_b, signs_rest, REST_IS_BF16: tl.constexpr, NORM: tl.constexpr):
    """The vectors with parts a, b and rest times the matrix of signs, scaled by NORM after the sum, f32 [n, 128]: each
    part times its rows of the matrix. The small terms are added first.
    """
    a_high, a_middle, a_low = _split(a)
    b_high, b_middle, b_low = _split(b)
    total = tl.dot(a_low, signs_a)
    total = tl.dot(b_low, signs_b, total)
    if not REST_IS_BF16:
        rest_high, rest_middle, rest_low = _split(rest)
        total = tl.dot(rest_low, signs_rest, total)
    total = tl.dot(a_middle, signs_a, total)
    total = tl.dot(b_middle, signs_b, total)
    if not REST_IS_BF16:
        total = tl.dot(rest_middle, signs_rest, total)
    else:
        rest_high = rest.to(tl.bfloat16)
    total = tl.dot(a_high, signs_a, total)
    total = tl.dot(b_high, signs_b, total)
    total = tl.dot(rest_high, signs_rest, total)
    return total * NORM


@triton.jit
def _key_tile(
    tile,
    first,
    second,
    others,
    signs_a,
    signs_b,
    signs_c,
    projected,
    weight,
    bias,
    positions,
    cos_sin,
    slots,
    pages,
    scales,
    projected_stride,
    cos_sin_stride,
    page_stride,
    token_stride,
    scales_stride,
    rows,
    count,
    max_position,
    eps,
    LAYER: tl.constexpr,
    FP8_KEYS: tl.constexpr,
    CVT: tl.constexpr,
    TILE: tl.constexpr,
    DIM: tl.constexpr,
    ROPE: tl.constexpr,
    PAGE: tl.constexpr,
    NORM: tl.constexpr,
):
    """`keys_kernel` for rows tile * TILE .. tile * TILE + TILE - 1."""
    r = tile.to(tl.int64) * TILE + tl.arange(0, TILE)
    valid = r < rows
    start = projected + r * projected_stride
    # All that is read is asked for before the first sum, behind whose barriers the compiler would leave it.
    p = tl.load(positions + r, mask=valid, other=0).to(tl.int64)
    slot = tl.load(slots + r, mask=valid, other=-1).to(tl.int64)
    a, b, c = _load(start, valid, first), _load(start, valid, second), _load(start, valid, others)
    weight_a, weight_b, weight_c = tl.load(weight + first), tl.load(weight + second), tl.load(weight + others)
    if LAYER:
        bias_a, bias_b, bias_c = tl.load(bias + first), tl.load(bias + second), tl.load(bias + others)
    cos, sin = _cos_sin(cos_sin, cos_sin_stride, p, max_position, valid, ROPE)
    if LAYER:
        mean = ((tl.sum(a, axis=1) + tl.sum(b, axis=1) + tl.sum(c, axis=1)) / DIM)[:, None]
        a, b, c = a - mean, b - mean, c - mean
    square = tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1) + tl.sum(c * c, axis=1)
    factor = tl.rsqrt(square / DIM + eps)[:, None]
    a = a * factor * weight_a[None, :]
    b = b * factor * weight_b[None, :]
    c = c * factor * weight_c[None, :]
    if LAYER:
        a += bias_a[None, :]
        b += bias_b[None, :]
        c += bias_c[None, :]
    a, b = a * cos - b * sin, b * cos + a * sin
    written = (slot >= 0) & (slot < count)
    page, offset = slot // PAGE, slot % PAGE
    to = (pages + page * page_stride + offset * token_stride)[:, None]
    if FP8_KEYS:
        x = _rotate(a, b, c, signs_a, signs_b, signs_c, False, NORM)
        bits = scale_bits(x)
        tl.store(to + tl.arange(0, DIM)[None, :], encode(x * inverse_of(bits)[:, None], CVT), mask=written[:, None])
        tl.store(scales + page * scales_stride + PAGE * DIM // 4 + offset, scale_of(bits), mask=written)
    else:
        tl.store(to + first[None, :], a.to(pages.dtype.element_ty), mask=written[:, None])
        tl.store(to + second[None, :], b.to(pages.dtype.element_ty), mask=written[:, None])
        tl.store(to + others[None, :], c.to(pages.dtype.element_ty), mask=written[:, None])


@triton.jit(do_not_specialize=["rows", "count", "max_position"])
def keys_kernel(
    projected,
    weight,
    bias,
    positions,
    cos_sin,
    slots,
    pages,
    scales,
    projected_stride,
    cos_sin_stride,
    page_stride,
    token_stride,
    scales_stride,
    rows,
    count,
    max_position,
    eps,
    LAYER: tl.constexpr,
    HALF: tl.constexpr,
    FP8_KEYS: tl.constexpr,
    CVT: tl.constexpr,
    TILE: tl.constexpr,
    DIM: tl.constexpr,
    ROPE: tl.constexpr,
    PAGE: tl.constexpr,
    NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    """Keys of rows projected [R, 128] into pages at slots [R] in [0, count).

    pages: bytes where FP8_KEYS, else the keys' dtype, and scales: the f32 view of the same; strides in elements.
    LAYER: LayerNorm with bias, else RMSNorm.
    """
    first, second, others = _columns(HALF, DIM, ROPE)
    signs_a, signs_b, signs_c = _signs(first, DIM), _signs(second, DIM), _signs(others, DIM)
    wait_for_earlier(PDL)
    let_next_start(PDL)
    _key_tile(
        tl.program_id(0),
        first,
        second,
        others,
        signs_a,
        signs_b,
        signs_c,
        projected,
        weight,
        bias,
        positions,
        cos_sin,
        slots,
        pages,
        scales,
        projected_stride,
        cos_sin_stride,
        page_stride,
        token_stride,
        scales_stride,
        rows,
        count,
        max_position,
        eps,
        LAYER,
        FP8_KEYS,
        CVT,
        TILE,
        DIM,
        ROPE,
        PAGE,
        NORM,
    )


@triton.jit
def _lengths(n, vectors, lengths, HEADS: tl.constexpr, SKIP: tl.constexpr):
    """Of the rows of vectors n [TILE]; anything without SKIP."""
    return tl.load(lengths + n // HEADS, mask=n < vectors, other=0) if SKIP else n


@triton.jit
def _needed(sizes, skip, SKIP: tl.constexpr):
    """Whether a row of `_lengths` is longer than skip; without SKIP all are needed."""
    return tl.max(sizes, 0) > skip if SKIP else True


@triton.jit
def _query_inputs(
    n,
    first,
    second,
    others,
    projected,
    weights,
    positions,
    cos_sin,
    projected_stride,
    cos_sin_stride,
    weights_stride,
    vectors,
    max_position,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    ROPE: tl.constexpr,
):
    """What `_query_tile` reads for vectors n [TILE]: three parts of each, cos, sin, weights."""
    valid = n < vectors
    r, head = (n // HEADS).to(tl.int64), n % HEADS
    p = tl.load(positions + r, mask=valid, other=0).to(tl.int64)
    start = projected + r * projected_stride + head * DIM
    a, b, c = _load(start, valid, first), _load(start, valid, second), _load(start, valid, others)
    weight = tl.load(weights + r * weights_stride + head, mask=valid, other=0.0).to(tl.float32)
    cos, sin = _cos_sin(cos_sin, cos_sin_stride, p, max_position, valid, ROPE)
    return a, b, c, cos, sin, weight


@triton.jit
def _query_tile(
    n,
    a,
    b,
    c,
    cos,
    sin,
    weight,
    first,
    second,
    others,
    signs_a,
    signs_b,
    signs_c,
    q,
    gate,
    vectors,
    gate_factor,
    REST_IS_BF16: tl.constexpr,
    FP8_KEYS: tl.constexpr,
    CVT: tl.constexpr,
    DIM: tl.constexpr,
    NORM: tl.constexpr,
):
    """`queries_kernel` for vectors n [TILE]."""
    valid = n < vectors
    a, b = a * cos - b * sin, b * cos + a * sin
    weight *= gate_factor
    to = (q + n.to(tl.int64) * DIM)[:, None]
    if FP8_KEYS:
        x = _rotate(a, b, c, signs_a, signs_b, signs_c, REST_IS_BF16, NORM)
        bits = scale_bits(x)
        tl.store(to + tl.arange(0, DIM)[None, :], encode(x * inverse_of(bits)[:, None], CVT), mask=valid[:, None])
        weight *= scale_of(bits)
    else:
        tl.store(to + first[None, :], a.to(q.dtype.element_ty), mask=valid[:, None])
        tl.store(to + second[None, :], b.to(q.dtype.element_ty), mask=valid[:, None])
        tl.store(to + others[None, :], c.to(q.dtype.element_ty), mask=valid[:, None])
    tl.store(gate + n, weight, mask=valid)


@triton.jit(do_not_specialize=["vectors", "max_position"])
def queries_kernel(
    projected,
    weights,
    positions,
    cos_sin,
    q,
    gate,
    lengths,
    projected_stride,
    cos_sin_stride,
    weights_stride,
    vectors,
    max_position,
    gate_factor,
    skip,
    HEADS: tl.constexpr,
    SKIP: tl.constexpr,
    HALF: tl.constexpr,
    FP8_KEYS: tl.constexpr,
    CVT: tl.constexpr,
    TILE: tl.constexpr,
    DIM: tl.constexpr,
    ROPE: tl.constexpr,
    NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    """Queries q [R, H, 128] (bytes where FP8_KEYS) and gate f32 [R, H] of projected [R, H * 128], weights [R, H].

    vectors: R * H, which programs take in turns, so that each makes the matrix of signs once. SKIP: those of rows with
    lengths [R] up to skip may be left out.
    """
    first, second, others = _columns(HALF, DIM, ROPE)
    signs_a, signs_b, signs_c = _signs(first, DIM), _signs(second, DIM), _signs(others, DIM)
    wait_for_earlier(PDL)
    let_next_start(PDL)
    begin, step = tl.program_id(0) * TILE, tl.num_programs(0) * TILE
    for turn in range(tl.cdiv(vectors - begin, step)):
        n = begin + turn * step + tl.arange(0, TILE)
        # Queries of rows that keep every token, which a long prefill may have many of, are not read.
        if _needed(_lengths(n, vectors, lengths, HEADS, SKIP), skip, SKIP):
            a, b, c, cos, sin, weight = _query_inputs(
                n,
                first,
                second,
                others,
                projected,
                weights,
                positions,
                cos_sin,
                projected_stride,
                cos_sin_stride,
                weights_stride,
                vectors,
                max_position,
                HEADS,
                DIM,
                ROPE,
            )
            _query_tile(
                n,
                a,
                b,
                c,
                cos,
                sin,
                weight,
                first,
                second,
                others,
                signs_a,
                signs_b,
                signs_c,
                q,
                gate,
                vectors,
                gate_factor,
                projected.dtype.element_ty == tl.bfloat16,
                FP8_KEYS,
                CVT,
                DIM,
                NORM,
            )


@triton.jit(do_not_specialize=["rows", "count", "vectors", "max_position"])
def front_kernel(
    key,
    weight,
    bias,
    slots,
    pages,
    scales,
    query,
    weights,
    q,
    gate,
    positions,
    cos_sin,
    lengths,
    key_stride,
    page_stride,
    token_stride,
    scales_stride,
    query_stride,
    weights_stride,
    cos_sin_stride,
    rows,
    count,
    vectors,
    max_position,
    eps,
    gate_factor,
    skip,
    LAYER: tl.constexpr,
    HEADS: tl.constexpr,
    SKIP: tl.constexpr,
    HALF: tl.constexpr,
    FP8_KEYS: tl.constexpr,
    CVT: tl.constexpr,
    TILE: tl.constexpr,
    DIM: tl.constexpr,
    ROPE: tl.constexpr,
    PAGE: tl.constexpr,
    NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    """`keys_kernel` in the first programs, `queries_kernel` in the others, each with one tile."""
    tile = tl.program_id(0)
    key_tiles = tl.cdiv(rows, TILE)
    # Made, and asked for, while the kernel ahead still runs.
    first, second, others = _columns(HALF, DIM, ROPE)
    signs_a, signs_b, signs_c = _signs(first, DIM), _signs(second, DIM), _signs(others, DIM)
    if tile < key_tiles:
        if PDL:
            r = tile.to(tl.int64) * TILE + tl.arange(0, TILE)
            real = r < rows
            prefetch_rows(positions + r, real, 32)
            prefetch_rows(slots + r, real, 32)
            prefetch_rows(key + r * key_stride, real, DIM * key.dtype.element_ty.primitive_bitwidth // 8)
            eighth = tl.arange(0, DIM // 8) * 8  # of the norm's f32
            prefetch_rows(weight + eighth, eighth >= 0, 32)
            if LAYER:
                prefetch_rows(bias + eighth, eighth >= 0, 32)
        wait_for_earlier(PDL)
        let_next_start(PDL)
        _key_tile(
            tile,
            first,
            second,
            others,
            signs_a,
            signs_b,
            signs_c,
            key,
            weight,
            bias,
            positions,
            cos_sin,
            slots,
            pages,
            scales,
            key_stride,
            cos_sin_stride,
            page_stride,
            token_stride,
            scales_stride,
            rows,
            count,
            max_position,
            eps,
            LAYER,
            FP8_KEYS,
            CVT,
            TILE,
            DIM,
            ROPE,
            PAGE,
            NORM,
        )
    else:
        n = (tile - key_tiles) * TILE + tl.arange(0, TILE)
        if PDL:
            r, head = (n // HEADS).to(tl.int64), n % HEADS
            real = n < vectors
            prefetch_rows(positions + r, real, 32)
            if SKIP:
                prefetch_rows(lengths + r, real, 32)
            start = query + r * query_stride + head * DIM
            prefetch_rows(start, real, DIM * query.dtype.element_ty.primitive_bitwidth // 8)
            prefetch_rows(weights + r * weights_stride + head, real, 32)
        wait_for_earlier(PDL)
        let_next_start(PDL)
        # Asked for together with the lengths that say whether they are wanted: these programs wait for memory.
        sizes = _lengths(n, vectors, lengths, HEADS, SKIP)
        a, b, c, cos, sin, factor = _query_inputs(
            n,
            first,
            second,
            others,
            query,
            weights,
            positions,
            cos_sin,
            query_stride,
            cos_sin_stride,
            weights_stride,
            vectors,
            max_position,
            HEADS,
            DIM,
            ROPE,
        )
        if _needed(sizes, skip, SKIP):
            _query_tile(
                n,
                a,
                b,
                c,
                cos,
                sin,
                factor,
                first,
                second,
                others,
                signs_a,
                signs_b,
                signs_c,
                q,
                gate,
                vectors,
                gate_factor,
                query.dtype.element_ty == tl.bfloat16,
                FP8_KEYS,
                CVT,
                DIM,
                NORM,
            )
