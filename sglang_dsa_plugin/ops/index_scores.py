"""Scores of the lightning indexer: how much each query row wants each key.

    score[r, j] = k_scale[s] * sum_h gate[r, h] * relu(q[r, h] . k[s])        s = the j-th key of row r's window

Column 0 is the first key of the row's window; columns past its end are -inf. `gate` is f32 and already holds q's scale,
128^-1/2 and H^-1/2: relu(a x) = a relu(x) for a > 0, so of the scales only the key's is left, applied after the sum.
A NaN in q, in a key or in a gate makes the scores that use it NaN. Products and sums are in fp32.

ragged: q [R, H, 128], k [S, 128]; the window of row r is keys start[r] .. end[r] - 1 (none when end <= start). start
        None says that every window begins at key 0, for which there are faster kernels.
paged:  the keys of request b lie in pages page_table[b, 0], page_table[b, 1], ..., 64 to a page; the window of row r is
        the first lengths[r] keys of request row_to_request[r].
dtypes: q and k both e4m3 with k_scale f32 [S] (paged: u8 pages [P, 8448]), or both float32, bfloat16 or float16 with
        k_scale None (paged: pages [P, 64, 128]). gate f32 [R, H]. Index tensors int32 or int64. Result f32 [R, width].
Source: DeepSeek-V3.2-Exp technical report, section 2 (lightning indexer).
"""

from __future__ import annotations

import torch

from .. import support
from ..cache.layouts import FP8, INDEX_DIM, INDEX_PAGE_BYTES, PAGE_SIZE
from . import _check


def ragged(
    q: torch.Tensor,
    k: torch.Tensor,
    k_scale: torch.Tensor | None,
    gate: torch.Tensor,
    start: torch.Tensor | None,
    end: torch.Tensor,
    width: int | None = None,
    *,
    impl: str | None = None,
) -> torch.Tensor:
    """Scores of each row's window of the key buffer: f32 [R, width], -inf past the window.

    `width` defaults to the widest window; a smaller one leaves the columns past it out. Raises ValueError for wrong
    shapes, dtypes or devices, a missing or superfluous k_scale, and, on the CPU, windows outside the keys (on other
    devices looking would stall the stream; there it is the caller's promise).
    """
    op = "index_scores.ragged"
    check_ragged(op, q, k, k_scale, gate, start, end)
    check_width(op, width)
    features = {"heads": q.shape[1], "dtype": q.dtype, "rows": q.shape[0]}
    choice = support.choose("index_scores_ragged", device=q.device, impl=impl, **features)
    return choice.implementation.load()(q, k, k_scale, gate, start_for(choice, start, end), end, width)


def paged(
    q: torch.Tensor,
    pages: torch.Tensor,
    gate: torch.Tensor,
    lengths: torch.Tensor,
    page_table: torch.Tensor,
    row_to_request: torch.Tensor,
    width: int | None = None,
    *,
    impl: str | None = None,
) -> torch.Tensor:
    """Scores of each row's first lengths[r] keys in its request's pages: f32 [R, width], -inf past them.

    `width` defaults to the longest window; a smaller one leaves the columns past it out. Raises ValueError for wrong
    shapes, dtypes or devices, and, on the CPU, lengths beyond the page table and requests outside it.
    """
    op = "index_scores.paged"
    check_paged(op, q, pages, gate, lengths, page_table, row_to_request)
    check_width(op, width)
    run = support.resolve("index_scores_paged", device=q.device, impl=impl, heads=q.shape[1], dtype=q.dtype)
    return run(q, pages, gate, lengths, page_table, row_to_request, width)


def check_ragged(
    op: str,
    q: torch.Tensor,
    k: torch.Tensor,
    k_scale: torch.Tensor | None,
    gate: torch.Tensor,
    start: torch.Tensor | None,
    end: torch.Tensor,
) -> None:
    """The argument rules of `ragged`, shared with index_select; ValueError names `op`."""
    _check_query(op, q, gate)
    _check.tensor(op, "k", k, (None, INDEX_DIM), (q.dtype,), q.device, "q")
    if q.dtype == FP8:
        if k_scale is None:
            _check.fail(op, "k_scale", f"a float32 tensor of shape [{k.shape[0]}] with float8 keys", k_scale)
        _check.tensor(op, "k_scale", k_scale, (k.shape[0],), (torch.float32,), q.device, "q")
    elif k_scale is not None:
        _check.fail(op, "k_scale", f"None with {str(q.dtype).removeprefix('torch.')} keys", k_scale)
    if start is not None:
        _check.index_tensor(op, "start", start, (q.shape[0],), q.device)
    _check.index_tensor(op, "end", end, (q.shape[0],), q.device)
    if q.device.type == "cpu" and q.shape[0]:
        low, high = 0 if start is None else int(start.min()), int(end.max())
        if low < 0:
            _check.fail(op, "start", "at least 0 everywhere", low)
        if high > k.shape[0]:
            _check.fail(op, "end", f"at most the {k.shape[0]} keys", high)


