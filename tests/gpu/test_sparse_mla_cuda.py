"""Sparse MLA in CUDA C++ (Hopper) on a CUDA device against fp64, with every number of blocks that share a row.

Tried here: junk past the length, slots out of range, any block scale, batch sizes, more than 65535 rows, numbers of
heads and picks, few heads, padded heads, rows with gaps and rows that overlap, scores in ascending order, rows that are
freed, and others at the place of those of a graph.
"""

import math

import pytest
import torch

from sglang_dsa_plugin.kernels.cuda import sparse_mla as kernels
from sglang_dsa_plugin.ops import quant, sparse_mla
from tests.cpu.ops.bounds import assert_attention
from tests.gpu.test_sparse_mla_triton import SCALE, N, generator, picks, queries, reference

pytestmark = pytest.mark.gpu

LAYOUTS = list(kernels.FORMS)
CLUSTERS = [None, 1, 2, 3, 8]
ALL_CLUSTERS = [None, *range(1, kernels.MOST_BLOCKS + 1)]


@pytest.fixture(scope="module", autouse=True)
def hopper():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("built for SM 9.0")


@pytest.fixture(scope="module")
def caches():
    g = generator()
    latent, rope = torch.randn(N, 512, device="cuda", generator=g), torch.randn(N, 64, device="cuda", generator=g)
    return {name: quant.quantize_latent(latent, rope, name, impl="torch") for name in LAYOUTS}


def run(q, kv, slots, layout, sink=None, lengths=None, cluster=None, **more):
    return kernels.sparse_mla(q, kv, slots, SCALE, layout, 1.0, sink, lengths, cluster=cluster, **more)


def check(q, kv, slots, layout, sink=None, lengths=None, clusters=CLUSTERS):
    want = reference(q, kv, slots, layout, sink, lengths)
    for cluster in clusters:
        assert_attention(run(q, kv, slots, layout, sink, lengths, cluster), want)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("heads", [1, 8, 13, 16, 40, 128])
@pytest.mark.parametrize("k", [1, 64, 65, 2048, 2051])
def test_heads_and_widths(caches, layout, heads, k):
    for rows in (1, 7):
        slots = picks(rows, k)
        slots[0, 3:40] = -1
        check(queries(rows, heads), caches[layout], slots, layout)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rows", [1, 16, 18, 24, 32])
def test_every_number_of_blocks_that_share_a_row(caches, layout, rows):
    lengths = torch.randint(0, 2049, (rows,), device="cuda", generator=generator(rows)).int()
    for k in (2048, 700):
        given = lengths.clamp(max=k)
        check(queries(rows, 16), caches[layout], picks(rows, k), layout, lengths=given, clusters=ALL_CLUSTERS)
        # A length far past int32 is the whole row.
        far = given.long().masked_fill(given == given.max(), 2**63 - 1)
        whole = torch.where(far > k, k, far).int()
        want = reference(queries(rows, 16), caches[layout], picks(rows, k), layout, lengths=whole)
        assert_attention(run(queries(rows, 16), caches[layout], picks(rows, k), layout, lengths=far), want)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rows", [2, 64, 133, 300])
def test_batches_with_a_sink(caches, layout, rows):
    slots = picks(rows, 2048 if rows < 300 else 200)
    slots[1] = -1
    slots[rows // 2, 17:] = -1
    check(queries(rows, 16), caches[layout], slots, layout, torch.randn(16, device="cuda", generator=generator(4)))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("rows", "heads"), [(1, 16), (7, 8), (64, 16), (3, 32)])
