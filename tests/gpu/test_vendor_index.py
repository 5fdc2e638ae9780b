"""Scores and top-k by other packages behind the operator contract, on a CUDA device against fp64.

What a GPU cannot run is skipped with the support table's reason. FlashInfer's selection has a
file of its own.
"""

import math

import pytest
import torch

from sglang_dsa_plugin.cache.layouts import FP8
from sglang_dsa_plugin.kernels.vendor import deep_gemm, deep_gemm_load, deep_gemm_plan
from sglang_dsa_plugin.ops import index_scores, index_select, select
from sglang_dsa_plugin.tools.bench_timing import peak_of
from tests.cpu.ops import indexer_inputs
from tests.gpu import selection_checks
from tests.gpu.selection_checks import paged_problem, scores_of, skip_unless_here

pytestmark = pytest.mark.gpu
SELECTIONS = ("sgl_kernel", "torch_topk")
COMPOSED = ("deep_gemm", *SELECTIONS, *(f"deep_gemm_{name}" for name in SELECTIONS))


@pytest.mark.parametrize("heads", [8, 16, 32, 48, 64])
@pytest.mark.parametrize("rows", [1, 9, 33])
def test_deep_gemm_paged(heads, rows):
    skip_unless_here("index_scores_paged", "deep_gemm", heads=heads)
    made, arguments, gpu = paged_problem(rows, heads, 1024, indexer_inputs.exact)
    want = scores_of(made, arguments, 1100).float()
    for width in (None, 100, 1024, 1100):
        got = index_scores.paged(*gpu, width, impl="deep_gemm").cpu()
        assert torch.equal(got, want[:, : width or 1024])


@pytest.mark.parametrize("heads", [16, 32, 64])
def test_deep_gemm_ragged(heads):
    skip_unless_here("index_scores_ragged", "deep_gemm", heads=heads)
    made = indexer_inputs.exact(70, heads, 1216, FP8)
    g = torch.Generator().manual_seed(1)
    start = torch.randint(0, 1217, (70,), generator=g, dtype=torch.int32)
    end = torch.minimum(start + torch.randint(0, 900, (70,), generator=g, dtype=torch.int32), torch.tensor(1216).int())
    end[3], start[4], end[5] = start[3], 1216, 0
    gpu = [t.cuda() for t in (made.q, made.k, made.k_scale, made.gate, start, end)]
    for width in (None, 64, 1300):
        want = index_scores.reference_ragged(made.q, made.k, made.k_scale, made.gate, start, end, width).float()
        assert torch.equal(index_scores.ragged(*gpu, width, impl="deep_gemm").cpu(), want)


def test_deep_gemm_on_gaussian_inputs():
    """Within what fp8 matrix units round: they add products with about 13 bits."""
    skip_unless_here("index_scores_paged", "deep_gemm", heads=64)
    made, arguments, gpu = paged_problem(40, 64, 2048, indexer_inputs.normal, requests=1)
    want = scores_of(made, arguments, 2048)
    got = index_scores.paged(*gpu, impl="deep_gemm").cpu().double()
    inside = want > -math.inf
    keys = (arguments[4][0].long().unsqueeze(1) * 64 + torch.arange(64)).flatten()
    error = (got - want)[inside].abs()
    assert torch.equal(got == -math.inf, ~inside)
    assert (error <= 2**-10 * made.term_size(keys)[inside]).all()


@pytest.mark.parametrize("rows", [32, 33, 64, 500])
def test_deep_gemm_with_empty_rows_alone(rows):
    """Padding rows may name any page."""
    skip_unless_here("index_scores_paged", "deep_gemm", heads=64)
    _, _, (q, pages, gate, lengths, table, owner) = paged_problem(rows, 64, 256, indexer_inputs.exact)
    none = torch.zeros_like(lengths)
    got = index_scores.paged(q, pages, gate, none, torch.full_like(table, -1), owner, 256, impl="deep_gemm")
    assert (got == -math.inf).all()


