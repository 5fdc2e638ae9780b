"""Index scores in torch; see ops/index_scores.py for the formula.

Rows of one window start (ragged) or one request (paged) are scored together, key tile by key tile:

    block [rows * H, keys] = q . k;   relu in place;   score [rows, keys] = gate [rows, 1, H] @ block [rows, H, keys]

The block is the only place where the head axis meets keys, and its size is a constant: on the CPU it stays in the
cache, so relu and head sum cost no memory traffic. Keys come in multiples of 64 (padded with zeros, or with what else
is in the page): then, on the CPU, a score depends on its row and key alone, not on the tile, its neighbours or the
batch (matmul.py says why).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch.nn.functional import pad

from ...cache.layouts import FP8, INDEX_DIM, PAGE_SIZE
from . import matmul, quant

_ALIGN = 64
_BLOCK_ELEMENTS = 1 << 20  # f32 elements of a block: 4 MiB
_BLOCK_ELEMENTS_CUDA = 1 << 24
_BLOCK_DOTS = 1024  # rows * H of a block
_MAX_KEYS = 4096
_WIDE_ROWS = 256  # queries widened at once, for all key tiles

# (first key, count) -> keys [count rounded up to 64, 128] and their scales f32 [count] or None
LoadKeys = Callable[[int, int], tuple[torch.Tensor, torch.Tensor | None]]
KeysOf = Callable[[int], LoadKeys]  # from the value that rows with the same keys share


def ragged(
    q: torch.Tensor,
    k: torch.Tensor,
    k_scale: torch.Tensor | None,
    gate: torch.Tensor,
    start: torch.Tensor,
    end: torch.Tensor,
    width: int | None,
) -> torch.Tensor:
    """q [R, H, 128], k [S, 128], k_scale [S] or None, gate [R, H], start, end [R] -> f32 [R, width]."""
    starts, lengths = windows(start, end)
    width = max(lengths, default=0) if width is None else width
    scores = torch.empty((q.shape[0], width), dtype=torch.float32, device=q.device)
    for first, last in runs(starts):
        load = ragged_keys(k, k_scale, starts[first])
        score_rows(scores[first:last], q[first:last], gate[first:last], lengths[first:last], load)
    return scores


def paged(
    q: torch.Tensor,
    pages: torch.Tensor,
    gate: torch.Tensor,
    lengths: torch.Tensor,
    page_table: torch.Tensor,
    row_to_request: torch.Tensor,
    width: int | None,
) -> torch.Tensor:
    """q [R, H, 128], pages, gate [R, H], lengths [R], page_table [B, n], row_to_request [R] -> f32 [R, width]."""
    sizes, requests = torch.stack((lengths.long(), row_to_request.long())).tolist()
    width = max(sizes, default=0) if width is None else width
    scores = torch.empty((q.shape[0], width), dtype=torch.float32, device=q.device)
    for first, last in runs(requests):
        load = paged_keys(pages, page_table[requests[first]])
        score_rows(scores[first:last], q[first:last], gate[first:last], sizes[first:last], load)
    return scores


def windows(start: torch.Tensor, end: torch.Tensor) -> tuple[list[int], list[int]]:
    """Starts and lengths of ragged windows on the host, in one read; an empty window has length 0."""
    starts, ends = torch.stack((start.long(), end.long())).tolist()
    return starts, [max(0, e - s) for s, e in zip(starts, ends)]


def runs(values: list[int]) -> Iterator[tuple[int, int]]:
    """[first, last) of each run of consecutive rows with the same value."""
    first = 0
    for r in range(1, len(values) + 1):
        if r == len(values) or values[r] != values[first]:
            yield first, r
            first = r


def ragged_keys(k: torch.Tensor, k_scale: torch.Tensor | None, start: int) -> LoadKeys:
    """Keys start, start + 1, ... of a key buffer [S, 128]."""

    def load(first: int, count: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        at = slice(start + first, start + first + count)
        keys = _widen(k[at])
        if count % _ALIGN:
            keys = pad(keys, (0, 0, 0, -count % _ALIGN))
        return keys, None if k_scale is None else k_scale[at]

    return load


def paged_keys(pages: torch.Tensor, table: torch.Tensor) -> LoadKeys:
    """Keys of one request, whose pages are `table` [n]; `first` is a multiple of 64."""

    def load(first: int, count: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        keys, scales = _unpack(pages.index_select(0, table[first // PAGE_SIZE : -(-(first + count) // PAGE_SIZE)]))
        return keys.view(-1, INDEX_DIM), None if scales is None else scales.view(-1)[:count]

    return load


def score_rows(
    scores: torch.Tensor,
    q: torch.Tensor,
    gate: torch.Tensor,
    lengths: list[int],
    load: LoadKeys,
    first_key: int = 0,
) -> None:
    """Fill scores [n, width] of rows that share their keys; column j is key first_key + j of the window.

    q [n, H, 128], gate f32 [n, H]; lengths: keys in each row's window, counted from the window's first key.
    """
    rows, heads, _ = q.shape
    if rows > _WIDE_ROWS:
        for top in range(0, rows, _WIDE_ROWS):
            part = slice(top, top + _WIDE_ROWS)
            score_rows(scores[part], q[part], gate[part], lengths[part], load, first_key)
        return
    wide = _widen(q)
    width = scores.shape[1]
    counts = [min(max(0, length - first_key), width) for length in lengths]
    row_tile = max(1, min(rows, _BLOCK_DOTS // max(1, heads)))
    dots = max(matmul.MIN_ROWS, row_tile * heads)
    elements = _BLOCK_ELEMENTS if q.device.type == "cpu" else _BLOCK_ELEMENTS_CUDA
    key_tile = max(_ALIGN, min(_MAX_KEYS, elements // dots // _ALIGN * _ALIGN))
    longest = max(counts, default=0)
    block = torch.empty(dots * min(key_tile, -(-longest // _ALIGN) * _ALIGN), device=q.device)
    for column in range(0, longest, key_tile):
        keys, scales = load(first_key + column, min(key_tile, longest - column))
        for top in range(0, rows, row_tile):
            tile = slice(top, top + row_tile)
            count = min(key_tile, max(counts[tile]) - column)
            if count > 0:
                part = _score_tile(wide[tile], gate[tile], keys[: -(-count // _ALIGN) * _ALIGN], block, q.dtype)
                target = scores[tile, column : column + count]
                if scales is None:
                    target.copy_(part[:, :count])
                else:
                    torch.mul(part[:, :count], scales[:count], out=target)
    _mask_tails(scores, counts)


def _score_tile(
    q: torch.Tensor, gate: torch.Tensor, keys: torch.Tensor, block: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """q [n, H, 128], keys [m, 128] as `_widen` gives them from `dtype`, gate [n, H], f32 scratch -> f32 [n, m]."""
    n, heads, dim = q.shape
    m = keys.shape[0]
    flat = matmul.pad_rows(q.reshape(n * heads, dim))
    # One row's heads are too few for the matmul library to share among threads: hand it a batch of pages instead.
    pieces = m // _ALIGN if n == 1 else 1
    dots = block[: len(flat) * m].view(pieces, len(flat), m // pieces)
    matmul.multiply(flat.expand(pieces, -1, -1), keys.view(pieces, -1, dim).mT, dots, dtype)
    dots = dots[:, : n * heads].unflatten(1, (n, heads)).flatten(0, 1)
    return _head_sum(dots, gate.expand(dots.shape[0], heads)).view(n, m)


def _head_sum(dots: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Overwrites dots f32 [n, H, m]; gate [n, H] -> f32 [n, m]."""
    dots.relu_()
    if dots.device.type == "cpu" and matmul.plain_f32(dots.device):
        return torch.bmm(gate.unsqueeze(1), dots).squeeze(1)
    return dots.mul_(gate.unsqueeze(2)).sum(1)


