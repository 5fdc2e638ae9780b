"""ops.index_keys, in torch and as compiled for this CPU, against fp64 written from the formula."""

import functools

import pytest
import torch

from sglang_dsa_plugin.cache.layouts import FP8
from sglang_dsa_plugin.ops import index_keys, key_pages
from tests.cpu.ops import index_front_inputs as data

DTYPES = (FP8, torch.bfloat16, torch.float32)


@pytest.fixture(autouse=True, params=["torch", "numba"])
def implementation(request, monkeypatch):
    """Calls of a test that name no implementation take this one."""
    monkeypatch.setattr(index_keys, "store", functools.partial(index_keys.store, impl=request.param))


@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 3, 67])
def test_equals_the_formula(layout, norm, dtype, rows):
    inputs, slots = data.key_inputs(rows, layout, norm, torch.bfloat16), data.slots_of(rows, 3)
    pages = data.new_pages(3, dtype)
    index_keys.store(pages, slots, *inputs.args())
    data.assert_keys(pages, slots, inputs)


@pytest.mark.parametrize("dtype", DTYPES)
def test_strided_rows_int32_indices_and_pages_of_a_larger_buffer(dtype):
    inputs, slots = data.key_inputs(9, "half"), data.slots_of(9, 2)
    want = data.new_pages(2, dtype)
    index_keys.store(want, slots, *inputs.args())
    inputs.projected = torch.cat((torch.ones(9, 40), inputs.projected), dim=1)[:, 40:]
    inputs.positions = inputs.positions.int()
    buffer = torch.stack((data.new_pages(2, dtype),) * 3, dim=1)
    index_keys.store(buffer[:, 1], slots.int(), *inputs.args())
    assert torch.equal(buffer[:, 1], want)
    assert torch.equal(buffer[:, ::2], torch.stack((data.new_pages(2, dtype),) * 2, dim=1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("slots", [[], [-1, -1, -1]])
def test_nothing_to_write(dtype, slots):
    pages = data.new_pages(1, dtype)
    index_keys.store(pages, torch.tensor(slots, dtype=torch.int64), *data.key_inputs(len(slots), "half").args())
    assert torch.equal(pages, data.new_pages(1, dtype))


@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_of_zeros_and_huge_values(dtype, norm):
    inputs, slots = data.key_inputs(6, "interleaved", norm), torch.arange(6)
    inputs.projected[0] = 0
    inputs.projected[1] *= 1e17
    inputs.projected[2] *= 1e-4
    inputs.projected[3, 5] = 1e12
    pages = data.new_pages(1, dtype)
    index_keys.store(pages, slots, *inputs.args())
    data.assert_keys(pages, slots, inputs)


def test_bytes_where_every_step_is_exact():
    inputs, slots = data.exact_keys(40), data.slots_of(40, 1)
    pages, want = data.new_pages(1, FP8), data.new_pages(1, FP8)
    index_keys.store(pages, slots, *inputs.args())
    index_keys.reference_store(want, slots, *inputs.args())
    assert torch.equal(pages, want)


def test_a_key_does_not_depend_on_its_batch():
    inputs, pages, alone = data.key_inputs(50, "half"), data.new_pages(1, FP8), data.new_pages(1, FP8)
    index_keys.store(pages, torch.arange(50), *inputs.args())
    for i in (0, 17, 49):
        projected, positions = inputs.projected[i : i + 1], inputs.positions[i : i + 1]
        rest = (inputs.weight, inputs.bias, inputs.eps, positions, inputs.cos_sin, inputs.layout)
        index_keys.store(alone, torch.tensor([i]), projected, *rest)
        assert all(
            torch.equal(a.float(), b.float())
            for a, b in zip(*(key_pages.load(p, torch.tensor([i])) for p in (pages, alone)))
        )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pages": torch.zeros(1, 8192, dtype=torch.uint8)}, "pages must be"),
        ({"slots": torch.zeros(4, dtype=torch.int64)}, "projected must be"),
        ({"slots": torch.tensor([0, 1, 64])}, r"slots must be -1 or in \[0, 64\)"),
        ({"projected": torch.zeros(3, 64)}, "projected must be"),
        ({"projected": torch.zeros(3, 128, dtype=torch.float64)}, "projected must be"),
        ({"weight": torch.ones(128, dtype=torch.bfloat16)}, "weight must be"),
        ({"bias": torch.ones(64)}, "bias must be"),
        ({"eps": -1.0}, "eps must be"),
        ({"eps": None}, "eps must be"),
        ({"positions": torch.zeros(3)}, "positions must be"),
        ({"cos_sin": torch.zeros(9, 128)}, "cos_sin must be"),
        ({"layout": "neox"}, "layout must be one of half, interleaved"),
        ({"impl": "triton"}, "impl='triton' cannot run here: triton: runs on cuda, not on cpu"),
    ],
)
def test_bad_arguments_are_named(change, message):
    good = {"pages": data.new_pages(1, FP8), "slots": torch.arange(3), **vars(data.key_inputs(3, "half"))}
    with pytest.raises(ValueError, match=message):
        index_keys.store(**{**good, **change})


@pytest.mark.parametrize("position", [-1, data.key_inputs(1, "half").cos_sin.shape[0]])
def test_a_position_outside_the_table_is_refused_before_anything_is_read(position):
    inputs, pages = data.key_inputs(3, "half"), data.new_pages(1, FP8)
    inputs.positions[1] = position
    with pytest.raises((ValueError, IndexError)):
        index_keys.store(pages, torch.arange(3), *inputs.args())
    assert torch.equal(pages, data.new_pages(1, FP8))
