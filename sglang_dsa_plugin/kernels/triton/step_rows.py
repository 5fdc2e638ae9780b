"""What scores by another package are told of a step's rows: how many keys, and their pages, a row each.

Two small kernels, so that a step does not make this by a handful of tensor operations with a launch each.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_dsa_plugin.cache.layouts import PAGE_SIZE

from .index_tables import power_of_two

_BLOCK = 1024  # pages that a program copies


def rows_of(
    lengths: torch.Tensor,
    page_table: torch.Tensor,
    row_to_request: torch.Tensor,
    pages: int,
    width: int,
    skip: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(keys to score of each row int32 [R, 1], pages of each row's request int32 [R, ceil(width / 64)]).

    A row has at least one key and at most `width`; one not longer than `skip` has one. Entries of pages that hold none
    of a row's keys are not written, the others lie in 0 .. pages - 1.
    """
    rows, covered = lengths.shape[0], -(-width // PAGE_SIZE)
    sizes = torch.empty((rows, 1), dtype=torch.int32, device=lengths.device)
    table = torch.empty((rows, covered), dtype=torch.int32, device=lengths.device)
    _rows_kernel[(rows, -(-covered // _BLOCK))](
        lengths,
        row_to_request,
        page_table,
        sizes,
        table,
        page_table.stride(0),
        covered,
        pages,
        width,
        skip,
        BLOCK=_BLOCK,
        PAGE=PAGE_SIZE,
        num_warps=4,
    )
    return sizes, table


def clear_without_long(numbers: torch.Tensor, lengths: torch.Tensor, skip: int) -> None:
    """Zeros in `numbers`, int32 and contiguous, in place, where none of lengths [R] is above `skip`."""
    rows, count = lengths.shape[0], numbers.numel()
    block = power_of_two(max(rows, count))
    _clear_kernel[(1,)](lengths, numbers, rows, count, skip, BLOCK=block, num_warps=4)


@triton.jit(do_not_specialize=["table_stride", "covered", "pages", "width", "skip"])
def _rows_kernel(
    lengths,
    requests,
    page_table,
    sizes,
    table,
    table_stride,
    covered,
    pages,
    width,
    skip,
    BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
):
    row = tl.program_id(0)
    length = tl.minimum(tl.load(lengths + row), width).to(tl.int32)  # before int64 becomes int32
    size = tl.where(length > skip, tl.maximum(length, 1), 1)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < (size + PAGE - 1) // PAGE
    request = tl.load(requests + row).to(tl.int64)
    page = tl.load(page_table + request * table_stride + column, mask=inside, other=0)
    page = tl.minimum(tl.maximum(page, 0), pages - 1).to(tl.int32)
    tl.store(table + row.to(tl.int64) * covered + column, page, mask=inside)
    tl.store(sizes + row, size, mask=tl.program_id(1) == 0)


@triton.jit(do_not_specialize=["rows", "count", "skip"])
def _clear_kernel(lengths, numbers, rows, count, skip, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    longest = tl.max(tl.load(lengths + at, mask=at < rows, other=0), 0)
    tl.store(numbers + at, at * 0, mask=(at < count) & (longest <= skip))
