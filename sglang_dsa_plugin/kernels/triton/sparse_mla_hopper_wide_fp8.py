"""Sparse MLA over gathered fp8 rows (`fp8_656`, `fp8_576`) for Hopper (SM90) and more than 32 heads, in Gluon: see
`sparse_mla_hopper_wide` for the shape of the products.

Codes of the next tile are copied to shared memory while the current one, decoded to f16, is multiplied: a tile is
decoded once for 64 heads and both products, block by block of 128 columns as soon as the sums no longer need what the
block held before. f16 holds e4m3 exactly, and weights well enough: one product, not two. Two warpgroups do everything
in turn: each computes the scores of 32 rows, owns half of the columns of each block, and they exchange the weights.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from sglang_dsa_plugin.kernels.triton.sparse_mla_hopper import (
    begin,
    finish,
    last_pick,
    let_next_start,
    scan,
    tile_slots,
)
from sglang_dsa_plugin.kernels.triton.sparse_mla_hopper_codes import WEIGHT_ONE, q_to_shared, spread, to_f16
from sglang_dsa_plugin.kernels.triton.sparse_mla_hopper_heads import barrier, softmax_step, store_columns


@gluon.jit
def _copy(pointer, slots, valid, kv_stride, to, FIRST: gl.constexpr):
    """Starts copying 64 rows' 4-byte words from FIRST on; a row that is not valid is not read and becomes 0."""
    base = gl.expand_dims(slots.to(gl.int64) * kv_stride * 4, 1)
    column = FIRST + gl.arange(0, to.shape[1], layout=gl.SliceLayout(0, slots.type.layout.parent))
    async_copy.async_copy_global_to_shared(
        to, pointer + base + gl.expand_dims(column, 0), mask=gl.expand_dims(valid, 1)
    )


@gluon.jit
def _start(words_ptr, scales_ptr, slots, valid, others, others_valid, kv_stride, codes, rope, scales, HAS_SCALES):
    """Starts copying 64 rows. others: the same slots, spread over the threads as it suits the scales, or the rope part
    where there are none.
    """
    _copy(words_ptr, slots, valid, kv_stride, codes, 0)
    if HAS_SCALES:
        _copy(words_ptr, slots, valid, kv_stride, rope, 132)
        _copy(scales_ptr, others, others_valid, kv_stride, scales, 128)
    else:
        _copy(words_ptr, others, others_valid, kv_stride, rope, 128)
    async_copy.commit_group()


@gluon.jit
def _decode(codes, to, FIRST: gl.constexpr):
    """32 words of each row -> 128 f16 values, in the order of `spread`."""
    WORDS: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [8, 1], [1, 0])
    KEY_WORDS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 32], gl.int32)
    words = codes.slice(FIRST, 32, dim=1).load(WORDS)
    to._reinterpret(gl.int32, [64, 64], KEY_WORDS).store(spread(to_f16(words)))


@gluon.jit
def _decode_rope(rope, to, HAS_SCALES: gl.constexpr):
    KEY_WORDS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 32], gl.int32)
    if HAS_SCALES:
        words = rope.load(gl.BlockedLayout([1, 4], [4, 8], [8, 1], [1, 0]))
    else:
        words = to_f16(rope.load(gl.BlockedLayout([1, 4], [8, 4], [8, 1], [1, 0])))
    to._reinterpret(gl.int32, [64, 32], KEY_WORDS).store(words)


@gluon.jit
def _factor(scales, BLOCK: gl.constexpr, MMA: gl.constexpr):
    """The scales [1, 64] of one block of columns."""
    return scales.permute((1, 0)).slice(BLOCK, 1, dim=0).load(MMA)


