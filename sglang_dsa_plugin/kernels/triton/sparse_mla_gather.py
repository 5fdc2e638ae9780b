"""Sparse MLA over gathered rows, portable Triton: any NVIDIA GPU from SM80.

    s = scale * q . row;  p = exp(s - max);  out = sum p * row[:512] / sum p        per head, over the picks of a query

One program handles one query, BLOCK_H of its heads and one split of its picks, and walks the split in tiles of BLOCK_N
rows that it gathers itself. With one split it writes the result; with several it writes a normalised partial result and
its log-sum-exp (base 2), which `sparse_mla_merge` joins. Work per program and the order of every sum depend on shapes
alone, so results repeat bit for bit.

Latent values stay what is stored (`layouts`): the block scales of `fp8_656` multiply scores after the product over
their 128 columns, and weights before the product with their 128 columns, so no value is rounded a second time.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sglang_dsa_plugin.kernels.triton.layouts import load_values
from sglang_dsa_plugin.kernels.triton.pdl import let_next_start, prefetch, wait_for_earlier

LOG2E = tl.constexpr(1.4426950408889634)
# Up to which the merge's programs, waiting, do not slow down those that work: H200, one row of 16 heads 7.8 us, 7.7
# where they come at once; two rows 9.1 and 9.9.
FEW_PROGRAMS = tl.constexpr(64)


@triton.jit
def _q_part(q_at, real, first: tl.constexpr, WIDTH: tl.constexpr, Q_PARTS: tl.constexpr):
    """Columns first .. first + WIDTH of q [BLOCK_H, WIDTH] as a sum of bf16 tiles, each what the one before cut off.

    One holds a bf16 query, two hold a f16 one and three a f32 one; those beyond Q_PARTS are not used.
    """
    x = tl.load(q_at + first + tl.arange(0, WIDTH)[None, :], mask=real[:, None], other=0)
    high = x.to(tl.bfloat16)
    middle = high
    low = high
    if Q_PARTS > 1:
        rest = x.to(tl.float32) - high.to(tl.float32)
        middle = rest.to(tl.bfloat16)
        if Q_PARTS > 2:
            low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
    return high, middle, low


@triton.jit
def _product(high, middle, low, k, Q_PARTS: tl.constexpr):
    """q . k: [BLOCK_H, BLOCK_N] f32."""
    k = tl.trans(k)
    s = tl.dot(high, k)
    if Q_PARTS > 1:
        s = tl.dot(middle, k, s)
    if Q_PARTS > 2:
        s = tl.dot(low, k, s)
    return s


@triton.jit
def _weighted(p, k, acc):
    """acc + p . k. Weights rounded to bf16 are off by more than the bounds allow when few picks share the weight, so
    they come as two bf16 numbers, the second what the first cut off.
    """
    high = p.to(tl.bfloat16)
    low = (p - high.to(tl.float32)).to(tl.bfloat16)
    return tl.dot(low, k, tl.dot(high, k, acc))


@triton.jit
def fetch_head(q, q_rope, length):
    """One head's query and a row's length, to the L2 cache while the kernel ahead still runs."""
    WIDTH: tl.constexpr = q.dtype.element_ty.primitive_bitwidth // 8
    byte = tl.arange(0, 64) * 64
    rope = byte - 512 * WIDTH
    at = tl.where(rope < 0, q.to(tl.uint64) + byte.to(tl.uint64), q_rope.to(tl.uint64) + rope.to(tl.uint64))
    prefetch(tl.where(rope < 64 * WIDTH, at, tl.where(byte == 63 * 64, length.to(tl.uint64), 0)))


@triton.jit
def gather_kernel(
    q_ptr,
    q_rope_ptr,
    nope_ptr,
    rope_ptr,
    scales_ptr,
    slots_ptr,
    lengths_ptr,
    sink_ptr,
    out_ptr,
    lse_ptr,
    count,
    heads,
    picks,
    split_picks,
    splits,
    scale_log2,
    value_scale,
    q_row_stride,
    q_head_stride,
    q_rope_row_stride,
    q_rope_head_stride,
    kv_stride,
    slots_stride,
    out_row_stride,
    out_head_stride,
    UNIT: tl.constexpr,
    ROPE_COLUMN: tl.constexpr,
    SCALES_COLUMN: tl.constexpr,
    NOPE_WORDS: tl.constexpr,
    ROPE_WORDS: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    HAS_LENGTHS: tl.constexpr,
    HAS_SINK: tl.constexpr,
    Q_PARTS: tl.constexpr,
    PARTIAL: tl.constexpr,
    PDL: tl.constexpr,
    DECODE: tl.constexpr,
    SCAN: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """q [R, H, 512] and q_rope [R, H, 64] over rows of the cache: out [R, H, 512] and lse [R, H], or partials f32
    [R, splits, H, 512] and [R, splits, H] when PARTIAL. count: N rows of the cache. scale_log2: the score scale times
    log2(e). value_scale: what one stored value is worth in the output. kv_stride counts UNIT bytes. SCAN: picks of a
    split, rounded up to a power of two; 0 leaves out the search for the last valid one, as with lengths.
    Grid: one axis of R * splits * head tiles.
    """
    tiles = tl.cdiv(heads, BLOCK_H)
    pid = tl.program_id(0)
    # Head tiles of one split run side by side: the second finds the rows in L2.
    tile = pid % tiles
    split = (pid // tiles) % splits
    row = (pid // (tiles * splits)).to(tl.int64)
    if PDL and PARTIAL:
        # Each program takes another head.
        fetch_head(
            q_ptr + row * q_row_stride + (pid % heads) * q_head_stride,
            q_rope_ptr + row * q_rope_row_stride + (pid % heads) * q_rope_head_stride,
            lengths_ptr + row,
        )
    wait_for_earlier(PDL)
    if PARTIAL:
        programs = tl.num_programs(0)
        if programs <= FEW_PROGRAMS:
            let_next_start(PDL)

    first = split * split_picks
    limit = tl.minimum(picks, first + split_picks)
    slots_ptr += row * slots_stride
    # Slots are read one tile ahead, so that the rows of a tile need not wait for them, and the first together with the
    # row's length.
    inner = tl.arange(0, BLOCK_N)
    slot = tl.load(slots_ptr + first + inner, mask=first + inner < limit, other=-1)
    if HAS_LENGTHS:
        # Cut before it is narrowed: a length far past int32 is the whole row.
        limit = tl.minimum(tl.load(lengths_ptr + row), limit).to(tl.int32)
        slot = tl.where(first + inner < limit, slot, -1)
    end = limit
    if SCAN:
        # Short rows are mostly -1: the loop ends behind the last valid pick.
        where = first + tl.arange(0, SCAN)
        seen = tl.load(slots_ptr + where, mask=where < limit, other=-1)
        end = tl.max(tl.where((seen >= 0) & (seen < count), where + 1, 0), axis=0)

    head = tile * BLOCK_H + tl.arange(0, BLOCK_H)
    real = head < heads
    q_at = q_ptr + row * q_row_stride + head.to(tl.int64)[:, None] * q_head_stride
    q0, middle0, low0 = _q_part(q_at, real, 0, 128, Q_PARTS)
    q1, middle1, low1 = _q_part(q_at, real, 128, 128, Q_PARTS)
    q2, middle2, low2 = _q_part(q_at, real, 256, 128, Q_PARTS)
    q3, middle3, low3 = _q_part(q_at, real, 384, 128, Q_PARTS)
    q_at = q_rope_ptr + row * q_rope_row_stride + head.to(tl.int64)[:, None] * q_rope_head_stride
    qr, middler, lowr = _q_part(q_at, real, 0, 64, Q_PARTS)

    m = tl.full([BLOCK_H], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    acc0 = tl.zeros([BLOCK_H, 128], tl.float32)
    acc1 = tl.zeros([BLOCK_H, 128], tl.float32)
    acc2 = tl.zeros([BLOCK_H, 128], tl.float32)
    acc3 = tl.zeros([BLOCK_H, 128], tl.float32)
    WORD: tl.constexpr = 4 if NOPE_WORDS else 1
    NOPE_UNIT: tl.constexpr = UNIT // 4 if NOPE_WORDS else UNIT // 2
    ROPE_UNIT: tl.constexpr = UNIT // 4 if ROPE_WORDS else UNIT // 2
    for at in tl.range(first, end, BLOCK_N):
        valid = (slot >= 0) & (slot < count)
        unit = slot.to(tl.int64) * kv_stride
        base = unit * NOPE_UNIT
        k0 = load_values(nope_ptr, base, 0, 128, valid, NOPE_WORDS, DECODE)
        k1 = load_values(nope_ptr, base, 128 // WORD, 128, valid, NOPE_WORDS, DECODE)
        k2 = load_values(nope_ptr, base, 256 // WORD, 128, valid, NOPE_WORDS, DECODE)
        k3 = load_values(nope_ptr, base, 384 // WORD, 128, valid, NOPE_WORDS, DECODE)
        kr = load_values(rope_ptr, unit * ROPE_UNIT, ROPE_COLUMN, 64, valid, ROPE_WORDS, DECODE)
        next_at = at + BLOCK_N + inner
        slot = tl.load(slots_ptr + next_at, mask=next_at < limit, other=-1)
        s = _product(qr, middler, lowr, kr, Q_PARTS)
        if HAS_SCALES:
            scale_at = scales_ptr + unit * (UNIT // 4) + SCALES_COLUMN
            f0 = tl.load(scale_at, mask=valid, other=0)[None, :]
            f1 = tl.load(scale_at + 1, mask=valid, other=0)[None, :]
            f2 = tl.load(scale_at + 2, mask=valid, other=0)[None, :]
            f3 = tl.load(scale_at + 3, mask=valid, other=0)[None, :]
            s += _product(q0, middle0, low0, k0, Q_PARTS) * f0
            s += _product(q1, middle1, low1, k1, Q_PARTS) * f1
            s += _product(q2, middle2, low2, k2, Q_PARTS) * f2
            s += _product(q3, middle3, low3, k3, Q_PARTS) * f3
        else:
            s += _product(q0, middle0, low0, k0, Q_PARTS)
            s += _product(q1, middle1, low1, k1, Q_PARTS)
            s += _product(q2, middle2, low2, k2, Q_PARTS)
            s += _product(q3, middle3, low3, k3, Q_PARTS)
        s = tl.where(valid[None, :], s * scale_log2, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, axis=1))
        lift = tl.where(m_new == float("-inf"), 0.0, m_new)
        alpha = tl.exp2(m - lift)
        p = tl.exp2(s - lift[:, None])
        total = total * alpha + tl.sum(p, axis=1)
        m = m_new
        acc0 = acc0 * alpha[:, None]
        acc1 = acc1 * alpha[:, None]
        acc2 = acc2 * alpha[:, None]
        acc3 = acc3 * alpha[:, None]
        if HAS_SCALES:
            acc0 = _weighted(p * f0, k0, acc0)
            acc1 = _weighted(p * f1, k1, acc1)
            acc2 = _weighted(p * f2, k2, acc2)
            acc3 = _weighted(p * f3, k3, acc3)
        else:
            acc0 = _weighted(p, k0, acc0)
            acc1 = _weighted(p, k1, acc1)
            acc2 = _weighted(p, k2, acc2)
            acc3 = _weighted(p, k3, acc3)

    # Not earlier where programs are many, because those of the merge that wait slow down those that work.
    let_next_start(PDL)
    # `m` decides whether there was a pick: a sum of weights may be NaN when a row holds NaN, and must stay so.
    some = m > float("-inf")
    some = some | (total != total)
    safe = tl.where(some, total, 1.0)
    lse = tl.where(some, m + tl.log2(safe), float("-inf"))
    weight = tl.where(some, value_scale / safe, 0.0)
    if PARTIAL:
        part = (row * splits + split) * heads + head
        tl.store(lse_ptr + part, lse, mask=real)
        out_at = out_ptr + part[:, None] * 512
        # The merge never reads a split without picks.
        real = real & (end > first)
    else:
        if HAS_SINK:
            sink = tl.load(sink_ptr + head, mask=real, other=0.0) * LOG2E
            weight = tl.where(some, weight / (1.0 + tl.exp2(sink - lse)), 0.0)
        tl.store(lse_ptr + row * heads + head, lse / LOG2E, mask=real)
        out_at = out_ptr + row * out_row_stride + head.to(tl.int64)[:, None] * out_head_stride
    out_at = out_at + tl.arange(0, 128)[None, :]
    weight = weight[:, None]
    kind = out_ptr.dtype.element_ty
    tl.store(out_at, (acc0 * weight).to(kind), mask=real[:, None])
    tl.store(out_at + 128, (acc1 * weight).to(kind), mask=real[:, None])
    tl.store(out_at + 256, (acc2 * weight).to(kind), mask=real[:, None])
    tl.store(out_at + 384, (acc3 * weight).to(kind), mask=real[:, None])