def test_queries_in_two_strided_parts(caches, layout, rows, heads):
    # As a server has them: absorbed queries come out of a product by heads, the rest is a part of wider vectors.
    q, slots = queries(rows, heads), picks(rows, 2048)
    latent = q[..., :512].transpose(0, 1).contiguous().transpose(0, 1)
    rope = torch.cat((torch.full_like(q[..., :128], 7.0), q[..., 512:]), dim=-1)[..., 128:]
    for cluster in CLUSTERS:
        got = run(latent, caches[layout], slots, layout, cluster=cluster, q_rope=rope)
        assert all(map(torch.equal, got, run(q, caches[layout], slots, layout, cluster=cluster)))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_junk_past_the_length_and_slots_out_of_range_change_nothing(caches, layout):
    kv, q = caches[layout], queries(80, 16)
    slots = picks(80, 512)
    lengths = torch.arange(80, device="cuda", dtype=torch.int32) * 7 - 3
    want = reference(q, kv, slots, layout, lengths=lengths.clamp(0, 512))
    behind = torch.arange(512, device="cuda") >= lengths[:, None]
    for junk in (-1, N, 2**31 - 1, -(2**31), 7):
        filled = slots.masked_fill(behind, junk)
        for cluster in CLUSTERS:
            assert_attention(run(q, kv, filled, layout, lengths=lengths, cluster=cluster), want)
            assert_attention(run(q, kv, filled.long(), layout, lengths=lengths.long(), cluster=cluster), want)
            if junk != 7:
                assert_attention(run(q, kv, filled, layout, cluster=cluster), want)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_row_without_picks_reads_nothing_and_gives_zero(caches, layout):
    kv = caches[layout].clone()
    kv.view(torch.uint8).fill_(0xFF)
    for junk in (-1, N):
        slots = torch.full((5, 2048), junk, device="cuda", dtype=torch.int32)
        for cluster in CLUSTERS:
            out, lse = run(queries(5, 16), kv, slots, layout, cluster=cluster)
            assert (out == 0).all() and (lse == -math.inf).all()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rows", [1, 40, 140])
def test_a_nan_is_seen_where_it_is_picked_and_nowhere_else(caches, layout, rows):
    kv = caches[layout].clone()
    kv.view(torch.uint8)[11, 4:6] = 0xFF
    slots = picks(rows + 1, 300)
    slots[slots == 11] = 12
    slots[:, 50:90] = -1
    slots[rows, 200] = 11
    for cluster in CLUSTERS:
        out, lse = run(queries(rows + 1, 16), kv, slots, layout, cluster=cluster)
        assert not out[:rows].isnan().any() and not lse[:rows].isnan().any()
        assert out[rows].isnan().any(1).all() and lse[rows].isnan().all()