@gluon.jit
def gather_fp8_wide(
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
    """As `sparse_mla_hopper_wide.gather_bf16_wide`; words and scales are views of the same rows. HAS_SCALES: `fp8_656`,
    else `fp8_576`. Grid: one axis of R * splits * head tiles. Eight warps.
    """
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 32, 16])
    MMA_OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 64, 16])
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    ROWS: gl.constexpr = gl.SliceLayout(1, gl.BlockedLayout([1, 4], [4, 8], [8, 1], [1, 0]))
    OTHERS: gl.constexpr = gl.SliceLayout(
        1, gl.BlockedLayout([1, 4], [32, 1] if HAS_SCALES else [8, 4], [8, 1], [1, 0])
    )
    TOKENS: gl.constexpr = gl.SliceLayout(0, MMA)
    KEYS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], gl.bfloat16)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    # Every warp has all scales of a tile, so that their maximum needs no exchange.
    ALL_SCALES: gl.constexpr = gl.BlockedLayout([2, 4], [32, 1], [1, 8], [1, 0])

    tile, split, row, slots_ptr, first, limit = begin(
        slots_ptr, lengths_ptr, heads, picks, split_picks, splits, slots_stride, HAS_LENGTHS, BLOCK_H, PDL
    )
    seen = scan(slots_ptr, first, limit, SCAN)
    codes = gl.allocate_shared_memory(gl.int32, [64, 128], PLAIN)
    rope = gl.allocate_shared_memory(gl.int32, [64, 32 if HAS_SCALES else 16], PLAIN)
    # Two, because the scales are needed until the sums have begun.
    scales = gl.allocate_shared_memory(gl.float32, [2, 64, 4], PLAIN)
    slots, valid = tile_slots(slots_ptr, first, limit, count, ROWS)
    others, others_valid = tile_slots(slots_ptr, first, limit, count, OTHERS)
    now = scales.index(0)
    _start(words_ptr, scales_ptr, slots, valid, others, others_valid, kv_stride, codes, rope, now, HAS_SCALES)
    slots, valid = tile_slots(slots_ptr, first + 64, limit, count, ROWS)
    others, others_valid = tile_slots(slots_ptr, first + 64, limit, count, OTHERS)

    head = tile * BLOCK_H + gl.arange(0, BLOCK_H, layout=gl.SliceLayout(1, COPY))
    strides, rope_strides = (q_row_stride, q_head_stride), (q_rope_row_stride, q_rope_head_stride)
    q0_shared, q1_shared, q2_shared, q3_shared, qr_shared, down = q_to_shared(
        q_ptr, q_rope_ptr, row, head, heads, strides, rope_strides, COPY, HAS_SCALES
    )
    down = gl.expand_dims(gl.convert_layout(down, gl.SliceLayout(1, MMA)), 1)
    k0_shared = gl.allocate_shared_memory(gl.float16, [1, 64, 128], KEYS)
    k1_shared = gl.allocate_shared_memory(gl.float16, [1, 64, 128], KEYS)
    k2_shared = gl.allocate_shared_memory(gl.float16, [1, 64, 128], KEYS)
    k3_shared = gl.allocate_shared_memory(gl.float16, [1, 64, 128], KEYS)
    kr_shared = gl.allocate_shared_memory(qr_shared.dtype, [1, 64, 64], KEYS)
    p0_shared = gl.allocate_shared_memory(gl.float16, [1, BLOCK_H, 64], KEYS)
    p1_shared = p0_shared
    p2_shared = p0_shared
    p3_shared = p0_shared
    if HAS_SCALES:
        p1_shared = gl.allocate_shared_memory(gl.float16, [1, BLOCK_H, 64], KEYS)
        p2_shared = gl.allocate_shared_memory(gl.float16, [1, BLOCK_H, 64], KEYS)
        p3_shared = gl.allocate_shared_memory(gl.float16, [1, BLOCK_H, 64], KEYS)
    end = last_pick(seen, first, count, SCAN)

    m = gl.full([BLOCK_H], float("-inf"), gl.float32, layout=gl.SliceLayout(1, MMA))
    zero = gl.zeros([BLOCK_H, 64], gl.float32, layout=MMA)
    # Summed over the 64 only at the end.
    total = zero
    # The sums are kept in units of the largest block scale so far, so that weights times scales fit into f16. It starts
    # as low as WEIGHT_ONE over it fits into f32; value_scale, 1 with scales, makes it a tensor.
    unit = gl.minimum(value_scale, 2.0**-100) if HAS_SCALES else value_scale
    acc0 = gl.zeros([BLOCK_H, 128], gl.float32, layout=MMA_OUT)
    acc1 = gl.zeros([BLOCK_H, 128], gl.float32, layout=MMA_OUT)
    acc2 = gl.zeros([BLOCK_H, 128], gl.float32, layout=MMA_OUT)
    acc3 = gl.zeros([BLOCK_H, 128], gl.float32, layout=MMA_OUT)
    async_copy.wait_group(0)
    _decode_rope(rope, kr_shared.index(0), HAS_SCALES)
    _decode(codes, k0_shared.index(0), 0)
    _decode(codes, k1_shared.index(0), 32)
    _decode(codes, k2_shared.index(0), 64)
    _decode(codes, k3_shared.index(0), 96)
    stage = 0
    for at in range(first, end, 64):
        # Always 0, but not to the compiler: otherwise it keeps the addresses of all operands in registers, and spills.
        only = (at < 0).to(gl.int32)
        k0 = k0_shared.index(only)
        k1 = k1_shared.index(only)
        k2 = k2_shared.index(only)
        k3 = k3_shared.index(only)
        kr = kr_shared.index(only)
        p0 = p0_shared.index(only)
        p1 = p1_shared.index(only)
        p2 = p2_shared.index(only)
        p3 = p3_shared.index(only)
        fence_async_shared()
        # Also: every warp has decoded what the next copies overwrite.
        barrier()
        now = scales.index(stage)
        ahead = scales.index(1 - stage)
        _start(words_ptr, scales_ptr, slots, valid, others, others_valid, kv_stride, codes, rope, ahead, HAS_SCALES)
        slots, valid = tile_slots(slots_ptr, at + 128, limit, count, ROWS)
        others, others_valid = tile_slots(slots_ptr, at + 128, limit, count, OTHERS)
        _, counts = tile_slots(slots_ptr, at, limit, count, TOKENS)
        s = warpgroup_mma(qr_shared.index(only), kr.permute((1, 0)), zero, use_acc=False, is_async=True)
        if HAS_SCALES:
            # In two halves: five sums at once are more than the registers hold.
            s0 = warpgroup_mma(q0_shared.index(only), k0.permute((1, 0)), zero, use_acc=False, is_async=True)
            s1 = warpgroup_mma(q1_shared.index(only), k1.permute((1, 0)), zero, use_acc=False, is_async=True)
            s, s0, s1 = warpgroup_mma_wait(0, deps=[s, s0, s1])
            s = s + (s0 * _factor(now, 0, MMA) + s1 * _factor(now, 1, MMA)) * down
            s2 = warpgroup_mma(q2_shared.index(only), k2.permute((1, 0)), zero, use_acc=False, is_async=True)
            s3 = warpgroup_mma(q3_shared.index(only), k3.permute((1, 0)), zero, use_acc=False, is_async=True)
            unit_new = gl.maximum(unit, gl.max(gl.max(now.load(ALL_SCALES), axis=1), axis=0))
            shrink = unit / unit_new
            unit = unit_new
            s2, s3 = warpgroup_mma_wait(0, deps=[s2, s3])
            s = s + (s2 * _factor(now, 2, MMA) + s3 * _factor(now, 3, MMA)) * down
        else:
            s = warpgroup_mma(q0_shared.index(only), k0.permute((1, 0)), s, is_async=True)
            s = warpgroup_mma(q1_shared.index(only), k1.permute((1, 0)), s, is_async=True)
            s = warpgroup_mma(q2_shared.index(only), k2.permute((1, 0)), s, is_async=True)
            s = warpgroup_mma(q3_shared.index(only), k3.permute((1, 0)), s, is_async=True)
            s = warpgroup_mma_wait(0, deps=[s]) * down
        p, m, factor = softmax_step(s, counts, scale_log2, m)
        total = total * gl.expand_dims(factor, 1) + p
        if HAS_SCALES:
            p = p * (WEIGHT_ONE / unit)
            p0.store((p * _factor(now, 0, MMA)).to(gl.float16))
            p1.store((p * _factor(now, 1, MMA)).to(gl.float16))
            p2.store((p * _factor(now, 2, MMA)).to(gl.float16))
            p3.store((p * _factor(now, 3, MMA)).to(gl.float16))
            factor = factor * shrink
        else:
            p0.store((p * WEIGHT_ONE).to(gl.float16))
        factor = gl.expand_dims(gl.convert_layout(factor, gl.SliceLayout(1, MMA_OUT)), 1)
        acc0 = acc0 * factor
        acc1 = acc1 * factor
        acc2 = acc2 * factor
        acc3 = acc3 * factor
        async_copy.wait_group(0)
        fence_async_shared()
        a0 = warpgroup_mma(p0, k0, acc0, is_async=True)
        a1 = warpgroup_mma(p1, k1, acc1, is_async=True)
        a2 = warpgroup_mma(p2, k2, acc2, is_async=True)
        a3 = warpgroup_mma(p3, k3, acc3, is_async=True)
        _decode_rope(rope, kr, HAS_SCALES)
        # The other warpgroup may be behind: a block is free when both have passed the barrier.
        acc0 = warpgroup_mma_wait(3, deps=[a0])
        barrier()
        _decode(codes, k0, 0)
        acc1 = warpgroup_mma_wait(2, deps=[a1])
        barrier()
        _decode(codes, k1, 32)
        acc2 = warpgroup_mma_wait(1, deps=[a2])
        barrier()
        _decode(codes, k2, 64)
        acc3 = warpgroup_mma_wait(0, deps=[a3])
        barrier()
        _decode(codes, k3, 96)
        stage = 1 - stage
    let_next_start(PDL)

    head = tile * BLOCK_H + gl.arange(0, BLOCK_H, layout=gl.SliceLayout(1, MMA))
    total = gl.sum(total, axis=1)
    weight = finish(m, total, sink_ptr, lse_ptr, row, split, splits, head, heads, unit / WEIGHT_ONE, HAS_SINK, PARTIAL)
    weight = gl.convert_layout(weight, gl.SliceLayout(1, MMA_OUT))
    keep = (end > first) | (not PARTIAL)
    where = (row, split, splits, tile, heads)
    strides = (out_row_stride, out_head_stride)
    store_columns(acc0, weight, out_ptr, where, strides, keep, 0, PARTIAL, True)
    store_columns(acc1, weight, out_ptr, where, strides, keep, 128, PARTIAL, True)
    store_columns(acc2, weight, out_ptr, where, strides, keep, 256, PARTIAL, True)
    store_columns(acc3, weight, out_ptr, where, strides, keep, 384, PARTIAL, True)