def start_for(choice: support.Choice, start: torch.Tensor | None, end: torch.Tensor) -> torch.Tensor | None:
    """`start` as the chosen implementation takes it: zeros instead of None where it does not know that."""
    return torch.zeros_like(end) if start is None and "no_start" not in choice.implementation.takes else start


def check_paged(
    op: str,
    q: torch.Tensor,
    pages: torch.Tensor,
    gate: torch.Tensor,
    lengths: torch.Tensor,
    page_table: torch.Tensor,
    row_to_request: torch.Tensor,
) -> None:
    """The argument rules of `paged`, shared with index_select; ValueError names `op`."""
    _check_query(op, q, gate)
    if q.dtype == FP8:
        _check.tensor(op, "pages", pages, (None, INDEX_PAGE_BYTES), (torch.uint8,), q.device, "q")
    else:
        _check.tensor(op, "pages", pages, (None, PAGE_SIZE, INDEX_DIM), (q.dtype,), q.device, "q")
    _check.index_tensor(op, "lengths", lengths, (q.shape[0],), q.device)
    _check.index_tensor(op, "page_table", page_table, (None, None), q.device)
    _check.index_tensor(op, "row_to_request", row_to_request, (q.shape[0],), q.device)
    if q.device.type == "cpu" and q.shape[0]:
        low, high = (int(v) for v in lengths.aminmax())
        if low < 0:
            _check.fail(op, "lengths", "at least 0 everywhere", low)
        if high > page_table.shape[1] * PAGE_SIZE:
            _check.fail(op, "lengths", f"at most the {page_table.shape[1]} x {PAGE_SIZE} keys of page_table", high)
        low, high = (int(v) for v in row_to_request.aminmax())
        if low < 0 or high >= page_table.shape[0]:
            _check.fail(op, "row_to_request", f"in 0 .. {page_table.shape[0] - 1}", (low, high))


def check_width(op: str, width: int | None) -> None:
    """`width` is None or an int of at least 0."""
    if width is not None and (not isinstance(width, int) or width < 0):
        _check.fail(op, "width", "None or an int of at least 0", width)


def _check_query(op: str, q: torch.Tensor, gate: torch.Tensor) -> None:
    _check.tensor(op, "q", q, (None, None, INDEX_DIM), (FP8, *_check.FLOATS))
    if q.shape[1] == 0:
        _check.fail(op, "q", "of at least one head", q)
    _check.tensor(op, "gate", gate, (q.shape[0], q.shape[1]), (torch.float32,), q.device, "q")


def reference_ragged(
    q: torch.Tensor,
    k: torch.Tensor,
    k_scale: torch.Tensor | None,
    gate: torch.Tensor,
    start: torch.Tensor | None,
    end: torch.Tensor,
    width: int | None = None,
) -> torch.Tensor:
    """The formula in fp64, one row at a time: float64 [R, width]."""
    start = torch.zeros_like(end) if start is None else start
    if width is None:
        width = max([0, *(end - start).tolist()])
    scores = torch.full((q.shape[0], width), -torch.inf, dtype=torch.float64, device=q.device)
    for r in range(q.shape[0]):
        first, last = int(start[r]), min(int(end[r]), int(start[r]) + width)
        if last <= first:
            continue
        dots = torch.einsum("hd,sd->hs", q[r].double(), k[first:last].double())
        row = (gate[r].double().unsqueeze(1) * dots.relu()).sum(0)
        scores[r, : last - first] = row if k_scale is None else row * k_scale[first:last].double()
    return scores


def reference_paged(
    q: torch.Tensor,
    pages: torch.Tensor,
    gate: torch.Tensor,
    lengths: torch.Tensor,
    page_table: torch.Tensor,
    row_to_request: torch.Tensor,
    width: int | None = None,
) -> torch.Tensor:
    """Keys collected token by token from the pages, then the formula in fp64: float64 [R, width]."""
    if width is None:
        width = max([0, *lengths.tolist()])
    scores = torch.full((q.shape[0], width), -torch.inf, dtype=torch.float64, device=q.device)
    for r in range(q.shape[0]):
        table, keys, scales = page_table[int(row_to_request[r])].tolist(), [], []
        for p in range(min(int(lengths[r]), width)):
            page, at = pages[table[p // PAGE_SIZE]], p % PAGE_SIZE
            if pages.dtype == torch.uint8:
                keys.append(page[at * INDEX_DIM : (at + 1) * INDEX_DIM].view(FP8).double())
                scale_bytes = page[PAGE_SIZE * INDEX_DIM + 4 * at : PAGE_SIZE * INDEX_DIM + 4 * at + 4]
                scales.append(scale_bytes.clone().view(torch.float32).double())
            else:
                keys.append(page[at].double())
        if keys:
            dots = q[r].double() @ torch.stack(keys).T
            row = (gate[r].double().unsqueeze(1) * dots.relu()).sum(0)
            scores[r, : len(keys)] = row * torch.cat(scales) if scales else row
    return scores
