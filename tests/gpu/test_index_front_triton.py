"""The Triton kernels that store keys and rows and prepare queries, on a CUDA device against fp64."""

import pytest
import torch

from sglang_dsa_plugin.cache.layouts import FP8, LATENT_LAYOUTS
from sglang_dsa_plugin.kernels.triton import e4m3, index_front
from sglang_dsa_plugin.kernels.triton import latent_rows as triton_rows
from sglang_dsa_plugin.ops import index_front as front
from sglang_dsa_plugin.ops import index_keys, index_queries, latent_rows
from tests.cpu.ops import index_front_inputs as data

pytestmark = pytest.mark.gpu

IMPL = {"impl": "triton"}
DTYPES = (FP8, torch.bfloat16, torch.float32)


@pytest.fixture(params=["hardware", "integers"])
def rounding(request, monkeypatch):
    """Both ways to make e4m3 codes."""
    if request.param == "integers":
        for module in (index_front, triton_rows):
            monkeypatch.setattr(module, "has_cvt", lambda _gpu: False)
    elif not e4m3.has_cvt(index_front.index_tables.gpu_of(torch.device("cuda"))):
        pytest.skip("this GPU does not round to e4m3")


def on_gpu(values):
    return [v.cuda() if isinstance(v, torch.Tensor) else v for v in values]


@pytest.mark.usefixtures("rounding")
@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 3, 64, 4096])
def test_keys(layout, norm, dtype, rows):
    inputs, slots = data.key_inputs(rows, layout, norm, torch.bfloat16), data.slots_of(rows, 70)
    pages = data.new_pages(70, dtype, "cuda")
    index_keys.store(pages, slots.cuda(), *inputs.args("cuda"), **IMPL)
    data.assert_keys(pages.cpu(), slots, inputs)


@pytest.mark.parametrize("dtype", DTYPES)
def test_keys_strided_int32_out_of_range_and_in_a_larger_buffer(dtype):
    inputs, slots = data.key_inputs(9, "half"), data.slots_of(9, 2).cuda()
    want = data.new_pages(2, dtype, "cuda")
    index_keys.store(want, slots, *inputs.args("cuda"), **IMPL)
    inputs.projected = torch.cat((torch.ones(9, 40), inputs.projected), dim=1)
    inputs.positions = inputs.positions.int()
    slots[4] = 128
    buffer = torch.stack((data.new_pages(2, dtype, "cuda"),) * 3, dim=1)
    projected, *rest = inputs.args("cuda")
    index_keys.store(buffer[:, 1], slots.int(), projected[:, 40:], *rest, **IMPL)
    assert torch.equal(buffer[:, 1], want)
    assert torch.equal(buffer[:, ::2], torch.stack((data.new_pages(2, dtype, "cuda"),) * 2, dim=1))


@pytest.mark.parametrize("dtype", DTYPES)
def test_keys_of_zeros_and_huge_values(dtype):
    inputs, slots = data.key_inputs(6, "interleaved"), torch.arange(6)
    inputs.projected[0] = 0
    inputs.projected[1] *= 1e17
    inputs.projected[2] *= 1e-4
    inputs.projected[3, 5] = 1e12
    pages = data.new_pages(1, dtype, "cuda")
    index_keys.store(pages, slots.cuda(), *inputs.args("cuda"), **IMPL)
    data.assert_keys(pages.cpu(), slots, inputs)


def test_keys_in_pages_past_2_to_the_31_bytes():
    inputs, slots = data.key_inputs(2, "half"), torch.tensor([64 * 300000 + 5, 3])
    pages = torch.zeros(300001, 8448, dtype=torch.uint8, device="cuda")
    index_keys.store(pages, slots.cuda(), *inputs.args("cuda"), **IMPL)
    small = data.new_pages(1, FP8, "cuda")
    index_keys.store(small, torch.tensor([5, 3], device="cuda"), *inputs.args("cuda"), **IMPL)
    assert torch.equal(pages[300000, 640:768], small[0, 640:768])
    assert torch.equal(pages[0, 384:512], small[0, 384:512])
    assert (pages[1:300000] == 0).all()


