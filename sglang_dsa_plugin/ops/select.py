"""Exact top-k of index scores, and what becomes of the picked positions.

    window of row r:    columns starts[r] .. starts[r] + lengths[r] - 1 of scores[r]; position p is column starts[r] + p
    order:              a before b  iff  score(a) > score(b), or the scores are equal and a < b
                        -0.0 equals 0.0; denormals count; -inf is a number; all NaN are equal and come after all numbers
    forced:             I = min(init_tokens, k) first positions, then the last L = min(local_tokens, k - I) positions
    picks[r]:           the forced positions and the first of the others in that order, min(lengths[r], k) in all,
                        ascending, then -1 up to k

The order is total, so the result is one value, bit for bit, on every implementation and every run: ReLU makes plateaus
of equal scores, and an unstated tie rule picks other keys on every replay (sgl-project/sglang#31115, #30645).
Ascending picks also make the gather that follows walk the cache forwards.

    slots:              page_table[row_to_request[r], p // page_size] * page_size + p % page_size
    ragged:             p + offsets[r]

scores f32 [R, W]; lengths, starts, offsets, row_to_request int [R]; page_table int [B, pages]; picks int32 [R, k].
"""

from __future__ import annotations

import torch

from .. import support
from ..cache.layouts import PAGE_SIZE
from . import _check


def topk(
    scores: torch.Tensor,
    lengths: torch.Tensor,
    k: int,
    starts: torch.Tensor | None = None,
    init_tokens: int = 0,
    local_tokens: int = 0,
    *,
    impl: str | None = None,
) -> torch.Tensor:
    """Positions of the k best columns of each row's window: int32 [R, k], ascending, then -1.

    Raises ValueError for wrong shapes, dtypes or devices, k < 1 and negative token counts. A window outside the columns
    of `scores` raises on the CPU; on other devices, where looking would stall the stream, it is cut to the columns, and
    positions count from the first of them that is left.
    """
    _check_topk("select.topk", scores, lengths, k, starts, init_tokens, local_tokens)
    run = support.resolve("topk", device=scores.device, impl=impl, k=k, rows=scores.shape[0])
    return run(scores, lengths, k, starts, init_tokens, local_tokens)


def topk_slots(
    scores: torch.Tensor,
    lengths: torch.Tensor,
    k: int,
    page_table: torch.Tensor,
    row_to_request: torch.Tensor,
    page_size: int = PAGE_SIZE,
    starts: torch.Tensor | None = None,
    init_tokens: int = 0,
    local_tokens: int = 0,
    *,
    impl: str | None = None,
) -> torch.Tensor:
    """`topk`, with each position turned into the slot that holds it: int32 [R, k]; -1 stays -1.

    Raises ValueError as `topk` and `positions_to_slots` do.
    """
    _check_topk("select.topk_slots", scores, lengths, k, starts, init_tokens, local_tokens)
    _check_table("select.topk_slots", page_table, row_to_request, page_size, "lengths", lengths, 1)
    run = support.resolve("topk_slots", device=scores.device, impl=impl, k=k, rows=scores.shape[0])
    return run(scores, lengths, k, starts, init_tokens, local_tokens, slots=(page_table, row_to_request, page_size))


def topk_ragged(
    scores: torch.Tensor,
    lengths: torch.Tensor,
    k: int,
    offsets: torch.Tensor,
    starts: torch.Tensor | None = None,
    init_tokens: int = 0,
    local_tokens: int = 0,
    *,
    impl: str | None = None,
) -> torch.Tensor:
    """`topk`, with offsets[r] added to each position: int32 [R, k]; -1 stays -1.

    Raises ValueError as `topk` does, and for offsets that are not int [R].
    """
    _check_topk("select.topk_ragged", scores, lengths, k, starts, init_tokens, local_tokens)
    _check.index_tensor("select.topk_ragged", "offsets", offsets, (scores.shape[0],), scores.device)
    run = support.resolve("topk_ragged", device=scores.device, impl=impl, k=k, rows=scores.shape[0])
    return run(scores, lengths, k, starts, init_tokens, local_tokens, offsets=offsets)


def positions_to_slots(
    positions: torch.Tensor,
    page_table: torch.Tensor,
    row_to_request: torch.Tensor,
    page_size: int = PAGE_SIZE,
    *,
    out: torch.Tensor | None = None,
    impl: str | None = None,
) -> torch.Tensor:
    """Slots of positions [R, k] by the page table of each row's request: int32 [R, k]; -1 stays -1.

    out: where to write, contiguous, instead of a new tensor.

    Raises ValueError for wrong shapes, dtypes or devices, page_size < 1, and, on the CPU, requests and positions
    outside the table.
    """
    op = "select.positions_to_slots"
    _check.index_tensor(op, "positions", positions, (None, None))
    _check_table(op, page_table, row_to_request, page_size, "positions", positions, 0)
    chosen = support.choose("positions_to_slots", device=positions.device, impl=impl).implementation
    run = chosen.load()
    if out is None:
        return run(positions, page_table, row_to_request, page_size)
    _check.tensor(op, "out", out, tuple(positions.shape), (torch.int32,), positions.device, "positions")
    if not out.is_contiguous():
        _check.fail(op, "out", "contiguous", out)
    if "out" in chosen.takes:
        return run(positions, page_table, row_to_request, page_size, out=out)
    return out.copy_(run(positions, page_table, row_to_request, page_size))


