"""On a GPU the cache and attention operators in torch read nothing back: they never stop the stream.

Run on fake CUDA tensors, which know shapes and devices but no values: an operation that needs a value raises.
"""

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from sglang_dsa_plugin.cache.layouts import FP8, LATENT_LAYOUTS
from sglang_dsa_plugin.kernels.torch_impl import dense_mha, key_pages, latent_rows, quant, sparse_mla

ROWS = 5


@pytest.fixture
def gpu():
    with FakeTensorMode():
        yield lambda *shape, dtype=torch.float32: torch.empty(*shape, dtype=dtype, device="cuda")


@pytest.mark.parametrize("layout", LATENT_LAYOUTS)
def test_latent_rows_and_sparse_mla(gpu, layout):
    spec = LATENT_LAYOUTS[layout]
    rows, slots = gpu(300, spec.width, dtype=spec.dtype), gpu(ROWS, dtype=torch.int32)
    latent, rope = gpu(ROWS, 512), gpu(ROWS, 64)
    assert quant.quantize_latent(latent, rope, layout, 0.3).dtype == spec.dtype
    latent_rows.store(rows, slots, latent, rope, layout, 0.3)
    latent_rows.load(rows, slots, layout, 0.3, gpu(ROWS, 512, dtype=torch.bfloat16), gpu(ROWS, 64))
    latent_rows.move(rows, slots, slots)
    q, picks = gpu(ROWS, 16, 576, dtype=torch.bfloat16), gpu(ROWS, 33, dtype=torch.int32)
    out, lse = sparse_mla.sparse_mla(q, rows, picks, 0.1, layout, 0.3, gpu(16), gpu(ROWS, dtype=torch.int32))
    assert out.device.type == "cuda" and out.shape == (ROWS, 16, 512) and lse.shape == (ROWS, 16)


@pytest.mark.parametrize("kind", [FP8, torch.bfloat16])
def test_keys_and_key_pages(gpu, kind):
    fp8 = kind == FP8
    k, scale = quant.quantize_keys(gpu(ROWS, 128)) if fp8 else (gpu(ROWS, 128, dtype=kind), None)
    pages = gpu(3, 8448, dtype=torch.uint8) if fp8 else gpu(3, 64, 128, dtype=kind)
    slots = gpu(ROWS, dtype=torch.int32)
    key_pages.store(pages, slots, k, scale)
    assert key_pages.load(pages, slots)[0].dtype == kind
    key_pages.move(pages, slots, slots)


def test_dense_mha_is_the_one_that_reads_its_lengths(gpu):
    ends = gpu(2, dtype=torch.int32)
    with pytest.raises(DataDependentOutputException):
        dense_mha.dense_mha(gpu(ROWS, 4, 24), gpu(ROWS, 4, 24), gpu(ROWS, 4, 16), ends, ends, 0.1)
