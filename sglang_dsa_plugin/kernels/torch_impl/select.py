"""Exact top-k in torch; see ops/select.py for the order.

A float becomes an int32 key whose integer order is the order asked for, so neither NaN rules nor a flush-to-zero mode
of the process can change a pick. `torch.topk` then gives only the k-th key: which of several equal keys it would return
is its own choice, so the picks are every key above the k-th and, in position order, as many equal to it as still fit.
"""

from __future__ import annotations

import numpy as np
import torch

_OUTSIDE = -(2**31)  # below the key of NaN: a column outside the window
_NAN = -0x7F000002
_SHIFT = 0x7FFFFF  # takes the key of +inf to the largest int32
_TILE_ELEMENTS = 1 << 18  # CPU: the keys of a tile stay in the L2 cache
_TILE_ELEMENTS_CUDA = 1 << 24


def order_keys(scores: torch.Tensor) -> torch.Tensor:
    """f32 -> int32 keys in the order of ops/select.py: -0.0 and 0.0 one key, NaN one key below every number."""
    bits = scores.view(torch.int32)
    sign = bits >> 31
    # bits of a negative number -> minus its magnitude, which sends -0.0 to 0
    keys = (sign & 0x7FFFFFFF).bitwise_xor_(bits).sub_(sign)
    # Adding the shift lets positive NaN wrap around to the bottom, next to the negative ones; the clamp merges them.
    return keys.add_(_SHIFT).clamp_(min=_NAN)


def topk(
    scores: torch.Tensor,
    lengths: torch.Tensor,
    k: int,
    starts: torch.Tensor | None,
    init_tokens: int,
    local_tokens: int,
) -> torch.Tensor:
    """scores f32 [R, W], lengths int [R] -> int32 [R, k]."""
    init = min(init_tokens, k)
    local = min(local_tokens, k - init)
    if init or local:
        return _with_forced(scores, lengths, k, starts, init, local)
    if starts is not None:
        return _shifted(scores, lengths, k, starts)
    if scores.device.type == "cpu":
        return _topk_cpu(scores, lengths, k)
    return _topk_device(scores, lengths, k)


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
) -> torch.Tensor:
    """`topk`, then slots by (page_table, row_to_request, page_size) or offsets, if given: int32 [R, k]."""
    return as_asked(topk(scores, lengths, k, starts, init_tokens, local_tokens), slots, offsets)


def as_asked(
    picks: torch.Tensor, slots: tuple[torch.Tensor, torch.Tensor, int] | None, offsets: torch.Tensor | None
) -> torch.Tensor:
    """picks as slots by (page_table, row_to_request, page_size), with offsets added, or as they are: int32 [R, k]."""
    if slots is not None:
        return positions_to_slots(picks, *slots)
    return picks if offsets is None else add_offsets(picks, offsets)


