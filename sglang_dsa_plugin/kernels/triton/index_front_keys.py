"""From projections to index keys in their page (index_front_parts.py says how a vector is held)."""

from __future__ import annotations

import triton
import triton.language as tl

from .e4m3 import encode, inverse_of, scale_bits, scale_of
from .index_front_parts import load_cos_sin, load_rows, part_columns, rotate, signs_of
from .pdl import let_next_start, wait_for_earlier


@triton.jit
def key_tile(
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
    a, b, c = load_rows(start, valid, first), load_rows(start, valid, second), load_rows(start, valid, others)
    weight_a, weight_b, weight_c = tl.load(weight + first), tl.load(weight + second), tl.load(weight + others)
    if LAYER:
        bias_a, bias_b, bias_c = tl.load(bias + first), tl.load(bias + second), tl.load(bias + others)
    cos, sin = load_cos_sin(cos_sin, cos_sin_stride, p, max_position, valid, ROPE)
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
        x = rotate(a, b, c, signs_a, signs_b, signs_c, False, NORM)
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
    first, second, others = part_columns(HALF, DIM, ROPE)
    signs_a, signs_b, signs_c = signs_of(first, DIM), signs_of(second, DIM), signs_of(others, DIM)
    wait_for_earlier(PDL)
    let_next_start(PDL)
    key_tile(
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
