"""Joins the partial results of splits (split-KV decode, as in FlashDecoding).

    lse = log sum_s exp(lse_s);   out = sum_s exp(lse_s - lse) * out_s / (1 + exp(sink - lse))

Sums run over the splits in order, so the result does not depend on which split finished first.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sglang_dsa_plugin.kernels.triton.pdl import let_next_start, wait_for_earlier

LOG2E = tl.constexpr(1.4426950408889634)
# With more, programs of a next kernel that come early lie two on a processor and none on another: fp8 rows, 8 heads, 16
# rows 24.1 us on an H200 instead of 16.8.
FEW_PROGRAMS = tl.constexpr(64)
# Of a single row, whose next kernel is small, too: decode steps of 8K / 32K / 128K tokens 20.3 / 21.5 / 26.4 us instead
# of 21.8 / 23.0 / 27.9.
FEW_OF_ONE_ROW = tl.constexpr(128)


@triton.jit
def merge_kernel(
    part_ptr,
    part_lse_ptr,
    sink_ptr,
    out_ptr,
    lse_ptr,
    heads,
    splits,
    out_row_stride,
    out_head_stride,
    HAS_SINK: tl.constexpr,
    PDL: tl.constexpr,
    SPLITS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """part f32 [R, splits, H, 512], part_lse f32 [R, splits, H] (base 2; -inf: a split without picks, whose part is not
    used) -> out [R, H, 512], lse f32 [R, H] (natural). SPLITS: splits rounded up to a power of two.
    Grid: one axis of R * H * (512 / COLUMNS).
    """
    CHUNKS: tl.constexpr = 512 // COLUMNS
    pid = tl.program_id(0)
    chunk = pid % CHUNKS
    head = (pid // CHUNKS) % heads
    row = (pid // (CHUNKS * heads)).to(tl.int64)
    # Started while the splits still run: nothing they write may be read above this line.
    wait_for_earlier(PDL)
    most = FEW_OF_ONE_ROW if tl.num_programs(0) == heads * CHUNKS else FEW_PROGRAMS
    if tl.num_programs(0) <= most:
        let_next_start(PDL)
    split = tl.arange(0, SPLITS)
    part = (row * splits + split) * heads + head
    lse_s = tl.load(part_lse_ptr + part, mask=split < splits, other=float("-inf"))
    top = tl.max(lse_s, axis=0)
    lift = tl.where(top == float("-inf"), 0.0, top)
    weight = tl.exp2(lse_s - lift)
    total = tl.sum(weight, axis=0)
    some = total != 0
    column = chunk * COLUMNS + tl.arange(0, COLUMNS)
    # Loaded before it is known which splits had picks: the loads need not wait for that, and `where` drops what a split
    # without picks never wrote.
    values = tl.load(part_ptr + part[:, None] * 512 + column[None, :], mask=(split < splits)[:, None], other=0.0)
    values = tl.where((lse_s != float("-inf"))[:, None], values * weight[:, None], 0.0)
    safe = tl.where(some, total, 1.0)
    lse = tl.where(some, lift + tl.log2(safe), float("-inf"))
    factor = tl.where(some, 1.0 / safe, 0.0)
    if HAS_SINK:
        sink = tl.load(sink_ptr + head) * LOG2E
        factor = tl.where(some, factor / (1.0 + tl.exp2(sink - lse)), 0.0)
    out = tl.sum(values, axis=0) * factor
    out_at = out_ptr + row * out_row_stride + head.to(tl.int64) * out_head_stride + column
    tl.store(out_at, out.to(out_ptr.dtype.element_ty))
    if chunk == 0:
        tl.store(lse_ptr + row * heads + head, lse / LOG2E)
