"""Kernels of other packages behind the operator contract, on a CUDA device against fp64."""

import pytest
import torch

from sglang_dsa_plugin.ops import dense_mha, sparse_mla
from tests.cpu.ops.bounds import assert_attention

pytestmark = pytest.mark.gpu
SCALE = 192**-0.5


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def on_gpu(*tensors):
    return [t.cuda() if isinstance(t, torch.Tensor) else t for t in tensors]


@pytest.mark.parametrize("heads", [64, 128, 100, 50])
@pytest.mark.parametrize("k", [2048, 300, 64])
def test_flash_mla_prefill(heads, k):
    pytest.importorskip("flash_mla")
    rows, count = 9, 5000
    q, kv = normal(rows, heads, 576), normal(count, 576, seed=1)
    slots = torch.randint(0, count, (rows, k), generator=torch.Generator().manual_seed(2), dtype=torch.int32)
    slots[0, 3:40] = -1
    slots[1] = -1
    slots[2, 1:] = -1
    slots[3, 9:] = count + 7
    lengths = torch.full((rows,), k)
    lengths[4], lengths[5] = 0, 33
    sink = torch.randn(heads)
    for options in ({}, {"sink": sink}, {"lengths": lengths}):
        want = sparse_mla.reference(q, kv, slots, SCALE, "bf16_1152", **options)
        # The same weights over |values|: the last 64 of a row only score.
        spread = magnitudes(q, kv, slots, **options)
        gpu = {name: value.cuda() for name, value in options.items()}
        got = sparse_mla.sparse_mla(*on_gpu(q, kv, slots), SCALE, "bf16_1152", impl="flash_mla", **gpu)
        assert_attention([t.cpu() for t in got], want, spread=spread)


def magnitudes(q, kv, slots, sink=None, lengths=None):
    """sum of weight * |latent| [R, H, 512] in fp64."""
    spread = torch.zeros(*q.shape[:2], 512, dtype=torch.float64)
    for r in range(q.shape[0]):
        mine = slots[r] if lengths is None else slots[r, : lengths[r]]
        rows = kv[mine[(mine >= 0) & (mine < kv.shape[0])].long()].double()
        if len(rows):
            spread[r] = torch.softmax(SCALE * q[r].double() @ rows.T, dim=1) @ rows[:, :512].abs()
    return spread


@pytest.mark.parametrize(("width", "values"), [(192, 128), (256, 256)])
@pytest.mark.parametrize("heads", [8, 16, 128])
def test_fa3_dense(heads, width, values):
    pytest.importorskip("sgl_kernel")
    queries, keys = [5, 1, 200, 64, 0], [5, 300, 200, 100, 0]
    cu_q = torch.tensor([0, *queries]).cumsum(0).int()
    cu_k = torch.tensor([0, *keys]).cumsum(0).int()
    q, k = normal(sum(queries), heads, width), normal(sum(keys), heads, width, seed=1)
    v = normal(sum(keys), heads, values, seed=2)
    want = dense_mha.reference(q, k, v, cu_q, cu_k, SCALE)
    spread, _ = dense_mha.reference(q, k, v.abs(), cu_q, cu_k, SCALE)
    got = dense_mha.dense_mha(*on_gpu(q, k, v, cu_q, cu_k), SCALE, impl="fa3")
    assert_attention([t.cpu() for t in got], want, spread=spread)


def test_no_tokens_at_all():
    cu = torch.zeros(3, dtype=torch.int32).cuda()
    q = torch.empty(0, 16, 192, device="cuda", dtype=torch.bfloat16)
    v = torch.empty(0, 16, 128, device="cuda", dtype=torch.bfloat16)
    out, lse = dense_mha.dense_mha(q, q, v, cu, cu, SCALE, impl="fa3")
    assert out.shape == (0, 16, 128) and lse.shape == (0, 16)
