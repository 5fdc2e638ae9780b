"""Sparse MLA over gathered bf16 rows for Hopper (SM90) in Gluon, and what it shares with `sparse_mla_hopper_fp8`.

The formula, the splits and the partial results are those of `sparse_mla_gather`. What differs is the shape of the work:
both products are turned around, so that the gathered rows are the left operand of the matrix unit (wgmma),

    scores^T [64 rows, H] = rows [64, 576] . q^T [576, H]        out^T [512, H] += rows[:, :512]^T [512, 64] . p [64, H]

because the left operand needs 64 rows and the right one only 8 columns: 8 or 16 heads cost what they are, with no heads
of padding, and q stays in shared memory instead of 144 registers. One warpgroup works on a tile of 64 rows while the
copies of the next STAGES - 1 tiles are under way.
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

LOG2E = gl.constexpr(1.4426950408889634)


@gluon.jit
def begin(slots_ptr, lengths_ptr, heads, picks, split_picks, splits, slots_stride, HAS_LENGTHS, BLOCK_H, PDL):
    """Waits as in pdl.py. Returns (head tile, split, row, the row's slots, first pick, end of its picks)."""
    if PDL:
        gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    tiles = gl.cdiv(heads, BLOCK_H)
    pid = gl.program_id(0)
    tile = pid % tiles
    split = (pid // tiles) % splits
    row = (pid // (tiles * splits)).to(gl.int64)
    first = split * split_picks
    limit = gl.minimum(picks, first + split_picks)
    if HAS_LENGTHS:
        # Cut before it is narrowed: a length far past int32 is the whole row.
        limit = gl.minimum(gl.load(lengths_ptr + row), limit).to(gl.int32)
    return tile, split, row, slots_ptr + row * slots_stride, first, limit


@gluon.jit
def let_next_start(PDL):
    """As in pdl.py; not earlier than at a program's end, because waiting programs of a merge slow down working ones."""
    if PDL:
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )


@gluon.jit
def scan(slots_ptr, first, limit, SCAN: gl.constexpr):
    """The slots of all picks of the split, to be looked through by `last_pick` once they are there. SCAN 0: nothing."""
    if SCAN:
        where = first + gl.arange(0, SCAN, layout=gl.BlockedLayout([4], [32], [gl.num_warps()], [0]))
        seen = gl.load(slots_ptr + where, mask=where < limit, other=-1)
    else:
        seen = limit
    return seen


@gluon.jit
def last_pick(seen, first, count, SCAN: gl.constexpr):
    """One past the last valid pick: short rows are mostly -1."""
    if SCAN:
        where = first + gl.arange(0, SCAN, layout=gl.BlockedLayout([4], [32], [gl.num_warps()], [0]))
        end = gl.max(gl.where((seen >= 0) & (seen < count), where + 1, 0), axis=0)
    else:
        end = seen
    return end


@gluon.jit
def tile_slots(slots_ptr, at, limit, count, LAYOUT: gl.constexpr):
    """Slots of the 64 picks from `at`, and which of them are valid."""
    where = at + gl.arange(0, 64, layout=LAYOUT)
    slot = gl.load(slots_ptr + where, mask=where < limit, other=-1)
    return slot, (slot >= 0) & (slot < count)


@gluon.jit
def softmax_step(s, valid, scale_log2, m, total):
    """One tile of the running softmax over axis 0: (weights p, new max m, new total, factor of what was summed so far).

    total: f32 [64, H], summed over the 64 only at the end. A tile without valid picks leaves m at -inf and adds 0.
    """
    s = gl.where(gl.expand_dims(valid, 1), s * scale_log2, float("-inf"))
    m_new = gl.maximum(m, gl.max(s, axis=0))
    lift = gl.where(m_new == float("-inf"), 0.0, m_new)
    p = gl.exp2(s - gl.expand_dims(lift, 0))
    factor = gl.expand_dims(gl.exp2(m - lift), 0)
    return p, m_new, total * factor + p, factor


@gluon.jit
def finish(m, total, sink_ptr, lse_ptr, row, split, splits, head, heads, value_scale, HAS_SINK: gl.constexpr, PARTIAL):
    """Writes lse; returns the factor that turns the sums into the output. m, total (of the weights), head: [H]."""
    # A sum of weights is NaN when a row holds NaN, and must stay so.
    some = (m > float("-inf")) | (total != total)
    safe = gl.where(some, total, 1.0)
    lse = gl.where(some, m + gl.log2(safe), float("-inf"))
    weight = gl.where(some, value_scale / safe, 0.0)
    real = head < heads
    if PARTIAL:
        gl.store(lse_ptr + (row * splits + split) * heads + head, lse, mask=real)
    else:
        if HAS_SINK:
            sink = gl.load(sink_ptr + head, mask=real, other=0.0) * LOG2E
            weight = gl.where(some, weight / (1.0 + gl.exp2(sink - lse)), 0.0)
        gl.store(lse_ptr + row * heads + head, lse / LOG2E, mask=real)
    return weight


@gluon.jit
def store_columns(acc, weight, out_ptr, where, strides, keep, FIRST: gl.constexpr, PARTIAL):
    """acc [WIDTH, H] * weight -> columns from FIRST of the output (strides: row, head) or of the partial result."""
    row, split, splits, tile, heads = where
    WIDTH: gl.constexpr = acc.shape[0]
    HEADS: gl.constexpr = acc.shape[1]
    OUT: gl.constexpr = gl.BlockedLayout([4, 1], [32, 1], [1, gl.num_warps()], [0, 1])
    out = gl.convert_layout(acc, OUT) * gl.expand_dims(gl.convert_layout(weight, gl.SliceLayout(0, OUT)), 0)
    out = out.to(out_ptr.dtype.element_ty)
    head = tile * HEADS + gl.arange(0, HEADS, layout=gl.SliceLayout(0, OUT))
    at = row * strides[0] + head.to(gl.int64) * strides[1]
    if PARTIAL:
        at = ((row * splits + split) * heads + head) * 512
    column = FIRST + gl.arange(0, WIDTH, layout=gl.SliceLayout(1, OUT))
    keep = gl.expand_dims((head < heads) & keep, 0)
    gl.store(out_ptr + gl.expand_dims(at, 0) + gl.expand_dims(column, 1), out, mask=keep)


@gluon.jit
def q_columns(q_ptr, row, head, heads, row_stride, head_stride, FIRST: gl.constexpr, WIDTH: gl.constexpr, COPY):
    """Columns FIRST .. FIRST + WIDTH of q: bf16 [H, WIDTH]; heads that do not exist are 0."""
    at = row * row_stride + gl.expand_dims(head.to(gl.int64) * head_stride, 1)
    column = gl.expand_dims(FIRST + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, COPY)), 0)
    return gl.load(q_ptr + at + column, mask=gl.expand_dims(head < heads, 1), other=0.0)


