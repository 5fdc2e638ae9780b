"""Index keys from wk's output into their page, a row at a time: norm, rope, rotation, quantisation, store.

A row's key depends on that row alone, whatever comes with it: nothing here crosses rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from sglang_dsa_plugin.cache.layouts import FP8_MAX, INDEX_DIM, PAGE_SIZE, ROPE_DIM
from sglang_dsa_plugin.kernels.numba.memory import encode_e4m3, flat_bytes, jit
from sglang_dsa_plugin.kernels.torch_impl import key_pages
from sglang_dsa_plugin.kernels.torch_impl.quant import EXPONENT_BITS, SMALLEST_AMAX, TO_SCALE

_HALF = ROPE_DIM // 2
_KEY_BYTES = PAGE_SIZE * INDEX_DIM
_ROTATION = np.float32(INDEX_DIM**-0.5)
_SMALLEST_AMAX = np.float32(SMALLEST_AMAX).view(np.int32)
_LIMIT = np.float32(FP8_MAX)


def store_keys(
    pages: torch.Tensor,
    slots: torch.Tensor,
    projected: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    layout: str,
) -> None:
    """`ops.index_keys.store`. Raises ValueError for a position outside the table."""
    rows = projected.shape[0]
    if not rows:
        return
    where = positions.long().numpy()
    if where.min() < 0 or where.max() >= cos_sin.shape[0]:
        raise ValueError(
            f"index_keys.store: positions must be in [0, {cos_sin.shape[0]}), the rows of cos_sin, got "
            f"{where.min()} to {where.max()}"
        )
    fp8 = pages.dtype == torch.uint8
    # A copy even of f32, because the kernel works in place.
    keys = torch.empty(rows, INDEX_DIM).copy_(projected)
    norm = weight.detach().numpy()
    shift = np.zeros(0, np.float32) if bias is None else bias.detach().numpy()
    values = keys.numpy()
    _turn(values, norm, shift, eps, where, cos_sin.numpy(), layout == "half", fp8)
    if not fp8:
        key_pages.store(pages, slots, keys.to(pages.dtype))
        return
    flat, step = flat_bytes(pages)
    _quantise_and_write(values, flat, step, slots.long().numpy())


@jit
def _turn(x: Any, weight: Any, bias: Any, eps: float, positions: Any, cos_sin: Any, half: bool, rotate: bool) -> None:
    """Norm, rope and, for fp8 keys, rotation of every row of x f32 [R, 128], in place. No bias [0]: RMSNorm."""
    for r in range(x.shape[0]):
        row = x[r]
        if bias.shape[0]:
            mean = np.float32(0)
            for i in range(INDEX_DIM):
                mean += row[i]
            mean /= np.float32(INDEX_DIM)
            for i in range(INDEX_DIM):
                row[i] -= mean
        power = np.float32(0)
        for i in range(INDEX_DIM):
            power += row[i] * row[i]
        inverse = np.float32(1) / np.sqrt(power / np.float32(INDEX_DIM) + np.float32(eps))
        for i in range(INDEX_DIM):
            row[i] = row[i] * inverse * weight[i]
        if bias.shape[0]:
            for i in range(INDEX_DIM):
                row[i] += bias[i]
        turn = cos_sin[positions[r]]
        for i in range(_HALF):
            a, b = (i, i + _HALF) if half else (2 * i, 2 * i + 1)
            cos, sin, first, second = turn[i], turn[i + _HALF], row[a], row[b]
            row[a] = first * cos - second * sin
            row[b] = second * cos + first * sin
        if rotate:
            width = 1
            while width < INDEX_DIM:
                for start in range(0, INDEX_DIM, 2 * width):
                    for i in range(start, start + width):
                        first, second = row[i], row[i + width]
                        row[i] = first + second
                        row[i + width] = first - second
                width *= 2
            for i in range(INDEX_DIM):
                row[i] *= _ROTATION


@jit
def _quantise_and_write(x: Any, pages: Any, page_bytes: int, slots: Any) -> None:
    """e4m3 of x f32 [R, 128] under a power-of-two scale a row, and the scale, at `slots` of the pages' bytes."""
    scaled = np.empty(INDEX_DIM, np.float32)
    bits = scaled.view(np.int32)
    one = np.empty(1, np.float32)
    one_bits = one.view(np.int32)
    for r in range(x.shape[0]):
        if slots[r] < 0:
            continue
        for i in range(INDEX_DIM):
            scaled[i] = x[r, i]
        # Bits of positive floats are in the order of the floats, NaN after all.
        largest = np.int32(_SMALLEST_AMAX)
        for i in range(INDEX_DIM):
            largest = max(largest, bits[i] & 0x7FFFFFFF)
        # The power of two of quant.power_of_two_scale, on the bits as there.
        one_bits[0] = (min(largest, EXPONENT_BITS) + TO_SCALE) & EXPONENT_BITS
        scale = one[0]
        for i in range(INDEX_DIM):
            value = scaled[i] / scale
            value = _LIMIT if value > _LIMIT else value
            scaled[i] = -_LIMIT if value < -_LIMIT else value
        page, offset = slots[r] // PAGE_SIZE, slots[r] % PAGE_SIZE
        at = page * page_bytes
        encode_e4m3(scaled, bits, pages[at + offset * INDEX_DIM : at + (offset + 1) * INDEX_DIM])
        pages[at + _KEY_BYTES + 4 * offset : at + _KEY_BYTES + 4 * offset + 4].view(np.float32)[0] = scale
