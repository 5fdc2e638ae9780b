"""ops.index_select: equal to selecting from all scores, and within its budget."""

import sys
import types

import pytest
import torch

from sglang_dsa_plugin import settings, support
from sglang_dsa_plugin.cache.layouts import FP8
from sglang_dsa_plugin.kernels.torch_impl import index_scores as torch_scores
from sglang_dsa_plugin.ops import index_scores, index_select, select
from sglang_dsa_plugin.support_row import Where

from .indexer_inputs import DTYPES, exact, generator, normal

ROWS, KEYS = 13, 1536


def _ragged_windows():
    start = torch.tensor([0, 0, 5, 5, 5, 100, 0, 3, 0, 0, 0, 0, 7], dtype=torch.int32)
    end = torch.tensor([1, 640, 5, 200, 1000, 1300, 64, 67, KEYS, 65, 63, 0, KEYS], dtype=torch.int32)
    return start, end


def _paged_windows(pages=KEYS // 64):
    table = torch.stack([torch.randperm(pages, generator=generator(i)) for i in range(3)]).int()
    lengths = torch.tensor([1, KEYS, 0, 63, 64, 65, 300, 1290, 1500, 0, 1, 1281, 1279], dtype=torch.int32)
    requests = torch.tensor([0, 0, 1, 2, 2, 1, 1, 0, 0, 2, 2, 2, 2], dtype=torch.int32)
    return lengths, table, requests


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("topk", [16, 64, 512])
@pytest.mark.parametrize("init, local", [(0, 0), (4, 70), (100, 3)])
def test_equals_topk_of_all_scores_at_every_budget(dtype, topk, init, local):
    """The budgets: one row in stretches of one page, in odd stretches, some rows at a time, everything at once."""
    inputs = normal(ROWS, 8, KEYS, dtype)
    start, end = _ragged_windows()
    lengths, table, requests = _paged_windows()
    ragged = inputs.q, inputs.k, inputs.k_scale, inputs.gate, start, end
    paged = inputs.q, inputs.pages, inputs.gate, lengths, table, requests
    sizes = (end - start).clamp(min=0)
    want = select.topk(index_scores.ragged(*ragged), sizes, topk, None, init, local)
    want_slots = select.topk_slots(index_scores.paged(*paged), lengths, topk, table, requests, 64, None, init, local)
    want_positions = select.topk(index_scores.paged(*paged), lengths, topk, None, init, local)
    least = 4 * (2 * topk + 64)
    for budget in (least, least + 999, 3 * 4 * KEYS, None):
        options = {"init_tokens": init, "local_tokens": local, "budget_bytes": budget}
        assert torch.equal(index_select.ragged(*ragged, topk, **options), want)
        assert torch.equal(index_select.paged(*paged, topk, **options), want_positions)
        assert torch.equal(index_select.paged(*paged, topk, slots=True, **options), want_slots)


@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8])
@pytest.mark.parametrize("init, local", [(0, 0), (3, 5)])
def test_equals_fp64_where_scores_are_exact(dtype, init, local):
    inputs = exact(ROWS, 4, KEYS, dtype)
    start, end = _ragged_windows()
    lengths, table, requests = _paged_windows()
    offsets = torch.arange(ROWS) * 1000
    ragged = inputs.q, inputs.k, inputs.k_scale, inputs.gate, start, end, 64, offsets, init, local
    got = index_select.ragged(*ragged)
    assert got.dtype == torch.int32
    assert torch.equal(got, index_select.reference_ragged(*ragged))
    lengths = lengths.clamp(max=400)
    paged = inputs.q, inputs.pages, inputs.gate, lengths, table, requests, 64
    for slots in (False, True):
        got = index_select.paged(*paged, slots, 64, init, local)
        assert torch.equal(got, index_select.reference_paged(*paged, slots, init, local))
    beside = torch.full_like(got, 7)
    positions = index_select.paged(*paged, False, 64, init, local, slots_out=beside)
    assert torch.equal(positions, index_select.reference_paged(*paged, False, init, local))
    assert torch.equal(beside, got)
    for slots, out in ((True, beside), (False, beside.t()), (False, beside.long()), (False, beside[1:])):
        with pytest.raises(ValueError, match=r"index_select\.paged: slots_out must be"):
            index_select.paged(*paged, slots, slots_out=out)


@pytest.mark.parametrize("budget", [None, 4 * (2 * 64 + 64)])
def test_plateaus_and_nan_rows(budget):
    """Keys of zeros score exactly 0, so most of a row is one plateau; a NaN query makes all of its scores NaN."""
    inputs = exact(4, 4, 1024)
    inputs.k[::3] = 0
    inputs.q[1] = 0
    inputs.q[2] = torch.nan
    start, end = torch.zeros(4, dtype=torch.long), torch.tensor([1024, 1000, 999, 130])
    args = inputs.q, inputs.k, None, inputs.gate, start, end, 64
    got = index_select.ragged(*args, budget_bytes=budget)
    assert torch.equal(got, index_select.reference_ragged(*args))
    assert torch.equal(got[1:3], torch.arange(64, dtype=torch.int32).expand(2, 64))
    assert all(torch.equal(index_select.ragged(*args, budget_bytes=budget), got) for _ in range(5))