@gluon.jit
def _copy_tile(kv_ptr, slots, valid, kv_stride, nope, rope, COPY: gl.constexpr):
    """Starts copying 64 rows to shared memory; a row that is not valid is not read and becomes 0."""
    base = gl.expand_dims(slots.to(gl.int64) * kv_stride * 8, 1)
    keep = gl.expand_dims(valid, 1)
    column = gl.expand_dims(gl.arange(0, 512, layout=gl.SliceLayout(0, COPY)), 0)
    async_copy.async_copy_global_to_shared(nope, kv_ptr + base + column, mask=keep)
    column = gl.expand_dims(512 + gl.arange(0, 64, layout=gl.SliceLayout(0, COPY)), 0)
    async_copy.async_copy_global_to_shared(rope, kv_ptr + base + column, mask=keep)
    async_copy.commit_group()


@gluon.jit
def beside(x, y):
    """x and y [n, H] (or [H]) side by side: [n, 2 * H]. A thread that holds a column holds it in both halves."""
    both = gl.join(x, y)
    if len(x.shape) == 2:
        return gl.reshape(gl.permute(both, (0, 2, 1)), [x.shape[0], 2 * x.shape[1]])
    else:
        return gl.reshape(gl.permute(both, (1, 0)), [2 * x.shape[0]])


@gluon.jit
def _scores(k_nope, k_rope, q_nope, q_rope, zero):
    """rows . q^T: [64, H], as four sums that do not wait for each other: narrow products end long after they began."""
    q_nope = q_nope.permute((1, 0))
    q_rope = q_rope.permute((1, 0))
    s = zero
    t = zero
    u = zero
    v = zero
    for j in gl.static_range(9):
        k = k_nope.slice(64 * j, 64, dim=1) if j < 8 else k_rope
        q = q_nope.slice(64 * j, 64, dim=0) if j < 8 else q_rope
        s = warpgroup_mma(k.slice(0, 16, dim=1), q.slice(0, 16, dim=0), s, use_acc=j > 0, is_async=True)
        t = warpgroup_mma(k.slice(16, 16, dim=1), q.slice(16, 16, dim=0), t, use_acc=j > 0, is_async=True)
        u = warpgroup_mma(k.slice(32, 16, dim=1), q.slice(32, 16, dim=0), u, use_acc=j > 0, is_async=True)
        v = warpgroup_mma(k.slice(48, 16, dim=1), q.slice(48, 16, dim=0), v, use_acc=j > 0, is_async=True)
    s, t, u, v = warpgroup_mma_wait(0, deps=[s, t, u, v])
    return (s + t) + (u + v)


