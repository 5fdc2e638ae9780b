"""Sparse MLA over gathered fp8 rows (`fp8_656`, `fp8_576`) for Hopper (SM90) in Gluon: see `sparse_mla_hopper`.

The codes of the next tile travel in registers while the current one, decoded to f16, is multiplied from shared memory:
the tile is decoded once for both products. One program holds a single tile; two programs share a multiprocessor, and
one waits for memory while the other computes.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from sglang_dsa_plugin.kernels.triton.sparse_mla_hopper import (
    begin,
    finish,
    last_pick,
    let_next_start,
    scan,
    softmax_step,
    store_columns,
    tile_slots,
)
from sglang_dsa_plugin.kernels.triton.sparse_mla_hopper_codes import WEIGHT_ONE, gathered, q_to_shared, spread, to_f16


@gluon.jit
def _words(words_ptr, slot, valid, kv_stride, FIRST: gl.constexpr, WIDTH: gl.constexpr, LAYOUT: gl.constexpr):
    """Words FIRST .. FIRST + WIDTH of 64 rows: int32 [64, WIDTH]; a row that is not valid is not read and gives 0."""
    base = gl.expand_dims(slot.to(gl.int64) * kv_stride * 4, 1)
    column = gl.expand_dims(FIRST + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, LAYOUT)), 0)
    return gl.load(words_ptr + base + column, mask=gl.expand_dims(valid, 1), other=0)


@gluon.jit
def _scales(scales_ptr, slot, valid, kv_stride):
    """The four block scales of 64 rows, f32 [64] each."""
    at = scales_ptr + slot.to(gl.int64) * kv_stride * 4 + 128
    f0 = gl.load(at, mask=valid, other=0.0)
    f1 = gl.load(at + 1, mask=valid, other=0.0)
    f2 = gl.load(at + 2, mask=valid, other=0.0)
    f3 = gl.load(at + 3, mask=valid, other=0.0)
    return f0, f1, f2, f3


@gluon.jit
def gather_fp8(
    q_ptr,
    q_rope_ptr,
    words_ptr,
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
    HAS_SCALES: gl.constexpr,
    HAS_LENGTHS: gl.constexpr,
    HAS_SINK: gl.constexpr,
    PARTIAL: gl.constexpr,
    PDL: gl.constexpr,
    SCAN: gl.constexpr,
    BLOCK_H: gl.constexpr,
):
    """As `sparse_mla_hopper.gather_bf16`; words and scales are views of the same rows. HAS_SCALES: `fp8_656`, else
    `fp8_576`. Grid: one axis of R * splits * head tiles. Four warps.
    """
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_H, 16])
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    WORDS: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    ROPE: gl.constexpr = WORDS if HAS_SCALES else gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0])
    ROPE_WORDS: gl.constexpr = 32 if HAS_SCALES else 16
    ROPE_AT: gl.constexpr = 132 if HAS_SCALES else 128
    ROWS: gl.constexpr = gl.SliceLayout(1, WORDS)
    ROPE_ROWS: gl.constexpr = gl.SliceLayout(1, ROPE)
    TOKENS: gl.constexpr = gl.SliceLayout(1, MMA)
    KEYS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], gl.bfloat16)
    KEY_WORDS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 32], gl.int32)
    WEIGHTS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, BLOCK_H], gl.bfloat16)

    tile, split, row, slots_ptr, first, limit = begin(
        slots_ptr, lengths_ptr, heads, picks, split_picks, splits, slots_stride, HAS_LENGTHS, BLOCK_H, PDL
    )
    seen = scan(slots_ptr, first, limit, SCAN)
    slot, valid = tile_slots(slots_ptr, first, limit, count, ROWS)
    rope_slot, rope_valid = tile_slots(slots_ptr, first, limit, count, ROPE_ROWS)
    token, counts = tile_slots(slots_ptr, first, limit, count, TOKENS)
    w0 = _words(words_ptr, slot, valid, kv_stride, 0, 32, WORDS)
    w1 = _words(words_ptr, slot, valid, kv_stride, 32, 32, WORDS)
    w2 = _words(words_ptr, slot, valid, kv_stride, 64, 32, WORDS)
    w3 = _words(words_ptr, slot, valid, kv_stride, 96, 32, WORDS)
    wr = _words(words_ptr, rope_slot, rope_valid, kv_stride, ROPE_AT, ROPE_WORDS, ROPE)
    if HAS_SCALES:
        f0, f1, f2, f3 = _scales(scales_ptr, token, counts, kv_stride)
    slot, valid = tile_slots(slots_ptr, first + 64, limit, count, ROWS)
    rope_slot, rope_valid = tile_slots(slots_ptr, first + 64, limit, count, ROPE_ROWS)
    token, counts_next = tile_slots(slots_ptr, first + 64, limit, count, TOKENS)

    head = tile * BLOCK_H + gl.arange(0, BLOCK_H, layout=gl.SliceLayout(1, COPY))
    strides, rope_strides = (q_row_stride, q_head_stride), (q_rope_row_stride, q_rope_head_stride)
    q0_shared, q1_shared, q2_shared, q3_shared, qr_shared, down = q_to_shared(
        q_ptr, q_rope_ptr, row, head, heads, strides, rope_strides, COPY, HAS_SCALES
    )
    down = gl.expand_dims(gl.convert_layout(down, gl.SliceLayout(0, MMA)), 0)
    k0_shared = gl.allocate_shared_memory(gl.float16, [1, 64, 128], KEYS)
    k1_shared = gl.allocate_shared_memory(gl.float16, [1, 64, 128], KEYS)
    k2_shared = gl.allocate_shared_memory(gl.float16, [1, 64, 128], KEYS)
    k3_shared = gl.allocate_shared_memory(gl.float16, [1, 64, 128], KEYS)
    kr_shared = gl.allocate_shared_memory(qr_shared.dtype, [1, 64, 64], KEYS)
    p0_shared = gl.allocate_shared_memory(gl.float16, [1, 64, BLOCK_H], WEIGHTS)
    p1_shared = p0_shared
    p2_shared = p0_shared
    p3_shared = p0_shared
    if HAS_SCALES:
        p1_shared = gl.allocate_shared_memory(gl.float16, [1, 64, BLOCK_H], WEIGHTS)
        p2_shared = gl.allocate_shared_memory(gl.float16, [1, 64, BLOCK_H], WEIGHTS)
        p3_shared = gl.allocate_shared_memory(gl.float16, [1, 64, BLOCK_H], WEIGHTS)
    end = last_pick(seen, first, count, SCAN)

    m = gl.full([BLOCK_H], float("-inf"), gl.float32, layout=gl.SliceLayout(0, MMA))
    zero = gl.zeros([64, BLOCK_H], gl.float32, layout=MMA)
    total = zero
    # The sums are kept in units of the largest block scale so far, so that weights times scales fit into f16. It starts
    # as low as WEIGHT_ONE over it fits into f32; value_scale, 1 with scales, makes it a tensor.
    unit = gl.minimum(value_scale, 2.0**-100) if HAS_SCALES else value_scale
    acc0 = gl.zeros([128, BLOCK_H], gl.float32, layout=MMA)
    acc1 = gl.zeros([128, BLOCK_H], gl.float32, layout=MMA)
    acc2 = gl.zeros([128, BLOCK_H], gl.float32, layout=MMA)
    acc3 = gl.zeros([128, BLOCK_H], gl.float32, layout=MMA)
    for at in range(first, end, 64):
        # Always 0, but not to the compiler: otherwise it keeps the addresses of all operands in registers, and spills.
        only = (at < 0).to(gl.int32)
        k0 = k0_shared.index(only)
        k1 = k1_shared.index(only)
        k2 = k2_shared.index(only)
        k3 = k3_shared.index(only)
        kr = kr_shared.index(only)
        b0 = q0_shared.index(only).permute((1, 0))
        b1 = q1_shared.index(only).permute((1, 0))
        b2 = q2_shared.index(only).permute((1, 0))
        b3 = q3_shared.index(only).permute((1, 0))
        br = qr_shared.index(only).permute((1, 0))
        p0 = p0_shared.index(only)
        p1 = p1_shared.index(only)
        p2 = p2_shared.index(only)
        p3 = p3_shared.index(only)
        k0._reinterpret(gl.int32, [64, 64], KEY_WORDS).store(spread(to_f16(w0)))
        k1._reinterpret(gl.int32, [64, 64], KEY_WORDS).store(spread(to_f16(w1)))
        k2._reinterpret(gl.int32, [64, 64], KEY_WORDS).store(spread(to_f16(w2)))
        k3._reinterpret(gl.int32, [64, 64], KEY_WORDS).store(spread(to_f16(w3)))
        if HAS_SCALES:
            kr._reinterpret(gl.int32, [64, 32], KEY_WORDS).store(wr)
        else:
            kr._reinterpret(gl.int32, [64, 32], KEY_WORDS).store(to_f16(wr))
        w0 = _words(words_ptr, slot, valid, kv_stride, 0, 32, WORDS)
        w1 = _words(words_ptr, slot, valid, kv_stride, 32, 32, WORDS)
        w2 = _words(words_ptr, slot, valid, kv_stride, 64, 32, WORDS)
        w3 = _words(words_ptr, slot, valid, kv_stride, 96, 32, WORDS)
        wr = _words(words_ptr, rope_slot, rope_valid, kv_stride, ROPE_AT, ROPE_WORDS, ROPE)
        if HAS_SCALES:
            n0, n1, n2, n3 = _scales(scales_ptr, token, counts_next, kv_stride)
        slot, valid = tile_slots(slots_ptr, at + 128, limit, count, ROWS)
        rope_slot, rope_valid = tile_slots(slots_ptr, at + 128, limit, count, ROPE_ROWS)

        fence_async_shared()
        if HAS_SCALES:
            s0 = warpgroup_mma(k0, b0, zero, use_acc=False, is_async=True)
            s1 = warpgroup_mma(k1, b1, zero, use_acc=False, is_async=True)
            s2 = warpgroup_mma(k2, b2, zero, use_acc=False, is_async=True)
            s3 = warpgroup_mma(k3, b3, zero, use_acc=False, is_async=True)
            s = warpgroup_mma(kr, br, zero, use_acc=False, is_async=True)
            top = gl.max(gl.maximum(gl.maximum(f0, f1), gl.maximum(f2, f3)), axis=0)
            unit_new = gl.maximum(unit, top)
            shrink = unit / unit_new
            unit = unit_new
            s0, s1, s2, s3, s = warpgroup_mma_wait(0, deps=[s0, s1, s2, s3, s])
            g0 = gl.expand_dims(f0, 1)
            g1 = gl.expand_dims(f1, 1)
            g2 = gl.expand_dims(f2, 1)
            g3 = gl.expand_dims(f3, 1)
            s = s + (s0 * g0 + s1 * g1 + s2 * g2 + s3 * g3) * down
        else:
            s = warpgroup_mma(k0, b0, zero, use_acc=False, is_async=True)
            s = warpgroup_mma(k1, b1, s, is_async=True)
            s = warpgroup_mma(k2, b2, s, is_async=True)
            s = warpgroup_mma(k3, b3, s, is_async=True)
            s = warpgroup_mma(kr, br, s, is_async=True)
            s = warpgroup_mma_wait(0, deps=[s]) * down
        p, m, total, factor = softmax_step(s, counts, scale_log2, m, total)
        if HAS_SCALES:
            inverse = WEIGHT_ONE / unit
            p0.store((p * (g0 * inverse)).to(gl.float16))
            p1.store((p * (g1 * inverse)).to(gl.float16))
            p2.store((p * (g2 * inverse)).to(gl.float16))
            p3.store((p * (g3 * inverse)).to(gl.float16))
            factor = factor * shrink
            f0 = n0
            f1 = n1
            f2 = n2
            f3 = n3
        else:
            p0.store((p * WEIGHT_ONE).to(gl.float16))
        counts = counts_next
        token, counts_next = tile_slots(slots_ptr, at + 128, limit, count, TOKENS)
        acc0 = acc0 * factor
        acc1 = acc1 * factor
        acc2 = acc2 * factor
        acc3 = acc3 * factor
        fence_async_shared()
        acc0 = warpgroup_mma(k0.permute((1, 0)), p0, acc0, is_async=True)
        acc1 = warpgroup_mma(k1.permute((1, 0)), p1, acc1, is_async=True)
        acc2 = warpgroup_mma(k2.permute((1, 0)), p2, acc2, is_async=True)
        acc3 = warpgroup_mma(k3.permute((1, 0)), p3, acc3, is_async=True)
        acc0, acc1, acc2, acc3 = warpgroup_mma_wait(0, deps=[acc0, acc1, acc2, acc3])
    let_next_start(PDL)

    head = tile * BLOCK_H + gl.arange(0, BLOCK_H, layout=gl.SliceLayout(0, MMA))
    total = gl.sum(total, axis=0)
    weight = finish(m, total, sink_ptr, lse_ptr, row, split, splits, head, heads, unit / WEIGHT_ONE, HAS_SINK, PARTIAL)
    keep = (end > first) | (not PARTIAL)
    where, strides = (row, split, splits, tile, heads), (out_row_stride, out_head_stride)
    store_columns(gathered(acc0), weight, out_ptr, where, strides, keep, 0, PARTIAL)
    store_columns(gathered(acc1), weight, out_ptr, where, strides, keep, 128, PARTIAL)
    store_columns(gathered(acc2), weight, out_ptr, where, strides, keep, 256, PARTIAL)
    store_columns(gathered(acc3), weight, out_ptr, where, strides, keep, 384, PARTIAL)