def test_prefill_in_one_piece_or_in_chunks_or_by_decode():  # ml-explore/mlx-lm#1189
    """A position's picks do not depend on how the prompt was cut."""
    inputs = normal(300, 8, 320, torch.bfloat16)
    position = torch.arange(300)
    table = torch.arange(5, dtype=torch.int32).flip(0).unsqueeze(0)
    pages = inputs.pages.flip(0).contiguous()

    def prefill(first, last):
        rows = slice(first, last)
        length = position[rows] + 1
        zero = torch.zeros(last - first, dtype=torch.long)
        ragged = index_select.ragged(inputs.q[rows], inputs.k, None, inputs.gate[rows], zero, length, 64)
        paged = index_select.paged(inputs.q[rows], pages, inputs.gate[rows], length, table, zero, 64)
        assert torch.equal(ragged, paged)
        return ragged

    whole = prefill(0, 300)
    for split in (1, 63, 64, 65, 128, 200, 299):
        assert torch.equal(torch.cat((prefill(0, split), prefill(split, 300))), whole)
    for p in (0, 63, 64, 65, 127, 200, 299):
        assert torch.equal(prefill(p, p + 1), whole[p : p + 1])


@pytest.mark.parametrize("length", [2047, 2048, 2049, 2500, 4095, 4097])
def test_lengths_around_topk_and_pages(length):  # ml-explore/mlx-lm#1453: right below a length, wrong above
    inputs = exact(2, 2, 4160)
    lengths = torch.tensor([length, length - 1])
    zero = torch.zeros(2, dtype=torch.long)
    args = inputs.q, inputs.k, None, inputs.gate, zero, lengths, 2048
    want = index_select.reference_ragged(*args)
    assert torch.equal(index_select.ragged(*args), want)
    table = torch.arange(65, dtype=torch.int32).unsqueeze(0)
    assert torch.equal(index_select.paged(inputs.q, inputs.pages, inputs.gate, lengths, table, zero, 2048), want)


class _Watch:
    """Score buffers and rows that reach the scorer."""

    def __init__(self, monkeypatch):
        self.bytes, self.rows = 0, 0
        inner = torch_scores.score_rows

        def watched(scores, q, gate, lengths, load, first_key=0):
            self.bytes = max(self.bytes, scores.untyped_storage().nbytes())
            self.rows += len(lengths)
            inner(scores, q, gate, lengths, load, first_key)

        monkeypatch.setattr(torch_scores, "score_rows", watched)


@pytest.mark.parametrize("budget", [4 * (2 * 64 + 64), 5000, 100_000])
def test_scores_alive_stay_within_the_budget(budget, monkeypatch):
    inputs = normal(30, 2, 2048)
    watch = _Watch(monkeypatch)
    zero = torch.zeros(30, dtype=torch.long)
    index_select.ragged(inputs.q, inputs.k, None, inputs.gate, zero, zero + 2048, 64, budget_bytes=budget)
    assert 0 < watch.bytes <= budget


def test_default_budget_comes_from_the_settings(monkeypatch):
    inputs = normal(30, 2, 2048)
    watch = _Watch(monkeypatch)
    monkeypatch.setattr(settings, "scores_budget_bytes", lambda: 20_000)
    zero = torch.zeros(30, dtype=torch.long)
    index_select.ragged(inputs.q, inputs.k, None, inputs.gate, zero, zero + 2048, 64)
    assert 0 < watch.bytes <= 20_000


def test_short_rows_are_not_scored(monkeypatch):
    inputs = normal(100, 2, 128)
    watch = _Watch(monkeypatch)
    zero = torch.zeros(100, dtype=torch.long)
    got = index_select.ragged(inputs.q, inputs.k, None, inputs.gate, zero, torch.arange(100), 90)
    assert watch.rows == 9  # lengths 91 .. 99
    assert got[40].tolist() == [*range(40), *[-1] * 50]


def test_no_rows_and_no_keys():
    inputs = normal(2, 4, 64)
    none = torch.zeros(2, dtype=torch.int32)
    table = torch.zeros(1, 0, dtype=torch.int32)
    assert (index_select.ragged(inputs.q, inputs.k, None, inputs.gate, none, none, 5) == -1).all()
    assert (index_select.ragged(inputs.q, inputs.k[:0], None, inputs.gate, none, none, 5, none + 7) == -1).all()
    assert (index_select.paged(inputs.q, inputs.pages, inputs.gate, none, table, none, 5, True) == -1).all()
    empty = index_select.paged(inputs.q[:0], inputs.pages, inputs.gate[:0], none[:0], table, none[:0], 5, True)
    assert empty.shape == (0, 5) and empty.dtype == torch.int32