@pytest.mark.parametrize("rows", [1024, 4096, 8192, 16384])
def test_deep_gemm_with_many_rows_as_ours(rows):
    """Its schedule must not outgrow shared memory."""
    skip_unless_here("index_scores_paged", "deep_gemm", heads=64)
    _, _, gpu = paged_problem(rows, 64, 512, indexer_inputs.exact)
    assert torch.equal(index_scores.paged(*gpu, 512, impl="deep_gemm"), index_scores.paged(*gpu, 512, impl="triton"))


def test_deep_gemm_gives_the_same_twenty_times():
    skip_unless_here("index_scores_paged", "deep_gemm", heads=64)
    _, _, gpu = paged_problem(64, 64, 16384, indexer_inputs.normal)
    first = index_scores.paged(*gpu, 16384, impl="deep_gemm")
    for _ in range(20):
        assert torch.equal(index_scores.paged(*gpu, 16384, impl="deep_gemm"), first)


@pytest.mark.parametrize("slots", [False, True])
@pytest.mark.parametrize("budget", [None, 4 * (2 * 2048 + 64) * 4])
def test_deep_gemm_scores_with_our_selection(slots, budget):
    skip_unless_here("index_select_paged", "deep_gemm", heads=64, k=2048, dtype=FP8)
    made, arguments, gpu = paged_problem(9, 64, 4096, indexer_inputs.exact)
    options = {"slots": slots, "init_tokens": 4, "local_tokens": 64}
    lengths, table, owner = arguments[3:]
    want = select.reference(scores_of(made, arguments, 4096), lengths, 2048, None, 4, 64)
    want = select.reference_slots(want, table, owner) if slots else want
    got = index_select.paged(*gpu, 2048, **options, budget_bytes=budget, impl="deep_gemm")
    assert torch.equal(got.cpu(), want)


