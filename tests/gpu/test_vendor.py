"""Attention by kernels of other packages behind the operator contract, on a CUDA device against fp64.

What a GPU cannot run is skipped with the support table's reason. The references run on the GPU, too: in fp64 the CPU
would take most of the time.
"""

import functools

import pytest
import torch

from sglang_dsa_plugin import support
from sglang_dsa_plugin.kernels.triton.slot_prefix import slot_prefix
from sglang_dsa_plugin.kernels.vendor import fa3
from sglang_dsa_plugin.ops import dense_mha, quant, sparse_mla
from sglang_dsa_plugin.tools.check_judges import spread_of
from tests.cpu.ops.bounds import assert_attention

pytestmark = pytest.mark.gpu
SCALE = 192**-0.5


# Those that are handed no sink: the adapter brings it in when the kernel has rounded its output already.
SINK_AFTERWARDS = ("fa3", "trtllm", "trtllm_fp8")


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def normal_gpu(*shape, seed=0):
    return normal(*shape, seed=seed).cuda()


def check(impl, q, kv, slots, layout, kv_scale=1.0, weights=1, **options):
    """One call against fp64. weights: how many times the bound of weights rounded to bf16."""
    with torch.device("cuda"):  # where the reference makes its own tensors
        want = sparse_mla.reference(q, kv, slots, SCALE, layout, kv_scale, **options)
    spread = weights * spread_of(q, kv, slots, SCALE, layout, kv_scale, options.get("lengths"))
    out, lse = sparse_mla.sparse_mla(q, kv, slots, SCALE, layout, kv_scale, impl=impl, **options)
    assert out.dtype == torch.bfloat16 and out.is_contiguous()
    rounded = 2 if "sink" in options and impl in SINK_AFTERWARDS else 1
    try:
        assert_attention((out, lse), want, spread=spread, rounded=rounded)
    except AssertionError as error:
        raise AssertionError(f"{impl} with {', '.join(options) or 'no options'}: {error}") from None


@pytest.mark.parametrize("heads", [64, 128, 100, 50])
@pytest.mark.parametrize("k", [2048, 300, 64])
def test_flash_mla_prefill(heads, k):
    pytest.importorskip("flash_mla")
    rows, count = 9, 5000
    q, kv = normal_gpu(rows, heads, 576), normal_gpu(count, 576, seed=1)
    slots = torch.randint(0, count, (rows, k), generator=torch.Generator().manual_seed(2), dtype=torch.int32)
    slots[0, 3:40] = -1
    slots[1] = -1
    slots[2, 1:] = -1
    slots[3, 9:] = count + 7
    lengths = torch.full((rows,), k)
    lengths[4], lengths[5] = 0, 33
    sink = normal(heads, seed=3).float().cuda()
    for options in ({}, {"sink": sink}, {"lengths": lengths.cuda()}):
        check("flash_mla", q, kv, slots.cuda(), "bf16_1152", **options)


# Implementation and the layouts that it reads; those whose result is the operator's.
SPARSE = [("flash_mla", "bf16_1152"), ("flash_mla_kv", "fp8_656"), ("fa3", "bf16_1152"), ("trtllm", "bf16_1152")]


def skip_unless_here(impl, layout, heads=64):
    try:
        support.choose("sparse_mla", device="cuda", impl=impl, layout=layout, heads=heads, dtype=torch.bfloat16)
    except support.NotServed as why:
        pytest.skip(str(why))


@functools.cache
def cached(count, layout, kv_scale=1.0):
    latent, rope = normal(count, 576, seed=1).split([512, 64], dim=1)
    return quant.reference_quantize_latent(latent.float(), rope.float(), layout, kv_scale).cuda()


def picks(rows, k, count):
    """Short, empty, out of range and scattered rows, then full ones."""
    slots = torch.randint(0, count, (rows, k), generator=torch.Generator().manual_seed(2), dtype=torch.int32)
    slots[0, 3:40], slots[1], slots[2, 1:], slots[3, 9:] = -1, -1, -1, count + 7
    slots[6, ::2] = -1
    slots[7] = -5
    return slots.cuda()