def add_offsets(picks: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """picks [R, k] + offsets [R] where a pick is not -1: int32 [R, k]."""
    return torch.where(picks >= 0, picks + offsets.to(torch.int32).unsqueeze(1), picks)


def _topk_cpu(scores: torch.Tensor, lengths: torch.Tensor, k: int) -> torch.Tensor:
    sizes = lengths.tolist()
    out = identity(lengths, k) if min(sizes, default=0) <= k else torch.empty((len(sizes), k), dtype=torch.int32)
    for first, last in long_runs(sizes, k, max(1, _TILE_ELEMENTS // max(1, scores.shape[1]))):
        width = max(sizes[first:last])
        keys = order_keys(scores[first:last, :width])
        shortest = min(sizes[first:last])
        if shortest < width:
            tail = torch.arange(shortest, width) >= lengths[first:last, None]
            keys[:, shortest:].masked_fill_(tail, _OUTSIDE)
        out[first:last] = _picks_of_full_rows(keys, k)
    return out


def _picks_of_full_rows(keys: torch.Tensor, k: int) -> torch.Tensor:
    """keys int32 [n, width], each row with at least k columns in its window -> int64 [n, k] ascending."""
    rows, width = keys.shape
    kth = keys.topk(k, sorted=False).values.amin(1, keepdim=True)
    flat = np.flatnonzero((keys >= kth).numpy())
    if flat.size != rows * k:  # more keys equal to the k-th than fit: the first positions win
        above = keys > kth
        equal = keys == kth
        room = k - above.sum(1, keepdim=True)
        flat = np.flatnonzero((above | (equal & (equal.cumsum(1) <= room))).numpy())
    picks = torch.from_numpy(flat).view(rows, k)
    return picks if rows == 1 else picks - torch.arange(0, rows * width, width).unsqueeze(1)


def _topk_device(scores: torch.Tensor, lengths: torch.Tensor, k: int) -> torch.Tensor:
    """The same without reading anything on the host."""
    rows, width = scores.shape
    if width <= k:
        return identity(lengths.clamp(max=width), k)
    out = torch.empty((rows, k), dtype=torch.int32, device=scores.device)
    columns = torch.arange(width, dtype=torch.int32, device=scores.device)
    tile = max(1, _TILE_ELEMENTS_CUDA // width)
    for first in range(0, rows, tile):
        part = slice(first, first + tile)
        inside = columns < lengths[part, None]
        keys = order_keys(scores[part]).masked_fill_(~inside, _OUTSIDE)
        kth = keys.topk(k, sorted=False).values.amin(1, keepdim=True)
        above = keys > kth
        equal = (keys == kth) & inside
        room = k - above.sum(1, keepdim=True)
        picked = above | (equal & (equal.cumsum(1) <= room))
        place = (picked.cumsum(1) - 1).masked_fill_(~picked, k)
        padded = torch.full((place.shape[0], k + 1), -1, dtype=torch.int32, device=scores.device)
        padded.scatter_(1, place, columns.expand(place.shape))  # column k takes what is not picked
        out[part] = padded[:, :k]
    return out


def _with_forced(
    scores: torch.Tensor, lengths: torch.Tensor, k: int, starts: torch.Tensor | None, init: int, local: int
) -> torch.Tensor:
    """Pick the best of the columns between the forced ones, then put the forced ones around them."""
    full = (lengths > k).unsqueeze(1)
    whole = identity(lengths, k)
    middle = k - init - local
    device = scores.device
    parts = [torch.arange(init, dtype=torch.int32, device=device).expand(len(lengths), init)]
    if middle:
        begin = torch.full_like(lengths, init) if starts is None else starts + init
        inner = torch.where(full.squeeze(1), lengths - (init + local), 0)
        begin = torch.where(full.squeeze(1), begin, 0)
        parts.append(topk(scores, inner, middle, begin, 0, 0) + init)
    last = lengths.to(torch.int32).unsqueeze(1) - local
    parts.append(last + torch.arange(local, dtype=torch.int32, device=device))
    return torch.where(full, torch.cat(parts, dim=1), whole)


def _shifted(scores: torch.Tensor, lengths: torch.Tensor, k: int, starts: torch.Tensor) -> torch.Tensor:
    """Windows with different starts: bring each tile's windows to column 0."""
    rows, width = scores.shape
    if rows == 0 or width == 0:
        return identity(lengths.clamp(max=0), k)
    on_cpu = scores.device.type == "cpu"
    lengths = torch.minimum(lengths, width - starts)
    columns = torch.arange(width, device=scores.device)
    out = torch.empty((rows, k), dtype=torch.int32, device=scores.device)
    tile = max(1, (_TILE_ELEMENTS if on_cpu else _TILE_ELEMENTS_CUDA) // width)
    for first in range(0, rows, tile):
        part = slice(first, first + tile)
        index = (starts[part, None].long() + columns).clamp_(0, width - 1)
        moved = scores[part].gather(1, index)
        out[part] = topk(moved, lengths[part], k, None, 0, 0)
    return out


def identity(lengths: torch.Tensor, k: int) -> torch.Tensor:
    """The picks of rows not longer than k: 0 .. lengths[r] - 1, then -1. int32 [R, k]."""
    columns = torch.arange(k, dtype=torch.int32, device=lengths.device)
    return torch.where(columns < lengths.unsqueeze(1), columns, -1)


def long_runs(sizes: list[int], k: int, limit: int) -> list[tuple[int, int]]:
    """Runs [first, last) of consecutive rows longer than k, at most `limit` rows each."""
    runs: list[tuple[int, int]] = []
    first: int | None = None
    for r, size in enumerate([*sizes, 0]):
        if first is not None and (size <= k or r - first == limit):
            runs.append((first, r))
            first = None
        if first is None and size > k:
            first = r
    return runs


def positions_to_slots(
    positions: torch.Tensor, page_table: torch.Tensor, row_to_request: torch.Tensor, page_size: int
) -> torch.Tensor:
    """positions int [R, k] -> slots int32 [R, k]; -1 stays -1."""
    if page_table.numel() == 0 or positions.numel() == 0:
        return torch.full(positions.shape, -1, dtype=torch.int32, device=positions.device)
    if page_size & (page_size - 1):
        page = torch.div(positions, page_size, rounding_mode="floor")
    else:
        page = positions >> (page_size.bit_length() - 1)  # division of int32 is many times slower on a CPU
    wide = torch.int32 if page_table.numel() < 2**31 else torch.int64
    first = (row_to_request.to(wide) * page_table.shape[1]).unsqueeze(1)
    index = page.to(wide).clamp(min=0) + first
    entry = page_table.reshape(-1).index_select(0, index.view(-1)).view(positions.shape)
    slots = (entry.to(torch.int32) - page) * page_size + positions
    return torch.where(positions < 0, -1, slots).to(torch.int32)
