"""Rows of attention without a valid pick get out 0 and lse -inf, whatever another package's kernel left in them; a sink
is brought in by the same launch.

Without a sink only such rows are written, and of the others only the lse is read: a pass over the output of a prefill
of 4096 rows and 64 heads would read and write half a gigabyte for rows that are hardly ever there.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_COLUMNS = 64


@triton.jit
def empty_rows_kernel(
    out,
    out_row,
    out_head,
    lse,
    lse_row,
    lse_head,
    counts,
    sink,
    heads,
    width,
    COUNTS: tl.constexpr,
    SINK: tl.constexpr,
    HEADS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """One row of out [R, heads, width] and lse [R, heads]; to clear are heads whose lse is +inf or -inf, or with COUNTS
    all of a row whose counts [R] is 0. SINK: the others are divided by 1 + exp(sink - lse).
    """
    row = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEADS)
    place = lse + row * lse_row + head * lse_head
    found = tl.load(place, mask=head < heads, other=0.0)
    none = tl.abs(found) == float("inf")
    if COUNTS:
        none = (head < heads) & (tl.load(counts + row) == 0)
    if SINK:
        changed = head < heads
        factor = 1.0 / (1.0 + tl.exp(tl.load(sink + head, mask=head < heads, other=0.0) - found))
    else:
        changed = none
        factor = found
    if tl.max(changed.to(tl.int32), 0) > 0:
        tl.store(place, tl.full((HEADS,), float("-inf"), tl.float32), mask=none)
        for begin in range(0, width, COLUMNS):
            column = begin + tl.arange(0, COLUMNS)
            target = out + row * out_row + head[:, None] * out_head + column[None, :]
            inside = changed[:, None] & (column < width)[None, :]
            value = tl.zeros((HEADS, COLUMNS), tl.float32)
            if SINK:
                value = tl.load(target, mask=inside, other=0.0).to(tl.float32) * factor[:, None]
                # Not by the factor: the kernel may have left NaN there.
                value = tl.where(none[:, None], 0.0, value)
            tl.store(target, value.to(out.dtype.element_ty), mask=inside)


def clear_empty_rows(
    out: torch.Tensor, lse: torch.Tensor, counts: torch.Tensor | None = None, sink: torch.Tensor | None = None
) -> None:
    """In place: where lse f32 [R, H] is infinite it becomes -inf, and those heads of out [R, H, D] become 0. With
    counts int [R] that happens to rows of 0 instead, whatever their lse: such a row was handed a slot not its own.
    sink f32 [H]: all other heads of out are divided by 1 + exp(sink - lse); lse stays without it.
    """
    rows, heads, width = out.shape
    if out.stride(2) != 1:
        raise ValueError(f"out must have its last dimension in one piece, got strides {out.stride()}")
    if rows and heads:
        empty_rows_kernel[(rows,)](
            out,
            out.stride(0),
            out.stride(1),
            lse,
            lse.stride(0),
            lse.stride(1),
            lse if counts is None else counts,
            lse if sink is None else sink,
            heads,
            width,
            COUNTS=counts is not None,
            SINK=sink is not None,
            HEADS=triton.next_power_of_2(heads),
            COLUMNS=_COLUMNS,
            num_warps=4,
        )