def test_bytes_where_every_step_is_exact():
    inputs, slots = data.exact_keys(40), data.slots_of(40, 1).cuda()
    pages, want = data.new_pages(1, FP8, "cuda"), data.new_pages(1, FP8, "cuda")
    index_keys.store(pages, slots, *inputs.args("cuda"), **IMPL)
    index_keys.store(want, slots, *inputs.args("cuda"), impl="torch")
    assert torch.equal(pages, want)
    queries = on_gpu(data.exact_queries(300, 64))
    got, expected = (index_queries.prepare(*queries, FP8, impl=i) for i in ("triton", "torch"))
    assert torch.equal(got[0].view(torch.uint8), expected[0].view(torch.uint8)) and torch.equal(got[1], expected[1])


@pytest.mark.usefixtures("rounding")
@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "heads"), [(1, 64), (3, 5), (64, 64), (4096, 32)])
def test_queries(layout, dtype, rows, heads):
    inputs = data.query_inputs(rows, heads, layout, torch.bfloat16)
    q, gate = index_queries.prepare(*on_gpu(inputs), dtype, **IMPL)
    few = torch.cat((torch.arange(min(rows, 40)), torch.arange(max(0, rows - 40), rows)))
    part = [inputs[0][few], inputs[1][few], inputs[2][few], *inputs[3:]]
    data.assert_queries(q.cpu()[few], gate.cpu()[few], part)
    if dtype != FP8:
        assert torch.equal(q, index_queries.prepare(*on_gpu(inputs), dtype, impl="torch")[0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_queries_strided_zeros_and_huge_values(dtype):
    inputs = data.query_inputs(6, 4, "interleaved")
    inputs[0][0], inputs[0][1] = 0, inputs[0][1] * 1e30
    inputs[0][2], inputs[0][3, 7] = inputs[0][2] * 1e-8, 1e12
    projected, weights, positions, *rest = on_gpu(inputs)
    wide = torch.cat((torch.ones(6, 24, device="cuda"), projected, weights), dim=1)
    q, gate = index_queries.prepare(wide[:, 24:-4], wide[:, -4:], positions.int(), *rest, dtype, **IMPL)
    data.assert_queries(q.cpu(), gate.cpu(), inputs)


def test_a_vector_does_not_depend_on_its_batch():
    # A key stored in decode must be the key of a prefill, bit for bit.
    inputs, slots = data.key_inputs(4096, "half", dtype=torch.bfloat16), torch.randperm(4096).cuda()
    many, few = (torch.zeros(64, 8448, dtype=torch.uint8, device="cuda") for _ in range(2))
    projected, weight, bias, eps, positions, *rest = inputs.args("cuda")
    index_keys.store(many, slots, projected, weight, bias, eps, positions, *rest, **IMPL)
    at = 0
    for size in (1, 2, 3, 16, 17, 64, 500, 3493):
        part = slice(at, at + size)
        index_keys.store(few, slots[part], projected[part], weight, bias, eps, positions[part], *rest, **IMPL)
        at += size
    assert at == 4096 and torch.equal(many, few)
    projected, weights, positions, *rest = on_gpu(data.query_inputs(4096, 64, "half", torch.bfloat16))
    q, gate = index_queries.prepare(projected, weights, positions, *rest, FP8, **IMPL)
    for part in (slice(0, 1), slice(5, 8), slice(100, 164), slice(1000, 4096)):
        got = index_queries.prepare(projected[part], weights[part], positions[part], *rest, FP8, **IMPL)
        assert torch.equal(got[0].view(torch.uint8), q[part].view(torch.uint8)) and torch.equal(got[1], gate[part])


@pytest.mark.usefixtures("rounding")
@pytest.mark.parametrize(("layout", "norm"), [("half", "layer"), ("interleaved", "rms")])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "heads"), [(1, 64), (3, 5), (16, 64), (40, 32), (130, 64), (1000, 64)])
def test_keys_and_queries_together_are_those_of_two_calls(layout, norm, dtype, rows, heads):
    # Bit for bit: keys stored in decode are those of a prefill, which takes two launches.
    keys = data.key_inputs(rows, layout, norm, torch.bfloat16)
    slots, queries = data.slots_of(rows, 20).cuda(), on_gpu(data.query_inputs(rows, heads, layout, torch.bfloat16))
    pages, want_pages = (data.new_pages(20, dtype, "cuda") for _ in range(2))
    index_keys.store(want_pages, slots, *keys.args("cuda"), **IMPL)
    want = index_queries.prepare(*queries, dtype, **IMPL)
    key, *norm_of_keys, positions, cos_sin, _ = keys.args("cuda")
    arguments = (slots, key, *norm_of_keys, *queries[:2], positions, cos_sin, layout)
    got = front.store_and_prepare(pages, *arguments, **IMPL)
    assert torch.equal(pages.view(torch.uint8), want_pages.view(torch.uint8))
    assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(got, want))
    lengths = torch.arange(rows, dtype=torch.int32, device="cuda") % 3 + 7
    pages = data.new_pages(20, dtype, "cuda")
    got = front.store_and_prepare(pages, *arguments, lengths, 8, **IMPL)
    assert torch.equal(pages.view(torch.uint8), want_pages.view(torch.uint8))
    for a, b in zip(got, want):
        assert torch.equal(a[lengths > 8].view(torch.uint8), b[lengths > 8].view(torch.uint8))


