"""The work of the adapters of scores and selection, without a GPU: stand-ins check what each kernel needs
(vendor_fakes.py), results are fp64's.

Slots are prepared by a Triton kernel, so the tests run in Triton's interpreter, in a process of their own.
"""

import math
import os

import pytest
import torch

from sglang_dsa_plugin.cache.layouts import FP8
from sglang_dsa_plugin.ops import index_scores, index_select, select
from tests.cpu.kernels import interpreted, vendor_fakes

if os.environ.get("TRITON_INTERPRET") != "1":

    @pytest.mark.full
    def test_in_the_interpreter():
        interpreted.assert_passes(__file__)

else:
    from sglang_dsa_plugin.kernels.triton import index_select as triton_select
    from sglang_dsa_plugin.kernels.vendor import deep_gemm, deep_gemm_load, deep_gemm_plan, topk
    from sglang_dsa_plugin.kernels.vendor import index_select as vendor_select

    SCALE = 192**-0.5

    def generator(seed=0):
        return torch.Generator().manual_seed(seed)

    @pytest.fixture(autouse=True)
    def gpu(monkeypatch):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)

    # Index scores

    def index_problem(heads, count=300, requests=3):
        g = generator(heads)

        def integers(low, high, *shape):
            return torch.randint(low, high, shape, generator=g, dtype=torch.int32)

        q, k = integers(-3, 4, 9, heads, 128).float().to(FP8), integers(-3, 4, count, 128).float().to(FP8)
        scale, gate = 2.0 ** integers(-2, 2, count).float(), integers(-4, 5, 9, heads).float()
        pages = torch.zeros(requests * 5, 8448, dtype=torch.uint8)
        pages[:, :8192] = integers(-3, 4, requests * 5, 8192).float().to(FP8).view(torch.uint8)
        pages[:, 8192:] = (2.0 ** integers(-2, 2, requests * 5, 64).float()).view(torch.uint8)
        table = torch.randperm(requests * 5, generator=g).view(requests, 5).int()
        lengths = integers(0, 301, 9)
        lengths[3], lengths[4] = 0, 320
        owner = integers(0, requests, 9)
        return (q, k, scale, gate), (q, pages, gate, lengths, table, owner)

    @pytest.mark.parametrize("heads", [8, 32, 40, 64])
    def test_deep_gemm_ragged(monkeypatch, heads):
        vendor_fakes.install(monkeypatch, vendor_fakes.deep_gemm(most_rows=0))
        (q, k, scale, gate), _ = index_problem(heads)
        start = torch.tensor([0, 5, 200, 300, 0, 10, 10, 299, 0], dtype=torch.int32)
        end = torch.tensor([300, 5, 263, 300, 1, 9, 200, 300, 150], dtype=torch.int32)
        for width in (None, 64, 350):
            for begin in (start, None):
                got = deep_gemm.ragged(q, k, scale, gate, begin, end, width)
                assert torch.equal(got, index_scores.reference_ragged(q, k, scale, gate, begin, end, width).float())

    @pytest.mark.parametrize(
        ("heads", "capability", "most"), [(8, (9, 0), 2048), (64, (10, 0), vendor_fakes.PROCESSORS)]
    )
    def test_deep_gemm_paged(monkeypatch, heads, capability, most):
        vendor_fakes.install(monkeypatch, vendor_fakes.deep_gemm(most))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
        _, arguments = index_problem(heads)
        for width in (None, 64, 100, 320, 400):
            got = deep_gemm.paged(*arguments, width)
            assert torch.equal(got, index_scores.reference_paged(*arguments, width).float())

    def test_deep_gemm_never_sees_only_empty_rows(monkeypatch):
        """Padding rows may name any page."""
        vendor_fakes.install(monkeypatch, vendor_fakes.deep_gemm(2048))
        (q, k, scale, gate), (_, pages, _, lengths, table, owner) = index_problem(64)
        none = torch.zeros_like(lengths)
        assert (deep_gemm.paged(q, pages, gate, none, torch.full_like(table, -1), owner, 64) == -math.inf).all()
        assert (deep_gemm.ragged(q, k, scale, gate, none + 300, none, 64) == -math.inf).all()

    # Selection

    @pytest.mark.parametrize("k", [1, 16, 64, 500])
    @pytest.mark.parametrize("forced", [(0, 0), (3, 4), (900, 900)])
    def test_torch_topk_without_ties(k, forced):
        scores = torch.randperm(9 * 200, generator=generator()).view(9, 200).float() - 900
        starts = torch.tensor([0, 0, 5, 100, 199, 0, 0, 0, 0])
        lengths = torch.tensor([200, 0, 60, 100, 1, 7, 33, 199, 150])
        scores[0, ::3], scores[6, 5] = -math.inf, math.nan
        got = topk.topk(scores, lengths, k, starts, *forced, by="torch_topk")
        want = select.reference(scores, lengths, k, starts, *forced)
        same = torch.ones(9, dtype=torch.bool)
        same[0] = k < 100  # past the numbers it is one -inf or another
        same[6] = False
        assert torch.equal(got[same], want[same])
        assert torch.equal((got >= 0).sum(1), (want >= 0).sum(1))
        assert all(len(set(row)) == len(row) for row in ([p for p in r if p >= 0] for r in got.tolist()))

    @pytest.mark.parametrize("slots", [False, True])
    @pytest.mark.parametrize(("scores", "selection"), [("deep_gemm", "triton"), ("triton", "torch_topk")])
    @pytest.mark.parametrize("budget", [1 << 20, 4 * 4 * 512])
    def test_scores_of_one_package_and_selection_of_another(monkeypatch, scores, selection, slots, budget):
        vendor_fakes.install(monkeypatch, vendor_fakes.deep_gemm(2048))
        _, (q, pages, gate, lengths, table, owner) = index_problem(32)
        if selection != "triton":
            gate = torch.rand(gate.shape, generator=generator())  # no two scores alike
        arguments = (q, pages, gate, lengths, table, owner, 64)
        got = vendor_select.paged(*arguments, 2, 3, budget, slots, scores=scores, selection=selection)
        want = index_select.reference_paged(*arguments, slots=slots, init_tokens=2, local_tokens=3)
        if selection == "triton":
            assert torch.equal(got, want)
        else:  # in float32 a few of the last picks may change places with their neighbours
            common = [len(set(a) & set(b)) / len(set(b)) for a, b in zip(got.tolist(), want.tolist())]
            assert min(common) > 0.9
        whole = vendor_select.paged(*arguments[:6], 400, 0, 0, budget, slots, scores=scores, selection=selection)
        want = index_select.reference_paged(*arguments[:6], 400, slots=slots)
        assert torch.equal(whole, want)

    # Prefill: keys in one piece

    def prefill_problem(rows=40, seed=0):
        """Three requests of very different lengths in turn, padding in the page table; scores exact in float32."""
        _, (q, pages, gate, _, table, _) = index_problem(32)
        g = generator(seed)
        q, gate = q.repeat(5, 1, 1)[:rows], gate.repeat(5, 1)[:rows]
        gate = gate + torch.randint(0, 3, gate.shape, generator=g)
        owner = torch.arange(rows, dtype=torch.int32) * 3 // rows
        most = torch.tensor([320, 40, 190], dtype=torch.int32)
        lengths = (most[owner] - torch.arange(rows - 1, -1, -1) % 30).clamp(min=0).int()
        table = table.clone()
        table[1, 1:], table[2, 3:] = -1, 10**6
        return q, pages, gate, lengths, table, owner

    @pytest.fixture
    def gathers(monkeypatch):
        """Every call is one for many rows; the rows and columns that DeepGEMM is called with."""
        calls = []
        vendor_fakes.install(monkeypatch, vendor_fakes.deep_gemm(0, calls))
        monkeypatch.setattr(vendor_select, "MANY_ROWS", 1)
        return calls

    @pytest.mark.parametrize("form", ["positions", "slots", "both"])
    @pytest.mark.parametrize("forced", [(0, 0), (2, 3)])
    def test_gathered_keys_give_the_picks_of_their_pages(gathers, form, forced):
        q, pages, gate, lengths, table, owner = prefill_problem()
        valid = table.clamp(0, len(pages) - 1)
        beside = torch.empty(len(q), 64, dtype=torch.int32) if form == "both" else None
        got = vendor_select.paged(
            q, pages, gate, lengths, table, owner, 64, *forced, 1 << 20, form == "slots", beside,
            scores="deep_gemm", selection="triton",
        )  # fmt: skip
        want = index_select.reference_paged(
            q, pages, gate, lengths, valid, owner, 64, init_tokens=forced[0], local_tokens=forced[1]
        )
        slots = select.reference_slots(want, valid, owner)
        assert torch.equal(got, slots if form == "slots" else want)
        assert beside is None or torch.equal(beside, slots)
        assert gathers == [(40, 320)], "as wide as the longest request"
        gathers.clear()
        alone = q, pages, gate, lengths, table[:1], owner * 0
        got = vendor_select.paged(*alone, 64, *forced, 1 << 20, scores="deep_gemm", selection="triton")
        want = index_select.reference_paged(*alone[:4], valid[:1], owner * 0, 64, False, *forced)
        assert torch.equal(got, want) and gathers == [(40, 320)]

    # Plans

    @pytest.mark.parametrize("budget", [1 << 20, 4 * 4 * 512])
    def test_a_plan_serves_every_layer(monkeypatch, budget):
        """Its schedules are made once; a layer differs from the next in queries, gates and pages."""
        plans, calls = [], []
        vendor_fakes.install(monkeypatch, vendor_fakes.deep_gemm(2048, calls, plans))
        by = {"scores": "deep_gemm", "selection": "triton"}
        _, (q, pages, gate, lengths, table, owner) = index_problem(32)
        table = table.clone()
        table[1, -(-int(lengths[owner == 1].max()) // 64) :] = 10**6  # past the longest row's keys
        made = vendor_select.plan(lengths, pages, table, owner, 64, budget, **by)
        groups = -(-9 // (budget // 2048)) if budget < 9 * 2048 else 1
        assert len(plans) == groups and made.table.shape == (9, 5)
        for layer in (pages, pages.flip(0)):
            got = vendor_select.paged(q, layer, gate, lengths, table, owner, 64, 2, 3, budget, plan=made, **by)
            want = index_select.reference_paged(
                q, layer, gate, lengths, table.clamp(max=len(pages) - 1), owner, 64, False, 2, 3
            )
            assert torch.equal(got, want)
        assert len(plans) == groups and len(calls) == 2 * groups
        # One made for another budget has other groups, and is not used.
        vendor_select.paged(q, pages, gate, lengths, table, owner, 64, 2, 3, 3 * 2048, plan=made, **by)
        assert len(plans) == groups + 3

    @pytest.mark.parametrize(("most", "groups"), [(256, [9]), (8, [8, 1]), (5, [4, 4, 1]), (1, [1] * 9)])
    def test_calls_of_an_eager_step_are_small_and_even(monkeypatch, most, groups):
        plans = []
        vendor_fakes.install(monkeypatch, vendor_fakes.deep_gemm(2048, [], plans))
        monkeypatch.setattr(deep_gemm_plan, "EAGER_ROWS", most)
        by = {"scores": "deep_gemm", "selection": "triton"}
        _, (q, pages, gate, lengths, table, owner) = index_problem(32)
        made = vendor_select.plan(lengths, pages, table, owner, 64, 1 << 20, eager=True, **by)
        got = vendor_select.paged(q, pages, gate, lengths, table, owner, 64, 2, 3, 1 << 20, plan=made, **by)
        assert torch.equal(got, index_select.reference_paged(q, pages, gate, lengths, table, owner, 64, False, 2, 3))
        assert [len(sizes) for sizes in plans] == groups

    @pytest.mark.parametrize(
        ("rows", "most", "group"),
        [(150, 2048, 150), (300, 2048, 160), (500, 2048, 256), (300, 150, 128), (40, 31, 20), (41, 31, 24), (9, 7, 4),
         (9, 3, 3)],
    )  # fmt: skip
    def test_calls_of_an_eager_step_begin_where_lengths_are_aligned(rows, most, group):
        """Four lengths are 16 bytes, which Triton compiles by; a call has no more rows than it may."""
        assert deep_gemm_plan.eager_group(rows, most) == group
        for n in range(1, 3000):
            taken = deep_gemm_plan.eager_group(n, most)
            assert 0 < taken <= min(most, 256) and (taken == n or taken % 4 == 0 or most < 4)

    @pytest.mark.parametrize(
        ("rows", "fit", "group"), [(9, 9, 9), (9, 100, 9), (9, 7, 4), (9, 3, 3), (40, 30, 28), (0, 5, 1)]
    )
    def test_groups_that_a_budget_makes_begin_where_lengths_are_aligned(rows, fit, group):
        for by, bytes_of_a_row in (("triton", 2048), ("torch_topk", 4 * 2048)):
            budget = fit * bytes_of_a_row + 5
            assert vendor_select._rows_of_a_group(rows, 512, budget, "triton", by) == (group, bytes_of_a_row)

    @pytest.mark.parametrize(
        ("requests", "most", "rows"),
        [
            (20, 2048, [32]),
            (33, 2048, [32, 64]),
            (4096, 2048, list(range(32, 257, 32))),
            (33, 148, [32, 64]),
            (140, 148, [32, 64, 96, 128, 148]),
            (4096, 148, [32, 64, 96, 128, 148]),
        ],
    )
    def test_what_eager_steps_take_is_loaded(monkeypatch, requests, most, rows):
        """One call for each schedule that steps of so many rows come to, and the scores' kernel. No call has more rows
        than DeepGEMM takes, which need not be a multiple of 32.
        """
        plans, calls = [], []
        vendor_fakes.install(monkeypatch, vendor_fakes.deep_gemm(most, calls, plans))
        monkeypatch.setattr(deep_gemm_plan, "_ROWS", most)
        pages = index_problem(32)[1][1]
        deep_gemm_load.load(pages, 32, 64, requests, scores="deep_gemm", selection="triton")
        assert [len(sizes) for sizes in plans] == rows and len(calls) == len(rows)
        taken = {-(-deep_gemm_plan.eager_group(n, most) // 32) for n in range(1, min(requests, 3000) + 1)}
        assert taken == {-(-n // 32) for n in rows}

    @pytest.mark.parametrize("planned", [True, False])
    def test_a_call_takes_so_many_rows(monkeypatch, planned):
        """From SM 10.0 on a call takes a row a processor, whatever the budget holds."""
        plans = []
        vendor_fakes.install(monkeypatch, vendor_fakes.deep_gemm(vendor_fakes.PROCESSORS, [], plans))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (10, 0))
        by = {"scores": "deep_gemm", "selection": "triton"}
        _, (q, pages, gate, lengths, table, owner) = index_problem(64)
        made = vendor_select.plan(lengths, pages, table, owner, 64, 1 << 20, **by) if planned else None
        got = vendor_select.paged(q, pages, gate, lengths, table, owner, 64, 0, 0, 1 << 20, plan=made, **by)
        assert torch.equal(got, index_select.reference_paged(q, pages, gate, lengths, table, owner, 64))
        assert len(plans) == -(-9 // vendor_fakes.PROCESSORS)

    def test_a_single_row_says_how_it_is_aligned(monkeypatch):
        """A vector load of the selection goes by the stride, which is 1 for what one row comes with."""
        fakes = vendor_fakes.deep_gemm(2048)
        module = fakes["deep_gemm"]
        score = module.fp8_paged_mqa_logits
        module.fp8_paged_mqa_logits = lambda *a, **b: (found := score(*a, **b)).as_strided(found.shape, (1, 1))
        vendor_fakes.install(monkeypatch, fakes)
        _, (q, pages, gate, lengths, table, owner) = index_problem(64)
        made = deep_gemm_plan.make(lengths[:1], table, owner[:1], len(pages), 320, 0)
        scores = deep_gemm.paged_scores(q[:1], pages, gate[:1], made, 0)
        assert scores.shape == (1, 320) and scores.stride() == (512, 1)

    def test_windows_past_the_keys_are_cut(monkeypatch):
        """The fake, like the kernel, must not be asked for keys that are not there."""
        vendor_fakes.install(monkeypatch, vendor_fakes.deep_gemm(most_rows=0))
        (q, k, scale, gate), _ = index_problem(64)
        start = torch.tensor([0, 5, 200, 0, 0, 10, 10, 299, 0])
        end = torch.tensor([300, 5, 263, 2**40, 1, 9, 200, 2**33, 150])
        got = vendor_select.ragged(q, k, scale, gate, start, end, 64, 0, 0, 1 << 20)
        assert torch.equal(got, index_select.reference_ragged(q, k, scale, gate, start, end.clamp(max=300), 64))

    def test_rows_that_keep_every_key_are_nobodys_share(monkeypatch):
        """Sizes are at least one key; where no row is longer than k nothing is scored, and queries hold anything."""
        plans, calls = [], []
        vendor_fakes.install(monkeypatch, vendor_fakes.deep_gemm(2048, calls, plans))
        by = {"scores": "deep_gemm", "selection": "triton"}
        _, (q, pages, gate, lengths, table, owner) = index_problem(32)
        made = vendor_select.plan(lengths, pages, table, owner, 100, 1 << 20, **by)
        assert torch.equal(plans[0][:, 0], torch.where(lengths > 100, lengths, 1)) and made.schedules[0].any()
        short = lengths.clamp(max=100)
        made = vendor_select.plan(short, pages, torch.full_like(table, -1), owner, 100, 1 << 20, **by)
        assert (made.sizes == 1).all() and (made.table[:, 0] == 0).all() and not made.schedules[0].any()
        got = vendor_select.paged(q, pages, gate, short, table, owner, 100, 0, 0, 1 << 20, plan=made, **by)
        place = torch.arange(100, dtype=torch.int32)
        assert torch.equal(got, torch.where(place < short.unsqueeze(1), place, -1)) and len(calls) == 1

    def test_nothing_to_plan(monkeypatch, caplog):
        vendor_fakes.install(monkeypatch, vendor_fakes.deep_gemm(2048))
        monkeypatch.setattr(vendor_select, "MANY_ROWS", 13)
        _, pages, _, lengths, table, owner = prefill_problem()
        by = {"scores": "deep_gemm", "selection": "triton"}
        assert vendor_select.plan(lengths, pages, table, owner, 64, 1 << 20, **by) is None, "keys are gathered"
        assert vendor_select.plan(lengths, pages, table, owner, 320, 1 << 20, **by) is None, "no row is longer"
        few = lengths[:9], pages, table, owner[:9]
        assert vendor_select.plan(*few, 64, 2048, **by).group == 1
        deep_gemm_plan.say_too_small.cache_clear()
        for _ in range(2):
            assert vendor_select.plan(*few, 64, 2047, **by) is None, "no row fits: Triton is taken"
        (said,) = caplog.messages
        assert "set SGLANG_DSA_PLUGIN_SCORES_MB to 1 or more" in said and "Triton" in said
        of_triton = {"scores": "triton", "selection": "torch_topk"}
        assert vendor_select.plan(lengths, pages, table, owner, 64, 1 << 20, **of_triton) is None
        assert vendor_select.plan(lengths[:0], pages, table[:0], owner[:0], 64, 1 << 20, **by) is None

    @pytest.mark.parametrize("missing", [0, 1])
    def test_scores_and_gathered_keys_share_the_budget(monkeypatch, gathers, missing):
        """Keys of 132 bytes may take half of it; where they take more, all is Triton's."""
        asked = []
        monkeypatch.setattr(triton_select, "paged", lambda *given: asked.append(given[6:]))
        budget = 2 * 3 * 320 * 132 - missing
        found = vendor_select.paged(*prefill_problem(), 64, 2, 3, budget, scores="deep_gemm", selection="triton")
        if missing:
            assert asked == [(64, 2, 3, budget, False, None)] and not gathers
        else:
            assert found.shape == (40, 64) and not asked and gathers

    @pytest.mark.parametrize(("room", "group"), [(63, 40), (40, 40), (39, 32), (17, 16), (11, 8), (4, 4), (3, 0)])
    def test_groups_occupy_every_processor(gathers, room, group):
        """A processor takes 4 rows of 32 heads, and there are 4 of them; DeepGEMM rounds rows up to 4."""
        q = torch.empty(40, 32, 128)
        assert vendor_select._group(q, 320, 64, 2048, room * 2048) == group
        assert vendor_select._group(q, 320, 64, 2048, room * 2048 + 2047) == group
        assert vendor_select._group(q, 320, 64, 2048, -1) == 0
        assert vendor_select._group(q[:39], 320, 64, 2048, room * 2048) == min(group, 39 if room >= 40 else 32)

    def test_row_bytes_are_those_of_the_scores(monkeypatch):
        vendor_fakes.install(monkeypatch, vendor_fakes.deep_gemm(2048))
        (q, k, scale, gate), _ = index_problem(64)
        first, last = deep_gemm.windows(torch.zeros(9), torch.full((9,), 300), 300)
        for width, row in ((None, deep_gemm.key_row_bytes(300)), (300, deep_gemm.score_row_bytes(300))):
            found = deep_gemm.ragged_scores(q, k, scale, gate, first, last, width)
            assert found.untyped_storage().nbytes() == 12 * row

    def test_ragged_in_groups(monkeypatch, gathers):
        (_, k, scale, _), _ = index_problem(32, count=320)
        q, _, gate, lengths, _, _ = prefill_problem()
        start = torch.arange(40, dtype=torch.int32) % 5
        end = (start + lengths - 4).clamp(max=320)
        offsets = torch.arange(40) * 1000
        arguments = (q, k, scale, gate, start, end, 64, 2, 3)
        row = 4 * 768  # a column a key, room for 256 that are scored together, and a multiple of 256
        got = vendor_select.ragged(*arguments, 17 * row, offsets)
        want = index_select.reference_ragged(*arguments[:7], offsets, 2, 3)
        assert torch.equal(got, want) and gathers == [(16, 320), (16, 320), (8, 320)]
        whole = (q, k, scale, gate, None, lengths, 64, 2, 3)
        assert torch.equal(vendor_select.ragged(*whole, 1 << 20), index_select.reference_ragged(*whole[:7], None, 2, 3))
        monkeypatch.setattr(triton_select, "ragged", lambda *given: given[6:])
        assert vendor_select.ragged(*arguments, 4 * row - 1, offsets) == (64, 2, 3, 4 * row - 1, offsets)

    def test_short_rows_alone_are_never_scored(gathers):
        arguments = prefill_problem()
        (q, pages, gate, lengths, table, owner), k = arguments, 320
        got = vendor_select.paged(*arguments, k, 0, 0, 1 << 20, scores="deep_gemm", selection="triton")
        place = torch.arange(k, dtype=torch.int32)
        assert torch.equal(got, torch.where(place < lengths.unsqueeze(1), place, -1)) and not gathers
        nothing = vendor_select.paged(
            q[:0], pages, gate[:0], lengths[:0], table[:0], owner[:0], 64, 0, 0, 1 << 20,
            scores="deep_gemm", selection="triton",
        )  # fmt: skip
        assert nothing.shape == (0, 64) and not gathers
        by = {"scores": "deep_gemm", "selection": "triton"}
        none = vendor_select.paged(q[:0], pages, gate[:0], lengths[:0], table, owner[:0], 64, 0, 0, 1 << 20, True, **by)
        assert none.shape == (0, 64)
        empty = vendor_select.paged(q, pages[:0], gate, lengths * 0, table, owner, 64, 0, 0, 1 << 20, **by)
        assert (empty == -1).all() and not gathers

    def test_a_budget_below_one_row_is_refused():
        _, arguments = index_problem(32)
        with pytest.raises(ValueError, match=r"at least 2048 .* set SGLANG_DSA_PLUGIN_SCORES_MB to 1 or more"):
            vendor_select.paged(*arguments, 64, 0, 0, 1000, scores="deep_gemm", selection="triton")
