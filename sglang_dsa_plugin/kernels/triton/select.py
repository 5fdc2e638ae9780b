"""Exact top-k in Triton, one pass over the scores; see ops/select.py for the order.

    1. A row not longer than k: the identity, written without looking at a score.
    2. A sample of the row gives a threshold that somewhat more than k scores pass.
    3. The row is streamed once; what passes goes, in position order, to a short list. A list that fills up is cut to
       its k best and the threshold rises, so no data can overflow it.
    4. The k-th key of the list is found by counting, and the picks leave in position order by one prefix sum.

Steps 2 and 3 decide only how long the list is: if too few scores passed, the row is streamed again with no threshold.
So the result is exact and the same on every run, whatever the sample says. With few rows, several programs stream one
row, and the last to finish does step 4 on all their lists; an integer ticket tells it that it is the last.

Slots or offsets are applied as the picks are written, and slots can be written beside the positions.
"""

from __future__ import annotations

import torch

from . import index_tables
from .select_kernels import rows_kernel, slots_kernel, split_kernel

_SLOTS_BLOCK = 1024
_GROUP = 32  # scores that a vector load reads together


def positions_to_slots(
    positions: torch.Tensor,
    page_table: torch.Tensor,
    row_to_request: torch.Tensor,
    page_size: int,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`ops.select.positions_to_slots` in one launch; a position that the table does not cover gives -1. out: contiguous
    int32 [R, k].
    """
    rows, k = positions.shape
    slots = torch.empty((rows, k), dtype=torch.int32, device=positions.device) if out is None else out
    if slots.numel():
        slots_kernel[(rows, -(-k // _SLOTS_BLOCK))](
            positions,
            positions.stride(0),
            page_table,
            page_table.stride(0),
            row_to_request,
            slots,
            k,
            page_table.shape[1] * page_size,
            PAGE=page_size,
            BLOCK=_SLOTS_BLOCK,
            num_warps=4,
        )
    return slots


def select_rows(
    scores: torch.Tensor,
    lengths: torch.Tensor,
    k: int,
    starts: torch.Tensor | None,
    init_tokens: int,
    local_tokens: int,
    *,
    slots: tuple[torch.Tensor, torch.Tensor, int] | None = None,
    offsets: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    slots_out: torch.Tensor | None = None,
    tickets: torch.Tensor | None = None,
    tiles: index_tables.SelectTiles | None = None,
) -> torch.Tensor:
    """`ops.select.topk`, k up to 4096; in the same pass `topk_slots` with slots, which are (page_table, row_to_request,
    page_size), and `topk_ragged` with offsets. out: contiguous int32 [R, k]. slots_out: the same, where slots go while
    positions are returned.

    Reads nothing on the host. tickets: int32 [R], zeros, where the caller has them at no cost. tiles: for tests.
    """
    rows, width = scores.shape
    if out is None:
        out = torch.empty((rows, k), dtype=torch.int32, device=scores.device)
    if rows == 0:
        return out
    init = min(init_tokens, k)
    local = min(local_tokens, k - init)
    if tiles is None:
        tiles = index_tables.select_tiles(index_tables.gpu_of(scores.device), rows, width, k)
    table, requests, page_size = slots if slots is not None else (out, out, 1)
    lists = torch.empty((tiles.lists, tiles.capacity), dtype=torch.int64, device=scores.device)
    common = {
        "C": tiles.capacity,
        "TILE": tiles.tile,
        "BLOCK": tiles.block,
        "SAMPLE": tiles.sample,
        "WIDE_READ": _may_read_whole_groups(scores) and starts is None,
        "STARTS": starts is not None,
        "WRITE": "positions" if slots is None else "slots" if slots_out is None else "both",
        "OFFSETS": offsets is not None,
        "PAGE": page_size,
        "num_warps": tiles.warps,
    }
    if tiles.registers is not None:
        common["maxnreg"] = tiles.registers
    first = (
        scores,
        scores.stride(0),
        lengths,
        lengths if starts is None else starts,
        out,
        out if slots_out is None else slots_out,
        lists,
        tiles.capacity,
        table,
        table.stride(0),
        requests,
        lengths if offsets is None else offsets,
    )
    if tiles.chunks == 1:
        rows_kernel[(tiles.programs,)](*first, rows, width, k, init, local, **common)
    else:
        if tickets is None:
            tickets = torch.zeros(rows, dtype=torch.int32, device=scores.device)
        counts = torch.empty((rows, tiles.chunks), dtype=torch.int32, device=scores.device)
        split_kernel[(rows * tiles.chunks,)](
            *first, counts, tickets, width, k, init, local, CHUNKS=tiles.chunks, **common
        )
    return out


def tickets_for(scores: torch.Tensor, k: int) -> torch.Tensor | None:
    """Uninitialised tickets, if a selection of k from these scores wants any."""
    rows, width = scores.shape
    if index_tables.select_tiles(index_tables.gpu_of(scores.device), rows, width, k).chunks == 1:
        return None
    return torch.empty(rows, dtype=torch.int32, device=scores.device)


def _may_read_whole_groups(scores: torch.Tensor) -> bool:
    """Whether the last row, too, has memory behind it up to a whole group of columns."""
    rows, width = scores.shape
    whole = (rows - 1) * scores.stride(0) + -(-width // _GROUP) * _GROUP
    have = scores.untyped_storage().nbytes() // scores.element_size() - scores.storage_offset()
    return scores.stride(0) >= width and whole <= have
