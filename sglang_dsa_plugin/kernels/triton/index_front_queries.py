"""From projections to index queries with a gate (index_front_parts.py says how a vector is held)."""

from __future__ import annotations

import triton
import triton.language as tl

from .e4m3 import encode, inverse_of, scale_bits, scale_of
from .index_front_parts import load_cos_sin, load_rows, part_columns, rotate, signs_of
from .pdl import let_next_start, wait_for_earlier


@triton.jit
def row_lengths(n, vectors, lengths, HEADS: tl.constexpr, SKIP: tl.constexpr):
    """Of the rows of vectors n [TILE]; anything without SKIP."""
    return tl.load(lengths + n // HEADS, mask=n < vectors, other=0) if SKIP else n


@triton.jit
def needed(sizes, skip, SKIP: tl.constexpr):
    """Whether a row of `row_lengths` is longer than skip; without SKIP all are needed."""
    return tl.max(sizes, 0) > skip if SKIP else True


@triton.jit
def query_inputs(
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
    """What `query_tile` reads for vectors n [TILE]: three parts of each, cos, sin, weights."""
    valid = n < vectors
    r, head = (n // HEADS).to(tl.int64), n % HEADS
    p = tl.load(positions + r, mask=valid, other=0).to(tl.int64)
    start = projected + r * projected_stride + head * DIM
    a, b, c = load_rows(start, valid, first), load_rows(start, valid, second), load_rows(start, valid, others)
    weight = tl.load(weights + r * weights_stride + head, mask=valid, other=0.0).to(tl.float32)
    cos, sin = load_cos_sin(cos_sin, cos_sin_stride, p, max_position, valid, ROPE)
    return a, b, c, cos, sin, weight


@triton.jit
def query_tile(
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
        x = rotate(a, b, c, signs_a, signs_b, signs_c, REST_IS_BF16, NORM)
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
    first, second, others = part_columns(HALF, DIM, ROPE)
    signs_a, signs_b, signs_c = signs_of(first, DIM), signs_of(second, DIM), signs_of(others, DIM)
    wait_for_earlier(PDL)
    let_next_start(PDL)
    begin, step = tl.program_id(0) * TILE, tl.num_programs(0) * TILE
    for turn in range(tl.cdiv(vectors - begin, step)):
        n = begin + turn * step + tl.arange(0, TILE)
        # Queries of rows that keep every token, which a long prefill may have many of, are not read.
        if needed(row_lengths(n, vectors, lengths, HEADS, SKIP), skip, SKIP):
            a, b, c, cos, sin, weight = query_inputs(
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
            query_tile(
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
