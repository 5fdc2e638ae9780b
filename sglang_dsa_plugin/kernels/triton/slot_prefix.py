"""Slots in the form that kernels of other packages want them in: the valid ones first, and how many there are.

The operators' rule is that -1 anywhere is skipped and that a slot outside the cache is masked, never read. Kernels
elsewhere have rules of their own: a valid-first prefix and a length, -1 and nothing else as "none", at least one slot a
row, a width that is a multiple of something. One launch brings the former to the latter and keeps the order. Slots that
are promised to have such a form already need none (`picks_in_front` in kernels/vendor/attention.py).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def prefix_kernel(
    slots,
    stride,
    lengths,
    out,
    counts,
    cached,
    picks,
    width,
    LENGTHS: tl.constexpr,
    FILL: tl.constexpr,
    NEVER_EMPTY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row of slots [R, picks] to out [R, width], and its number of valid slots."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    slot = tl.load(slots + row * stride + column, mask=column < picks, other=-1).to(tl.int64)
    valid = (slot >= 0) & (slot < cached)
    if LENGTHS:
        valid = valid & (column < tl.load(lengths + row))
    one = valid.to(tl.int32)
    place = tl.cumsum(one, 0) - 1
    count = tl.sum(one, 0)
    target = out + row * width
    tl.store(target + place, slot.to(tl.int32), mask=valid)
    # What is left are the columns from the count on, so no column is written twice.
    rest = tl.full((BLOCK,), FILL, tl.int32)
    if NEVER_EMPTY:
        rest = tl.where((count == 0) & (column == 0), 0, rest)
    tl.store(target + column, rest, mask=(column >= count) & (column < width))
    tl.store(counts + row, count)


def slot_prefix(
    slots: torch.Tensor,
    cached: int,
    lengths: torch.Tensor | None = None,
    fill: int = -1,
    multiple: int = 1,
    never_empty: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """slots [R, K] int32 or int64 of a cache of `cached` rows -> (int32 [R, W], counts int32 [R]).

    W is K rounded up to a multiple of `multiple`. Of each row the valid slots in their order, then `fill`; lengths [R]:
    only the first lengths[r] slots count. never_empty: a row without a valid slot begins with slot 0, for kernels that
    need one, and still has the count 0: its result is for the caller to replace.
    """
    rows, picks = slots.shape
    width = -(-picks // multiple) * multiple
    out = torch.empty((rows, width), dtype=torch.int32, device=slots.device)
    counts = torch.empty(rows, dtype=torch.int32, device=slots.device)
    if rows and width:
        prefix_kernel[(rows,)](
            slots,
            slots.stride(0),
            counts if lengths is None else lengths,
            out,
            counts,
            cached,
            picks,
            width,
            LENGTHS=lengths is not None,
            FILL=fill,
            NEVER_EMPTY=never_empty,
            BLOCK=triton.next_power_of_2(width),
            num_warps=4 if width <= 1024 else 8,
        )
    else:
        counts.zero_()
    return out, counts
