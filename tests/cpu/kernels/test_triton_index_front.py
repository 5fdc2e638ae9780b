"""The Triton kernels that store keys and prepare queries, in Triton's interpreter, against torch and fp64.

The interpreter must be chosen before Triton is imported, so the tests run in a process of their own.
"""

import os

import pytest
import torch

from sglang_dsa_plugin import support
from sglang_dsa_plugin.cache.layouts import FP8
from sglang_dsa_plugin.kernels.torch_impl import index_front as torch_front
from tests.cpu.kernels import interpreted
from tests.cpu.ops import index_front_inputs as data

DTYPES = (FP8, torch.bfloat16, torch.float32)

if os.environ.get("TRITON_INTERPRET") != "1":

    def test_in_the_interpreter():
        interpreted.assert_passes(__file__)

    @pytest.mark.parametrize(
        ("operator", "on_a_cpu"),
        [("index_keys_store", "numba"), ("index_queries", "torch")],
    )
    def test_a_gpu_takes_them_before_torch_and_a_cpu_never(operator, on_a_cpu):
        for sm in (80, 86, 89, 90, 100, 120):
            assert support.choose(operator, device="cuda", sm=sm).name == "triton"
        assert support.choose(operator, device="cuda", sm=75).name == "torch"
        assert support.choose(operator, device="cpu").name == on_a_cpu

else:
    from sglang_dsa_plugin.kernels.triton import index_front as triton_front
    from tests.cpu.kernels import triton_interpreter  # noqa: F401

    @pytest.mark.parametrize("layout", ["half", "interleaved"])
    @pytest.mark.parametrize("norm", ["layer", "rms"])
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("rows", [1, 37])
    def test_keys(layout, norm, dtype, rows):
        inputs, slots = data.key_inputs(rows, layout, norm, torch.bfloat16), data.slots_of(rows, 3)
        pages = data.new_pages(3, dtype)
        triton_front.store_keys(pages, slots, *inputs.args())
        data.assert_keys(pages, slots, inputs)

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_keys_strided_int32_out_of_range_and_in_a_larger_buffer(dtype):
        inputs, slots = data.key_inputs(9, "half"), data.slots_of(9, 2)
        want = data.new_pages(2, dtype)
        triton_front.store_keys(want, slots, *inputs.args())
        inputs.projected = torch.cat((torch.ones(9, 40), inputs.projected), dim=1)[:, 40:]
        inputs.positions = inputs.positions.int()
        slots[4] = 128
        buffer = torch.stack((data.new_pages(2, dtype),) * 3, dim=1)
        triton_front.store_keys(buffer[:, 1], slots.int(), *inputs.args())
        assert torch.equal(buffer[:, 1], want)
        assert torch.equal(buffer[:, ::2], torch.stack((data.new_pages(2, dtype),) * 2, dim=1))

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_keys_of_zeros_and_huge_values(dtype):
        inputs, slots = data.key_inputs(6, "interleaved"), torch.arange(6)
        inputs.projected[0] = 0
        inputs.projected[1] *= 1e17
        inputs.projected[2] *= 1e-4
        inputs.projected[3, 5] = 1e12
        pages = data.new_pages(1, dtype)
        triton_front.store_keys(pages, slots, *inputs.args())
        data.assert_keys(pages, slots, inputs)

    def test_bytes_of_keys_where_every_step_is_exact():
        inputs, slots = data.exact_keys(40), data.slots_of(40, 1)
        pages, want = data.new_pages(1, FP8), data.new_pages(1, FP8)
        triton_front.store_keys(pages, slots, *inputs.args())
        torch_front.store_keys(want, slots, *inputs.args())
        assert torch.equal(pages, want)

    @pytest.mark.parametrize("layout", ["half", "interleaved"])
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize(("rows", "heads"), [(1, 64), (5, 5), (23, 16)])
    def test_queries(layout, dtype, rows, heads):
        inputs = data.query_inputs(rows, heads, layout, torch.bfloat16)
        q, gate = triton_front.prepare_queries(*inputs, dtype)
        data.assert_queries(q, gate, inputs)
        if dtype != FP8:
            assert torch.equal(q, torch_front.prepare_queries(*inputs, dtype)[0])

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_queries_strided_zeros_and_huge_values(dtype):
        inputs = data.query_inputs(6, 4, "interleaved")
        inputs[0][0], inputs[0][1] = 0, inputs[0][1] * 1e30
        inputs[0][2], inputs[0][3, 7] = inputs[0][2] * 1e-8, 1e12
        projected, weights, positions, *rest = inputs
        wide = torch.cat((torch.ones(6, 24), projected, weights), dim=1)
        q, gate = triton_front.prepare_queries(wide[:, 24:-4], wide[:, -4:], positions.int(), *rest, dtype)
        data.assert_queries(q, gate, inputs)

    def test_bytes_of_queries_where_every_step_is_exact():
        inputs = data.exact_queries(10, 8)
        got, want = (f.prepare_queries(*inputs, FP8) for f in (triton_front, torch_front))
        assert torch.equal(got[0].view(torch.uint8), want[0].view(torch.uint8)) and torch.equal(got[1], want[1])

    def test_queries_that_are_no_numbers_spoil_their_own_head_only():
        inputs = data.query_inputs(2, 3, "half")
        inputs[0][0, 5], inputs[0][1, 128 + 100] = torch.nan, torch.inf
        (q, gate), (want, want_gate) = (f.prepare_queries(*inputs, FP8) for f in (triton_front, torch_front))
        assert torch.equal(q.float().isnan(), want.float().isnan()) and torch.equal(gate, want_gate)
        assert (q[1, 1].float().abs() == 448).all()