@pytest.mark.parametrize("count", [6400, 5003])
@pytest.mark.parametrize("heads", [8, 16, 64, 100, 128])
@pytest.mark.parametrize("k", [2048, 300, 64])
@pytest.mark.parametrize(("impl", "layout"), SPARSE)
def test_sparse_attention(impl, layout, k, heads, count):
    """count 5003: not whole pages."""
    skip_unless_here(impl, layout, heads)
    rows = 11
    q, kv, slots = normal_gpu(rows, heads, 576), cached(count, layout), picks(rows, k, count)
    lengths = torch.full((rows,), k)
    lengths[4], lengths[5], lengths[6] = 0, 33, 21
    sink, lengths = normal(heads, seed=3).float().cuda(), lengths.cuda()
    for options in ({}, {"sink": sink}, {"lengths": lengths}, {"lengths": lengths.int(), "sink": sink}):
        check(impl, q, kv, slots, layout, **options)


@pytest.mark.parametrize("rows", [1, 2, 7, 64, 130, 600])
@pytest.mark.parametrize(("impl", "layout"), SPARSE)
def test_a_row_does_not_depend_on_the_batch(impl, layout, rows):
    """Every row and head gets its own picks, whatever the batch; slots of int64 and `out` given."""
    skip_unless_here(impl, layout, 16)
    q, kv = normal_gpu(rows, 16, 576), cached(6400, layout)
    slots = torch.randint(0, 6400, (rows, 512), generator=torch.Generator().manual_seed(rows)).cuda()
    out = torch.empty(rows, 16, 512, dtype=torch.bfloat16, device="cuda")
    got, lse = sparse_mla.sparse_mla(q, kv, slots, SCALE, layout, impl=impl, out=out)
    assert got is out and not out.isnan().any()
    some = range(0, rows, max(1, rows // 8))
    for r in some:
        alone, alone_lse = sparse_mla.sparse_mla(q[r : r + 1], kv, slots[r : r + 1], SCALE, layout, impl="torch")
        assert torch.allclose(lse[r], alone_lse[0], atol=2e-5, rtol=2e-6)
        assert (out[r].float() - alone[0].float()).abs().max() < 0.02


@pytest.mark.parametrize("heads", [8, 64, 128])
@pytest.mark.parametrize("k", [2048, 300])
@pytest.mark.parametrize("rows", [1, 7, 64, 200, 1000])
@pytest.mark.parametrize(("impl", "layout"), [row for row in SPARSE if row[0] != "trtllm"])
def test_promised_picks(impl, layout, rows, k, heads):
    """Valid picks first, then -1, some rows without any, as selection writes them and padding rows have them: output
    with and without lse, with a sink, with queries in two parts, into `out`; nothing is read behind the picks, and no
    cached row that is not picked changes anything, not even NaN in the first one.
    """
    skip_unless_here(impl, layout, heads)
    generator = torch.Generator().manual_seed(rows + k)
    lengths = torch.randint(0, k + 1, (rows,), generator=generator)
    lengths[::5], lengths[-1], lengths[rows // 2] = 0, 0 if rows > 1 else 1, k
    slots = torch.randint(1, 6400, (rows, k), generator=generator, dtype=torch.int32)
    slots[torch.arange(k) >= lengths.unsqueeze(1)] = -1
    q, kv, slots = normal_gpu(rows, heads, 576), cached(6400, layout), slots.cuda()
    sink, lengths = normal(heads, seed=3).float().cuda(), lengths.int().cuda()
    some = torch.arange(rows) % max(1, rows // 16) == 0 if rows > 64 else torch.ones(rows, dtype=torch.bool)
    some = some.cuda()
    poisoned = kv.clone()
    poisoned[0].view(torch.uint8).fill_(255)
    for sunk in ({}, {"sink": sink}):
        with torch.device("cuda"):
            want = sparse_mla.reference(q[some], kv, slots[some], SCALE, layout, **sunk)
        spread = spread_of(q[some], kv, slots[some], SCALE, layout)
        options = {"lengths": lengths, "prefix": True, "impl": impl, **sunk}
        out, lse = sparse_mla.sparse_mla(q, kv, slots, SCALE, layout, **options)
        rounded = 2 if sunk and impl in SINK_AFTERWARDS else 1
        assert_attention((out[some], lse[some]), want, spread=spread, rounded=rounded)
        assert (out[lengths == 0] == 0).all() and (lse[lengths == 0] == -torch.inf).all() and not out.isnan().any()
        given = torch.full_like(out, 3.0)
        latent = q[..., :512].transpose(0, 1).contiguous().transpose(0, 1)
        for more in ({}, {"q_rope": q[..., 512:]}, {"out": given}):
            query = latent if "q_rope" in more else q
            alone, none = sparse_mla.sparse_mla(
                query, poisoned, slots, SCALE, layout, **options, **more, with_lse=False
            )
            assert none is None and torch.equal(alone, out)
        assert torch.equal(given, out)


def test_packed_rows_with_large_and_small_powers_of_two():
    """The scale of a block is an f32 power of two, far from 1 in real checkpoints."""
    skip_unless_here("flash_mla_kv", "fp8_656")
    size = torch.tensor([1e-3, 1.0, 30.0, 200.0]).repeat_interleave(128)
    latent, rope = normal(640, 576, seed=3).float().split([512, 64], dim=1)
    kv = quant.reference_quantize_latent(latent * size, rope, "fp8_656").cuda()
    q, slots = normal_gpu(4, 64, 576) / 64, torch.arange(256, dtype=torch.int32).expand(4, 256).contiguous()
    check("flash_mla_kv", q, kv, slots.cuda(), "fp8_656")


def test_trtllm_on_raw_fp8_rows():
    """Queries that e4m3 holds, since it rounds them."""
    skip_unless_here("trtllm_fp8", "fp8_576", 16)
    q = (normal_gpu(9, 16, 576) / 4).to(torch.float8_e4m3fn).bfloat16()
    kv, slots = cached(6400, "fp8_576", 0.02), picks(9, 512, 6400)
    check("trtllm_fp8", q, kv, slots, "fp8_576", 0.02, weights=8)  # weights in fp8


@pytest.mark.parametrize("rows", [1, 16, 64])
@pytest.mark.parametrize(("impl", "layout"), SPARSE)
def test_in_a_cuda_graph_as_eagerly(impl, layout, rows):
    """Replays follow the picks, their number and the queries; two graphs of one shape do not share what they write.

    In a graph FA3 splits rows by its schedule, so its bits are its own there, and its result is held to fp64.
    """
    skip_unless_here(impl, layout, 64)
    q, kv = normal_gpu(rows, 64, 576), cached(6400, layout)
    slots, lengths = torch.zeros(rows, 2048, dtype=torch.int32).cuda(), torch.full((rows,), 2048).int().cuda()

    def step():
        found = sparse_mla.sparse_mla(q, kv, slots, SCALE, layout, lengths=lengths, impl=impl)
        kept = torch.where(torch.arange(2048, device="cuda") < lengths.unsqueeze(1), slots, -1)
        lean, _ = sparse_mla.sparse_mla(
            q, kv, kept, SCALE, layout, lengths=lengths, impl=impl, prefix=True, with_lse=False
        )
        return *found, lean

    for _ in range(2):
        step()
    torch.cuda.synchronize()
    graphs = []
    for _ in range(2):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = step()
        graphs.append((graph, results))
    for trial in range(3):
        q.copy_(normal(rows, 64, 576, seed=trial))
        slots.copy_(torch.randint(0, 6400, (rows, 2048), generator=torch.Generator().manual_seed(trial)))
        lengths.copy_(torch.randint(0, 2049, (rows,), generator=torch.Generator().manual_seed(trial)))
        graph, replayed = graphs[trial % 2]
        graph.replay()
        first = [one.clone() for one in replayed]
        if impl == "fa3":
            graph.replay()
            with torch.device("cuda"):
                want = sparse_mla.reference(q, kv, slots, SCALE, layout, lengths=lengths)
            spread = spread_of(q, kv, slots, SCALE, layout, lengths=lengths)
            assert_attention(first[:2], want, spread=spread)
            assert torch.equal(first[0], first[2])
        for a, b in zip(first, replayed if impl == "fa3" else step()):
            assert torch.equal(a.nan_to_num(neginf=-7), b.nan_to_num(neginf=-7))


@pytest.mark.parametrize("heads", [8, 64, 128])
@pytest.mark.parametrize("rows", [1, 16, 64, 200, 512])
def test_layers_of_a_graph_share_fa3s_schedule(rows, heads):
    """The counter in it is where it was after every call: each layer is right, at every replay, whatever the lengths
    and the other graph did.
    """
    skip_unless_here("fa3", "bf16_1152", heads)
    layers = [normal_gpu(rows, heads, 576, seed=seed) for seed in range(3)]
    kv, lengths = cached(6400, "bf16_1152"), torch.full((rows,), 1024).int().cuda()
    picked = torch.randint(0, 6400, (rows, 1024), generator=torch.Generator().manual_seed(rows)).int().cuda()
    slots = picked.clone()

    def step():
        options = {"lengths": lengths, "prefix": True, "impl": "fa3"}
        return [sparse_mla.sparse_mla(q, kv, slots, SCALE, "bf16_1152", **options) for q in layers]

    step()
    graphs = [torch.cuda.CUDAGraph() for _ in range(2)]
    found = []
    for graph in graphs:
        with torch.cuda.graph(graph):
            found.append(step())
    assert len(fa3._recorded) == 1
    some = torch.arange(rows, device="cuda") % max(1, rows // 8) == 0
    for trial in range(3):
        generator = torch.Generator().manual_seed(trial)
        lengths.copy_(torch.randint(0, 1025, (rows,), generator=generator) if trial else torch.full((rows,), 1024))
        slots.copy_(torch.where(torch.arange(1024, device="cuda") < lengths.unsqueeze(1), picked, -1))
        for graph, results in zip(graphs, found):
            for out, lse in results:
                out.fill_(torch.nan), lse.fill_(torch.nan)
            graph.replay()
            for q, (out, lse) in zip(layers, results):
                with torch.device("cuda"):
                    want = sparse_mla.reference(q[some], kv, slots[some], SCALE, "bf16_1152")
                spread = spread_of(q[some], kv, slots[some], SCALE, "bf16_1152")
                assert_attention((out[some], lse[some]), want, spread=spread)
                assert not out.isnan().any() and not lse.isnan().any()


@pytest.mark.parametrize("k", [1, 63, 2048, 2051, 5000])
@pytest.mark.parametrize("rows", [1, 70000])
def test_slots_in_front(rows, k):
    """70000 rows: more than a grid's second dimension takes."""
    if rows * k > 2**28:
        pytest.skip("memory")
    slots = torch.randint(-200, 1200, (rows, k), generator=torch.Generator("cuda").manual_seed(k), device="cuda")
    found, counts = slot_prefix(slots, 1000, None, -1, 64, never_empty=True)
    valid = (slots >= 0) & (slots < 1000)
    assert torch.equal(counts, valid.sum(1).int())
    order = torch.sort(~valid, dim=1, stable=True).indices
    want = torch.where(valid, slots, -1).gather(1, order).int()
    want[counts == 0, 0] = 0
    assert torch.equal(found[:, :k], want) and (found[:, k:] == -1).all()


@pytest.mark.parametrize(("width", "values"), [(192, 128), (256, 256)])
@pytest.mark.parametrize("heads", [8, 16, 128])
def test_fa3_dense(heads, width, values):
    pytest.importorskip("sgl_kernel")
    queries, keys = [5, 1, 200, 64, 0], [5, 300, 200, 100, 0]
    cu_q = torch.tensor([0, *queries]).cumsum(0).int()
    cu_k = torch.tensor([0, *keys]).cumsum(0).int()
    q, k = normal_gpu(sum(queries), heads, width), normal_gpu(sum(keys), heads, width, seed=1)
    v = normal_gpu(sum(keys), heads, values, seed=2)
    cu_q, cu_k = cu_q.cuda(), cu_k.cuda()
    with torch.device("cuda"):
        want = dense_mha.reference(q, k, v, cu_q, cu_k, SCALE)
        spread, _ = dense_mha.reference(q, k, v.abs(), cu_q, cu_k, SCALE)
    got = dense_mha.dense_mha(q, k, v, cu_q, cu_k, SCALE, impl="fa3")
    assert_attention(got, want, spread=spread)


def test_no_tokens_at_all():
    cu = torch.zeros(3, dtype=torch.int32).cuda()
    q = torch.empty(0, 16, 192, device="cuda", dtype=torch.bfloat16)
    v = torch.empty(0, 16, 128, device="cuda", dtype=torch.bfloat16)
    out, lse = dense_mha.dense_mha(q, q, v, cu, cu, SCALE, impl="fa3")
    assert out.shape == (0, 16, 128) and lse.shape == (0, 16)
