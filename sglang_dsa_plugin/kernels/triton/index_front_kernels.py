"""Keys, queries and gate of a step in one launch; index_front.py launches it."""

from __future__ import annotations

import triton
import triton.language as tl

from .index_front_keys import key_tile
from .index_front_parts import part_columns, signs_of
from .index_front_queries import needed, query_inputs, query_tile, row_lengths
from .pdl import let_next_start, prefetch_rows, wait_for_earlier


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
    first, second, others = part_columns(HALF, DIM, ROPE)
    signs_a, signs_b, signs_c = signs_of(first, DIM), signs_of(second, DIM), signs_of(others, DIM)
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
        key_tile(
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
        sizes = row_lengths(n, vectors, lengths, HEADS, SKIP)
        a, b, c, cos, sin, factor = query_inputs(
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
        if needed(sizes, skip, SKIP):
            query_tile(
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
