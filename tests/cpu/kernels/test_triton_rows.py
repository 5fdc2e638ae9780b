"""The Triton kernels that store and read latent rows and put keys together, in Triton's interpreter, against torch and
fp64.

The interpreter must be chosen before Triton is imported, so the tests run in a process of their own.
"""

import os

import pytest
import torch

from sglang_dsa_plugin import support
from sglang_dsa_plugin.cache.layouts import FP8, LATENT_LAYOUTS
from sglang_dsa_plugin.kernels.torch_impl import latent_rows as torch_rows
from sglang_dsa_plugin.ops import latent_rows, mha_keys, quant
from tests.cpu.kernels import interpreted
from tests.cpu.ops import index_front_inputs as data

if os.environ.get("TRITON_INTERPRET") != "1":

    def test_in_the_interpreter():
        interpreted.assert_passes(__file__)

    @pytest.mark.parametrize("operator", ["latent_rows_store", "latent_rows_load", "mha_keys"])
    def test_a_gpu_takes_them_before_torch_and_a_cpu_never(operator):
        for sm in (80, 86, 89, 90, 100, 120):
            # Rows of bf16 have a kernel in CUDA C++ on SM 9.0 (test_cuda_latent_rows.py).
            assert support.choose(operator, device="cuda", sm=sm, layout="fp8_656").name == "triton"
        assert support.choose(operator, device="cuda", sm=75).name == "torch"
        assert support.choose(operator, device="cpu").name == "torch"

else:
    from sglang_dsa_plugin.kernels.triton import latent_rows as triton_rows
    from sglang_dsa_plugin.kernels.triton import mha_keys as triton_keys
    from tests.cpu.kernels import triton_interpreter  # noqa: F401

    def tokens(rows, dtype, g):
        latent, rope = torch.randn(rows, 512, generator=g).to(dtype), torch.randn(rows, 64, generator=g).to(dtype)
        latent[3], latent[5, 130], latent[6] = 0, 1e20, latent[6] * 1e-6
        return latent, rope

    def cache(layout, byte):
        spec = LATENT_LAYOUTS[layout]
        return torch.full((101, 3, spec.width * spec.dtype.itemsize), byte, dtype=torch.uint8), spec.dtype

    @pytest.mark.parametrize("layout", LATENT_LAYOUTS)
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
    @pytest.mark.parametrize("rows", [8, 41])
    def test_store(layout, dtype, rows):
        g = data.generator()
        latent, rope = tokens(rows, dtype, g)
        slots = torch.randperm(101, generator=g)[:rows]
        slots[::6], slots[3] = -1, 101
        (pool, row), (want, _) = cache(layout, 7), cache(layout, 7)
        triton_rows.store(pool.view(row)[:, 1], slots.int(), latent, rope, layout, 0.37)
        slots[3] = -1
        latent_rows.reference_store(want.view(row)[:, 1], slots, latent, rope, layout, 0.37)
        assert torch.equal(pool, want)

    def loaded(by, rows, slots, layout, dtype=torch.float32, scale=0.37):
        out = torch.full((len(slots), 600), 7.0).to(dtype)
        by.load(rows, slots, layout, scale, out[:, :512], out[:, 520:584])
        assert (out[:, 512:520] == 7).all() and (out[:, 584:] == 7).all()
        return torch.cat((out[:, :512], out[:, 520:584]), dim=1)

    @pytest.mark.parametrize("layout", LATENT_LAYOUTS)
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
    @pytest.mark.parametrize("rows", [1, 4, 41])
    def test_load(layout, dtype, rows):
        g = data.generator()
        pool, row = cache(layout, 0)
        part = pool.view(row)[:, 1]
        latent_rows.store(part, torch.arange(101), *(torch.randn(101, n, generator=g) for n in (512, 64)), layout, 0.37)
        slots = torch.randint(0, 101, (rows,), generator=g)
        slots[::5] = -1
        slots[-1] = 101
        got = loaded(triton_rows, part, slots.int(), layout, dtype)
        slots[-1] = -1
        assert torch.equal(got, loaded(torch_rows, part, slots, layout, dtype))
        want = latent_rows.reference_load(part, slots, layout, 0.37)
        torch.testing.assert_close(got.double(), want, rtol=2**-8 if dtype == torch.bfloat16 else 2e-7, atol=0)

    def test_every_code_is_read():
        rows = torch.arange(256, dtype=torch.uint8).repeat(9).view(4, 576).view(FP8)
        got, want = loaded(triton_rows, rows, torch.arange(4), "fp8_576", scale=1.0), rows.float()
        assert torch.equal(got.isnan(), want.isnan()) and torch.equal(got.nan_to_num(7.0), want.nan_to_num(7.0))

    def test_every_e4m3_code_its_borders_and_what_is_no_number():
        latent = data.e4m3_borders()
        rows, want = (torch.zeros(3, 576, dtype=torch.uint8).view(FP8) for _ in range(2))
        args = (torch.arange(3), latent, latent[:, :64], "fp8_576", 1.0)
        triton_rows.store(rows, *args)
        torch_rows.store(want, *args)
        nan = want.float().isnan()
        assert torch.equal(rows.float().isnan(), nan) and nan.any()
        assert torch.equal(rows.view(torch.uint8)[~nan], want.view(torch.uint8)[~nan])
        assert torch.equal(rows.float()[~nan], quant.reference_e4m3(torch.cat(args[1:3], 1).double()).float()[~nan])

    @pytest.mark.parametrize(
        ("heads", "width", "value"), [(1, 128, 128), (5, 40, 48), (16, 128, 128), (24, 192, 256), (130, 100, 4)]
    )
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
    def test_keys_put_together(heads, width, value, dtype):
        g = data.generator()
        expanded = torch.randn(7, heads, width + value, generator=g).to(dtype)
        rope = torch.randn(7, 576, generator=g).to(dtype)[:, 512:]
        got = triton_keys.join(expanded[..., :width], rope)
        assert got.is_contiguous() and torch.equal(got, mha_keys.reference(expanded[..., :width], rope))
        assert triton_keys.join(expanded[:0, :, :width], rope[:0]).shape == (0, heads, width + 64)
