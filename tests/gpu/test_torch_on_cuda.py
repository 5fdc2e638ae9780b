"""The torch implementations on a CUDA device against the fp64 references: the path that serves a GPU without kernels
of its own.
"""

import pytest
import torch

from sglang_dsa_plugin.cache.layouts import FP8, LATENT_LAYOUTS
from sglang_dsa_plugin.ops import (
    dense_mha,
    hadamard,
    index_scores,
    index_select,
    key_pages,
    latent_rows,
    quant,
    rope,
    select,
    sparse_mla,
)
from tests.cpu.ops import indexer_inputs
from tests.cpu.ops.bounds import assert_attention

pytestmark = pytest.mark.gpu

SCALE = 192**-0.5
IMPL = {"impl": "torch"}


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def on_host(values):
    return [None if v is None else v.cpu() for v in values]


@pytest.mark.parametrize("layout", LATENT_LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("rows", "heads", "k"), [(1, 16, 2048), (7, 5, 129), (64, 128, 256)])
def test_sparse_mla(layout, dtype, rows, heads, k):
    cache = quant.quantize_latent(normal(4096, 512), normal(4096, 64, seed=1), layout)
    q = normal(rows, heads, 576, seed=2).to(dtype)
    slots = torch.stack([torch.randperm(4096)[:k] for _ in range(rows)]).int()
    slots[:, ::7] = -1
    got = sparse_mla.sparse_mla(q.cuda(), cache.cuda(), slots.cuda(), SCALE, layout, **IMPL)
    want = sparse_mla.reference(q, cache, slots, SCALE, layout)
    assert_attention(on_host(got), want, f32=dtype == torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("qk", "v"), [(192, 128), (256, 256)])
def test_dense_mha(dtype, qk, v):
    queries, keys = [5, 0, 64, 1], [5, 7, 200, 130]
    cu_q, cu_k = (torch.tensor([0, *torch.tensor(n).cumsum(0).tolist()], dtype=torch.int32) for n in (queries, keys))
    q = normal(sum(queries), 8, qk).to(dtype)
    k, values = normal(sum(keys), 8, qk, seed=1).to(dtype), normal(sum(keys), 8, v, seed=2).to(dtype)
    got = dense_mha.dense_mha(*(t.cuda() for t in (q, k, values, cu_q, cu_k)), qk**-0.5, **IMPL)
    assert_attention(on_host(got), dense_mha.reference(q, k, values, cu_q, cu_k, qk**-0.5), f32=dtype == torch.float32)


@pytest.mark.parametrize("dtype", [FP8, torch.bfloat16, torch.float32])
def test_index_scores_and_select(dtype):
    data = indexer_inputs.exact(rows=40, heads=64, keys=1024, dtype=dtype)
    table = torch.randperm(16).view(2, 8)
    lengths = torch.randint(0, 513, (40,), generator=torch.Generator().manual_seed(4)).int()
    owner = (torch.arange(40) >= 17).int()
    args = (data.q, data.pages, data.gate, lengths, table.int(), owner)
    scores = index_scores.paged(*(a.cuda() for a in args), **IMPL)
    want = index_scores.reference_paged(*args)
    assert torch.equal(scores.cpu().double(), want.double()[:, : scores.shape[1]])
    picks = index_select.paged(*(a.cuda() for a in args), 100, **IMPL)
    assert torch.equal(picks.cpu(), index_select.reference_paged(*args, 100))
    again = index_select.paged(*(a.cuda() for a in args), 100, budget_bytes=4 * 264, **IMPL)
    assert torch.equal(again, picks)


@pytest.mark.parametrize("k", [64, 2048])
def test_topk_is_exact_with_ties_and_specials(k):
    g = torch.Generator().manual_seed(5)
    scores = torch.randint(-3, 4, (33, 5000), generator=g).float()
    scores[0], scores[1], scores[2] = 0.0, -torch.inf, torch.nan
    scores[3, ::3], scores[4, ::5], scores[5, ::2] = torch.nan, -0.0, 1e-42
    lengths = torch.randint(0, 5001, (33,), generator=g).int()
    want = select.reference(scores, lengths, k)
    results = {tuple(select.topk(scores.cuda(), lengths.cuda(), k, **IMPL).cpu().flatten().tolist()) for _ in range(5)}
    assert results == {tuple(want.flatten().tolist())}


@pytest.mark.parametrize("layout", LATENT_LAYOUTS)
def test_rows_and_pages_round_trip(layout):
    rows = torch.zeros(256, LATENT_LAYOUTS[layout].width, dtype=LATENT_LAYOUTS[layout].dtype, device="cuda")
    slots = torch.tensor([3, 70, -1, 255], device="cuda")
    latent, turned = normal(4, 512).cuda(), normal(4, 64, seed=1).cuda()
    latent_rows.store(rows, slots, latent, turned, layout, **IMPL)
    want = quant.dequantize_latent(quant.quantize_latent(latent.cpu(), turned.cpu(), layout), layout)
    got = latent_rows.load(rows, slots[[0, 1, 3]], layout, **IMPL).cpu()
    assert torch.equal(got, want[[0, 1, 3]])
    pages = torch.zeros(4, 8448, dtype=torch.uint8, device="cuda")
    keys, scales = quant.quantize_keys(normal(4, 128).cuda(), **IMPL)
    key_pages.store(pages, slots, keys, scales, **IMPL)
    back = key_pages.load(pages, slots[[0, 1, 3]], **IMPL)
    assert torch.equal(back[0].float(), keys[[0, 1, 3]].float()) and torch.equal(back[1], scales[[0, 1, 3]])


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_rope_and_rotation(layout):
    x, positions = normal(30, 4, 64), torch.randint(0, 512, (30,))
    angle = torch.arange(512).double()[:, None] * 1e4 ** (-torch.arange(0, 64, 2).double() / 64)
    table = torch.cat([angle.cos(), angle.sin()], dim=-1).float()
    turned = rope.apply(x.cuda(), positions.cuda(), table.cuda(), layout, **IMPL)
    assert (turned.cpu() - rope.reference(x, positions, table, layout)).abs().max() < 1e-5
    y = normal(30, 128)
    assert (hadamard.rotate(y.cuda(), **IMPL).cpu() - hadamard.reference(y)).abs().max() < 1e-5
