"""Sparse MLA on a CUDA device against fp64: the Triton kernel that is chosen, the portable one, and the portable one in
CUDA C++ (sparse_mla_portable.py).

Most of the time goes into compiling; on a machine with many cores run it with pytest-xdist (-n 12).

Tried here: junk past the length, slots out of range, any block scale, batch sizes, more than 65535 rows, numbers of
heads and picks, few heads, padded heads, padded rows.
"""

import math

import pytest
import torch

from sglang_dsa_plugin.kernels.cuda import sparse_mla_portable as portable
from sglang_dsa_plugin.kernels.triton import index_tables
from sglang_dsa_plugin.kernels.triton import sparse_mla as kernels
from sglang_dsa_plugin.kernels.triton import sparse_mla_tiles as tiles
from sglang_dsa_plugin.ops import quant, sparse_mla
from tests.cpu.ops.bounds import assert_attention

pytestmark = pytest.mark.gpu

SCALE = 192**-0.5
LAYOUTS = ["bf16_1152", "fp8_656", "fp8_576"]
N = 20000


def generator(seed=0):
    return torch.Generator("cuda").manual_seed(seed)


def kv_scale_of(layout):
    return 0.02 if layout == "fp8_576" else 1.0


@pytest.fixture(scope="module")
def caches():
    g = generator()
    latent, rope = torch.randn(N, 512, device="cuda", generator=g), torch.randn(N, 64, device="cuda", generator=g)
    return {name: quant.quantize_latent(latent, rope, name, kv_scale_of(name), impl="torch") for name in LAYOUTS}


def queries(rows, heads, seed=1, dtype=torch.bfloat16):
    return torch.randn(rows, heads, 576, device="cuda", generator=generator(seed)).to(dtype)


def picks(rows, k, seed=2, count=N):
    return torch.randint(0, count, (rows, k), device="cuda", generator=generator(seed), dtype=torch.int32)


def reference(q, kv, slots, layout, sink=None, lengths=None):
    """fp64 on the GPU, row by row, on the dequantised rows; None in `slots` out of range."""
    out, lse = [], []
    for r in range(q.shape[0]):
        mine = slots[r] if lengths is None else slots[r, : lengths[r]]
        mine = mine[(mine >= 0) & (mine < kv.shape[0])].long()
        rows = kv.view(torch.uint8)[mine].view(kv.dtype)
        values = quant.dequantize_latent(rows, layout, kv_scale_of(layout), impl="torch").double()
        scores = SCALE * (q[r].double() @ values.T)
        total = torch.logsumexp(scores, dim=1)
        mean = torch.softmax(scores, dim=1) @ values[:, :512]
        if sink is not None and len(mine):
            mean = mean / (1 + torch.exp(sink.double() - total))[:, None]
        out.append(mean if len(mine) else torch.zeros_like(mean))
        lse.append(total)
    return torch.stack(out), torch.stack(lse)


def run(q, kv, slots, layout, sink=None, lengths=None, plan=None, q_rope=None):
    of_plan = portable if isinstance(plan, portable.Plan) else kernels
    return of_plan.sparse_mla(
        q, kv, slots, SCALE, layout, kv_scale_of(layout), sink, lengths, None, plan=plan, q_rope=q_rope
    )