def plan_problem():
    inputs = normal(2, 4, 128)
    rows = torch.tensor([128, 3]), torch.tensor([[0, 1]]), torch.zeros(2, dtype=torch.int32)
    return (inputs.q, inputs.pages, inputs.gate), rows


def test_what_has_nothing_to_make_once_plans_nothing():
    (_, pages, _), rows = plan_problem()
    assert index_select.plan(pages, *rows, 5, 4) is None
    assert index_select.plan(pages, *rows, 5, 4, impl="torch") is None
    with pytest.raises(ValueError, match=r"index_select\.plan: budget_bytes must be"):
        index_select.plan(pages, *rows, 5, 4, 10)


def test_a_plan_is_made_by_its_implementation_and_handed_back_to_it(monkeypatch):
    """By the table's choice for the step's rows, with the budget of the settings."""
    (q, pages, gate), rows = plan_problem()
    module = types.ModuleType("planned_kernels")

    def make(lengths, pages, page_table, row_to_request, topk, budget, eager):
        assert all(a is b for a, b in zip((lengths, page_table, row_to_request), rows)) and pages is pages
        return (topk, budget, "eager") if eager else (topk, budget)

    def run(*given, plan=None):
        runs.append((given[6], given[9], plan))
        return torch.full((2, given[6]), 7, dtype=torch.int32)

    module.make, module.run, runs = make, run, []
    monkeypatch.setitem(sys.modules, "planned_kernels", module)
    few = Where(min_rows=256)
    target = {"plans": "planned_kernels:make", "planned": Where(), "first": few}
    row = support.Implementation("index_select_paged", "planner", "planned_kernels:run", **target)
    monkeypatch.setattr(support, "_ROWS", [row, *support.rows()])
    support._choose.cache_clear()
    try:
        made = index_select.plan(pages, *rows, 5, 4, 10**6)
        assert made == index_select.Plan("planner", (5, 10**6), len(q), 5)
        assert index_select.plan(pages, *rows, 5, 4, 10**6, eager=True).made == (5, 10**6, "eager")
        call = (q, pages, gate, *rows, 5)
        assert (index_select.paged(*call, budget_bytes=10**6, plan=made) == 7).all()
        assert runs == [(5, 10**6, (5, 10**6))]
        assert (index_select.paged(*call) != 7).any(), "without a plan its rows a request are too few"
        with pytest.raises(ValueError, match=r"index_select\.paged: plan must be one for impl='torch'"):
            index_select.paged(*call, plan=made, impl="torch")
        with pytest.raises(ValueError, match=r"index_select\.paged: plan must be one for 2 rows and topk 4"):
            index_select.paged(*call[:-1], 4, plan=made)
    finally:
        support._choose.cache_clear()


@pytest.mark.parametrize(
    "change, argument",
    [
        ({"topk": 0}, "topk"),
        ({"init_tokens": -1}, "init_tokens"),
        ({"local_tokens": -1}, "local_tokens"),
        ({"budget_bytes": 4 * (2 * 5 + 64) - 1}, "budget_bytes"),
        ({"offsets": torch.zeros(3, dtype=torch.int32)}, "offsets"),
        ({"gate": torch.zeros(5, 4)}, "gate"),
        ({"end": torch.tensor([1, 65])}, "end"),
    ],
)
def test_bad_ragged_input_is_named(change, argument):
    inputs = normal(2, 4, 64)
    good = {"q": inputs.q, "k": inputs.k, "k_scale": None, "gate": inputs.gate, "topk": 5}
    good |= {"start": torch.zeros(2, dtype=torch.long), "end": torch.tensor([64, 3])}
    with pytest.raises(ValueError, match=rf"index_select\.ragged: {argument} must be"):
        index_select.ragged(**{**good, **change})


@pytest.mark.parametrize(
    "change, argument",
    [
        ({"page_size": 32}, "page_size"),
        ({"lengths": torch.tensor([1, 2, 3])}, "lengths"),
        ({"row_to_request": torch.tensor([0, 1])}, "row_to_request"),
        ({"topk": 2.0}, "topk"),
    ],
)
def test_bad_paged_input_is_named(change, argument):
    inputs = normal(2, 4, 64)
    zero = torch.zeros(2, dtype=torch.long)
    good = {"q": inputs.q, "pages": inputs.pages, "gate": inputs.gate, "lengths": zero + 64, "topk": 5}
    good |= {"page_table": torch.zeros(1, 1, dtype=torch.int32), "row_to_request": zero}
    with pytest.raises(ValueError, match=rf"index_select\.paged: {argument} must be"):
        index_select.paged(**{**good, **change})
