"""ops.rope against complex multiplication in fp64."""

import pytest
import torch

from sglang_dsa_plugin.ops import rope


def _table(size=300, theta=10000.0, dtype=torch.float32):
    inverse = theta ** (-torch.arange(32, dtype=torch.float64) / 32)
    angle = torch.arange(size, dtype=torch.float64).unsqueeze(1) * inverse
    return torch.cat((angle.cos(), angle.sin()), dim=1).to(dtype)


def _x(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("layout", rope.LAYOUTS)
@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-6), (torch.bfloat16, 2**-8), (torch.float16, 2**-11)])
@pytest.mark.parametrize(
    "shape, positions", [((7, 64), (7,)), ((5, 3, 64), (5,)), ((2, 3, 4, 64), (2, 3)), ((64,), ())]
)
def test_equals_complex_rotation(layout, dtype, bound, shape, positions):
    x, table = _x(*shape, dtype=dtype), _table()
    p = torch.randint(0, 300, positions, generator=torch.Generator().manual_seed(1))
    got = rope.apply(x, p, table, layout)
    want = rope.reference(x, p, table, layout)
    assert got.dtype == dtype and got.shape == x.shape
    assert ((got.double() - want).abs() <= bound * want.abs().clamp(min=1)).all()
    assert torch.equal(got, rope.apply(x, p.int(), table, layout))


def test_layouts_differ_and_are_a_permutation_apart():
    x, p, table = _x(6, 64), torch.arange(1, 7), _table()
    half, interleaved = (rope.apply(x, p, table, layout) for layout in rope.LAYOUTS)
    assert (half - interleaved).abs().max() > 0.1
    order = torch.arange(64).view(2, 32).T.reshape(-1)  # interleaved slot 2i + j holds half slot 32j + i
    assert torch.equal(rope.apply(x[:, order], p, table, "interleaved"), half[:, order])


@pytest.mark.parametrize("layout", rope.LAYOUTS)
def test_scores_depend_on_distance_only(layout):
    q, k, table = _x(1, 64), _x(1, 64, seed=1), _table()
    dots = [
        float(
            (
                rope.apply(q, torch.tensor([p]), table, layout) * rope.apply(k, torch.tensor([p - 7]), table, layout)
            ).sum()
        )
        for p in (7, 50, 299)
    ]
    assert max(dots) - min(dots) < 1e-4


def test_position_zero_is_the_identity_and_input_is_untouched():
    wide = _x(4, 2, 128)
    kept = wide.clone()
    got = rope.apply(wide[..., :64], torch.zeros(4, dtype=torch.long), _table(), "half")
    assert torch.equal(got, wide[..., :64]) and torch.equal(wide, kept)


@pytest.mark.parametrize("layout", rope.LAYOUTS)
def test_a_row_does_not_depend_on_its_batch(layout):
    x, p, table = _x(299, 33, 64), torch.arange(299), _table()
    whole = rope.apply(x, p, table, layout)
    for first, last in ((0, 1), (7, 10), (100, 250), (298, 299)):
        assert torch.equal(rope.apply(x[first:last], p[first:last], table, layout), whole[first:last])
        assert torch.equal(rope.apply(x[first:last, 5], p[first:last], table, layout), whole[first:last, 5])


def test_no_rows():
    assert rope.apply(torch.zeros(0, 4, 64), torch.zeros(0, dtype=torch.int32), _table(), "half").shape == (0, 4, 64)


def test_bf16_table_is_read_as_it_is():
    x, p, table = _x(5, 64), torch.arange(5) + 20, _table(dtype=torch.bfloat16)
    want = rope.reference(x, p, table, "half")
    assert (rope.apply(x, p, table, "half").double() - want).abs().max() < 2e-6


@pytest.mark.parametrize(
    "change, argument",
    [
        ({"layout": "neox"}, "layout"),
        ({"x": torch.zeros(5, 128)}, "x"),
        ({"x": torch.zeros(5, 64, dtype=torch.int32)}, "x"),
        ({"positions": torch.zeros(4, dtype=torch.long)}, "positions"),
        ({"positions": torch.zeros(5)}, "positions"),
        ({"positions": torch.zeros(5, 64, dtype=torch.long)}, "positions"),
        ({"cos_sin": torch.zeros(9, 32)}, "cos_sin"),
    ],
)
def test_bad_input_is_named(change, argument):
    good = {
        "x": torch.zeros(5, 64),
        "positions": torch.zeros(5, dtype=torch.long),
        "cos_sin": _table(),
        "layout": "half",
    }
    with pytest.raises(ValueError, match=rf"rope\.apply: {argument} must be"):
        rope.apply(**{**good, **change})
