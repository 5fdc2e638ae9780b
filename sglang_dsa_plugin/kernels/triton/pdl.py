"""Programmatic dependent launch (SM 9.0 and later): a kernel's blocks take their places while the kernel ahead of it in
the stream still runs, and wait there. Between the short kernels of a decode step it hides most of a launch.

A kernel launched with `options` waits in every program before it touches memory that another kernel may write or read,
and lets the next one start behind its own wait, never ahead of it: else the next could overtake the one before. A short
kernel does so at once, a long one at its end: blocks that wait slow down those that work (H200: scores of 64 rows of
128K keys 16 % slower with those of the selection beside them).
"""

from __future__ import annotations

import contextlib
from typing import Any

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .index_tables import Gpu

_WHOLE = 100  # per cent of what a processor can make shared memory
_asked: set[int] = set()


def used(gpu: Gpu) -> bool:
    """Whether kernels are launched so on this GPU."""
    return gpu.kind == "cuda" and gpu.sm >= 90


def options(pdl: bool) -> dict[str, bool]:
    """Launch options of a kernel with PDL=pdl. The interpreter and AMD do not know the option."""
    return {"launch_pdl": True} if pdl else {}


def leave_room(kernel: Any) -> None:
    """Ask that a processor keeps all the shared memory it can have while it runs `kernel` (what a launch returned).

    A processor divides its memory anew only when it is idle: beside blocks of a kernel that needs little, one block of
    the next found room where two should have been, and the others ran after it. The interpreter returns None.
    """
    if kernel is None or kernel.function in _asked:
        return
    _asked.add(kernel.function)
    with contextlib.suppress(ImportError):  # cuda.bindings; a matter of speed only
        from cuda.bindings import driver

        what = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
        (error,) = driver.cuFuncSetAttribute(driver.CUfunction(kernel.function), what, _WHOLE)
        if error != driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"cuFuncSetAttribute({what.name}): {error.name}")


@triton.jit
def wait_for_earlier(PDL: tl.constexpr):
    """Behind this the kernels ahead in the stream are done."""
    if PDL:
        gdc_wait()


@triton.jit
def let_next_start(PDL: tl.constexpr):
    """From here on the next kernel may take its place, once all programs of this one have come here or ended."""
    if PDL:
        gdc_launch_dependents()
