"""ops.hadamard against its fp64 sum."""

import pytest
import torch

from sglang_dsa_plugin.ops import hadamard


def _x(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _within_rounding(got, x):
    """Sums in fp32: 1e-6 of the sum of the terms' sizes; then one rounding to the result's dtype."""
    want = hadamard.reference(x)
    sums = 1e-6 * x.double().abs().sum(-1, keepdim=True) / 128**0.5
    last = 0 if x.dtype == torch.float32 else torch.finfo(x.dtype).eps / 2
    return ((got.double() - want).abs() <= sums + last * want.abs() + 1e-7).all()


@pytest.mark.parametrize("shape", [(128,), (1, 128), (7, 128), (3, 5, 128), (0, 128), (2, 0, 128)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_equals_the_sum(shape, dtype):
    x = _x(*shape, dtype=dtype)
    got = hadamard.rotate(x)
    assert got.dtype == dtype and got.shape == x.shape
    assert _within_rounding(got, x)


def test_is_its_own_inverse_and_keeps_dot_products():
    q, k = _x(9, 128), _x(9, 128, seed=1)
    torch.testing.assert_close(hadamard.rotate(hadamard.rotate(q)), q, rtol=0, atol=2e-6)
    before, after = q.double() @ k.double().T, hadamard.rotate(q).double() @ hadamard.rotate(k).double().T
    torch.testing.assert_close(after, before, rtol=0, atol=2e-5)


def test_matrix_is_in_sylvester_order():
    got = hadamard.rotate(torch.eye(128))
    matrix = torch.ones(1, 1)
    for _ in range(7):
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)), 0)
    torch.testing.assert_close(got, matrix / 128**0.5, rtol=0, atol=1e-7)


@pytest.mark.parametrize("precision", ["high", "medium"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_matmul_precision_switch_of_the_process_costs_no_accuracy(precision, dtype):
    x = _x(33, 128, dtype=dtype)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision(precision)
        got = hadamard.rotate(x)
    finally:
        torch.set_float32_matmul_precision(before)
    assert _within_rounding(got, x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_does_not_depend_on_its_batch(dtype):
    """A key rotated alone in decode must be the key rotated in a prefill."""
    x = _x(4130, 128, dtype=dtype)
    whole = hadamard.rotate(x)
    for first, last in ((0, 1), (5, 7), (17, 32), (40, 71), (4100, 4130), (4000, 4129)):
        assert torch.equal(hadamard.rotate(x[first:last]), whole[first:last])


def test_reads_a_slice_of_a_wider_tensor_and_leaves_it_alone():
    wide = _x(4, 3, 256)
    kept = wide.clone()
    torch.testing.assert_close(
        hadamard.rotate(wide[..., 128:]).double(), hadamard.reference(wide[..., 128:]), rtol=0, atol=2e-6
    )
    assert torch.equal(wide, kept)


def test_a_nan_stays_in_its_row():
    x = _x(3, 128)
    x[1, 17] = torch.nan
    assert hadamard.rotate(x).isnan().all(-1).tolist() == [False, True, False]


@pytest.mark.parametrize(
    "x",
    [torch.zeros(3, 64), torch.zeros(()), torch.zeros(3, 128, dtype=torch.float64), torch.zeros(128, 3).T, [0.0]],
)
def test_bad_input_is_named(x):
    with pytest.raises(ValueError, match=r"hadamard\.rotate: x must be"):
        hadamard.rotate(x)


def test_unknown_implementation_is_refused():
    with pytest.raises(ValueError, match="impl='fast' does not exist"):
        hadamard.rotate(torch.zeros(128), impl="fast")
