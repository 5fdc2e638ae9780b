"""Cases of index scores and selection, apart and in one; see bench_cases."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from sglang_dsa_plugin.cache.layouts import FP8, INDEX_DIM, INDEX_PAGE_BYTES, PAGE_SIZE
from sglang_dsa_plugin.ops import index_scores, index_select, select
from sglang_dsa_plugin.support_row import SOME_ROWS
from sglang_dsa_plugin.tools import bench_floors as floors
from sglang_dsa_plugin.tools import bench_rivals as rivals
from sglang_dsa_plugin.tools.bench_cases import PORTABLE_DECODE, Case, Sizes
from sglang_dsa_plugin.tools.bench_floors import Work
from sglang_dsa_plugin.tools.bench_inputs import Maker
from sglang_dsa_plugin.tools.bench_rivals import Inputs
from sglang_dsa_plugin.tools.bench_timing import SLOWER


def paged_inputs(maker: Maker, lengths: torch.Tensor, tokens: int, sizes: Sizes, width: int) -> Inputs:
    """Index queries, gate, pages and table of one row a request; the table is `width` tokens wide. plan: what selection
    needs of the step, once for all layers, as the built-in's schedules are.
    """
    batch = lengths.shape[0]
    table = maker.page_table(batch, tokens, width)
    inputs = Inputs(
        q=maker.normal(batch, sizes.index_heads, INDEX_DIM, dtype=FP8),
        gate=maker.normal(batch, sizes.index_heads, dtype=torch.float32),
        pages=maker.index_pages(batch * -(-tokens // PAGE_SIZE)),
        lengths=lengths,
        table=table,
        owner=maker.rows_of_requests(batch),
        k_picks=sizes.k,
    )
    rows = inputs.lengths, inputs.table, inputs.owner
    inputs.plan = index_select.plan(inputs.pages, *rows, sizes.k, sizes.index_heads)
    return inputs


def planned(inputs: Inputs, impl: str | None) -> index_select.Plan | None:
    """The plan of the support table's choice, which another one cannot use."""
    return inputs.plan if impl is None else None


def paged_scores(sizes: Sizes, tokens: int, batch: int) -> Case:
    """Index scores alone of one row a request over its pages, by the portable kernel. A step never asks for them alone,
    and takes DeepGEMM's from 16 rows on (`paged_select`); fewer it takes from this kernel, so it has to keep up there.
    """
    work = floors.index_scores(batch, sizes.index_heads, batch * tokens, batch * tokens)
    return Case(
        "index scores, decode, portable",
        f"B={batch}",
        tokens,
        work,
        int(work.bytes),
        lambda maker: paged_inputs(maker, maker.full(batch, tokens), tokens, sizes, tokens),
        lambda i, impl: index_scores.paged(
            i.q, i.pages, i.gate, i.lengths, i.table, i.owner, tokens, impl=impl or "triton"
        ),
        rivals.PAGED_SCORES,
        lambda i: index_scores.reference_paged(i.q, i.pages, i.gate, i.lengths, i.table, i.owner, tokens),
        PORTABLE_DECODE if batch >= SOME_ROWS else SLOWER,
        kind="scores",
    )


def paged_select(sizes: Sizes, tokens: int, batch: int, quick: bool = False) -> Case:
    """Scores, selection and slots of a decode step, in a table for the whole context."""
    scores = floors.index_scores(batch, sizes.index_heads, batch * tokens, batch * tokens, written=False)
    return _paged_select(
        sizes,
        "scores and selection, decode",
        batch,
        tokens,
        scores + Work(4 * batch * sizes.k),
        lambda maker: maker.full(batch, tokens),
        quick,
    )


def short_rows(sizes: Sizes, batch: int, quick: bool = False) -> Case:
    """Scores and selection in a decode step whose rows are all at most k long, in a table for the whole context."""

    def lengths(maker: Maker) -> torch.Tensor:
        return torch.randint(1, sizes.k + 1, (batch,), generator=maker.generator, device=maker.device).int()

    work = Work(4 * batch * sizes.k)
    return _paged_select(sizes, "scores and selection, every row <= k", batch, sizes.k, work, lengths, quick)


