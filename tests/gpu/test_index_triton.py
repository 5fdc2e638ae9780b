"""The indexer's Triton kernels on a CUDA device: picks bit for bit, scores against fp64."""

import math

import pytest
import torch

from sglang_dsa_plugin.cache.layouts import FP8
from sglang_dsa_plugin.kernels.triton import select as triton_select
from sglang_dsa_plugin.ops import index_scores, index_select, select
from tests.cpu.ops import indexer_inputs
from tests.gpu.selection_checks import by_sorting

pytestmark = pytest.mark.gpu

IMPL = {"impl": "triton"}


def generator(seed=0):
    return torch.Generator("cuda").manual_seed(seed)


def normal(*shape, seed=0):
    return torch.randn(*shape, device="cuda", generator=generator(seed))


def ints(low, high, *shape, seed=0):
    return torch.randint(low, high, shape, device="cuda", generator=generator(seed))


def lengths_of(*values):
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def assert_picks(scores, lengths, k, repeats=1):
    want = by_sorting(scores, lengths, k)
    for _ in range(repeats):
        got = select.topk(scores, lengths, k, **IMPL)
        assert torch.equal(got, want)


@pytest.mark.parametrize("rows", [1, 5, 80, 600])
@pytest.mark.parametrize("k", [64, 2048])
def test_lengths_around_tile_and_list_sizes(rows, k):
    sizes = [0, 1, k - 1, k, k + 1, *(n + d for n in (2048, 4096, 8192, 16384, 32768) for d in (-1, 0, 1)), 40000]
    lengths = lengths_of(*(sizes * (rows // len(sizes) + 1))[:rows])
    lengths[0] = 40000
    assert_picks(normal(rows, 40000, seed=rows), lengths, k)


@pytest.mark.parametrize("width", [4097, 8191, 20001, 65537])
def test_rows_without_alignment(width):
    scores = normal(9, width)
    assert_picks(scores, torch.full((9,), width, dtype=torch.int32, device="cuda"), 1024)
    part = normal(9, width + 3)[:, 1:-2]
    assert_picks(part, torch.full((9,), width, dtype=torch.int32, device="cuda"), 1024)


@pytest.mark.parametrize("rows", [2, 700])
@pytest.mark.parametrize("levels", [1, 2, 7, 3000])
def test_thousands_of_ties_25_times(rows, levels):
    scores = ints(0, levels, rows, 20000).float()
    lengths = ints(15000, 20001, rows, seed=1).int()
    assert_picks(scores, lengths, 2048, repeats=25)


@pytest.mark.parametrize("rows", [3, 600])
@pytest.mark.parametrize("value", [0.0, -0.0, -3.0, math.inf, -math.inf, math.nan])
def test_equal_rows(rows, value):
    scores = torch.full((rows, 9000), value, device="cuda")
    got = select.topk(scores, torch.full((rows,), 9000, device="cuda"), 2048, **IMPL)
    assert torch.equal(got, torch.arange(2048, dtype=torch.int32, device="cuda").expand(rows, 2048))


@pytest.mark.parametrize("rows", [4, 600])
def test_plateau_of_zeros_below_a_few_winners(rows):
    # ReLU gives exact zeros.
    scores = torch.zeros(rows, 8320, device="cuda")
    scores[:, torch.randperm(8320)[:100].cuda()] = 1.5
    assert_picks(scores, torch.full((rows,), 8320, dtype=torch.int32, device="cuda"), 2048)


@pytest.mark.parametrize("rows", [4, 600])
def test_nan_inf_signed_zeros_and_denormals(rows):
    width = 12000
    lengths = torch.full((rows,), width, dtype=torch.int32, device="cuda")
    scores = normal(rows, width)
    scores[:, 5] = math.nan
    scores[0] = math.nan
    scores[1, :11000] = math.nan
    scores[2, ::2] = -math.inf
    scores[3] = math.inf
    assert_picks(scores, lengths, 2048)
    zeros = torch.where(ints(0, 2, rows, width) > 0, 0.0, -0.0)
    zeros[:, 7000:7100] = -1e-45
    zeros[:, 11000] = 1e-45
    assert_picks(zeros, lengths, 2048)
    tiny = ints(0, 300, rows, width).int() | (ints(0, 2, rows, width, seed=1).int() << 31)
    assert_picks(tiny.view(torch.float32), lengths, 2048)


@pytest.mark.parametrize("rows", [4, 600])
@pytest.mark.parametrize("sign", [1, -1])
def test_scores_that_differ_in_the_low_bits_only(rows, sign):
    bits = ints(0, 1024, rows, 30000).int() | 0x3F800000
    assert_picks(sign * bits.view(torch.float32), torch.full((rows,), 30000, device="cuda"), 2048)


@pytest.mark.parametrize("order", [False, True])
@pytest.mark.parametrize("rows", [3, 300])
def test_sorted_rows(rows, order):
    scores = normal(rows, 30000).sort(dim=1, descending=order).values
    assert_picks(scores, torch.full((rows,), 30000, device="cuda"), 2048)


@pytest.mark.parametrize("k", [64, 2048, 4096])
def test_rows_of_a_million(k):
    scores = normal(64, 1 << 20)
    scores[3] = scores[3].relu()
    assert_picks(scores, torch.full((64,), 1 << 20, dtype=torch.int32, device="cuda"), k)


def test_more_than_2_to_the_31_scores():
    scores = torch.empty(8200, 262209, device="cuda")
    for part in scores.split(1000):
        part.normal_(generator=generator(1))
    lengths = torch.full((8200,), 262209, dtype=torch.int32, device="cuda")
    got = select.topk(scores, lengths, 2048, **IMPL)
    for rows in (slice(0, 3), slice(4095, 4098), slice(8190, 8200)):
        assert torch.equal(got[rows], by_sorting(scores[rows], lengths[rows], 2048))


@pytest.mark.parametrize("rows", [6, 600])
@pytest.mark.parametrize(("init", "local"), [(0, 0), (4, 0), (0, 64), (100, 1000), (2000, 100), (3000, 9)])
def test_windows_forced_tokens_slots_and_offsets(rows, init, local):
    width, k = 13000, 2048
    scores = ints(0, 5000, rows, width).float()
    starts = ints(0, 900, rows, seed=1).int()
    lengths = (torch.rand(rows, device="cuda", generator=generator(2)) * (width - starts)).int()
    lengths[0], lengths[1], lengths[2], lengths[3] = 0, k, k + 1, width - starts[3]
    few = slice(0, 6)
    want = select.reference(scores[few].cpu(), lengths[few].cpu(), k, starts[few].cpu(), init, local)
    got = select.topk(scores, lengths, k, starts, init, local, **IMPL)
    assert torch.equal(got[few].cpu(), want)
    assert torch.equal(got, select.topk(scores, lengths, k, starts, init, local, impl="torch"))
    table = ints(0, 100000, 3, width // 64 + 1).int()
    requests = torch.arange(rows, device="cuda") % 3
    slots = select.topk_slots(scores, lengths, k, table, requests, 64, starts, init, local, **IMPL)
    assert torch.equal(slots, select.positions_to_slots(got, table, requests, impl="torch"))
    assert torch.equal(slots, select.positions_to_slots(got, table, requests, **IMPL))
    offsets = ints(0, 10**6, rows)
    moved = select.topk_ragged(scores, lengths, k, offsets, starts, init, local, **IMPL)
    assert torch.equal(moved, torch.where(got >= 0, got + offsets.unsqueeze(1), -1).int())
    beside = torch.full_like(slots, 7)
    where = {"slots": (table, requests, 64), "slots_out": beside}
    assert torch.equal(triton_select.select_rows(scores, lengths, k, starts, init, local, **where), got)
    assert torch.equal(beside, slots)


def on_gpu(inputs):
    return [None if x is None else x.cuda() for x in (inputs.q, inputs.k, inputs.k_scale, inputs.gate)]


def assert_scores(got, want, inputs, keys):
    """Errors relative to the sum of the terms' sizes; -inf in the same places."""
    assert torch.equal(got.isneginf(), want.isneginf())
    inside = ~want.isneginf()
    error = (got.double() - want).abs()[inside]
    size = inputs.term_size().gather(1, keys.clamp(max=len(inputs.k) - 1))[inside]
    # Hopper adds fp8 products in 14 bits or so; f32 sums of exact products are far better.
    assert (error / size).max() < (2**-10 if inputs.q.dtype == FP8 else 2**-18)


@pytest.mark.parametrize("dtype", [FP8, torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("heads", [8, 12, 16, 32, 64, 128])
def test_scores(dtype, heads):
    keys = 1024
    inputs = indexer_inputs.normal(70, heads, keys, dtype)
    q, k, scale, gate = on_gpu(inputs)
    start = torch.tensor([0] * 40 + [100] * 20 + [7, 900, 3, 64, 65, 1000, 0, 500, 20, 1])
    end = (start + torch.arange(70) * 13 + 1).clamp(max=keys)
    end[60:] = torch.tensor([7, 1024, 259, 64, 130, 1023, 1024, 499, 21, 258])
    got = index_scores.ragged(q, k, scale, gate, start.cuda(), end.cuda(), **IMPL).cpu()
    want = index_scores.reference_ragged(inputs.q, inputs.k, inputs.k_scale, inputs.gate, start, end)
    columns = torch.arange(got.shape[1])
    assert_scores(got, want, inputs, start.unsqueeze(1) + columns)
    pages = inputs.pages.cuda()
    table = torch.stack((torch.arange(16), torch.arange(15, -1, -1))).int()
    order = torch.stack([(table[b].long() * 64).repeat_interleave(64) + torch.arange(1024) % 64 for b in (0, 1)])
    for rows, per_request in ((2, 1), (4, 2), (8, 4), (6, 3), (70, 35)):
        requests = torch.arange(rows) // per_request
        lengths = torch.randint(0, 1025, (rows,), generator=torch.Generator().manual_seed(rows))
        part = indexer_inputs.Inputs(inputs.q[:rows], inputs.k, inputs.k_scale, inputs.gate[:rows])
        args = (table.cuda(), requests.cuda())
        got = index_scores.paged(q[:rows], pages, gate[:rows], lengths.cuda(), *args, 1024, **IMPL).cpu()
        columns = torch.arange(1024)
        whole = torch.full((rows,), 1024)
        each = index_scores.reference_ragged(part.q, part.k, part.k_scale, part.gate, whole * 0, whole)
        want = each.gather(1, order[requests])
        want = torch.where(columns < lengths.unsqueeze(1), want, -math.inf)
        assert_scores(got, want, part, order[requests])


@pytest.mark.parametrize(
    ("heads", "dtype"), [(16, FP8), (32, FP8), (64, FP8), (16, torch.bfloat16), (64, torch.bfloat16)]
)
def test_a_score_does_not_depend_on_its_neighbours(heads, dtype):
    # One call, other batch, other tile, other kernel: the same bits.
    inputs = indexer_inputs.normal(300, heads, 4096, dtype)
    q, k, scale, gate = on_gpu(inputs)
    pages, table = inputs.pages.cuda(), torch.arange(64, dtype=torch.int32, device="cuda").unsqueeze(0)
    requests, lengths = torch.zeros(300, dtype=torch.int32, device="cuda"), torch.full((300,), 4096, device="cuda")
    many = index_scores.paged(q, pages, gate, lengths, table, requests, **IMPL)
    flat = index_scores.ragged(q, k, scale, gate, lengths * 0, lengths, **IMPL)
    assert torch.equal(many, flat)
    for rows in (slice(0, 1), slice(7, 9), slice(100, 104), slice(290, 300)):
        assert torch.equal(
            index_scores.paged(q[rows], pages, gate[rows], lengths[rows], table, requests[rows], **IMPL), many[rows]
        )
    # Requests with the same keys: rows of one each, bundles of two and four, and, last, a tile in which requests meet.
    few = slice(0, 16)
    for each in (1, 2, 4):
        owner, tables = torch.arange(16, device="cuda") // each, table.repeat(16 // each, 1)
        assert torch.equal(index_scores.paged(q[few], pages, gate[few], lengths[few], tables, owner, **IMPL), many[few])
    turns = torch.arange(300, device="cuda") % 2
    assert torch.equal(index_scores.paged(q, pages, gate, lengths, table.repeat(2, 1), turns, **IMPL), many)
    for _ in range(20):
        assert torch.equal(index_scores.paged(q, pages, gate, lengths, table, requests, **IMPL), many)


def test_large_scores_equal_small_ones():
    # 4096 x 600000 scores pass 2^31.
    inputs = indexer_inputs.normal(4096, 16, 64, FP8)
    q, _, _, gate = on_gpu(inputs)
    k, scale = normal(600000, 128).to(FP8), torch.rand(600000, device="cuda")
    start = torch.zeros(4096, dtype=torch.int32, device="cuda")
    scores = index_scores.ragged(q, k, scale, gate, start, start + 600000, 600000, **IMPL)
    for rows in (slice(0, 1), slice(2047, 2049), slice(4095, 4096)):
        few = index_scores.ragged(q[rows], k, scale, gate[rows], start[rows], start[rows] + 600000, 600000, **IMPL)
        assert torch.equal(scores[rows], few)


def test_nan_in_query_key_or_gate():
    inputs = indexer_inputs.normal(4, 64, 256, FP8)
    q, k, scale, gate = on_gpu(inputs)
    q[1, 3, 5] = math.nan
    k[9, 100] = math.nan
    gate[2, 63] = math.nan
    end = torch.full((4,), 256, device="cuda")
    got = index_scores.ragged(q, k, scale, gate, end * 0, end, **IMPL)
    nan = torch.zeros(4, 256, dtype=torch.bool, device="cuda")
    nan[1], nan[2], nan[:, 9] = True, True, True
    assert torch.equal(got.isnan(), nan)


@pytest.mark.parametrize("dtype", [FP8, torch.bfloat16])
@pytest.mark.parametrize(("rows", "requests"), [(3, 3), (12, 3), (400, 3)])
@pytest.mark.parametrize("budget", [1 << 30, 4 * 8192 * 5, 4 * (2 * 2048 + 1024)])
def test_index_select_equals_scores_then_selection(dtype, rows, requests, budget):
    if rows > 12 and budget < 1 << 15:
        rows = 20
    inputs = indexer_inputs.exact(rows, 64, 8192, dtype)
    q, k, scale, gate = on_gpu(inputs)
    pages = inputs.pages.cuda()
    table = torch.stack([torch.randperm(128) for _ in range(requests)]).int().cuda()
    owner = torch.arange(rows, device="cuda") * requests // rows
    lengths = ints(0, 8193, rows).int()
    lengths[0], lengths[1], lengths[2] = 8192, 2048, 2049
    args = (q, pages, gate, lengths, table, owner)
    want = select.topk(index_scores.paged(*args, **IMPL), lengths, 2048, None, 3, 5, **IMPL)
    got = index_select.paged(*args, 2048, False, 64, 3, 5, budget, **IMPL)
    assert torch.equal(got, want)
    slots = index_select.paged(*args, 2048, True, 64, 3, 5, budget, **IMPL)
    assert torch.equal(slots, select.positions_to_slots(want, table, owner, impl="torch"))
    beside = torch.full_like(slots, 7)
    both = index_select.paged(*args, 2048, False, 64, 3, 5, budget, slots_out=beside, **IMPL)
    assert torch.equal(both, want) and torch.equal(beside, slots)
    # Rows that keep everything have picks whatever their query and gate are.
    kept = lengths <= 2048
    junk = (q.float().masked_fill(kept[:, None, None], math.nan).to(dtype), gate.masked_fill(kept[:, None], math.nan))
    got = index_select.paged(junk[0], pages, junk[1], *args[3:], 2048, False, 64, 3, 5, budget, **IMPL)
    assert torch.equal(got, want)
    few = min(rows, 4)
    zero = torch.zeros(few, dtype=torch.int32)
    fp64 = index_scores.reference_ragged(inputs.q[:few], inputs.k, inputs.k_scale, inputs.gate[:few], zero, zero + 8192)
    order = (table[owner[:few]].long() * 64).repeat_interleave(64, 1) + torch.arange(8192, device="cuda") % 64
    exact = select.reference(fp64.gather(1, order.cpu()), lengths[:few].cpu(), 2048, None, 3, 5)
    assert torch.equal(got[:few].cpu(), exact)
    start = ints(0, 3000, rows).int()
    end = torch.minimum(start + lengths, torch.full_like(start, 8192))
    flat = index_scores.ragged(q, k, scale, gate, start, end, **IMPL)
    offsets = ints(0, 10**6, rows)
    want = select.topk_ragged(flat, end - start, 1024, offsets, **IMPL)
    assert torch.equal(index_select.ragged(q, k, scale, gate, start, end, 1024, offsets, 0, 0, budget, **IMPL), want)


@pytest.mark.parametrize("rows", [1, 32, 33, 64])
def test_all_zero_lengths(rows):
    inputs = indexer_inputs.normal(rows, 64, 256, FP8)
    q, _, _, gate = on_gpu(inputs)
    table = torch.zeros(rows, 64, dtype=torch.int32, device="cuda")
    owner, lengths = torch.arange(rows, device="cuda"), torch.zeros(rows, dtype=torch.int32, device="cuda")
    picks = index_select.paged(q, inputs.pages.cuda(), gate, lengths, table, owner, 2048, True, **IMPL)
    assert (picks == -1).all()
    assert index_scores.paged(q, inputs.pages.cuda(), gate, lengths, table, owner, 4096, **IMPL).isneginf().all()


@pytest.mark.parametrize("rows", [2, 16, 300])
def test_a_captured_graph_follows_new_lengths(rows):
    inputs = indexer_inputs.exact(rows, 32, 32768, FP8)
    q, _, _, gate = on_gpu(inputs)
    pages = inputs.pages.cuda()
    table = torch.stack([torch.randperm(512) for _ in range(2)]).int().cuda()
    owner = torch.arange(rows, device="cuda") * 2 // rows
    lengths = torch.full((rows,), 100, dtype=torch.int32, device="cuda")
    args = (q, pages, gate, lengths, table, owner, 2048, True)
    beside = torch.empty(rows, 2048, dtype=torch.int32, device="cuda")
    index_select.paged(*args, **IMPL)
    index_select.paged(*args[:-1], slots_out=beside, **IMPL)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        picks = index_select.paged(*args, **IMPL)
        positions = index_select.paged(*args[:-1], slots_out=beside, **IMPL)
    for seed in range(4):
        lengths.copy_(ints(0, 32769, rows, seed=seed))
        lengths[0] = (0, 2048, 2049, 32768)[seed]
        graph.replay()
        whole = index_scores.paged(*args[:-2], **IMPL)
        assert torch.equal(picks, select.topk_slots(whole, lengths, 2048, table, owner, impl="torch"))
        assert torch.equal(picks, index_select.paged(*args, **IMPL))
        assert torch.equal(beside, picks)
        assert torch.equal(positions, index_select.paged(*args[:-1], **IMPL))
        assert (picks >= 0).sum(1).equal(lengths.clamp(max=2048).long())