def _check_topk(
    op: str,
    scores: torch.Tensor,
    lengths: torch.Tensor,
    k: int,
    starts: torch.Tensor | None,
    init_tokens: int,
    local_tokens: int,
) -> None:
    _check.tensor(op, "scores", scores, (None, None), (torch.float32,))
    rows, width = scores.shape
    if not isinstance(lengths, torch.Tensor) or lengths.shape != (rows,):
        _check.fail(op, "lengths", f"an int32/int64 tensor of shape [{rows}], one per row of scores", lengths)
    _check.index_tensor(op, "lengths", lengths, (rows,), scores.device)
    if starts is not None:
        _check.index_tensor(op, "starts", starts, (rows,), scores.device)
    if not isinstance(k, int) or k < 1:
        _check.fail(op, "k", "an int of at least 1", k)
    for name, value in (("init_tokens", init_tokens), ("local_tokens", local_tokens)):
        if not isinstance(value, int) or value < 0:
            _check.fail(op, name, "an int of at least 0", value)
    if scores.device.type == "cpu" and rows:
        low = int(lengths.min())
        if low < 0:
            _check.fail(op, "lengths", "at least 0 everywhere", low)
        if starts is not None and int(starts.min()) < 0:
            _check.fail(op, "starts", "at least 0 everywhere", int(starts.min()))
        high = int((lengths if starts is None else lengths + starts).max())
        if high > width:
            _check.fail(op, "starts + lengths", f"at most the {width} columns of scores", high)


def _check_table(
    op: str,
    page_table: torch.Tensor,
    row_to_request: torch.Tensor,
    page_size: int,
    what: str,
    positions: torch.Tensor,
    most: int,
) -> None:
    """`positions` [R, ...] are below `most` plus the positions that the table covers; looked at on the CPU only."""
    _check.index_tensor(op, "page_table", page_table, (None, None), positions.device)
    _check.index_tensor(op, "row_to_request", row_to_request, (positions.shape[0],), positions.device)
    if not isinstance(page_size, int) or page_size < 1:
        _check.fail(op, "page_size", "an int of at least 1", page_size)
    if positions.device.type == "cpu" and positions.numel():
        low, high = (int(v) for v in row_to_request.aminmax())
        if low < 0 or high >= page_table.shape[0]:
            _check.fail(op, "row_to_request", f"in 0 .. {page_table.shape[0] - 1}", (low, high))
        covered, high = page_table.shape[1] * page_size, int(positions.max())
        if high >= covered + most:
            _check.fail(op, what, f"within the {page_table.shape[1]} x {page_size} positions of page_table", high)


def reference(
    scores: torch.Tensor,
    lengths: torch.Tensor,
    k: int,
    starts: torch.Tensor | None = None,
    init_tokens: int = 0,
    local_tokens: int = 0,
) -> torch.Tensor:
    """The definition by sorting each window in fp64, one row at a time: int32 [R, k] on the CPU."""
    picks = torch.full((scores.shape[0], k), -1, dtype=torch.int32)
    for r, length in enumerate(lengths.tolist()):
        first = 0 if starts is None else int(starts[r])
        values = scores[r, first : first + length].double().tolist()
        init = min(init_tokens, k)
        local = min(local_tokens, k - init)

        def rank(
            p: int, values: list[float] = values, init: int = init, local: int = local
        ) -> tuple[bool, bool, float]:
            forced = p < init or p >= len(values) - local
            number = values[p] == values[p]
            return not forced, not number, -values[p] if number and not forced else 0.0

        best = sorted(sorted(range(length), key=rank)[:k])  # sorted() is stable: equal ranks stay in position order
        picks[r, : len(best)] = torch.tensor(best, dtype=torch.int32)
    return picks


def reference_slots(
    positions: torch.Tensor, page_table: torch.Tensor, row_to_request: torch.Tensor, page_size: int = PAGE_SIZE
) -> torch.Tensor:
    """Slots one position at a time: int32 [R, k] on the CPU."""
    table, requests = page_table.tolist(), row_to_request.tolist()
    slots = [
        [-1 if p < 0 else table[requests[r]][p // page_size] * page_size + p % page_size for p in row]
        for r, row in enumerate(positions.tolist())
    ]
    return torch.tensor(slots, dtype=torch.int32).reshape(positions.shape)
