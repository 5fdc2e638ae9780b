"""Programmatic dependent launch (SM 9.0 and later): a kernel's blocks take their places while the kernel ahead of it in
the stream still runs, and wait there. Between the short kernels of a decode step it hides most of a launch.

A kernel launched with `arguments` waits in every program before it touches memory that another one may write or read,
and lets the next one start behind its own wait, never ahead of it: else the next could overtake the one before. When it
does so was measured for each (docs/benchmarks.md): programs that come early lie unevenly where some processors have
more room than others, and those that wait slow down those that work. So a short kernel does it at once, a long one not
at all or at its end, and scores of many rows at once, which leave no processor room for another of their kind.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .index_tables import Gpu


def arguments(gpu: Gpu) -> dict[str, bool]:
    """What a kernel is launched with: its constant PDL, and an option that the interpreter and AMD do not know."""
    used = gpu.kind == "cuda" and gpu.sm >= 90
    return {"PDL": used} | ({"launch_pdl": True} if used else {})


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