@gluon.jit
def gather_bf16(
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
    STAGES: gl.constexpr,
):
    """As `sparse_mla_gather.gather_kernel`, for bf16 q and rows on 16-byte bounds; kv_stride counts 16 bytes.
    Grid: one axis of R * splits * head tiles. Four warps.
    """
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_H, 16])
    # Weights rounded to bf16 are off by more than the bounds allow when few picks share the weight. So they come as two
    # bf16 numbers, the second what the first cut off; side by side, so that the rows are read once for both, as long as
    # the sums of both fit into registers.
    JOINED: gl.constexpr = BLOCK_H <= 16
    COLUMNS: gl.constexpr = 2 * BLOCK_H if JOINED else BLOCK_H
    MMA_OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    # Eight lanes copy 128 consecutive bytes of a row, and a thread has few rows to compute addresses of.
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    ROWS: gl.constexpr = gl.SliceLayout(1, COPY)
    KEYS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], gl.bfloat16)
    WEIGHTS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, COLUMNS], gl.bfloat16)

    tile, split, row, slots_ptr, first, limit = begin(
        slots_ptr, lengths_ptr, heads, picks, split_picks, splits, slots_stride, HAS_LENGTHS, BLOCK_H, PDL
    )
    seen = scan(slots_ptr, first, limit, SCAN)
    nope = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 64, 512], KEYS)
    rope = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 64, 64], KEYS)
    slots, valid = tile_slots(slots_ptr, first, limit, count, ROWS)
    for ahead in gl.static_range(STAGES):
        _copy_tile(kv_ptr, slots, valid, kv_stride, nope.index(ahead), rope.index(ahead), COPY)
        slots, valid = tile_slots(slots_ptr, first + (ahead + 1) * 64, limit, count, ROWS)
    head = tile * BLOCK_H + gl.arange(0, BLOCK_H, layout=ROWS)
    q_nope = q_columns(q_ptr, row, head, heads, q_row_stride, q_head_stride, 0, 512, COPY)
    q_rope = q_columns(q_rope_ptr, row, head, heads, q_rope_row_stride, q_rope_head_stride, 0, 64, COPY)
    q_nope_shared = gl.allocate_shared_memory(gl.bfloat16, [1, BLOCK_H, 512], KEYS)
    q_rope_shared = gl.allocate_shared_memory(gl.bfloat16, [1, BLOCK_H, 64], KEYS)
    q_nope_shared.index(0).store(q_nope)
    q_rope_shared.index(0).store(q_rope)
    weights_shared = gl.allocate_shared_memory(gl.bfloat16, [1, 64, COLUMNS], WEIGHTS)
    end = last_pick(seen, first, count, SCAN)

    m = gl.full([BLOCK_H], float("-inf"), gl.float32, layout=gl.SliceLayout(0, MMA))
    zero = gl.zeros([64, BLOCK_H], gl.float32, layout=MMA)
    total = zero
    acc = gl.zeros([512, COLUMNS], gl.float32, layout=MMA_OUT)
    stage = 0
    for at in range(first, end, 64):
        _, counts = tile_slots(slots_ptr, at, limit, count, gl.SliceLayout(1, MMA))
        # Always 0, but not to the compiler: otherwise it keeps the addresses of all operands in registers, and spills.
        only = (at < 0).to(gl.int32)
        async_copy.wait_group(STAGES - 1)
        fence_async_shared()
        k_nope = nope.index(stage + only)
        k_rope = rope.index(stage + only)
        s = _scores(k_nope, k_rope, q_nope_shared.index(only), q_rope_shared.index(only), zero)
        p, m, total, factor = softmax_step(s, counts, scale_log2, m, total)
        factor = gl.convert_layout(gl.reshape(factor, [BLOCK_H]), gl.SliceLayout(0, MMA))
        high = p.to(gl.bfloat16)
        low = (p - high.to(gl.float32)).to(gl.bfloat16)
        weights = weights_shared.index(only)
        if JOINED:
            factor = gl.convert_layout(beside(factor, factor), gl.SliceLayout(0, MMA_OUT))
            weights.store(beside(high, low))
        else:
            weights.store(high)
        acc = acc * gl.expand_dims(factor, 0)
        fence_async_shared()
        acc = warpgroup_mma(k_nope.permute((1, 0)), weights, acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        if not JOINED:
            weights.store(low)
            fence_async_shared()
            acc = warpgroup_mma(k_nope.permute((1, 0)), weights, acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc])
        _copy_tile(kv_ptr, slots, valid, kv_stride, k_nope, k_rope, COPY)
        slots, valid = tile_slots(slots_ptr, at + (STAGES + 1) * 64, limit, count, ROWS)
        stage = (stage + 1) % STAGES
    async_copy.wait_group(0)
    let_next_start(PDL)

    head = tile * BLOCK_H + gl.arange(0, BLOCK_H, layout=gl.SliceLayout(0, MMA))
    total = gl.sum(total, axis=0)
    weight = finish(m, total, sink_ptr, lse_ptr, row, split, splits, head, heads, value_scale, HAS_SINK, PARTIAL)
    if JOINED:
        acc = gl.sum(gl.reshape(acc, [512, 2, BLOCK_H]), axis=1)
    keep = (end > first) | (not PARTIAL)
    where = (row, split, splits, tile, heads)
    store_columns(acc, weight, out_ptr, where, (out_row_stride, out_head_stride), keep, 0, PARTIAL)