def _paged_select(
    sizes: Sizes,
    panel: str,
    batch: int,
    tokens: int,
    work: Work,
    lengths: Callable[[Maker], torch.Tensor],
    quick: bool,
) -> Case:
    return Case(
        panel,
        f"B={batch}",
        tokens,
        work,
        batch * -(-tokens // PAGE_SIZE) * INDEX_PAGE_BYTES,
        lambda maker: paged_inputs(maker, lengths(maker), tokens, sizes, sizes.context),
        lambda i, impl: index_select.paged(
            i.q, i.pages, i.gate, i.lengths, i.table, i.owner, sizes.k, slots=True, plan=planned(i, impl), impl=impl
        ),
        rivals.PAGED_SELECT,
        lambda i: index_select.reference_paged(i.q, i.pages, i.gate, i.lengths, i.table, i.owner, sizes.k, slots=True),
        quick=quick,
        kind="picks",
    )


def _ragged_inputs(maker: Maker, rows: int, tokens: int, sizes: Sizes) -> Inputs:
    end = torch.arange(tokens - rows + 1, tokens + 1, dtype=torch.int32, device=maker.device)
    return Inputs(
        q=maker.normal(rows, sizes.index_heads, INDEX_DIM, dtype=FP8),
        gate=maker.normal(rows, sizes.index_heads, dtype=torch.float32),
        k=maker.normal(tokens, INDEX_DIM, dtype=FP8),
        k_scale=maker.powers(tokens),
        start=torch.zeros_like(end),
        end=end,
        lengths=end,
        # Pages in order, so that the built-in's slots are our positions.
        table=torch.arange(-(-tokens // PAGE_SIZE), dtype=torch.int32, device=maker.device).unsqueeze(0),
        scores=None,
        k_picks=sizes.k,
    )


def ragged_scores(sizes: Sizes, tokens: int, quick: bool = False) -> Case:
    """Index scores of the last rows of one request over its gathered keys; both sides get the keys gathered."""
    rows = sizes.prefill
    work = floors.index_scores(rows, sizes.index_heads, _pairs(rows, tokens), tokens)
    return Case(
        "index scores, prefill",
        f"T={rows}",
        tokens,
        work,
        int(work.bytes),
        lambda maker: _ragged_inputs(maker, rows, tokens, sizes),
        lambda i, impl: index_scores.ragged(i.q, i.k, i.k_scale, i.gate, None, i.end, tokens, impl=impl),
        rivals.RAGGED_SCORES,
        lambda i: index_scores.reference_ragged(i.q, i.k, i.k_scale, i.gate, i.start, i.end, tokens),
        quick=quick,
        kind="scores",
    )


def ragged_select(sizes: Sizes, tokens: int, quick: bool = False) -> Case:
    """Scores and selection of the last rows of one request, ours within the budget of score memory."""
    rows = sizes.prefill
    work = floors.index_scores(rows, sizes.index_heads, _pairs(rows, tokens), tokens, written=False)
    return Case(
        "scores and selection, prefill",
        f"T={rows}",
        tokens,
        work,
        4 * _pairs(rows, tokens),
        lambda maker: _ragged_inputs(maker, rows, tokens, sizes),
        lambda i, impl: index_select.ragged(i.q, i.k, i.k_scale, i.gate, None, i.end, sizes.k, impl=impl),
        rivals.RAGGED_SELECT,
        lambda i: index_select.reference_ragged(i.q, i.k, i.k_scale, i.gate, i.start, i.end, sizes.k),
        quick=quick,
        kind="picks",
    )


def _selection(sizes: Sizes, rows: int, tokens: int, panel: str, line: str, one_request: bool, quick: bool) -> Case:
    work = floors.selection(rows, rows * tokens, sizes.k)

    def make(maker: Maker) -> Inputs:
        return Inputs(
            scores=maker.normal(rows, tokens, dtype=torch.float32),
            lengths=maker.full(rows, tokens),
            table=maker.page_table(1 if one_request else rows, tokens),
            owner=maker.full(rows, 0) if one_request else maker.rows_of_requests(rows),
            offsets=maker.full(rows, 0),
            k_picks=sizes.k,
        )

    return Case(
        panel,
        line,
        tokens,
        work,
        int(work.bytes),
        make,
        lambda i, impl: select.topk_slots(i.scores, i.lengths, sizes.k, i.table, i.owner, impl=impl),
        rivals.TOPK_PREFILL if one_request else rivals.TOPK_DECODE,
        lambda i: select.reference_slots(select.reference(i.scores, i.lengths, sizes.k), i.table, i.owner),
        quick=quick,
        kind="picks",
    )


def decode_selection(sizes: Sizes, tokens: int, batch: int, quick: bool = False) -> Case:
    """Slots of the best of one row a request."""
    return _selection(sizes, batch, tokens, "selection, decode", f"B={batch}", False, quick)


def prefill_selection(sizes: Sizes, tokens: int, quick: bool = False) -> Case:
    """Slots of the best of many full rows of one request."""
    return _selection(sizes, sizes.prefill, tokens, "selection, prefill", f"{sizes.prefill} rows", True, quick)


def ragged_selection(sizes: Sizes, tokens: int) -> Case:
    """The same into gathered rows: positions with an offset, no table."""
    slots = prefill_selection(sizes, tokens)
    return Case(
        "selection, ragged prefill",
        slots.line,
        tokens,
        slots.work,
        slots.set_bytes,
        slots.make,
        lambda i, impl: select.topk_ragged(i.scores, i.lengths, sizes.k, i.offsets, impl=impl),
        rivals.TOPK_RAGGED,
        lambda i: select.reference(i.scores, i.lengths, sizes.k),
        kind="picks",
    )


def _pairs(rows: int, tokens: int) -> int:
    """(row, key) pairs of the last `rows` of `tokens` tokens, each of which sees itself and those before it."""
    return math.comb(tokens + 1, 2) - math.comb(tokens - rows + 1, 2)
