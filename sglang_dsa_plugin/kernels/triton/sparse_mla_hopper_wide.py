"""Sparse MLA over gathered bf16 rows for Hopper (SM90) and more than 32 heads, in Gluon.

The formula, the splits and the partial results are those of `sparse_mla_gather`. 64 heads fill the left operand of the
matrix unit (wgmma), so here they are what `sparse_mla_hopper` makes the rows:

    scores [64, 64 rows] = q [64, 576] . rows^T [576, 64]        out [64, 512] += p [64, 64 rows] . rows[:, :512]

Four warps copy rows, four compute scores and weights, and eight the sums, which take 128 registers a thread. They hand
tiles of 64 rows on through shared memory, so that copies, scores and sums of different tiles are under way at once;
eight warps that do all in turn take a third longer. There is room for q and two tiles; the first weights of a tile take
the place of its rope part, which nobody needs any more by then.

What goes together is passed as a tuple:  where (row, split, splits, head tile, heads),  span (the row's slots, first
pick, end and limit of the picks, rows of the cache),  strides (of the row and of the head).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from sglang_dsa_plugin.kernels.triton.sparse_mla_hopper import (
    begin,
    finish,
    last_pick,
    let_next_start,
    q_columns,
    scan,
    tile_slots,
)
from sglang_dsa_plugin.kernels.triton.sparse_mla_hopper_heads import barrier, softmax_step, store_columns


@gluon.jit
def _copy(kv_ptr, span, kv_stride, nope, rope, full, free):
    """Four warps: the rows of each tile to shared memory, a quarter of the columns at a time, the first two as soon as
    the sums of these columns are done for the tile before last.
    """
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    ROWS: gl.constexpr = gl.SliceLayout(1, COPY)
    slots_ptr, first, end, limit, count = span
    slots, valid = tile_slots(slots_ptr, first, limit, count, ROWS)
    for i in range(gl.cdiv(end - first, 64)):
        stage = i & 1
        k_nope = nope.index(stage)
        base = kv_ptr + gl.expand_dims(slots.to(gl.int64) * kv_stride * 8, 1)
        keep = gl.expand_dims(valid, 1)
        slots, valid = tile_slots(slots_ptr, first + 64 * (i + 1), limit, count, ROWS)
        column = gl.expand_dims(gl.arange(0, 128, layout=gl.SliceLayout(0, COPY)), 0)
        for j in gl.static_range(4):
            if j % 2 == 0:
                mbarrier.wait(free.index(2 * stage + j // 2), (i // 2 + 1) & 1, pred=i >= 2)
            async_copy.async_copy_global_to_shared(k_nope.slice(128 * j, 128, dim=1), base + 128 * j + column, keep)
            if j == 3:
                column = gl.expand_dims(512 + gl.arange(0, 64, layout=gl.SliceLayout(0, COPY)), 0)
                async_copy.async_copy_global_to_shared(rope.index(stage), base + column, keep)
            async_copy.mbarrier_arrive(full.index(4 * stage + j), increment_count=False)
    async_copy.commit_group()
    async_copy.wait_group(0)  # all have come by now, as those who wait for the barriers know


@gluon.jit
def _weigh(
    q_ptr,
    q_rope_ptr,
    sink_ptr,
    lse_ptr,
    where,
    span,
    q_strides,
    q_rope_strides,
    scale_log2,
    value_scale,
    q,
    k,
    weights,
    barriers,
    BLOCK_H: gl.constexpr,
    HAS_SINK: gl.constexpr,
    PARTIAL: gl.constexpr,
):
    """Four warps: scores, softmax and weights of each tile."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    HEADS: gl.constexpr = gl.SliceLayout(1, MMA)
    row, split, splits, tile, heads = where
    slots_ptr, first, end, limit, count = span
    q_nope, q_rope = q
    nope, rope = k
    low_shared, factors = weights
    full, free, high_full, low_full = barriers
    head = tile * BLOCK_H + gl.arange(0, BLOCK_H, layout=gl.SliceLayout(1, COPY))
    for j in gl.static_range(8):
        part = q_columns(q_ptr, row, head, heads, q_strides[0], q_strides[1], 64 * j, 64, COPY)
        q_nope.slice(64 * j, 64, dim=1).store(part)
    part = q_columns(q_rope_ptr, row, head, heads, q_rope_strides[0], q_rope_strides[1], 0, 64, COPY)
    q_rope.store(part)
    fence_async_shared()
    barrier()
    m = gl.full([BLOCK_H], float("-inf"), gl.float32, layout=HEADS)
    total = gl.zeros([BLOCK_H], gl.float32, layout=HEADS)
    zero = gl.zeros([BLOCK_H, 64], gl.float32, layout=MMA)
    for i in range(gl.cdiv(end - first, 64)):
        stage = i & 1
        k_nope = nope.index(stage)
        k_rope = rope.index(stage)
        s = zero
        for j in gl.static_range(4):
            mbarrier.wait(full.index(4 * stage + j), (i // 2) & 1)
            fence_async_shared()
            columns = k_nope.slice(128 * j, 128, dim=1).permute((1, 0))
            s = warpgroup_mma(q_nope.slice(128 * j, 128, dim=1), columns, s, use_acc=j > 0, is_async=True)
        s = warpgroup_mma(q_rope, k_rope.permute((1, 0)), s, is_async=True)
        # Only now: the fences would wait for these loads.
        _, counts = tile_slots(slots_ptr, first + 64 * i, limit, count, gl.SliceLayout(0, MMA))
        s = warpgroup_mma_wait(0, deps=[s])
        p, m, factor = softmax_step(s, counts, scale_log2, m)
        total = total * factor + gl.sum(p, axis=1)
        # Weights rounded to bf16 are off by more than the bounds allow when few picks share the weight. So they come as
        # two bf16 numbers, the second what the first cut off.
        high = p.to(gl.bfloat16)
        low = (p - high.to(gl.float32)).to(gl.bfloat16)
        # All four warps are through with the rope part.
        barrier()
        k_rope.store(high)
        factors.index(stage).store(factor)
        fence_async_shared()
        barrier()
        mbarrier.arrive(high_full.index(stage), count=1)
        # There is one place for the second numbers: when the sums of the tile before are done.
        mbarrier.wait(free.index(3 - 2 * stage), ((i + 1) // 2 + 1) & 1, pred=i >= 1)
        low_shared.store(low)
        fence_async_shared()
        barrier()
        mbarrier.arrive(low_full, count=1)
    head = tile * BLOCK_H + gl.arange(0, BLOCK_H, layout=HEADS)
    weight = finish(m, total, sink_ptr, lse_ptr, row, split, splits, head, heads, value_scale, HAS_SINK, PARTIAL)
    factors.index(2).store(weight)
    barrier()
    mbarrier.arrive(high_full.index(2), count=1)


@gluon.jit
def _sum(
    out_ptr,
    where,
    span,
    strides,
    k,
    weights,
    barriers,
    BLOCK_H: gl.constexpr,
    PARTIAL: gl.constexpr,
    PDL: gl.constexpr,
):
    """Eight warps: the sums of each tile, and the output."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 128, 16])
    HEADS: gl.constexpr = gl.SliceLayout(1, MMA)
    _, first, end, _, _ = span
    nope, rope = k
    low_shared, factors = weights
    _, free, high_full, low_full = barriers
    a = gl.zeros([BLOCK_H, 256], gl.float32, layout=MMA)
    b = gl.zeros([BLOCK_H, 256], gl.float32, layout=MMA)
    for i in range(gl.cdiv(end - first, 64)):
        stage = i & 1
        left = nope.index(stage).slice(0, 256, dim=1)
        right = nope.index(stage).slice(256, 256, dim=1)
        high = rope.index(stage)
        mbarrier.wait(high_full.index(stage), (i // 2) & 1)
        factor = gl.expand_dims(factors.index(stage).load(HEADS), 1)
        a = a * factor
        b = b * factor
        fence_async_shared()
        a = warpgroup_mma(high, left, a, is_async=True)
        mbarrier.wait(low_full, i & 1)
        fence_async_shared()
        a = warpgroup_mma(low_shared, left, a, is_async=True)
        b = warpgroup_mma(high, right, b, is_async=True)
        b = warpgroup_mma(low_shared, right, b, is_async=True)
        a = warpgroup_mma_wait(2, deps=[a])
        barrier()
        mbarrier.arrive(free.index(2 * stage), count=1)
        b = warpgroup_mma_wait(0, deps=[b])
        barrier()
        mbarrier.arrive(free.index(2 * stage + 1), count=1)
    mbarrier.wait(high_full.index(2), 0)
    let_next_start(PDL)
    weight = factors.index(2).load(HEADS)
    keep = (end > first) | (not PARTIAL)
    store_columns(a, weight, out_ptr, where, strides, keep, 0, PARTIAL, False)
    store_columns(b, weight, out_ptr, where, strides, keep, 256, PARTIAL, False)


@gluon.jit
def gather_bf16_wide(
    q_ptr,
    q_rope_ptr,
    kv_ptr,
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
    HAS_LENGTHS: gl.constexpr,
    HAS_SINK: gl.constexpr,
    PARTIAL: gl.constexpr,
    PDL: gl.constexpr,
    SCAN: gl.constexpr,
    BLOCK_H: gl.constexpr,
):
    """As `sparse_mla_hopper.gather_bf16`, with 64 heads a program. Grid: one axis of R * splits * head tiles. Eight
    warps, and eight more that it starts itself.
    """
    KEYS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], gl.bfloat16)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    tile, split, row, slots_ptr, first, limit = begin(
        slots_ptr, lengths_ptr, heads, picks, split_picks, splits, slots_stride, HAS_LENGTHS, BLOCK_H, PDL
    )
    end = last_pick(scan(slots_ptr, first, limit, SCAN), first, count, SCAN)
    nope = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 512], KEYS)
    rope = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 64], KEYS)
    q_nope = gl.allocate_shared_memory(gl.bfloat16, [BLOCK_H, 512], KEYS)
    q_rope = gl.allocate_shared_memory(gl.bfloat16, [BLOCK_H, 64], KEYS)
    low_shared = gl.allocate_shared_memory(gl.bfloat16, [BLOCK_H, 64], KEYS)
    factors = gl.allocate_shared_memory(gl.float32, [3, BLOCK_H], FLAT)
    # A quarter of a tile's columns has been copied (128 threads report it), the sums of one half of its columns are
    # done, its first weights are there (and, in the end, what the output is multiplied by), and the second ones.
    full = gl.allocate_shared_memory(gl.int64, [8, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    high_full = gl.allocate_shared_memory(gl.int64, [3, 1], mbarrier.MBarrierLayout())
    low_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for i in gl.static_range(8):
        mbarrier.init(full.index(i), count=128)
    for i in gl.static_range(4):
        mbarrier.init(free.index(i), count=1)
    for i in gl.static_range(3):
        mbarrier.init(high_full.index(i), count=1)
    mbarrier.init(low_full, count=1)
    barrier()
    where = (row, split, splits, tile, heads)
    span = (slots_ptr, first, end, limit, count)
    k = (nope, rope)
    weights = (low_shared, factors)
    barriers = (full, free, high_full, low_full)
    gl.warp_specialize(
        [
            (
                _sum,
                (out_ptr, where, span, (out_row_stride, out_head_stride), k, weights, barriers, BLOCK_H, PARTIAL, PDL),
            ),
            (
                _weigh,
                (
                    q_ptr,
                    q_rope_ptr,
                    sink_ptr,
                    lse_ptr,
                    where,
                    span,
                    (q_row_stride, q_head_stride),
                    (q_rope_row_stride, q_rope_head_stride),
                    scale_log2,
                    value_scale,
                    (q_nope, q_rope),
                    k,
                    weights,
                    barriers,
                    BLOCK_H,
                    HAS_SINK,
                    PARTIAL,
                ),
            ),
            (_copy, (kv_ptr, span, kv_stride, nope, rope, full, free)),
        ],
        [4, 4],
        [112, 64],
    )