@pytest.mark.parametrize("rows", [2, 64])
def test_a_captured_graph_makes_queries_of_the_rows_that_are_long_at_replay(rows):
    queries, slots = on_gpu(data.query_inputs(rows, 64, "half", torch.bfloat16)), data.slots_of(rows, 3).cuda()
    key, *norm, positions, cos_sin, layout = data.key_inputs(rows, "half", dtype=torch.bfloat16).args("cuda")
    lengths, pages = torch.zeros(rows, dtype=torch.int32, device="cuda"), data.new_pages(3, FP8, "cuda")
    arguments = (pages, slots, key, *norm, *queries[:2], positions, cos_sin, layout, lengths, 8)
    front.store_and_prepare(*arguments, **IMPL)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        q, gate = front.store_and_prepare(*arguments, **IMPL)
    want = index_queries.prepare(*queries, FP8, **IMPL)
    for first in (0, 1):
        q.view(torch.uint8).fill_(7)
        lengths.fill_(8)[first::2] = 9
        graph.replay()
        long = lengths > 8
        assert torch.equal(q[long].view(torch.uint8), want[0][long].view(torch.uint8))
        assert torch.equal(gate[long], want[1][long])
        # 64 heads are whole tiles, so nothing was made for the other rows.
        assert (q[~long].view(torch.uint8) == 7).all()