@pytest.mark.parametrize("spread", [1.0, 2.0**-30, 2.0**20])
def test_block_scales_of_any_kind_and_every_code(caches, spread):
    kv = caches["fp8_656"][:4096].clone()
    scales = torch.tensor([0.3, 1.7, 0.011, 2.0**-9], device="cuda")
    kv[:, 512:528] = (scales * torch.rand(4096, 4, device="cuda", generator=generator(5))).view(torch.uint8)
    codes = torch.arange(256, device="cuda", dtype=torch.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0
    kv[5, :512] = codes.repeat(2)
    # Blocks whose scales differ by orders of magnitude within a row's picks, the largest ones last.
    by = torch.where(torch.arange(4096, device="cuda") % 7 == 0, spread, 1.0)[:, None]
    kv[:, 512:528] = (kv[:, 512:528].contiguous().view(torch.float32) * by).view(torch.uint8)
    slots = picks(9, 700, count=4096).sort(dim=1).values
    slots[:, 3] = 5
    q = queries(9, 16) * 0.02 / max(1.0, spread)
    check(q, kv, slots, "fp8_656")


@pytest.mark.parametrize("size", [2.0**-60, 2.0**60, 0.0])
def test_queries_of_any_size(caches, size):
    q, slots = queries(4, 16), picks(4, 300)
    q[:, ::2] *= size
    scale = 1 / size if size else 1.0
    kv = caches["fp8_656"]
    got, lse = run(q, kv, slots, "fp8_656")
    want = reference(q, kv, slots, "fp8_656")
    if size <= 1:  # large ones make the softmax a choice of one row, which rounding may decide
        assert_attention((got, lse), want)
    assert_attention((got[:, 1::2], lse[:, 1::2]), tuple(x[:, 1::2] for x in want))
    # A power of two in the query and its inverse in the scale: the same bits.
    if size:
        small = kernels.sparse_mla(q[:, ::2], kv, slots, SCALE * scale, "fp8_656")
        same = kernels.sparse_mla(queries(4, 16)[:, ::2], kv, slots, SCALE, "fp8_656")
        assert torch.equal(small[0], same[0])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_few_picks_that_share_the_weight(caches, layout):
    slots = torch.full((64, 2048), -1, device="cuda", dtype=torch.int32)
    slots[:, 5:2000:400] = picks(64, 5)
    check(queries(64, 16) * 0.05, caches[layout], slots, layout)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("heads", [1, 7, 8, 13, 16, 24])
def test_heads_are_those_of_a_wider_run_and_padding_is_inert(caches, layout, heads):
    """Rows with disjoint picks, and NaN in the memory behind the last head."""
    kv = caches[layout]
    wide = queries(2, 128)
    slots = torch.stack((picks(1, 640, count=N // 2)[0], picks(1, 640, count=N // 2)[0] + N // 2)).int()
    wide[:, heads:] = math.nan
    check(wide[:, :heads], kv, slots, layout)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_more_rows_than_a_grid_axis_holds(caches, layout):
    rows = 65537
    q, slots = queries(rows, 1), picks(rows, 4)
    for cluster in (None, 2):
        out, lse = run(q, caches[layout], slots, layout, cluster=cluster)
        tail = slice(rows - 3, rows)
        assert_attention((out[tail], lse[tail]), reference(q[tail], caches[layout], slots[tail], layout))


def test_rows_past_two_to_the_31_bytes_and_elements():
    count = 2**31 // 576 + 70
    kv = torch.zeros(count, 576, dtype=torch.bfloat16, device="cuda")
    kv[-64:] = torch.randn(64, 576, device="cuda", generator=generator(6)).bfloat16()
    slots = (count - 64 + torch.arange(64, device="cuda")).repeat(2, 1)
    check(queries(2, 16), kv, slots.int(), "bf16_1152")
    check(queries(2, 16), kv, slots.long(), "bf16_1152")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("rows", "heads"), [(1, 16), (7, 8), (64, 16), (300, 16)])
def test_results_repeat_bit_for_bit(caches, layout, rows, heads):
    q, slots = queries(rows, heads), picks(rows, 2051)
    slots[0, 100:1900] = -1
    for cluster in CLUSTERS:
        out, lse = run(q, caches[layout], slots, layout, cluster=cluster)
        for _ in range(24):
            again = run(q, caches[layout], slots, layout, cluster=cluster)
            assert torch.equal(again[0], out) and torch.equal(again[1], lse)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_inside_a_cuda_graph_with_new_inputs(caches, layout):
    q, slots = queries(16, 16), picks(16, 2048)
    lengths = torch.full((16,), 2048, device="cuda", dtype=torch.int32)
    run(q, caches[layout], slots, layout, lengths=lengths)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run(q, caches[layout], slots, layout, lengths=lengths)
    for seed in (7, 80):
        q.copy_(queries(16, 16, seed))
        slots.copy_(picks(16, 2048, seed))
        slots[3, seed:] = -1
        lengths.copy_(torch.arange(16, device="cuda") * seed)
        graph.replay()
        assert_attention(got, reference(q, caches[layout], slots, layout, lengths=lengths))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strided_and_unaligned_arguments(caches, layout):
    q = queries(4, 12)[:, ::3]
    odd = torch.empty(q.numel() + 1, dtype=torch.bfloat16, device="cuda")[1:].view_as(q)
    odd.copy_(q)
    slots = torch.cat((picks(4, 600), picks(4, 100)), 1)[:, :600]
    kv = caches[layout]
    wider = torch.zeros(N, kv.shape[1] + 16, dtype=kv.dtype, device="cuda")[:, : kv.shape[1]]
    wider.copy_(kv)
    want = reference(q, kv, slots, layout)
    for view in (kv, wider):
        for asked in (q, odd):
            out = torch.full((4, 8, 701), 9.0, dtype=torch.bfloat16, device="cuda")
            part = out[:, ::2, 101:613]
            got = sparse_mla.sparse_mla(asked, view, slots, SCALE, layout, out=part, impl="cuda")
            assert_attention(got, want)
            assert (out[:, 1::2] == 9).all() and (out[:, :, :101] == 9).all() and (out[:, :, 613:] == 9).all()
    # Rows off 16-byte bounds, which the kernel cannot copy, are Triton's.
    apart = torch.zeros(N, kv.shape[1] + (4 if layout == "fp8_656" else 2), dtype=kv.dtype, device="cuda")
    off = apart[:, : kv.shape[1]]
    off.copy_(kv)
    assert_attention(sparse_mla.sparse_mla(q, off, slots, SCALE, layout, impl="cuda"), want)


@pytest.mark.parametrize("heads", [8, 16])
@pytest.mark.parametrize("gap", [8, 64, 576])
def test_rows_with_gaps_between_them(caches, heads, gap):
    kv = torch.full((N, 576 + gap), math.nan, dtype=torch.bfloat16, device="cuda")[:, :576]
    kv.copy_(caches["bf16_1152"])
    slots = picks(140, 330)
    slots[0, 3:40], slots[7], slots[20, 17:] = -1, -1, N
    masked = slots.masked_fill(slots >= N, -1)
    want = reference(queries(140, heads), kv, masked, "bf16_1152")
    assert_attention(run(queries(140, heads), kv, slots, "bf16_1152"), want)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_that_overlap(caches, layout):
    """Which the tensor unit gets no map of."""
    kv = caches[layout][5:6].expand(N, -1)
    check(queries(140, 16), kv, picks(140, 100), layout, clusters=[None, 2])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("heads", [8, 16])
@pytest.mark.parametrize("size", [1, 10, 30])
@pytest.mark.parametrize(("rows", "clusters"), [(6, [1, 2]), (270, [1])])
def test_scores_that_grow_from_pick_to_pick(caches, layout, heads, size, rows, clusters):
    """So that every tile, and every quarter of it, has a larger maximum than those before; or a smaller one. As few
    rows as a cluster takes, and more than there are processors: blocks walk over these, 16 heads in another form.
    """
    k = 700
    q, kv = queries(rows, heads) * size, caches[layout]
    slots = picks(rows, k)
    by_score = (q[:, 0].double() @ quant.dequantize_latent(kv, layout, impl="torch").double().T).gather(1, slots.long())
    slots = slots.gather(1, by_score.argsort(1))
    slots[1] = slots[1].flip(0)
    slots[2, :70], slots[3, :16], slots[4, 16:64] = -1, -1, -1
    check(q, kv, slots, layout, clusters=clusters)


def test_a_graph_keeps_the_rows_it_was_recorded_with(caches):
    kv, q, slots = caches["bf16_1152"].clone(), queries(140, 16), picks(140, 100)
    run(q, kv, slots, "bf16_1152")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run(q, kv, slots, "bf16_1152")
    for size in (100, N):
        run(q, kv[:size] * 2, slots % size, "bf16_1152")
    kv.neg_()
    graph.replay()
    assert_attention(got, reference(q, kv, slots, "bf16_1152"))


def test_rows_that_nobody_holds_are_freed():
    run(queries(140, 16), torch.zeros(N, 576, dtype=torch.bfloat16, device="cuda"), picks(140, 100), "bf16_1152")
    before = torch.cuda.memory_allocated()
    kv = torch.zeros(200_000, 576, dtype=torch.bfloat16, device="cuda")
    run(queries(140, 16), kv, picks(140, 100), "bf16_1152")
    del kv
    assert torch.cuda.memory_allocated() == before
