"""Scores and selection in one, within a budget of score memory; see ops/index_select.py."""

from __future__ import annotations

import torch

from ...cache.layouts import PAGE_SIZE
from . import index_scores, select

_MAX_ROWS = 256  # rows scored before they are selected from: enough to reuse the keys, few enough to stay in the cache


def ragged(
    q: torch.Tensor,
    k: torch.Tensor,
    k_scale: torch.Tensor | None,
    gate: torch.Tensor,
    start: torch.Tensor,
    end: torch.Tensor,
    topk: int,
    init_tokens: int,
    local_tokens: int,
    budget_bytes: int,
    offsets: torch.Tensor | None = None,
) -> torch.Tensor:
    """q [R, H, 128], k [S, 128], k_scale [S] or None, gate [R, H], start, end, offsets [R] -> picks int32 [R, topk]."""
    starts, sizes = index_scores.windows(start, end)
    lengths = (end.long() - start).clamp_(min=0)

    def keys_of(group: int) -> index_scores.LoadKeys:
        return index_scores.ragged_keys(k, k_scale, group)

    picks = _select(q, gate, lengths, sizes, starts, keys_of, topk, init_tokens, local_tokens, budget_bytes)
    return picks if offsets is None else select.add_offsets(picks, offsets)


def paged(
    q: torch.Tensor,
    pages: torch.Tensor,
    gate: torch.Tensor,
    lengths: torch.Tensor,
    page_table: torch.Tensor,
    row_to_request: torch.Tensor,
    topk: int,
    init_tokens: int,
    local_tokens: int,
    budget_bytes: int,
    slots: bool = False,
) -> torch.Tensor:
    """q [R, H, 128], pages, gate [R, H], lengths [R], page_table, row_to_request [R] -> picks int32 [R, topk]."""
    sizes, requests = torch.stack((lengths.long(), row_to_request.long())).tolist()

    def keys_of(group: int) -> index_scores.LoadKeys:
        return index_scores.paged_keys(pages, page_table[group])

    picks = _select(q, gate, lengths, sizes, requests, keys_of, topk, init_tokens, local_tokens, budget_bytes)
    return select.positions_to_slots(picks, page_table, row_to_request, PAGE_SIZE) if slots else picks


def _select(
    q: torch.Tensor,
    gate: torch.Tensor,
    lengths: torch.Tensor,
    sizes: list[int],
    groups: list[int],
    keys_of: index_scores.KeysOf,
    topk: int,
    init_tokens: int,
    local_tokens: int,
    budget_bytes: int,
) -> torch.Tensor:
    """`sizes` is `lengths` on the host; consecutive rows with the same value in `groups` share their keys."""
    short = min(sizes, default=0) <= topk
    picks = select.identity(lengths, topk) if short else lengths.new_empty((len(sizes), topk), dtype=torch.int32)
    floats = budget_bytes // 4
    limit = max(1, min(_MAX_ROWS, floats // max(1, max(sizes, default=0))))
    for first, last in select.long_runs(sizes, topk, limit):
        part = slice(first, last)
        longest = max(sizes[part])
        if longest > floats:
            load = keys_of(groups[first])
            picks[part] = _select_long_row(q[part], gate[part], longest, load, topk, init_tokens, local_tokens, floats)
            continue
        scores = torch.empty((last - first, longest), dtype=torch.float32, device=q.device)
        for a, b in index_scores.runs(groups[part]):
            rows = slice(first + a, first + b)
            index_scores.score_rows(scores[a:b], q[rows], gate[rows], sizes[rows], keys_of(groups[first + a]))
        picks[part] = select.topk(scores, lengths[part], topk, None, init_tokens, local_tokens)
    return picks


def _select_long_row(
    q: torch.Tensor,
    gate: torch.Tensor,
    length: int,
    load: index_scores.LoadKeys,
    topk: int,
    init_tokens: int,
    local_tokens: int,
    floats: int,
) -> torch.Tensor:
    """One row, q [1, H, 128], in stretches of keys: [1, topk].

    The kept picks stay in ascending position and the new keys come after them, so position still breaks ties rightly.
    """
    init = min(init_tokens, topk)
    local = min(local_tokens, topk - init)
    middle, stop = topk - init - local, length - local
    device = q.device
    kept = torch.empty(0, dtype=torch.float32, device=device)
    places = torch.empty(0, dtype=torch.int32, device=device)
    stretch = (floats - 2 * topk) // PAGE_SIZE * PAGE_SIZE
    for begin in range(init // PAGE_SIZE * PAGE_SIZE, stop if middle else 0, stretch):
        end = min(begin + stretch, stop)
        scores = torch.empty((1, end - begin), dtype=torch.float32, device=device)
        index_scores.score_rows(scores, q, gate, [length], load, begin)
        skip = max(0, init - begin)
        pool = torch.cat((kept, scores[0, skip:]))
        places = torch.cat((places, torch.arange(begin + skip, end, dtype=torch.int32, device=device)))
        best = select.topk(pool.unsqueeze(0), torch.tensor([len(pool)], device=device), middle, None, 0, 0)
        best = best[0, : min(middle, len(pool))].long()
        kept, places = pool[best], places[best]
    head = torch.arange(init, dtype=torch.int32, device=device)
    tail = torch.arange(stop, length, dtype=torch.int32, device=device)
    return torch.cat((head, places, tail)).unsqueeze(0)
