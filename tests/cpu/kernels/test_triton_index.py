"""The indexer's Triton kernels in Triton's interpreter, on small tiles, against the fp64 references.

The interpreter must be chosen before Triton is imported, so the tests run in a process of their own.
"""

import dataclasses
import math
import os

import pytest
import torch

from sglang_dsa_plugin.cache.layouts import FP8
from sglang_dsa_plugin.ops import index_scores, index_select, select
from tests.cpu.kernels import cuda_emulation, interpreted
from tests.cpu.ops import indexer_inputs

if os.environ.get("TRITON_INTERPRET") != "1":

    def test_in_the_interpreter(request):
        interpreted.assert_passes(__file__, *(["--full"] if request.config.getoption("--full") else []))

else:
    from sglang_dsa_plugin.kernels.triton import index_scores as triton_scores
    from sglang_dsa_plugin.kernels.triton import index_scores_row, index_tables, pdl
    from sglang_dsa_plugin.kernels.triton import index_select as triton_select
    from sglang_dsa_plugin.kernels.triton import select as triton_topk

    # Lists of 256 entries and tiles of 128 to 512 scores: every path of the kernels at a few hundred columns.
    WHOLE = index_tables.SelectTiles(1, 2, capacity=256, tile=512, block=64, sample=128, warps=4)
    SPLIT = index_tables.SelectTiles(4, 4, capacity=256, tile=128, block=256, sample=256, warps=4)

    def tiles_for(rows, tiles):
        return dataclasses.replace(tiles, programs=rows * tiles.chunks) if tiles.chunks > 1 else tiles

    def generator(seed=0):
        return torch.Generator().manual_seed(seed)

    def scores_of(kind, rows, width):
        x = torch.randn(rows, width, generator=generator(1))
        if kind == "ties":
            return (2 * x).round()
        if kind == "equal":
            return x * 0
        if kind == "odd":
            x[0, ::2], x[1, : width - 40], x[2], x[3, ::3] = math.nan, math.nan, -math.inf, math.inf
            return x
        if kind == "tiny":
            bits = torch.randint(0, 300, (rows, width), generator=generator(2)).int()
            return (bits | (torch.randint(0, 2, (rows, width), generator=generator(3)).int() << 31)).view(torch.float32)
        return x.sort(dim=1).values if kind == "rising" else x

    @pytest.mark.parametrize("tiles", [WHOLE, SPLIT], ids=["whole", "split"])
    @pytest.mark.parametrize("kind", ["normal", "ties", "equal", "odd", "tiny", "rising"])
    def test_selection(kind, tiles):
        lengths = torch.tensor([700, 699, 513, 257, 256, 64, 65, 0])
        scores = scores_of(kind, len(lengths), 700)
        got = triton_topk.select_rows(scores, lengths, 64, None, 0, 0, tiles=tiles_for(len(lengths), tiles))
        assert torch.equal(got, select.reference(scores, lengths, 64))

    @pytest.mark.parametrize("tiles", [WHOLE, SPLIT], ids=["whole", "split"])
    @pytest.mark.parametrize(("init", "local"), [(5, 9), (100, 40)])
    def test_windows_forced_tokens_slots_and_offsets(init, local, tiles):
        starts, lengths = torch.tensor([100, 7, 3, 800, 0]), torch.tensor([800, 893, 300, 100, 129])
        scores = scores_of("ties", 5, 900)
        table = torch.randint(0, 1000, (2, 15), generator=generator()).int()
        requests, offsets = torch.tensor([0, 1, 0, 1, 1]), torch.arange(5) * 100
        want = select.reference(scores, lengths, 128, starts, init, local)
        args = (scores, lengths.int(), 128, starts.int(), init, local)
        tiles = tiles_for(5, tiles)
        got = triton_topk.select_rows(*args, slots=(table, requests, 64), tiles=tiles)
        assert torch.equal(got, select.reference_slots(want, table, requests))
        assert torch.equal(triton_topk.positions_to_slots(want, table, requests, 64), got)
        beside = torch.full_like(got, 7)
        both = triton_topk.select_rows(*args, slots=(table, requests, 64), slots_out=beside, tiles=tiles)
        assert torch.equal(both, want) and torch.equal(beside, got)
        assert triton_topk.positions_to_slots(want, table, requests, 64, out=beside.fill_(7)) is beside
        assert torch.equal(beside, got)
        got = triton_topk.select_rows(*args, offsets=offsets, tiles=tiles)
        assert torch.equal(got, torch.where(want >= 0, want + offsets.unsqueeze(1), -1).int())

    @pytest.mark.parametrize("tiles", [WHOLE, SPLIT], ids=["whole", "split"])
    def test_windows_outside_the_columns_are_cut(tiles):
        """Also those that begin or end further away than int32 reaches."""
        far = 2**32 + 3
        starts = torch.tensor([-20, 5, 707, -700, -far, far, 0])
        lengths = torch.tensor([700, 700, 30, 1400, 700, 40, far])
        scores = scores_of("normal", len(starts), 700)
        size, first = cuda_emulation.cut(lengths, starts, 700)
        got = triton_topk.select_rows(scores, lengths, 64, starts, 0, 0, tiles=tiles_for(len(starts), tiles))
        assert torch.equal(got, select.reference(scores, size, 64, first))
        size, _ = cuda_emulation.cut(lengths, None, 700)
        got = triton_topk.select_rows(scores, lengths, 64, None, 0, 0, tiles=tiles_for(len(starts), tiles))
        assert torch.equal(got, select.reference(scores, size, 64))

    def assert_scores(got, want):
        assert torch.equal(got.isneginf(), want.isneginf())
        inside = ~want.isneginf()
        assert (got.double() - want)[inside].abs().max() < 1e-5 * want[inside].abs().max()

    # The interpreter multiplies bf16 as integers, so f16 stands for the 16-bit types here.
    @pytest.mark.parametrize("dtype", [FP8, torch.float16, torch.float32])
    @pytest.mark.parametrize("heads", [12, 16, 64])
    def test_ragged_scores(dtype, heads):
        inputs = indexer_inputs.normal(9, heads, 320, dtype)
        start = torch.tensor([0, 0, 0, 0, 0, 0, 0, 10, 200])
        end = torch.tensor([320, 299, 50, 0, 129, 128, 257, 300, 150])
        args = (inputs.q, inputs.k, inputs.k_scale, inputs.gate, start, end)
        assert_scores(triton_scores.ragged(*args, None), index_scores.reference_ragged(*args))

    @pytest.mark.parametrize("dtype", [FP8, torch.float16])
    @pytest.mark.parametrize("heads", [16, 64])
    @pytest.mark.parametrize(
        ("requests", "lengths"),
        [
            ([2, 0, 1], [300, 0, 65]),
            ([0, 0, 1, 1, 2, 2], [100, 101, 319, 320, 64, 0]),
            ([0, 1, 1, 1, 2, 2], [100, 101, 319, 320, 64, 0]),
            ([0] * 9 + [1] * 8, [*range(200, 209), *range(290, 298)]),
        ],
    )
    def test_paged_scores(dtype, heads, requests, lengths):
        inputs = indexer_inputs.normal(len(requests), heads, 768, dtype)
        table = torch.stack([torch.randperm(12, generator=generator(b))[:5] for b in range(3)]).int()
        rest = (torch.tensor(lengths).int(), table, torch.tensor(requests))
        want = index_scores.reference_paged(inputs.q, inputs.pages, inputs.gate, *rest)
        assert_scores(triton_scores.paged(inputs.q, inputs.pages, inputs.gate, *rest, None), want)

    @pytest.mark.parametrize("dtype", [FP8, torch.float16])
    @pytest.mark.parametrize("programs", [1, 2, 8])
    @pytest.mark.parametrize("length", [0, 1, 128, 300])
    def test_a_single_row_has_the_scores_that_it_has_among_others(length, programs, dtype, monkeypatch):
        inputs = indexer_inputs.normal(2, 16, 768, dtype)
        table = torch.randperm(12, generator=generator())[:5].int().expand(2, 5)
        lengths, owner = torch.full((2,), length), torch.arange(2)
        both = triton_scores.paged(inputs.q, inputs.pages, inputs.gate, lengths, table, owner, None)
        tiles = index_tables.stream_tiles
        fewer = lambda *shape: dataclasses.replace(tiles(*shape), programs=programs)  # noqa: E731
        monkeypatch.setattr(index_tables, "stream_tiles", fewer)
        for r in range(2):
            part = slice(r, r + 1)
            alone = (inputs.q[part], inputs.pages, inputs.gate[part], lengths[part], table[part], owner[:1])
            assert torch.equal(triton_scores.paged(*alone, None), both[part])

    @pytest.mark.parametrize("dtype", [FP8, torch.float16, torch.float32])
    @pytest.mark.parametrize(("programs", "length"), [(1, 5000), (2, 4999)])
    def test_a_single_row_of_more_pages_than_a_program_holds_entries_of(programs, length, dtype, monkeypatch):
        """Also where a program's tiles begin inside a page, which those of f32 keys, of half a page, may."""
        assert length > programs * 64 * index_scores_row.ENTRIES.value
        inputs = indexer_inputs.normal(1, 16, 5120, dtype)
        rest = (torch.tensor([length]), torch.randperm(80, generator=generator()).int().view(1, 80), torch.tensor([0]))
        tiles = index_tables.stream_tiles
        fewer = lambda *shape: dataclasses.replace(tiles(*shape), programs=programs)  # noqa: E731
        monkeypatch.setattr(index_tables, "stream_tiles", fewer)
        want = index_scores.reference_paged(inputs.q, inputs.pages, inputs.gate, *rest)
        assert_scores(triton_scores.paged(inputs.q, inputs.pages, inputs.gate, *rest, None), want)

    @pytest.mark.parametrize("programs", [1, 8])
    @pytest.mark.parametrize(
        ("seen", "request_seen", "page_seen", "brings"),
        [(0, 0, 3, ""), (64, 1, 99, "table"), (70, 1, 99, ""), (400, 0, 3, "keys"), (400, 2, 3, ""), (400, -1, -7, "")],
    )
    @pytest.mark.parametrize("length", [0, 64, 300])
    def test_what_a_row_seems_to_be_ahead_of_the_wait_decides_nothing(
        length, seen, request_seen, page_seen, brings, programs, monkeypatch
    ):
        """Length, request and page table come when others had been read, and nothing outside the tensors is fetched."""
        inputs = indexer_inputs.normal(1, 16, 768, torch.float16)
        table = torch.randperm(12, generator=generator())[:10].int().view(2, 5)
        right = (torch.tensor([length]), table, torch.tensor([1]))
        early = (torch.tensor([seen]), torch.full_like(table, page_seen), torch.tensor([request_seen]))
        given = tuple(tensor.clone() for tensor in right)
        want = triton_scores.new_scores(1, 320, table.device).fill_(7)
        triton_scores.score_paged(want, inputs.q, inputs.pages, inputs.gate, *given, skip=64)
        fetched, let_in, look_ahead = [], [], index_scores_row.look_ahead

        def put(values):
            for mine, value in zip(given, values):
                mine.copy_(value)

        def look(*arguments):
            put(early)
            let_in.append(0)
            return look_ahead(*arguments)

        def fetch(at, size=32):
            fetched.extend((int(one), int(one) + int(getattr(size, "value", size))) for one in at.handle.data if one)

        def let_next_start(_used):
            let_in[-1] += 1

        monkeypatch.setattr(index_scores_row, "look_ahead", look)
        monkeypatch.setattr(index_scores_row, "wait_for_earlier", lambda _used: put(right))
        monkeypatch.setattr(index_scores_row, "let_next_start", let_next_start)
        monkeypatch.setattr(index_scores_row, "prefetch", fetch)
        monkeypatch.setattr(index_scores_row, "prefetch_whole", fetch)
        monkeypatch.setattr(pdl, "arguments", lambda gpu: {"PDL": True})
        tiles = index_tables.stream_tiles
        monkeypatch.setattr(
            index_tables, "stream_tiles", lambda *shape: dataclasses.replace(tiles(*shape), programs=programs)
        )
        got = triton_scores.new_scores(1, 320, table.device).fill_(7)
        triton_scores.score_paged(got, inputs.q, inputs.pages, inputs.gate, *given, skip=64)
        assert torch.equal(got, want)
        assert len(let_in) == programs and min(let_in) >= 1
        # Keys of whole pages; of the table lines of 32 bytes, the last of which may end past it.
        table_end = given[1].data_ptr() + 4 * table.numel()
        of_table = [first for first, _ in fetched if given[1].data_ptr() <= first < table_end]
        pages_end = inputs.pages.data_ptr() + 2 * inputs.pages.numel()
        of_keys = [first for first, end in fetched if inputs.pages.data_ptr() <= first and end <= pages_end]
        assert len(of_table) + len(of_keys) == len(fetched)
        # One program has more than one tile of a long row; then it is the table that is fetched.
        brings = "table" if brings == "keys" and programs == 1 else brings
        assert (bool(of_table), bool(of_keys)) == (brings == "table", brings == "keys")

    def test_nan_of_e4m3_in_a_key_and_in_a_query():
        inputs = indexer_inputs.normal(3, 16, 64, FP8)
        inputs.q[1, 3, 5] = inputs.k[9, 100] = math.nan
        got = triton_scores.ragged(
            inputs.q, inputs.k, inputs.k_scale, inputs.gate, torch.zeros(3).int(), torch.full((3,), 64), None
        )
        want = torch.zeros(3, 64, dtype=torch.bool)
        want[1], want[:, 9] = True, True
        assert torch.equal(got.isnan(), want)

    @pytest.mark.parametrize("tiles", [WHOLE, SPLIT], ids=["whole", "split"])
    @pytest.mark.parametrize("budget", [1 << 20, 4 * 512 * 2, 4 * (2 * 64 + 128)])
    @pytest.mark.parametrize(("init", "local"), [(3, 5)])
    def test_index_select_in_any_budget(budget, init, local, tiles, monkeypatch):
        monkeypatch.setattr(index_tables, "select_tiles", lambda _gpu, rows, *_: tiles_for(rows, tiles))
        inputs = indexer_inputs.exact(4, 16, 512, FP8)
        table = torch.stack([torch.randperm(8, generator=generator(b)) for b in range(2)]).int()
        lengths, requests = torch.tensor([512, 300, 64, 65]), torch.tensor([0, 0, 1, 1])
        args = (inputs.q, inputs.pages, inputs.gate, lengths, table, requests)
        got = triton_select.paged(*args, 64, init, local, budget, True)
        assert torch.equal(got, index_select.reference_paged(*args, 64, True, init, local))
        beside = torch.full_like(got, 7)
        both = triton_select.paged(*args, 64, init, local, budget, slots_out=beside)
        assert torch.equal(both, index_select.reference_paged(*args, 64, False, init, local))
        assert torch.equal(beside, got)
        start, offsets = torch.tensor([0, 100, 200, 7]), torch.arange(4) * 1000
        end = torch.tensor([512, 500, 264, 72])
        args = (inputs.q, inputs.k, inputs.k_scale, inputs.gate, start, end)
        got = triton_select.ragged(*args, 64, init, local, budget, offsets)
        assert torch.equal(got, index_select.reference_ragged(*args, 64, offsets, init, local))

    def test_rows_that_all_fit_are_not_scored(monkeypatch):
        monkeypatch.setattr(triton_scores, "score_paged", None)
        inputs = indexer_inputs.exact(3, 16, 128, FP8)
        table, lengths = torch.tensor([[1, 0]]).int(), torch.tensor([128, 5, 0])
        requests = torch.zeros(3, dtype=torch.int32)
        got = triton_select.paged(inputs.q, inputs.pages, inputs.gate, lengths, table, requests, 128, 0, 0, 1 << 20)
        columns = torch.arange(128)
        want = torch.where(columns < lengths.unsqueeze(1), columns, -1).int()
        assert torch.equal(got, want)
        beside = torch.full_like(got, 7)
        args = (inputs.q, inputs.pages, inputs.gate, lengths, table, requests, 128, 0, 0, 1 << 20)
        assert torch.equal(triton_select.paged(*args, slots_out=beside), want)
        assert torch.equal(beside, select.reference_slots(want, table, requests))

    @pytest.mark.parametrize(
        ("dtype", "requests", "width"),
        [
            (FP8, [0, 1, 1, 0], 8),
            (torch.float16, [0, 0, 1, 1], 8),
            (FP8, [0] * 6 + [1] * 6, 8),
            pytest.param(torch.float16, [0, 1, 1, 0], 8, marks=pytest.mark.full),
            pytest.param(FP8, [0, 0, 1, 1], 8, marks=pytest.mark.full),
            pytest.param(torch.float16, [0] * 6 + [1] * 6, 8, marks=pytest.mark.full),
        ],
    )
    def test_query_and_gate_of_a_row_that_keeps_everything_may_be_anything(dtype, requests, width):
        rows = len(requests)
        inputs = indexer_inputs.exact(rows, 16, 512, dtype)
        table = torch.stack([torch.randperm(width, generator=generator(b)) for b in range(2)]).int()
        lengths = torch.randint(65, 512, (rows,), generator=generator(5))
        lengths[::2] = torch.randint(0, 65, (len(lengths[::2]),), generator=generator(6))
        rest = (lengths, table, torch.tensor(requests), 64)
        want = index_select.reference_paged(inputs.q, inputs.pages, inputs.gate, *rest)
        inputs.q[::2], inputs.gate[::2] = math.nan, math.nan
        for budget in (1 << 20, 4 * (2 * 64 + 128)):
            got = triton_select.paged(inputs.q, inputs.pages, inputs.gate, *rest, 0, 0, budget)
            assert torch.equal(got, want)
