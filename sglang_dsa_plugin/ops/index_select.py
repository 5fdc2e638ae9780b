"""Index scores and their exact top-k in one call, with a promise on memory.

    picks[r] = topk(scores[r], length[r], topk)          scores as in ops/index_scores.py, topk as in ops/select.py

Equal to `select.topk(index_scores.ragged(...), end - start, topk)` bit for bit with scores by the same implementation
(each rounds them in its own way), and likewise for pages, but:
- at most `budget_bytes` of f32 scores are alive at a time. Rows are split first; a row that is too long alone is scored
  in stretches of keys, keeping the best so far. The default is the budget of `settings`;
- a row not longer than `topk` keeps every position: it is neither scored nor sorted.

Shapes and dtypes are those of the two operators. Result int32 [R, topk]: ascending, then -1. `offsets` [R] is added to
the picks of a row (ragged); `slots=True` gives slots instead of positions (paged; index pages hold 64 tokens).
Source: as the two operators; why a budget and not a share of free memory: huggingface/transformers#48788.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch

from .. import settings, support
from ..cache.layouts import FP8, PAGE_SIZE
from . import _check, index_scores, select


@dataclass(frozen=True)
class Plan:
    """What `paged` may be handed of a step (`plan`): for an implementation, what it made of its rows and for topk."""

    implementation: str
    made: Any
    rows: int
    topk: int


def ragged(
    q: torch.Tensor,
    k: torch.Tensor,
    k_scale: torch.Tensor | None,
    gate: torch.Tensor,
    start: torch.Tensor | None,
    end: torch.Tensor,
    topk: int,
    offsets: torch.Tensor | None = None,
    init_tokens: int = 0,
    local_tokens: int = 0,
    budget_bytes: int | None = None,
    *,
    impl: str | None = None,
) -> torch.Tensor:
    """Picks of each row's window of the key buffer: int32 [R, topk], positions in the window (+ offsets[r]).

    Raises ValueError as `index_scores.ragged` and `select.topk` do, and for a budget that cannot hold one row's picks
    and one page of new scores (4 * (2 * topk + 64) bytes).
    """
    op = "index_select.ragged"
    index_scores.check_ragged(op, q, k, k_scale, gate, start, end)
    if offsets is not None:
        _check.index_tensor(op, "offsets", offsets, (q.shape[0],), q.device)
    budget = _check_picks(op, topk, init_tokens, local_tokens, budget_bytes)
    features = {"heads": q.shape[1], "k": topk, "dtype": q.dtype, "rows": q.shape[0]}
    choice = support.choose("index_select_ragged", device=q.device, impl=impl, **features)
    start = index_scores.start_for(choice, start, end)
    run = choice.implementation.load()
    return run(q, k, k_scale, gate, start, end, topk, init_tokens, local_tokens, budget, offsets)


def paged(
    q: torch.Tensor,
    pages: torch.Tensor,
    gate: torch.Tensor,
    lengths: torch.Tensor,
    page_table: torch.Tensor,
    row_to_request: torch.Tensor,
    topk: int,
    slots: bool = False,
    page_size: int = PAGE_SIZE,
    init_tokens: int = 0,
    local_tokens: int = 0,
    budget_bytes: int | None = None,
    *,
    slots_out: torch.Tensor | None = None,
    plan: Plan | None = None,
    impl: str | None = None,
) -> torch.Tensor:
    """Picks among each row's first lengths[r] keys: int32 [R, topk], positions or (slots=True) cache slots.

    slots_out: contiguous int32 [R, topk], where the slots go as well while positions are returned.
    plan: of `plan` for the same rows, pages of as many keys, topk and budget; it saves time only. Without `impl` its
    implementation is taken.
    Query and gate of a row not longer than topk may hold anything.

    Raises ValueError as `index_scores.paged` and `select.topk_slots` do, for a page_size other than the 64 tokens of an
    index page, and for a budget that cannot hold one row's picks and one page (4 * (2 * topk + 64) bytes).
    """
    op = "index_select.paged"
    index_scores.check_paged(op, q, pages, gate, lengths, page_table, row_to_request)
    if page_size != PAGE_SIZE:
        _check.fail(op, "page_size", f"{PAGE_SIZE}, the tokens of an index page", page_size)
    budget = _check_picks(op, topk, init_tokens, local_tokens, budget_bytes)
    if plan is not None and impl not in (None, plan.implementation):
        _check.fail(op, "plan", f"one for impl={impl!r}", plan.implementation)
    if plan is not None and (plan.rows, plan.topk) != (q.shape[0], topk):
        _check.fail(op, "plan", f"one for {q.shape[0]} rows and topk {topk}", f"{plan.rows} rows, topk {plan.topk}")
    impl = impl if plan is None else plan.implementation
    features = {"heads": q.shape[1], "k": topk, "dtype": q.dtype, "rows": q.shape[0] // max(1, page_table.shape[0])}
    chosen = support.choose("index_select_paged", device=q.device, impl=impl, **features).implementation
    run = chosen.load()
    if plan is not None:
        run = functools.partial(run, plan=plan.made)
    arguments = (q, pages, gate, lengths, page_table, row_to_request, topk, init_tokens, local_tokens, budget)
    if slots_out is None:
        return run(*arguments, slots)
    _check.tensor(op, "slots_out", slots_out, (q.shape[0], topk), (torch.int32,), q.device, "q")
    if slots or not slots_out.is_contiguous():
        _check.fail(op, "slots_out", "contiguous, and slots False", slots_out)
    if "slots_out" in chosen.takes:
        return run(*arguments, slots_out=slots_out)
    picks = run(*arguments)
    select.positions_to_slots(picks, page_table, row_to_request, page_size, out=slots_out)
    return picks


def plan(
    pages: torch.Tensor,
    lengths: torch.Tensor,
    page_table: torch.Tensor,
    row_to_request: torch.Tensor,
    topk: int,
    heads: int,
    budget_bytes: int | None = None,
    *,
    eager: bool = False,
    impl: str | None = None,
) -> Plan | None:
    """What `paged` may be handed, for every layer of a step with these rows; None where nothing is to be made once.

    pages: of any layer. heads: of the indexer. Nothing is read on the host, so a CUDA graph may hold it. eager: none
    will, so it takes forms only that can be compiled before (`paged` with it gives the same picks).
    Raises ValueError for a topk or budget that `paged` does not take; its tensors are looked at there.
    """
    op = "index_select.plan"
    budget = _check_picks(op, topk, 0, 0, budget_bytes)
    dtype = FP8 if pages.dtype == torch.uint8 else pages.dtype
    features = {"device": pages.device, "impl": impl, "heads": heads, "k": topk, "dtype": dtype}
    choice = support.choose("index_select_paged", **features, rows=lengths.shape[0], planned=True)
    make = choice.implementation.load_plan()
    made = None if make is None else make(lengths, pages, page_table, row_to_request, topk, budget, eager=eager)
    return None if made is None else Plan(choice.name, made, lengths.shape[0], topk)


def _check_picks(op: str, topk: int, init_tokens: int, local_tokens: int, budget_bytes: int | None) -> int:
    for name, value, low in (("topk", topk, 1), ("init_tokens", init_tokens, 0), ("local_tokens", local_tokens, 0)):
        if not isinstance(value, int) or value < low:
            _check.fail(op, name, f"an int of at least {low}", value)
    if budget_bytes is None:
        budget_bytes = settings.scores_budget_bytes()
    least = 4 * (2 * topk + PAGE_SIZE)
    if not isinstance(budget_bytes, int) or budget_bytes < least:
        _check.fail(op, "budget_bytes", f"an int of at least {least} for topk {topk}", budget_bytes)
    return budget_bytes


def reference_ragged(
    q: torch.Tensor,
    k: torch.Tensor,
    k_scale: torch.Tensor | None,
    gate: torch.Tensor,
    start: torch.Tensor | None,
    end: torch.Tensor,
    topk: int,
    offsets: torch.Tensor | None = None,
    init_tokens: int = 0,
    local_tokens: int = 0,
) -> torch.Tensor:
    """fp64 scores of all keys, then the selection by sorting: int32 [R, topk] on the CPU.

    Scores of an implementation are rounded to f32, so near-equal scores may order differently there; give it data whose
    scores are exact in f32 to compare picks bit for bit.
    """
    start = torch.zeros_like(end) if start is None else start
    scores = index_scores.reference_ragged(q, k, k_scale, gate, start, end)
    picks = select.reference(scores, (end - start).clamp(min=0), topk, None, init_tokens, local_tokens)
    if offsets is not None:
        for r, offset in enumerate(offsets.tolist()):
            picks[r][picks[r] >= 0] += offset
    return picks


def reference_paged(
    q: torch.Tensor,
    pages: torch.Tensor,
    gate: torch.Tensor,
    lengths: torch.Tensor,
    page_table: torch.Tensor,
    row_to_request: torch.Tensor,
    topk: int,
    slots: bool = False,
    init_tokens: int = 0,
    local_tokens: int = 0,
) -> torch.Tensor:
    """fp64 scores of all keys, then the selection by sorting: int32 [R, topk] on the CPU; see reference_ragged."""
    scores = index_scores.reference_paged(q, pages, gate, lengths, page_table, row_to_request)
    picks = select.reference(scores, lengths, topk, None, init_tokens, local_tokens)
    return select.reference_slots(picks, page_table, row_to_request) if slots else picks
