"""From projections to index keys in their page and to index queries with a gate, a launch each; see ops/index_keys.py
and ops/index_queries.py.

A program holds 16 vectors of 128. It reads each value of the rope part together with its partner instead of moving
values between threads. The Hadamard rotation is a product with the matrix of signs on the matrix unit: an f32 value is
the sum of three bf16 values, 8 bits of it each, and a sign times any of them is exact.

A vector depends on its own input alone, not on how many come with it: tiles have one size whatever the number of rows,
sums run in one order, and multiply and add are not fused.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_dsa_plugin.cache.layouts import FP8, INDEX_DIM, PAGE_SIZE, ROPE_DIM

from . import index_tables
from .e4m3 import encode, has_cvt, inverse_of, scale_bits, scale_of

TILE = 16  # vectors, the least the matrix unit takes; more would change its instruction, and with it the last bit
WARPS = 4
_PROGRAMS_PER_PROCESSOR = 4


@triton.jit
def _partner(HALF: tl.constexpr, DIM: tl.constexpr, ROPE: tl.constexpr):
    """Per column of the rope part: where its pair's other value is, its angle, and whether it is the pair's first."""
    columns = tl.arange(0, DIM)
    if HALF:
        partner, angle, first = columns ^ (ROPE // 2), columns & (ROPE // 2 - 1), columns < ROPE // 2
    else:
        partner, angle, first = columns ^ 1, columns >> 1, (columns & 1) == 0
    return columns, partner, angle, first


@triton.jit
def _rope(
    x,
    other,
    cos_sin,
    cos_sin_stride,
    positions,
    max_position,
    valid,
    HALF: tl.constexpr,
    DIM: tl.constexpr,
    ROPE: tl.constexpr,
):
    """x [n, 128] and the partner of each value -> x with its first 64 values turned. A position outside the table is
    not read; its rope part becomes 0.
    """
    columns, _, angle, first = _partner(HALF, DIM, ROPE)
    inside = (valid & (positions >= 0) & (positions < max_position))[:, None] & (columns < ROPE)[None, :]
    at = cos_sin + positions[:, None] * cos_sin_stride + angle[None, :]
    cos = tl.load(at, mask=inside, other=0.0)
    sin = tl.load(at + ROPE // 2, mask=inside, other=0.0)
    sin = tl.where(first[None, :], -sin, sin)
    return tl.where((columns < ROPE)[None, :], x * cos + other * sin, x)


@triton.jit
def _signs(DIM: tl.constexpr):
    """(-1)^popcount(i & j) as bf16 [128, 128]. 0x6996 holds the parities of 0 .. 15."""
    i = tl.arange(0, DIM)
    both = i[:, None] & i[None, :]
    odd = (0x6996 >> ((both ^ (both >> 4)) & 15)) & 1
    return (1 - 2 * odd).to(tl.float32).to(tl.bfloat16)


@triton.jit
def _upper(x):
    """x without its lower 16 bits: what bf16 holds of it, cut off, since rounding up could overflow."""
    return (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _rotate(x, signs, NORM: tl.constexpr):
    """f32 [n, 128] times signs, scaled by NORM after the sum. The small terms are added first."""
    high = _upper(x)
    rest = tl.where((x.to(tl.int32, bitcast=True) & 0x7FFFFFFF) == 0x7F800000, 0.0, x - high)
    middle = _upper(rest)
    low = rest - middle
    total = tl.dot(low.to(tl.bfloat16), signs)
    total = tl.dot(middle.to(tl.bfloat16), signs, total)
    total = tl.dot(high.to(tl.bfloat16), signs, total)
    return total * NORM


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
):
    """Keys of rows projected [R, 128] into pages at slots [R] in [0, count).

    pages: bytes where FP8_KEYS, else the keys' dtype, and scales: the f32 view of the same; strides in elements.
    LAYER: LayerNorm with bias, else RMSNorm.
    """
    r = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    valid = r < rows
    columns, partner, _, _ = _partner(HALF, DIM, ROPE)
    start = projected + r[:, None] * projected_stride
    turning = valid[:, None] & (columns < ROPE)[None, :]
    x = tl.load(start + columns[None, :], mask=valid[:, None], other=0.0).to(tl.float32)
    other = tl.load(start + partner[None, :], mask=turning, other=0.0).to(tl.float32)
    if LAYER:
        mean = tl.sum(x, axis=1) / DIM
        x -= mean[:, None]
        other -= mean[:, None]
    factor = tl.rsqrt(tl.sum(x * x, axis=1) / DIM + eps)
    x = x * factor[:, None] * tl.load(weight + columns)[None, :]
    other = other * factor[:, None] * tl.load(weight + partner)[None, :]
    if LAYER:
        x += tl.load(bias + columns)[None, :]
        other += tl.load(bias + partner)[None, :]
    p = tl.load(positions + r, mask=valid, other=0).to(tl.int64)
    x = _rope(x, other, cos_sin, cos_sin_stride, p, max_position, valid, HALF, DIM, ROPE)
    slot = tl.load(slots + r, mask=valid, other=-1).to(tl.int64)
    written = (slot >= 0) & (slot < count)
    page, offset = slot // PAGE, slot % PAGE
    to = pages + (page * page_stride + offset * token_stride)[:, None] + columns[None, :]
    if FP8_KEYS:
        x = _rotate(x, _signs(DIM), NORM)
        bits = scale_bits(x)
        tl.store(to, encode(x * inverse_of(bits)[:, None], CVT), mask=written[:, None])
        tl.store(scales + page * scales_stride + PAGE * DIM // 4 + offset, scale_of(bits), mask=written)
    else:
        tl.store(to, x.to(pages.dtype.element_ty), mask=written[:, None])


@triton.jit(do_not_specialize=["vectors", "max_position"])
def queries_kernel(
    projected,
    weights,
    positions,
    cos_sin,
    q,
    gate,
    projected_stride,
    cos_sin_stride,
    weights_stride,
    vectors,
    max_position,
    gate_factor,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    FP8_KEYS: tl.constexpr,
    CVT: tl.constexpr,
    TILE: tl.constexpr,
    DIM: tl.constexpr,
    ROPE: tl.constexpr,
    NORM: tl.constexpr,
):
    """Queries q [R, H, 128] (bytes where FP8_KEYS) and gate f32 [R, H] of projected [R, H * 128], weights [R, H].

    vectors: R * H, which programs take in turns, so that each makes the matrix of signs once.
    """
    columns, partner, _, _ = _partner(HALF, DIM, ROPE)
    signs = _signs(DIM)
    first, step = tl.program_id(0) * TILE, tl.num_programs(0) * TILE
    for turn in range(tl.cdiv(vectors - first, step)):
        n = (first + tl.arange(0, TILE)).to(tl.int64) + turn * step
        valid = n < vectors
        r, head = n // HEADS, n % HEADS
        start = projected + (r * projected_stride + head * DIM)[:, None]
        turning = valid[:, None] & (columns < ROPE)[None, :]
        x = tl.load(start + columns[None, :], mask=valid[:, None], other=0.0).to(tl.float32)
        other = tl.load(start + partner[None, :], mask=turning, other=0.0).to(tl.float32)
        p = tl.load(positions + r, mask=valid, other=0).to(tl.int64)
        x = _rope(x, other, cos_sin, cos_sin_stride, p, max_position, valid, HALF, DIM, ROPE)
        weight = tl.load(weights + r * weights_stride + head, mask=valid, other=0.0).to(tl.float32) * gate_factor
        to = q + n[:, None] * DIM + columns[None, :]
        if FP8_KEYS:
            x = _rotate(x, signs, NORM)
            bits = scale_bits(x)
            tl.store(to, encode(x * inverse_of(bits)[:, None], CVT), mask=valid[:, None])
            weight *= scale_of(bits)
        else:
            tl.store(to, x.to(q.dtype.element_ty), mask=valid[:, None])
        tl.store(gate + n, weight, mask=valid)


def store_keys(
    pages: torch.Tensor,
    slots: torch.Tensor,
    projected: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    layout: str,
) -> None:
    """`ops.index_keys.store`."""
    rows, count = projected.shape[0], pages.shape[0] * PAGE_SIZE
    if not rows or not count:
        return
    fp8 = pages.dtype == torch.uint8
    scales = pages.view(torch.float32) if fp8 else pages
    keys_kernel[(triton.cdiv(rows, TILE),)](
        projected,
        weight,
        weight if bias is None else bias,
        positions,
        cos_sin,
        slots,
        pages,
        scales,
        projected.stride(0),
        cos_sin.stride(0),
        pages.stride(0),
        INDEX_DIM if fp8 else pages.stride(1),
        scales.stride(0),
        rows,
        count,
        cos_sin.shape[0],
        float(eps),
        LAYER=bias is not None,
        PAGE=PAGE_SIZE,
        **_common(projected.device, layout, fp8),
    )


def prepare_queries(
    projected: torch.Tensor,
    weights: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    layout: str,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`ops.index_queries.prepare`."""
    rows, heads = weights.shape
    q = torch.empty((rows, heads, INDEX_DIM), dtype=dtype, device=projected.device)
    gate = torch.empty((rows, heads), dtype=torch.float32, device=projected.device)
    vectors = rows * heads
    if not vectors:
        return q, gate
    fp8 = dtype == FP8
    programs = _PROGRAMS_PER_PROCESSOR * index_tables.gpu_of(projected.device).processors
    queries_kernel[(min(triton.cdiv(vectors, TILE), programs),)](
        projected,
        weights,
        positions,
        cos_sin,
        q.view(torch.uint8) if fp8 else q,
        gate,
        projected.stride(0),
        cos_sin.stride(0),
        weights.stride(0),
        vectors,
        cos_sin.shape[0],
        heads**-0.5 * INDEX_DIM**-0.5,
        HEADS=heads,
        **_common(projected.device, layout, fp8),
    )
    return q, gate


def _common(device: torch.device, layout: str, fp8: bool) -> dict[str, object]:
    """Compile-time arguments of both kernels."""
    return {
        "HALF": layout == "half",
        "FP8_KEYS": fp8,
        "CVT": has_cvt(index_tables.gpu_of(device)),
        "TILE": TILE,
        "DIM": INDEX_DIM,
        "ROPE": ROPE_DIM,
        "NORM": INDEX_DIM**-0.5,
        "num_warps": WARPS,
        "enable_fp_fusion": False,
    }
