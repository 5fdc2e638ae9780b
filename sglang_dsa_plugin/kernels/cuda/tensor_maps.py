"""Tensor maps: what the GPU's unit for copies of tensors (TMA, SM 9.0 and later) knows of a cache's rows.

A map holds an address, sizes and strides, and nothing of what lies there. So rows at the same place have the same map
whoever allocated them, and to keep one keeps no memory alive. Kernels take it by value; a captured graph has its own.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from sglang_dsa_plugin.kernels.cuda import program

_BLOCK = 64  # bf16 values of 128 bytes, which the unit swaps by pieces of 16 bytes
_MOST_BYTES = 1 << 40  # from a row to the next


def describes(kv_rows: torch.Tensor) -> bool:
    """Whether bf16 rows on 16-byte bounds have a map: not if they overlap, as expanded ones do."""
    row_bytes = kv_rows.stride(0) * kv_rows.element_size()
    return kv_rows.shape[1] * kv_rows.element_size() <= row_bytes < _MOST_BYTES


def of_rows(kv_rows: torch.Tensor) -> Any:
    """The map of bf16 rows [N, a multiple of 64] in boxes of one row, for `copy_row` of warps.cuh."""
    rows, width = kv_rows.shape
    row_bytes = kv_rows.stride(0) * kv_rows.element_size()
    return _of_rows(kv_rows.get_device(), kv_rows.data_ptr(), rows, width // _BLOCK, row_bytes)


class _Described:
    """Memory that somebody else owns."""

    def __init__(self, address: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": shape,
            "strides": strides,  # in bytes
            "typestr": "<u2",  # the bits of bf16
            "version": 3,
        }


# Each layer has rows of its own, the same in every step. To make a map took the host 27 microseconds.
@functools.lru_cache(maxsize=512)
def _of_rows(index: int, address: int, rows: int, blocks: int, row_bytes: int) -> Any:
    from cuda.core import TensorMapDescriptorOptions
    from cuda.core.utils import StridedMemoryView

    swizzle = type(TensorMapDescriptorOptions.swizzle).SWIZZLE_128B
    described = _Described(address, (rows, blocks, _BLOCK), (row_bytes, 2 * _BLOCK, 2))
    with torch.cuda.device(index):
        program.make_current(index)
        view = StridedMemoryView.from_cuda_array_interface(described, stream_ptr=-1)
        return view.as_tensor_map((1, blocks, _BLOCK), swizzle=swizzle)
