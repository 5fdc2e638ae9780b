"""Scores and top-k by other packages behind the operator contract, on a CUDA device against fp64.

What a GPU cannot run is skipped with the support table's reason. Tried here of the known faults: U15, U17, U36, U43,
U67, U68.
"""

import math

import pytest
import torch

from sglang_dsa_plugin import support
from sglang_dsa_plugin.cache.layouts import FP8
from sglang_dsa_plugin.ops import index_scores, index_select, select
from tests.cpu.ops import indexer_inputs

pytestmark = pytest.mark.gpu
SELECTIONS = ("sgl_kernel", "flashinfer", "torch_topk")
COMPOSED = ("deep_gemm", *SELECTIONS, *(f"deep_gemm_{name}" for name in SELECTIONS))


def skip_unless_here(operator, impl, **features):
    try:
        support.choose(operator, device="cuda", impl=impl, **features)
    except ValueError as why:
        pytest.skip(str(why))


def paged_problem(rows, heads, keys, kind, requests=3, seed=0):
    """(inputs on the CPU, arguments of paged on the GPU): every request has its own order of the same pages."""
    made = kind(rows, heads, keys, FP8, seed)
    g = torch.Generator().manual_seed(seed)
    table = torch.stack([torch.randperm(keys // 64, generator=g) for _ in range(requests)]).int()
    lengths = torch.randint(0, keys + 1, (rows,), generator=g, dtype=torch.int32)
    lengths[0] = keys
    if rows > 2:
        lengths[1], lengths[2] = 0, 1
    owner = torch.randint(0, requests, (rows,), generator=g, dtype=torch.int32)
    arguments = (made.q, made.pages, made.gate, lengths, table, owner)
    return made, arguments, [t.cuda() for t in arguments]


@pytest.mark.parametrize("heads", [8, 16, 32, 48, 64])
@pytest.mark.parametrize("rows", [1, 9, 33])
def test_deep_gemm_paged(heads, rows):
    skip_unless_here("index_scores_paged", "deep_gemm", heads=heads)
    _, arguments, gpu = paged_problem(rows, heads, 1024, indexer_inputs.exact)
    for width in (None, 100, 1024, 1100):
        want = index_scores.reference_paged(*arguments, width).float()
        got = index_scores.paged(*gpu, width, impl="deep_gemm").cpu()
        assert torch.equal(got, want)


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
    want = index_scores.reference_paged(*arguments)
    got = index_scores.paged(*gpu, impl="deep_gemm").cpu().double()
    inside = want > -math.inf
    keys = (arguments[4][0].long().unsqueeze(1) * 64 + torch.arange(64)).flatten()
    error = (got - want)[inside].abs()
    assert torch.equal(got == -math.inf, ~inside)
    assert (error <= 2**-10 * made.term_size(keys)[inside]).all()


@pytest.mark.parametrize("rows", [32, 33, 64, 500])
def test_deep_gemm_with_empty_rows_alone(rows):
    """U67; padding rows may name any page."""
    skip_unless_here("index_scores_paged", "deep_gemm", heads=64)
    _, _, (q, pages, gate, lengths, table, owner) = paged_problem(rows, 64, 256, indexer_inputs.exact)
    none = torch.zeros_like(lengths)
    got = index_scores.paged(q, pages, gate, none, torch.full_like(table, -1), owner, 256, impl="deep_gemm")
    assert (got == -math.inf).all()


@pytest.mark.parametrize("rows", [1024, 4096, 8192, 16384])
def test_deep_gemm_with_many_rows_as_ours(rows):
    """U68: its schedule must not outgrow shared memory."""
    skip_unless_here("index_scores_paged", "deep_gemm", heads=64)
    _, _, gpu = paged_problem(rows, 64, 512, indexer_inputs.exact)
    assert torch.equal(index_scores.paged(*gpu, 512, impl="deep_gemm"), index_scores.paged(*gpu, 512, impl="triton"))


def test_deep_gemm_gives_the_same_twenty_times():
    """U43."""
    skip_unless_here("index_scores_paged", "deep_gemm", heads=64)
    _, _, gpu = paged_problem(64, 64, 16384, indexer_inputs.normal)
    first = index_scores.paged(*gpu, 16384, impl="deep_gemm")
    for _ in range(20):
        assert torch.equal(index_scores.paged(*gpu, 16384, impl="deep_gemm"), first)


@pytest.mark.parametrize("slots", [False, True])
@pytest.mark.parametrize("budget", [None, 4 * (2 * 2048 + 64) * 4])
def test_deep_gemm_scores_with_our_selection(slots, budget):
    skip_unless_here("index_select_paged", "deep_gemm", heads=64, k=2048, dtype=FP8)
    _, arguments, gpu = paged_problem(9, 64, 4096, indexer_inputs.exact)
    options = {"slots": slots, "init_tokens": 4, "local_tokens": 64}
    want = index_select.reference_paged(*arguments, 2048, **options)
    got = index_select.paged(*gpu, 2048, **options, budget_bytes=budget, impl="deep_gemm")
    assert torch.equal(got.cpu(), want)


# Selection

K_OF = [("sgl_kernel", 2048), ("flashinfer", 64), ("flashinfer", 2048), ("torch_topk", 64), ("torch_topk", 4096)]


@pytest.mark.parametrize("width", [1500, 5000, 70001])
@pytest.mark.parametrize(("impl", "k"), K_OF)
def test_selection_without_ties(impl, k, width):
    skip_unless_here("topk", impl, k=k)
    rows = 13
    g = torch.Generator("cuda").manual_seed(width)
    scores = torch.stack([torch.randperm(width, generator=g, device="cuda") for _ in range(rows)]).float() - width // 2
    lengths = torch.randint(0, width + 1, (rows,), generator=g, device="cuda").int()
    lengths[0], lengths[1], lengths[2] = width, 0, min(k, width)
    starts = ((width - lengths) // 2).int()
    for begin in (None, starts):
        for forced in ((0, 0), (4, 64)):
            want = select.topk(scores, lengths, k, begin, *forced, impl="triton" if begin is None else "torch")
            assert torch.equal(select.topk(scores, lengths, k, begin, *forced, impl=impl), want)


@pytest.mark.parametrize(("impl", "k"), K_OF)
@pytest.mark.parametrize("kind", ["few values", "zeros", "winners", "equal", "minus infinity"])
def test_selection_with_ties_is_a_right_one(impl, k, kind):
    """U15: distinct positions of the window, ascending, as many as there should be, and their scores are the best."""
    skip_unless_here("topk", impl, k=k)
    rows, width = 9, 8320
    scores = torch.zeros(rows, width, device="cuda")
    g = torch.Generator("cuda").manual_seed(3)
    if kind == "few values":
        scores = torch.randint(0, 5, (rows, width), generator=g, device="cuda").float() - 2
    elif kind == "winners":
        scores[:, torch.randperm(width, generator=g, device="cuda")[:100]] = 1.0
    elif kind == "equal":
        scores += 3.25
    elif kind == "minus infinity":
        scores -= math.inf
    lengths = torch.randint(0, width + 1, (rows,), generator=g, device="cuda").int()
    lengths[0], lengths[1] = width, k + 1
    got, want = (select.topk(scores, lengths, k, impl=name) for name in (impl, "triton"))
    count = lengths.clamp(max=k)
    assert torch.equal((got >= 0).sum(1), count)
    for r in range(rows):
        mine, right = got[r, : count[r]].long(), want[r, : count[r]].long()
        assert (mine.diff() > 0).all() and (mine < lengths[r]).all() and (got[r, count[r] :] == -1).all()
        assert torch.equal(scores[r, mine].sort().values, scores[r, right].sort().values)


@pytest.mark.parametrize("impl", SELECTIONS)
def test_slots_and_offsets(impl):
    k = 2048
    skip_unless_here("topk_slots", impl, k=k)
    scores = torch.rand(5, 6400, generator=torch.Generator("cuda").manual_seed(1), device="cuda")
    lengths = torch.tensor([6400, 0, 100, 2048, 2049], device="cuda").int()
    table = torch.randperm(300)[:200].view(2, 100).int().cuda()
    owner = torch.tensor([0, 1, 1, 0, 1], device="cuda").int()
    picks = select.topk(scores, lengths, k, impl=impl)
    slots = select.topk_slots(scores, lengths, k, table, owner, impl=impl)
    assert torch.equal(slots, select.positions_to_slots(picks, table, owner, impl="torch"))
    offsets = torch.arange(5, device="cuda").int() * 1000
    moved = select.topk_ragged(scores, lengths, k, offsets, impl=impl)
    assert torch.equal(moved, torch.where(picks >= 0, picks + offsets.unsqueeze(1), -1))


@pytest.mark.parametrize("rows", [1, 64])
@pytest.mark.parametrize("impl", COMPOSED)
def test_picks_in_a_cuda_graph_as_eagerly(impl, rows):
    skip_unless_here("index_select_paged", impl, heads=64, k=2048, dtype=FP8)
    _, _, (q, pages, gate, lengths, table, owner) = paged_problem(rows, 64, 8192, indexer_inputs.normal)

    def step():
        return index_select.paged(q, pages, gate, lengths, table, owner, 2048, impl=impl)

    for _ in range(2):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = step()
    for trial in range(3):
        _, _, other = paged_problem(rows, 64, 8192, indexer_inputs.normal, seed=trial + 1)
        for old, new in zip((q, gate, lengths, owner), (other[0], other[2], other[3], other[5])):
            old.copy_(new)
        graph.replay()
        eager = step()
        count = lengths.clamp(max=2048)
        assert torch.equal((replayed >= 0).sum(1), count) and torch.equal((eager >= 0).sum(1), count)
        for a, b in zip(replayed.tolist(), eager.tolist()):
            both = set(a) & set(b)
            # Only scores that are equal at the edge may be picked differently.
            assert len(both) >= 0.99 * len(set(b))