@pytest.mark.usefixtures("rounding")
@pytest.mark.parametrize("layout", LATENT_LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows", [1, 3, 64, 4096])
def test_latent_rows(layout, dtype, rows):
    g = data.generator()
    latent, rope = torch.randn(rows, 512, generator=g).to(dtype), torch.randn(rows, 64, generator=g).to(dtype)
    latent[rows // 2], latent[rows - 1, 130] = 0, 1e20
    spec, slots = LATENT_LAYOUTS[layout], torch.randperm(5000, generator=g)[:rows]
    slots[2::6] = -1
    pool = torch.full((5000, 2, spec.width * spec.dtype.itemsize), 7, dtype=torch.uint8)
    got = pool.cuda()
    args = (slots, latent, rope, layout, 0.37)
    latent_rows.store(got.view(spec.dtype)[:, 1], *on_gpu(args), **IMPL)
    latent_rows.reference_store(pool.view(spec.dtype)[:, 1], *args)
    assert torch.equal(got.cpu(), pool)


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    ("rows", "width"), [(1, 576), (15, 576), (16, 576), (17, 576), (301, 584), (8192, 576), (64, 580)]
)
def test_latent_rows_in_cuda(index, rows, width):
    """Whole units are copied; of rows of 580 values there are none, and Triton stores them."""
    g = data.generator()
    both = torch.randn(rows, 2112, generator=g).bfloat16()
    slots = torch.randperm(9000, generator=g)[:rows].to(index)
    slots[2::6] = -1
    pool = torch.full((9000, width), 7.0).bfloat16()
    got = pool.cuda()
    args = (both[:, 1536:2048], both[:, 2048:], "bf16_1152")
    beyond = slots.clone()
    beyond[5::7] = 9000
    latent_rows.store(got[:, :576], beyond.cuda(), *on_gpu(args), impl="cuda")
    slots[5::7] = -1
    latent_rows.reference_store(pool[:, :576], slots, *args)
    assert torch.equal(got.cpu(), pool)


@pytest.mark.usefixtures("rounding")
def test_every_e4m3_code_its_borders_and_what_is_no_number():
    latent = data.e4m3_borders()
    args = (torch.arange(3), latent, latent[:, :64], "fp8_576", 1.0)
    rows, want = torch.zeros(3, 576, dtype=torch.uint8, device="cuda").view(FP8), torch.zeros(3, 576).to(FP8)
    latent_rows.store(rows, *on_gpu(args), **IMPL)
    latent_rows.reference_store(want, *args)
    rows, nan = rows.cpu(), want.float().isnan()
    assert torch.equal(rows.float().isnan(), nan) and nan.any()
    assert torch.equal(rows.view(torch.uint8)[~nan], want.view(torch.uint8)[~nan])


@pytest.mark.parametrize("rows", [1, 3, 64])
def test_captured_graphs_follow_new_inputs(rows):
    def inputs_of(seed):
        g = data.generator(seed)
        keys = data.key_inputs(rows, "half", dtype=torch.bfloat16, seed=seed).args("cuda")
        queries = on_gpu(data.query_inputs(rows, 64, "half", torch.bfloat16, seed=seed))
        keys[4] = queries[2] = data.positions_of(rows + 4, seed)[4:].cuda()
        latent = torch.randn(rows, 576, generator=g).bfloat16().cuda()
        return [keys[0], queries[0], queries[1], keys[4], data.slots_of(rows, 3, seed).cuda(), latent], keys

    def call(inputs, keys, pages, rows):
        key, query, weights, positions, slots, latent = inputs
        index_keys.store(pages, slots, key, *keys[1:4], positions, *keys[5:], **IMPL)
        latent_rows.store(rows, slots, latent[:, :512], latent[:, 512:], "fp8_656", **IMPL)
        return index_queries.prepare(query, weights, positions, *keys[5:], FP8, **IMPL)

    caches = [
        (data.new_pages(3, FP8, "cuda"), torch.zeros(192, 656, dtype=torch.uint8, device="cuda")) for _ in range(2)
    ]
    static, keys = inputs_of(0)
    for cache in caches:
        call(static, keys, *cache)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        q, gate = call(static, keys, *caches[0])
    for seed in (1, 2, 3):
        fresh, _ = inputs_of(seed)
        for old, new in zip(static, fresh):
            old.copy_(new)
        graph.replay()
        want_q, want_gate = call(fresh, keys, *caches[1])
        assert torch.equal(q.view(torch.uint8), want_q.view(torch.uint8)) and torch.equal(gate, want_gate)
        assert all(torch.equal(a, b) for a, b in zip(*caches))
