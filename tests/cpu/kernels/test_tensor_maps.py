"""The map of a cache's rows for copies by the tensor unit: what is asked of cuda.core, and what is kept of it.

No driver encodes it here. That copies by it bring the right rows is held on a GPU (tests/gpu/test_sparse_mla_cuda.py).
"""

import contextlib
import weakref

import pytest
import torch

pytest.importorskip("cuda.core")

from cuda.core import utils

from sglang_dsa_plugin.kernels.cuda import program, tensor_maps


@pytest.fixture
def asked(monkeypatch):
    """(described memory, box, options) of every map that is made."""
    made = []

    class View:
        def __init__(self, described):
            self.described = described

        @classmethod
        def from_cuda_array_interface(cls, described, stream_ptr):
            assert stream_ptr == -1
            return cls(described)

        def as_tensor_map(self, box, **options):
            made.append((self.described.__cuda_array_interface__, box, options))
            return object()

    monkeypatch.setattr(utils, "StridedMemoryView", View)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(program, "make_current", lambda _: None)
    tensor_maps._of_rows.cache_clear()
    yield made
    tensor_maps._of_rows.cache_clear()


@pytest.mark.parametrize("padding", [0, 8, 576])
def test_a_row_is_blocks_of_128_bytes_that_are_swapped(asked, padding):
    kv = torch.zeros(50, 576 + padding, dtype=torch.bfloat16)[3:, :576]
    tensor_maps.of_rows(kv)
    [(memory, box, options)] = asked
    blocks = kv.unflatten(1, (9, 64))
    assert memory["shape"] == tuple(blocks.shape) and memory["data"] == (kv.data_ptr(), False)
    assert memory["strides"] == tuple(2 * step for step in blocks.stride()) and memory["typestr"] == "<u2"
    assert box == (1, 9, 64) and options["swizzle"].name == "SWIZZLE_128B" and set(options) == {"swizzle"}


def test_a_map_is_made_once_for_the_same_rows(asked):
    kv = torch.zeros(50, 576, dtype=torch.bfloat16)
    first = tensor_maps.of_rows(kv)
    assert tensor_maps.of_rows(kv.view(50, 576)) is first and len(asked) == 1
    for other in (kv[1:], kv[:49], kv[::2], torch.zeros(50, 576, dtype=torch.bfloat16)):
        assert tensor_maps.of_rows(other) is not first
    assert len(asked) == 5 and tensor_maps._of_rows.cache_info().maxsize


def test_a_map_keeps_no_rows_alive(asked):
    kv = torch.zeros(50, 576, dtype=torch.bfloat16)
    gone = weakref.ref(kv)
    tensor_maps.of_rows(kv)
    del kv
    assert gone() is None and tensor_maps._of_rows.cache_info().currsize == 1


def test_rows_that_overlap_have_no_map():
    kv = torch.zeros(50, 576, dtype=torch.bfloat16)
    assert tensor_maps.describes(kv) and tensor_maps.describes(kv[::3])
    assert not tensor_maps.describes(kv[:1].expand(50, 576))
    assert not tensor_maps.describes(kv.flatten().as_strided((50, 576), (8, 1)))