def prefill_problem(rows, heads, keys, requests, kind=indexer_inputs.exact, seed=0):
    """As paged_problem, with rows of a request together and requests that are short but for the first; the page table
    past a request's end holds anything, and so do queries and gates of rows not longer than 256.
    """
    made, (q, pages, gate, _, table, _), _ = paged_problem(rows, heads, keys, kind, requests, seed)
    owner = torch.arange(rows, dtype=torch.int32) * requests // rows
    most = torch.tensor([keys, *(keys // 3 + 77 * i for i in range(1, requests))]).clamp(max=keys)
    back = torch.arange(rows - 1, -1, -1) % -(-rows // requests)
    lengths = (most[owner.long()] - back).clamp(min=0).int()
    lengths[5], lengths[6], lengths[-1] = 0, 1, 256
    table[torch.arange(keys // 64) >= -(-most // 64).unsqueeze(1)] = -1
    gpu = [t.cuda() for t in (q, pages, gate, lengths, table, owner)]
    gpu[2][gpu[3] <= 256] = math.nan
    return made, (q, pages, gate, lengths, table.clamp(min=0), owner), gpu


@pytest.mark.parametrize("heads", [16, 32, 64])
@pytest.mark.parametrize("forced", [(0, 0), (4, 64)])
@pytest.mark.parametrize("budget_rows", [None, 300, 17])
def test_prefill_from_gathered_keys(heads, forced, budget_rows):
    """Against fp64, in one group of rows and in several, as positions, as slots and as both."""
    skip_unless_here("index_select_paged", "deep_gemm", heads=heads, k=256, dtype=FP8)
    made, arguments, gpu = prefill_problem(800, heads, 1024, 3)
    lengths, table, owner = arguments[3:]
    want = select.reference(scores_of(made, arguments, 1024), lengths, 256, None, *forced).cuda()
    slots = select.reference_slots(want.cpu(), table, owner).cuda()
    keys = 3 * 1024 * 132
    budget = None if budget_rows is None else max(2 * keys, keys + 4096 * budget_rows)
    options = {"init_tokens": forced[0], "local_tokens": forced[1], "budget_bytes": budget, "impl": "deep_gemm"}
    beside = torch.empty(800, 256, dtype=torch.int32, device="cuda")
    assert torch.equal(index_select.paged(*gpu, 256, **options), want)
    assert torch.equal(index_select.paged(*gpu, 256, slots=True, **options), slots)
    assert torch.equal(index_select.paged(*gpu, 256, slots_out=beside, **options), want) and torch.equal(beside, slots)


@pytest.mark.parametrize(("rows", "keys", "requests"), [(4096, 32768, 1), (4000, 50048, 8), (2100, 131072, 2)])
def test_long_prefill_as_ours_within_the_budget(rows, keys, requests):
    """Scores that are exact, so that both pick the same; the memory that is added is the budget and the result."""
    skip_unless_here("index_select_paged", "deep_gemm", heads=64, k=2048, dtype=FP8)
    _, _, gpu = prefill_problem(rows, 64, keys, requests)
    want = index_select.paged(*gpu, 2048, impl="triton")
    index_select.paged(*gpu, 2048, impl="deep_gemm")
    budget = 256 << 20
    got, more = peak_of(lambda: index_select.paged(*gpu, 2048, budget_bytes=budget, impl="deep_gemm"))
    assert torch.equal(got, want)
    assert more <= budget + got.nbytes + (4 << 20), f"{more >> 20} MiB"


@pytest.mark.parametrize("rows", [1, 5, 64, 130])
def test_memory_of_scores_is_what_is_counted(rows):
    """Of every form. DeepGEMM rounds columns up to 1024 bytes, and rows of keys in one piece to as many as a processor
    takes, which the count rounds to four.
    """
    skip_unless_here("index_select_paged", "deep_gemm", heads=64, k=64, dtype=FP8)
    made, _, (q, pages, gate, lengths, table, owner) = paged_problem(rows, 64, 1984, indexer_inputs.exact)
    k, scale = made.k.cuda()[:1900], made.k_scale.cuda()[:1900]
    window = deep_gemm.windows(torch.zeros_like(lengths), lengths.clamp(max=1900), 1900)
    whole = -(-rows // deep_gemm.ROW_ALIGN) * deep_gemm.ROW_ALIGN
    for width, row_bytes in ((None, deep_gemm.key_row_bytes(1900)), (1900, deep_gemm.score_row_bytes(1900))):
        found = deep_gemm.ragged_scores(q, k, scale, gate, *window, width)
        made_rows, rest = divmod(found.untyped_storage().nbytes(), row_bytes)
        assert found.shape == (rows, 1900) and rest == 0 and rows <= made_rows <= whole
    plan = deep_gemm_plan.make(lengths, table, owner, len(pages), 1984, 0)
    found = deep_gemm.paged_scores(q, pages, gate, plan, 0)
    assert found.shape == (rows, 1984) and found.untyped_storage().nbytes() == rows * deep_gemm.page_row_bytes(1984)
    assert 4 * found.stride(0) == deep_gemm.page_row_bytes(1984)


@pytest.mark.parametrize("rows", [1, 2, 16, 64, 257])
@pytest.mark.parametrize("per_request", [1, 3])
def test_a_plan_in_a_cuda_graph_follows_its_rows(rows, per_request):
    """Made and used by two layers in one graph, whose batch then grows, shrinks, pads and loses its long rows. Scores
    are exact, so that picks are ours bit for bit.
    """
    skip_unless_here("index_select_paged", "deep_gemm", heads=64, k=256, dtype=FP8)
    _, _, (q, pages, gate, lengths, _, _) = paged_problem(rows, 64, 4096, indexer_inputs.exact)
    requests = -(-rows // per_request)
    g = torch.Generator().manual_seed(rows)
    table = torch.stack([torch.randperm(len(pages), generator=g)[:64] for _ in range(requests)]).int().cuda()
    owner = (torch.arange(rows, device="cuda") // per_request).int()
    layers = (pages, pages.flip(0).contiguous())
    slots = torch.empty(2, rows, 256, dtype=torch.int32, device="cuda")

    def step(impl, out):
        plan = index_select.plan(pages, lengths, table, owner, 256, 64, impl=impl)
        assert (plan is None) == (impl == "triton")
        for layer, beside in zip(layers, out):
            index_select.paged(
                q, layer, gate, lengths, table, owner, 256, local_tokens=3, slots_out=beside, plan=plan, impl=impl
            )

    for _ in range(2):
        step("deep_gemm", slots)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step("deep_gemm", slots)
    everything = torch.full_like(lengths, 4096)
    mixed = torch.randint(0, 4097, (rows,), generator=g).int().cuda()
    padded = mixed * (torch.arange(rows, device="cuda") < -(-rows // 2))
    one = torch.zeros_like(lengths)
    one[-1] = 4095
    for given in (everything, mixed, padded, mixed % 257, one, torch.zeros_like(lengths), lengths.clone(), everything):
        lengths.copy_(given)
        graph.replay()
        want = torch.empty_like(slots)
        step("triton", want)
        assert torch.equal(slots, want)


def test_prefill_is_by_deep_gemm_unasked():
    """Where it was measured faster; the other operators of the same scores as well."""
    skip_unless_here("index_select_paged", "deep_gemm", heads=64, k=2048, dtype=FP8)
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("measured on SM 9.0 only")
    made, _, gpu = prefill_problem(600, 64, 4096, 1, indexer_inputs.normal)
    by_name = index_select.paged(*gpu, 2048, impl="deep_gemm")
    assert torch.equal(index_select.paged(*gpu, 2048), by_name)
    k, scale = made.k.cuda(), made.k_scale.cuda()
    end = torch.arange(4096 - 600, 4096, device="cuda").int()
    start, offsets = torch.zeros_like(end), torch.arange(600, device="cuda")
    arguments = (gpu[0], k, scale, gpu[2].nan_to_num(), start, end, 2048, offsets)
    by_name = index_select.ragged(*arguments, impl="deep_gemm")
    assert torch.equal(index_select.ragged(*arguments), by_name)
    ours = index_select.ragged(*arguments, impl="triton")
    common = [len(set(a) & set(b)) / 2048 for a, b in zip(by_name.tolist(), ours.tolist())]
    assert min(common) > 0.99  # scores are rounded differently: a few of the last picks may change places


# Selection

K_OF = [("sgl_kernel", 2048), ("torch_topk", 64), ("torch_topk", 4096)]


@pytest.mark.parametrize("width", selection_checks.WIDTHS)
@pytest.mark.parametrize(("impl", "k"), K_OF)
def test_selection_without_ties(impl, k, width):
    selection_checks.without_ties(impl, k, width)


@pytest.mark.parametrize(("impl", "k"), K_OF)
@pytest.mark.parametrize("kind", selection_checks.TIES)
def test_selection_with_ties_is_a_right_one(impl, k, kind):
    selection_checks.with_ties(impl, k, kind)


@pytest.mark.parametrize("impl", SELECTIONS)
def test_slots_and_offsets(impl):
    selection_checks.slots_and_offsets(impl)


@pytest.mark.parametrize("rows", [1, 64])
@pytest.mark.parametrize("impl", COMPOSED)
def test_picks_in_a_cuda_graph_as_eagerly(impl, rows):
    selection_checks.in_a_graph(impl, rows)


@pytest.mark.parametrize("rows", [20, 300, 513])
def test_an_eager_step_takes_loaded_schedules_only(monkeypatch, rows):
    """And picks what Triton picks, in calls of up to 256 rows."""
    skip_unless_here("index_select_paged", "deep_gemm", heads=64, k=256, dtype=FP8)
    import deep_gemm as package

    _, _, (q, pages, gate, lengths, table, owner) = paged_problem(rows, 64, 4096, indexer_inputs.exact)
    sizes, made = [], package.get_paged_mqa_logits_metadata
    monkeypatch.setattr(
        package, "get_paged_mqa_logits_metadata", lambda n, *rest: sizes.append(len(n)) or made(n, *rest)
    )
    by = {"scores": "deep_gemm", "selection": "triton"}
    deep_gemm_load.load(pages, 64, 256, rows, **by)
    loaded = {-(-size // 32) for size in sizes}
    sizes.clear()
    plan = index_select.plan(pages, lengths, table, owner, 256, 64, eager=True, impl="deep_gemm")
    found = index_select.paged(q, pages, gate, lengths, table, owner, 256, plan=plan, impl="deep_gemm")
    assert torch.equal(found, index_select.paged(q, pages, gate, lengths, table, owner, 256, impl="triton"))
    assert {-(-size // 32) for size in sizes} <= loaded and max(sizes) <= 256 and sum(sizes) == rows
