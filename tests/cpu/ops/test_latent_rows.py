"""ops.latent_rows: store, load and move tokens of a latent cache in every layout."""

import pytest
import torch

from sglang_dsa_plugin.cache.layouts import LATENT_LAYOUTS
from sglang_dsa_plugin.kernels.torch_impl import slot_io
from sglang_dsa_plugin.ops import latent_rows, quant

LAYOUTS = tuple(LATENT_LAYOUTS)
SCALE = 0.37


def _normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _rows(layout, count=101):
    return quant.quantize_latent(_normal(count, 512), _normal(count, 64, seed=1), layout, SCALE)


def _equal(a, b):
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("slots", [[], [100], [-1, -1], [7, -1, 0, 99, 64], list(range(100, 0, -3))])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_store_then_load(layout, slots, dtype):
    rows, want = _rows(layout), _rows(layout)
    latent, rope = _normal(len(slots), 512, seed=2).to(dtype), _normal(len(slots), 64, seed=3).to(dtype)
    slots = torch.tensor(slots, dtype=torch.int32)
    latent_rows.store(rows, slots, latent, rope, layout, SCALE)
    latent_rows.reference_store(want, slots, latent, rope, layout, SCALE)
    assert _equal(rows, want)
    got = latent_rows.load(rows, slots, layout, SCALE)
    assert got.dtype == torch.float32 and got.shape == (len(slots), 576)
    torch.testing.assert_close(got.double(), latent_rows.reference_load(rows, slots, layout, SCALE), rtol=2e-7, atol=0)
    assert (got[slots < 0] == 0).all()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rows_are_read_in_two_parts_of_a_dtype(layout, dtype):
    rows, slots = _rows(layout), torch.tensor([3, -1, 9, 50])
    parts = latent_rows.load_parts(rows, slots, layout, dtype, SCALE)
    assert [(part.dtype, part.shape[1], part.is_contiguous()) for part in parts] == [
        (dtype, 512, True),
        (dtype, 64, True),
    ]
    # Rounded once.
    assert torch.equal(torch.cat(parts, dim=1), latent_rows.load(rows, slots, layout, SCALE).to(dtype))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "src, dst",
    [([70], [5]), ([3, 4, 5], [4, 5, 6]), ([6, 5], [5, 6]), ([-1, 7, 9], [2, -1, 60]), ([], []), ([-1], [-1])],
)
def test_move_copies_bytes_and_reads_all_sources_first(layout, src, dst):
    rows, want = _rows(layout), _rows(layout)
    src, dst = torch.tensor(src, dtype=torch.int64), torch.tensor(dst, dtype=torch.int64)
    latent_rows.move(rows, src, dst)
    latent_rows.reference_move(want, src, dst)
    assert _equal(rows, want)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layer_of_a_larger_pool_is_written_in_place(layout):
    spec = LATENT_LAYOUTS[layout]
    pool = torch.zeros(11, 3, spec.width, dtype=torch.uint8 if spec.dtype.itemsize == 1 else spec.dtype)
    layer = pool[:, 1].view(spec.dtype)
    slots = torch.tensor([2, 10])
    latent_rows.store(layer, slots, _normal(2, 512), _normal(2, 64), layout, SCALE)
    assert (pool[:, ::2] == 0).all()
    want = quant.quantize_latent(_normal(2, 512), _normal(2, 64), layout, SCALE)
    assert _equal(layer[slots] if spec.dtype.itemsize > 1 else pool[slots, 1], want)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("bad", [-2, 101])
def test_slots_out_of_range_raise_and_write_nothing(layout, bad):
    rows = _rows(layout)
    slots = torch.tensor([3, bad])
    with pytest.raises(ValueError, match=rf"latent_rows.store: slots must be -1 or in \[0, 101\), got \[{bad}\]"):
        latent_rows.store(rows, slots, _normal(2, 512), _normal(2, 64), layout, SCALE)
    with pytest.raises(ValueError, match=r"latent_rows.load: slots"):
        latent_rows.load(rows, slots, layout, SCALE)
    with pytest.raises(ValueError, match=r"latent_rows.move: src"):
        latent_rows.move(rows, slots, torch.tensor([1, 2]))
    with pytest.raises(ValueError, match=r"latent_rows.move: dst"):
        latent_rows.move(rows, torch.tensor([1, 2]), slots)
    assert _equal(rows, _rows(layout))


@pytest.mark.parametrize("slots", [[5], [-1], [7, -1, 101, 99, -5, 2**31 - 1], [-1, 101], list(range(101))])
def test_writing_without_a_look_at_the_slots_skips_the_same(slots):
    """What a GPU does, where out-of-range slots cannot raise."""
    rows, want = _normal(101, 2, 3), _normal(101, 2, 3)
    other, want_other = _normal(101, seed=1), _normal(101, seed=1)
    values, more = _normal(len(slots), 2, 3, seed=2), _normal(len(slots), seed=3)
    for i, slot in enumerate(slots):
        if 0 <= slot < 101:
            want[slot], want_other[slot] = values[i], more[i]
    slots = torch.tensor(slots, dtype=torch.int32)
    slot_io.scatter_unseen(slots, 101, lambda s: (s,), ((rows, values), (other, more)))
    assert torch.equal(rows, want) and torch.equal(other, want_other)
    read = slot_io.gather(slots, 101, lambda s: (s,), (rows, other))
    valid = (slots >= 0) & (slots < 101)
    assert torch.equal(read[0][valid], rows[slots[valid].long()]) and (read[0][~valid] == 0).all()
    assert torch.equal(read[1][valid], other[slots[valid].long()]) and (read[1][~valid] == 0).all()


SLOTS = torch.tensor([0, 1])


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: latent_rows.load(_rows("fp8_656"), SLOTS, "fp8_576"), "load: rows must be a float8_e4m3fn"),
        (lambda: latent_rows.load(_rows("fp8_656"), SLOTS, "v4"), "load: layout must be one of"),
        (
            lambda: latent_rows.load_parts(_rows("fp8_656"), SLOTS, "fp8_656", torch.int8),
            "load_parts: dtype must be one",
        ),
        (lambda: latent_rows.load(_rows("fp8_576"), SLOTS, "fp8_576", -1.0), "load: kv_scale must be"),
        (
            lambda: latent_rows.store(_rows("fp8_656"), SLOTS, _normal(2, 511), _normal(2, 64), "fp8_656"),
            "store: latent must be",
        ),
        (
            lambda: latent_rows.store(_rows("fp8_656"), SLOTS, _normal(2, 512), _normal(3, 64), "fp8_656"),
            "store: rope must be",
        ),
        (lambda: latent_rows.move(torch.zeros(4, 656), SLOTS, SLOTS), "move: rows must be"),
        (lambda: latent_rows.move(_rows("fp8_656"), SLOTS, SLOTS[:1]), "move: dst must be"),
    ],
)
def test_bad_arguments_are_named(call, message):
    with pytest.raises(ValueError, match="latent_rows." + message):
        call()