def plans(heads, k, layout):
    """The table's choice, and the portable kernels with and without splits."""
    block = 16 if heads <= 16 else 32
    block_n, warps = (64, 8) if heads > 64 else (32, 4)
    return [
        None,
        tiles.Plan("gather", block, 32, 4, 2, 256, -(-k // 256)),
        tiles.Plan("gather", block, block_n, warps, 2, -(-k // block_n) * block_n, 1),
        *portable_plans(k, layout),
    ]


def portable_plans(k, layout):
    """Those of CUDA C++ that fit into this GPU's shared memory."""
    if layout not in portable.LAYOUTS:
        return []
    fp8, room = layout == "fp8_656", index_tables.gpu_of(torch.device("cuda")).shared_kib << 10
    whole = -(-k // 32) * 32
    stages, small = (1, 2) if fp8 else (3, 4)
    shared = dict(kept=15, together=2) if fp8 else {}
    found = [
        portable.Plan(64, stages, whole, 1, fp8, **shared),
        portable.Plan(64, stages, 256, -(-k // 256), fp8, **shared),
        portable.Plan(64, small, whole, 1, fp8, tile=16, kept=30),
        portable.Plan(32, stages, whole, 1, fp8),
    ]
    if not fp8:
        found.append(portable.Plan(64, stages, whole, 1, spread=True))
    return [plan for plan in found if plan.shared_bytes <= room]


def check(q, kv, slots, layout, sink=None, lengths=None):
    want = reference(q, kv, slots, layout, sink, lengths)
    for plan in plans(q.shape[1], slots.shape[1], layout):
        assert_attention(run(q, kv, slots, layout, sink, lengths, plan), want)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("heads", [1, 8, 16, 32, 64, 128])
@pytest.mark.parametrize("k", [64, 2048, 2051])
def test_heads_and_widths(caches, layout, heads, k):
    for rows in (1, 7):
        slots = picks(rows, k)
        slots[0, 3:40] = -1
        check(queries(rows, heads), caches[layout], slots, layout)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("rows", "heads"), [(2, 16), (64, 16), (300, 16), (2, 64), (300, 128)])
def test_batches_with_a_sink(caches, layout, rows, heads):
    slots = picks(rows, 2048 if rows < 300 else 200)
    slots[1] = -1
    slots[rows // 2, 17:] = -1
    check(
        queries(rows, heads), caches[layout], slots, layout, torch.randn(heads, device="cuda", generator=generator(4))
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("heads", [5, 64])
def test_wide_queries(caches, dtype, layout, heads):
    slots = picks(3, 500)
    q = queries(3, heads, dtype=dtype)
    assert_attention(run(q, caches[layout], slots, layout), reference(q, caches[layout], slots, layout))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("rows", "heads"), [(1, 16), (7, 8), (64, 16), (3, 32), (5, 128)])
def test_queries_in_two_strided_parts(caches, layout, rows, heads):
    # As a server has them: absorbed queries come out of a product by heads, the rest is a part of wider vectors.
    q, slots = queries(rows, heads), picks(rows, 2048)
    latent = q[..., :512].transpose(0, 1).contiguous().transpose(0, 1)
    rope = torch.cat((torch.full_like(q[..., :128], 7.0), q[..., 512:]), dim=-1)[..., 128:]
    for plan in plans(heads, 2048, layout):
        got = run(latent, caches[layout], slots, layout, plan=plan, q_rope=rope)
        assert all(map(torch.equal, got, run(q, caches[layout], slots, layout, plan=plan)))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("heads", [16, 64])
def test_junk_past_the_length_and_slots_out_of_range_change_nothing(caches, layout, heads):
    kv, q = caches[layout], queries(80, heads)
    slots = picks(80, 512)
    lengths = torch.arange(80, device="cuda", dtype=torch.int32) * 6
    want = reference(q, kv, slots, layout, lengths=lengths)
    behind = torch.arange(512, device="cuda") >= lengths[:, None]
    for junk in (-1, N, 2**31 - 1, -(2**31), 7):
        filled = slots.masked_fill(behind, junk)
        for plan in plans(heads, 512, layout):
            assert_attention(run(q, kv, filled, layout, lengths=lengths, plan=plan), want)
            if junk != 7:
                assert_attention(run(q, kv, filled, layout, plan=plan), want)


@pytest.mark.parametrize("heads", [16, 64])
def test_a_row_without_picks_reads_nothing_and_gives_zero(caches, heads):
    kv = caches["bf16_1152"].clone()
    kv.fill_(math.nan)
    for junk in (-1, N):
        slots = torch.full((5, 2048), junk, device="cuda", dtype=torch.int32)
        for plan in plans(heads, 2048, "bf16_1152"):
            out, lse = run(queries(5, heads), kv, slots, "bf16_1152", plan=plan)
            assert (out == 0).all() and (lse == -math.inf).all()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("rows", "heads"), [(1, 16), (40, 16), (1, 64), (140, 64)])
def test_a_nan_is_seen_where_it_is_picked_and_nowhere_else(caches, layout, rows, heads):
    kv = caches[layout].clone()
    kv.view(torch.uint8)[11, 4:6] = 0xFF
    slots = picks(rows + 1, 300)
    slots[slots == 11] = 12
    slots[:, 50:90] = -1
    slots[rows, 200] = 11
    for plan in plans(heads, 300, layout):
        out, lse = run(queries(rows + 1, heads), kv, slots, layout, plan=plan)
        assert not out[:rows].isnan().any() and not lse[:rows].isnan().any()
        assert out[rows].isnan().any(1).all() and lse[rows].isnan().all()


@pytest.mark.parametrize("heads", [16, 64])
def test_block_scales_of_any_kind_and_every_code(caches, heads):
    kv = caches["fp8_656"][:4096].clone()
    scales = torch.tensor([0.3, 1.7, 0.011, 2.0**-9], device="cuda")
    kv[:, 512:528] = (scales * torch.rand(4096, 4, device="cuda", generator=generator(5))).view(torch.uint8)
    codes = torch.arange(256, device="cuda", dtype=torch.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0
    kv[5, :512] = codes.repeat(2)
    for row, odd in enumerate(([0.0, 1.0, 1e-30, 2.0], [1.0, 0.0, 0.0, 0.0], [0.0] * 4), 6):
        kv[row, 512:528] = torch.tensor(odd, device="cuda").view(torch.uint8)
    slots = picks(20, 700, count=4096)
    slots[:, 3:7] = torch.arange(5, 9)
    check(queries(20, heads) * 0.02, kv, slots, "fp8_656")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("heads", [16, 64])
def test_few_picks_that_share_the_weight(caches, layout, heads):
    slots = torch.full((64, 2048), -1, device="cuda", dtype=torch.int32)
    slots[:, 5:2000:400] = picks(64, 5)
    check(queries(64, heads) * 0.05, caches[layout], slots, layout)


@pytest.mark.parametrize("layout", ["fp8_656", "fp8_576"])
@pytest.mark.parametrize("heads", [16, 64])
def test_many_small_weights_beside_a_heavy_one(layout, heads):
    """2047 picks of some 2^-26 each, below what f16 holds, are all that the output is of."""
    latent, rope = torch.full((2048, 512), 8.0, device="cuda"), torch.zeros(2048, 64, device="cuda")
    latent[0], rope[0, 0] = 0, 8
    kv = quant.quantize_latent(latent, rope, layout, kv_scale_of(layout), impl="torch")
    q = torch.zeros(3, heads, 576, device="cuda", dtype=torch.bfloat16)
    q[..., 512] = 30.5
    check(q, kv, torch.arange(2048, device="cuda").int().expand(3, -1).contiguous(), layout)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("rows", "heads"), [(1, 16), (16, 40), (16, 128), (70, 100)])
def test_lengths_of_any_size_with_heads_that_fill_no_tile(caches, layout, rows, heads):
    """As decode has them. A length far past int32 is the whole row, and slots may be int64."""
    q, slots = queries(rows, heads), picks(rows, 2048)
    lengths = torch.randint(1, 2049, (rows,), device="cuda", generator=generator(rows))
    lengths[rows // 2] = 0
    lengths[0] = 2048
    check(q, caches[layout], slots, layout, lengths=lengths.int())
    far = lengths.masked_fill(lengths == 2048, 2**63 - 1)
    want = reference(q, caches[layout], slots, layout, lengths=lengths)
    assert_attention(run(q, caches[layout], slots.long(), layout, lengths=far), want)


@pytest.mark.parametrize("heads", [1, 7, 8, 13, 16, 24, 32, 64])
def test_heads_are_those_of_a_wider_run_and_padding_is_inert(caches, heads):
    """Rows with disjoint picks, and NaN in the memory behind the last head."""
    kv = caches["bf16_1152"]
    wide = queries(2, 128)
    slots = torch.stack((picks(1, 640, count=N // 2)[0], picks(1, 640, count=N // 2)[0] + N // 2)).int()
    wide[:, heads:] = math.nan
    want = reference(wide[:, :heads], kv, slots, "bf16_1152")
    for plan in (None, *portable_plans(640, "bf16_1152")):
        assert_attention(run(wide[:, :heads], kv, slots, "bf16_1152", plan=plan), want)


@pytest.mark.parametrize("rows", [65535, 65536, 65537])
def test_more_rows_than_a_grid_axis_holds(caches, rows):
    q, slots = queries(rows, 1), picks(rows, 4)
    for plan in (None, tiles.Plan("gather", 16, 32, 4, 2, 32, 1), portable.Plan(32, 3, 32, 1)):
        out, lse = run(q, caches["bf16_1152"], slots, "bf16_1152", plan=plan)
        tail = slice(rows - 3, rows)
        assert_attention((out[tail], lse[tail]), reference(q[tail], caches["bf16_1152"], slots[tail], "bf16_1152"))


def test_rows_past_two_to_the_31_bytes_and_elements():
    count = 2**31 // 576 + 70
    kv = torch.zeros(count, 576, dtype=torch.bfloat16, device="cuda")
    kv[-64:] = torch.randn(64, 576, device="cuda", generator=generator(6)).bfloat16()
    slots = (count - 64 + torch.arange(64, device="cuda")).repeat(2, 1)
    check(queries(2, 16), kv, slots.int(), "bf16_1152")
    check(queries(2, 16), kv, slots.long(), "bf16_1152")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("rows", "heads"), [(1, 16), (7, 8), (64, 16), (3, 128), (300, 16), (140, 128)])
def test_results_repeat_bit_for_bit(caches, layout, rows, heads):
    q, slots = queries(rows, heads), picks(rows, 2051)
    slots[0, 100:1900] = -1
    for plan in plans(heads, 2051, layout):
        out, lse = run(q, caches[layout], slots, layout, plan=plan)
        for _ in range(24):
            again = run(q, caches[layout], slots, layout, plan=plan)
            assert torch.equal(again[0], out) and torch.equal(again[1], lse)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("heads", [16, 128])
def test_inside_a_cuda_graph_with_new_inputs(caches, layout, heads):
    for plan in (None, *portable_plans(2048, layout)):
        q, slots = queries(16, heads), picks(16, 2048)
        run(q, caches[layout], slots, layout, plan=plan)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = run(q, caches[layout], slots, layout, plan=plan)
        for seed in (7, 8):
            q.copy_(queries(16, heads, seed))
            slots.copy_(picks(16, 2048, seed))
            slots[3, seed:] = -1
            graph.replay()
            assert_attention(got, reference(q, caches[layout], slots, layout))


@pytest.mark.parametrize("size", [2.0**20, 2.0**-20, 0.0])
@pytest.mark.parametrize("layout", portable.LAYOUTS)
def test_values_that_f16_does_not_hold(layout, size):
    """All of them, and one: the portable kernel in CUDA C++ goes over the picks again."""
    g = generator(9)
    latent, rope = torch.randn(N, 512, device="cuda", generator=g), torch.randn(N, 64, device="cuda", generator=g)
    some = latent.clone()
    some[11, 100] = 2.0**17
    for values, q in ((latent * size, queries(3, 64) / max(size, 1)), (some, queries(3, 64) * 2.0**-12)):
        kv, slots = quant.quantize_latent(values, rope, layout, impl="torch"), picks(3, 300)
        slots[1, 7] = 11
        want = reference(q, kv, slots, layout)
        for plan in portable_plans(300, layout):
            assert_attention(run(q, kv, slots, layout, plan=plan), want)


def test_strided_arguments(caches):
    q = queries(4, 12)[:, ::3]
    out = torch.full((4, 8, 700), 9.0, dtype=torch.bfloat16, device="cuda")
    kv = torch.zeros(N, 584, dtype=torch.bfloat16, device="cuda")
    kv[:, :576] = caches["bf16_1152"]
    slots = torch.cat((picks(4, 600), picks(4, 100)), 1)[:, :600]
    want = reference(q, caches["bf16_1152"], slots, "bf16_1152")
    for view in (kv[:, :576], torch.cat((kv, kv[:, :1]), 1)[:, :576]):
        part = out[:, ::2, 100:612]
        for impl in ("triton", "cuda_portable"):
            part.fill_(5)
            got = sparse_mla.sparse_mla(q, view, slots, SCALE, "bf16_1152", out=part, impl=impl)
            assert_attention(got, want)
        assert (out[:, 1::2] == 9).all() and (out[:, :, :100] == 9).all() and (out[:, :, 612:] == 9).all()


def test_software_decode_equals_hardware_decode(caches, monkeypatch):
    fp8 = torch.cuda.get_device_capability() >= (8, 9)
    q, slots = queries(3, 16), picks(3, 400)
    for layout in ("fp8_656", "fp8_576"):
        results = []
        for decode in ("cvt", "bits", "ops") if fp8 else ("bits", "ops"):
            monkeypatch.setattr(kernels, "_decode", lambda _, way=decode: way)
            results.append(run(q, caches[layout], slots, layout, plan=plans(16, 400, layout)[2]))
        for out, lse in results[1:]:
            assert torch.equal(out, results[0][0]) and torch.equal(lse, results[0][1])
