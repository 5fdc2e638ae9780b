"""What a selection is held to on a CUDA device: ours in test_index_triton.py and test_cuda_select.py, those of other
packages in test_vendor_index.py and in test_flashinfer_topk.py, a file of its own because FlashInfer builds a module
for minutes first.
"""

import math

import pytest
import torch

from sglang_dsa_plugin import support
from sglang_dsa_plugin.cache.layouts import FP8
from sglang_dsa_plugin.ops import index_scores, index_select, select
from tests.cpu.ops import indexer_inputs

WIDTHS = (1500, 5000, 70001)
TIES = ("few values", "zeros", "winners", "equal", "minus infinity")


def skip_unless_here(operator, impl, **features):
    try:
        support.choose(operator, device="cuda", impl=impl, **features)
    except support.NotServed as why:
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


def scores_of(made, arguments, width):
    """fp64 [R, width] on the CPU: `ops.index_scores.paged` of a paged_problem, whole rows at a time on the GPU."""
    q, _, gate, lengths, table, owner = arguments
    keys = (table.long().unsqueeze(2) * 64 + torch.arange(64)).flatten(1)
    start = owner.long() * keys.shape[1]
    q, k, scale = made.q.double(), made.k.double()[keys.flatten()], made.k_scale[keys.flatten()]
    inputs = (t.cuda() for t in (q, k, scale, gate, start, start + lengths))
    return index_scores.reference_ragged(*inputs, width).cpu()


def by_sorting(scores, lengths, k):
    """The picks of `ops.select.topk` by a stable sort in fp64: NaN below -inf, -0.0 as 0.0."""
    values = scores.double() + 0.0
    values = torch.where(values == -math.inf, -1e300, values)
    values = torch.where(values.isnan(), -math.inf, values)
    columns = torch.arange(scores.shape[1], device=scores.device)
    values = torch.where(columns < lengths.unsqueeze(1), values, -math.inf)  # after every NaN of the window: stable
    best = values.sort(dim=1, descending=True, stable=True).indices[:, :k]
    count = lengths.unsqueeze(1).clamp(max=k)
    place = torch.arange(best.shape[1], device=scores.device)
    best = torch.where(place < count, best, scores.shape[1]).sort(dim=1).values
    best = torch.where(place < count, best, -1).int()
    return torch.nn.functional.pad(best, (0, k - best.shape[1]), value=-1)


def without_ties(impl, k, width):
    """Equal to ours, in windows and with forced tokens."""
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


def with_ties(impl, k, kind):
    """Distinct positions of the window, ascending, as many as there should be, and their scores are the best."""
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


def slots_and_offsets(impl, k=2048):
    """As the picks, translated."""
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


def in_a_graph(impl, rows):
    """Scores and picks: a replay follows its inputs as an eager call does."""
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