def _mask_tails(scores: torch.Tensor, counts: list[int]) -> None:
    """-inf from counts[r] on in row r."""
    width = scores.shape[1]
    shortest = min(counts, default=width)
    if shortest == width:
        return
    if len(counts) == 1:
        scores[0, shortest:] = -torch.inf
        return
    limits = torch.tensor(counts, device=scores.device).unsqueeze(1)
    columns = torch.arange(shortest, width, device=scores.device)
    scores[:, shortest:].masked_fill_(columns >= limits, -torch.inf)


def _unpack(taken: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Gathered pages [..., 8448] u8 or [..., 64, 128] -> widened keys [..., 64, 128], scales f32 [..., 64] or None."""
    if taken.dtype != torch.uint8:
        return _widen(taken), None
    split = PAGE_SIZE * INDEX_DIM
    keys = _widen(taken[..., :split].view(FP8)).view(*taken.shape[:-1], PAGE_SIZE, INDEX_DIM)
    return keys, taken[..., split:].contiguous().view(torch.float32)


def _widen(x: torch.Tensor) -> torch.Tensor:
    """x without loss in a dtype that the device multiplies into f32: f32 on the CPU, elsewhere 16 bits if they do."""
    if x.device.type == "cpu":
        return quant.widen_e4m3(x) if x.dtype == FP8 else x.float()
    return x.bfloat16() if x.dtype == FP8 else x
