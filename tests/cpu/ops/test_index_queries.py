"""ops.index_queries in torch against fp64 written from the formula."""

import pytest
import torch

from sglang_dsa_plugin.cache.layouts import FP8
from sglang_dsa_plugin.kernels.torch_impl import index_front
from sglang_dsa_plugin.ops import index_queries
from tests.cpu.ops import index_front_inputs as data

DTYPES = (FP8, torch.bfloat16, torch.float32)


@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "heads"), [(1, 64), (3, 5), (37, 16)])
def test_equals_the_formula(layout, dtype, rows, heads):
    inputs = data.query_inputs(rows, heads, layout, torch.bfloat16)
    q, gate = index_queries.prepare(*inputs, dtype)
    assert q.dtype == dtype
    data.assert_queries(q, gate, inputs)


@pytest.mark.parametrize("dtype", DTYPES)
def test_strided_rows_and_int32_positions(dtype):
    inputs = data.query_inputs(7, 8, "half")
    want = index_queries.prepare(*inputs, dtype)
    projected, weights, positions, *rest = inputs
    wide = torch.cat((torch.ones(7, 24), projected, weights), dim=1)
    got = index_queries.prepare(wide[:, 24:-8], wide[:, -8:], positions.int(), *rest, dtype)
    assert all(torch.equal(a.float(), b.float()) for a, b in zip(got, want))


@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros_huge_and_tiny_values(dtype):
    inputs = data.query_inputs(6, 4, "interleaved")
    inputs[0][0], inputs[0][1] = 0, inputs[0][1] * 1e30
    inputs[0][2], inputs[0][3, 7] = inputs[0][2] * 1e-8, 1e12
    q, gate = index_queries.prepare(*inputs, dtype)
    data.assert_queries(q, gate, inputs)


def test_bytes_where_every_step_is_exact():
    inputs = data.exact_queries(30, 8)
    q, gate = index_queries.prepare(*inputs, FP8)
    want, want_gate = index_queries.reference(*inputs, FP8)
    assert torch.equal(data.steps(q), data.steps(want))
    assert torch.allclose(gate.double(), want_gate, rtol=2e-7, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_the_same_in_tiles(monkeypatch, dtype):
    inputs = data.query_inputs(37, 5, "half", torch.bfloat16)
    want = index_queries.prepare(*inputs, dtype)
    monkeypatch.setattr(index_front, "_CPU_TILE", 41)
    got = index_queries.prepare(*inputs, dtype)
    assert got[0].dtype == dtype
    assert all(torch.equal(a.float(), b.float()) for a, b in zip(got, want))


def test_no_rows():
    q, gate = index_queries.prepare(*data.query_inputs(0, 4, "half"), FP8)
    assert q.shape == (0, 4, 128) and gate.shape == (0, 4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({0: torch.zeros(3, 500)}, "projected must be"),
        ({0: torch.zeros(3, 512, dtype=torch.int32)}, "projected must be"),
        ({1: torch.zeros(3)}, "weights must be"),
        ({2: torch.zeros(4, dtype=torch.int64)}, "positions must be"),
        ({3: torch.zeros(9, 64, dtype=torch.bfloat16)}, "cos_sin must be"),
        ({4: "neox"}, "layout must be one of"),
        ({5: torch.float64}, "dtype must be one of"),
    ],
)
def test_bad_arguments_are_named(change, message):
    arguments = [*data.query_inputs(3, 4, "half"), FP8]
    for i, value in change.items():
        arguments[i] = value
    with pytest.raises(ValueError, match=f"index_queries.prepare: {message}"):
        index_queries.prepare(*arguments)
