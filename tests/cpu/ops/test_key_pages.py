"""ops.key_pages: tokens of an index page, keys and scales apart, neighbours untouched."""

import pytest
import torch

from sglang_dsa_plugin.cache.layouts import FP8, INDEX_PAGE_BYTES
from sglang_dsa_plugin.ops import key_pages

KINDS = (FP8, torch.bfloat16, torch.float32, torch.float16)


def _generator(seed=0):
    return torch.Generator().manual_seed(seed)


def _pages(kind, count=3):
    """Pages full of arbitrary numbers."""
    g = _generator(1)
    if kind != FP8:
        return torch.randn(count, 64, 128, generator=g).to(kind)
    pages = torch.randint(0, 127, (count, INDEX_PAGE_BYTES), generator=g, dtype=torch.uint8)
    pages[:, 8192:] = torch.rand(count, 64, generator=g).view(torch.uint8)
    return pages


def _keys(kind, rows):
    k = torch.randn(rows, 128, generator=_generator(2)).to(kind)
    return (k, torch.rand(rows, generator=_generator(3)) + 0.1) if kind == FP8 else (k, None)


def _equal(a, b):
    if a is None or b is None:
        return a is b
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("slots", [[], [0], [191], [-1], [70, -1, 5, 64, 63, 127, -1], list(range(191, -1, -3))])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_store_then_load(kind, slots, index):
    pages, want = _pages(kind), _pages(kind)
    slots = torch.tensor(slots, dtype=index)
    k, scale = _keys(kind, len(slots))
    key_pages.store(pages, slots, k, scale)
    key_pages.reference_store(want, slots, k, scale)
    assert _equal(pages, want)
    got = key_pages.load(pages, slots)
    assert all(_equal(a, b) for a, b in zip(got, key_pages.reference_load(pages, slots)))
    kept = slots >= 0
    assert _equal(got[0][kept], k[kept]) and (got[0].float()[~kept] == 0).all()
    if scale is not None:
        assert torch.equal(got[1], torch.where(kept, scale, 0))


@pytest.mark.parametrize("kind", KINDS)
def test_moving_a_token_leaves_its_neighbours_alone(kind):
    pages = _pages(kind)
    everything = torch.arange(192)
    before = key_pages.load(pages, everything)
    key_pages.move(pages, torch.tensor([70]), torch.tensor([5]))
    came_from = everything.clone()
    came_from[5] = 70
    for now, then in zip(key_pages.load(pages, everything), before):
        assert (now is None and then is None) or _equal(now, then[came_from])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "src, dst",
    [
        ([3, 4, 5], [4, 5, 6]),
        ([4, 5, 6], [3, 4, 5]),
        ([10, 130], [130, 10]),
        ([-1, 7, 9], [2, -1, 60]),
        ([-1], [-1]),
        ([], []),
        (list(range(0, 100)), list(range(63, 163))),
    ],
)
def test_move_reads_all_sources_first(kind, src, dst):
    pages, want = _pages(kind), _pages(kind)
    src, dst = torch.tensor(src, dtype=torch.int32), torch.tensor(dst, dtype=torch.int32)
    key_pages.move(pages, src, dst)
    key_pages.reference_move(want, src, dst)
    assert _equal(pages, want)


def test_pages_of_a_larger_buffer_are_written_in_place():
    buffer = torch.zeros(3, 2, INDEX_PAGE_BYTES, dtype=torch.uint8)
    k, scale = _keys(FP8, 2)
    slots = torch.tensor([1, 130])
    key_pages.store(buffer[:, 1], slots, k, scale)
    assert (buffer[:, 0] == 0).all()
    got = key_pages.load(buffer[:, 1], slots)
    assert _equal(got[0], k) and torch.equal(got[1], scale)


@pytest.mark.parametrize("kind", [FP8, torch.float32])
@pytest.mark.parametrize("bad", [-2, 192, 2**31 - 1])
def test_slots_out_of_range_raise_and_write_nothing(kind, bad):
    pages = _pages(kind)
    slots = torch.tensor([3, bad], dtype=torch.int32)
    k, scale = _keys(kind, 2)
    with pytest.raises(ValueError, match=r"key_pages.store: slots must be -1 or in \[0, 192\)"):
        key_pages.store(pages, slots, k, scale)
    with pytest.raises(ValueError, match=r"key_pages.load: slots"):
        key_pages.load(pages, slots)
    with pytest.raises(ValueError, match=r"key_pages.move: src"):
        key_pages.move(pages, slots, torch.tensor([1, 2]))
    with pytest.raises(ValueError, match=r"key_pages.move: dst"):
        key_pages.move(pages, torch.tensor([1, 2]), slots)
    assert _equal(pages, _pages(kind))


def test_no_pages_hold_nothing():
    pages = torch.zeros(0, INDEX_PAGE_BYTES, dtype=torch.uint8)
    none = torch.tensor([-1, -1])
    k, scale = _keys(FP8, 2)
    key_pages.store(pages, none, k, scale)
    key_pages.move(pages, none, none)
    got = key_pages.load(pages, none)
    assert (got[0].float() == 0).all() and got[0].shape == (2, 128) and got[1].tolist() == [0, 0]


SLOTS = torch.tensor([0, 1])


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: key_pages.store(_pages(FP8), SLOTS, *_keys(FP8, 3)), "store: k must be"),
        (lambda: key_pages.store(_pages(FP8), SLOTS, _keys(FP8, 2)[0]), "store: scale must be .* got None"),
        (lambda: key_pages.store(_pages(FP8), SLOTS, *_keys(torch.float32, 2)), "store: k must be a float8_e4m3fn"),
        (lambda: key_pages.store(_pages(torch.bfloat16), SLOTS, *_keys(FP8, 2)), "store: k must be a bfloat16"),
        (
            lambda: key_pages.store(_pages(torch.bfloat16), SLOTS, _keys(torch.bfloat16, 2)[0], torch.ones(2)),
            "store: scale must be None",
        ),
        (lambda: key_pages.load(torch.zeros(2, 8192, dtype=torch.uint8), SLOTS), r"load: pages must be .*8448"),
        (lambda: key_pages.load(_pages(FP8), SLOTS.float()), "load: slots must be a int32/int64"),
        (lambda: key_pages.move(_pages(FP8), SLOTS, SLOTS[:1]), "move: dst must be"),
        (lambda: key_pages.load(_pages(FP8), SLOTS, impl="x"), "key_pages_load: impl='x'"),
    ],
)
def test_bad_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
