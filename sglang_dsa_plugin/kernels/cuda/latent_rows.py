"""Storing latent rows of bf16 in CUDA C++, SM 9.0 and later (latent_rows.cu); see ops/latent_rows.py.

What is not a plain copy in whole units of 16 bytes goes to the Triton kernel, and so do a few rows, of which that is
the faster (docs/tried.md).
"""

from __future__ import annotations

import ctypes

import torch

from sglang_dsa_plugin.kernels.triton import latent_rows as triton_rows
from sglang_dsa_plugin.support_row import SOME_ROWS

from . import program

SOURCE, NAME = "latent_rows.cu", "store_rows"
WARPS = 2  # of a block, a row each: of 1, 2, 4 and 8 the fastest from 64 rows on, and no slower than the others at 16
_UNIT = 16  # bytes that a thread copies at once


def defines(wide_slots: bool) -> program.Defines:
    """The macros of the kernel; wide_slots: slots are int64."""
    return {"WARPS": WARPS, "WIDE_SLOTS": int(wide_slots)}


def store(
    rows: torch.Tensor,
    slots: torch.Tensor,
    latent: torch.Tensor,
    rope: torch.Tensor,
    layout: str,
    kv_scale: float = 1.0,
) -> None:
    """`ops.latent_rows.store`."""
    tokens = slots.shape[0]
    if tokens < SOME_ROWS or not rows.shape[0] or not copied_in_units(rows, latent, rope):
        triton_rows.store(rows, slots, latent, rope, layout, kv_scale)
        return
    run = program.kernel(SOURCE, NAME, rows.device, defines(slots.dtype == torch.int64))
    units = (part.stride(0) * part.element_size() // _UNIT for part in (latent, rope))
    addresses = (part.data_ptr() for part in (latent, rope, slots, rows))
    numbers = map(ctypes.c_int, (*units, rows.stride(0) * rows.element_size(), tokens, rows.shape[0]))
    run.launch((-(-tokens // WARPS),), (32 * WARPS,), (*addresses, *numbers), pdl=True)


def copied_in_units(*parts: torch.Tensor) -> bool:
    """Whether rows of all these [R, n] are bf16 and begin and end with a unit."""
    return all(
        part.dtype == torch.bfloat16
        and part.stride(1) == 1
        and part.data_ptr() % _UNIT == 0
        and part.stride(0) * part.element_size() % _UNIT == 0
        for part in parts
    )
