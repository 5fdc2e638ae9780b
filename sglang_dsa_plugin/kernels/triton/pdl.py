"""Programmatic dependent launch (SM 9.0 and later): a kernel's blocks take their places while the kernel ahead of it in
the stream still runs, and wait there. Between the short kernels of a decode step it hides most of a launch.

A kernel launched with `arguments` waits in every program before it touches memory that another one may write or read,
and lets the next one start behind its own wait, never ahead of it: else the next could overtake the one before. Ahead
of the wait it may have its input fetched to the L2 cache, as far as that keeps nobody who works from memory; what it
reads to know where (past the L1 cache, which would keep it) may be out of date and decides nothing but speed. When it
lets the next one start was measured for each (docs/tried.md): programs that come early lie unevenly where some
processors have more room than others, and those that wait slow down those that work. So a short kernel does it at once,
a long one not at all or at its end, and scores of many rows or of a long one at once, which leave no processor room for
another of their kind.
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


@triton.jit
def prefetch(at):
    """Has what lies at addresses `at` (uint64; 0: nothing) fetched to the L2 cache. Right ahead of `wait_for_earlier`,
    too: what another kernel writes later, it writes in that cache. Each brings 32 bytes at least.
    """
    tl.inline_asm_elementwise(
        "{ .reg .pred real; setp.ne.u64 real, $1, 0; @real prefetch.global.L2 [$1]; mov.u32 $0, 0; }",
        "=r,l",
        [at],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def prefetch_rows(start, real, BYTES: tl.constexpr):
    """`prefetch` of BYTES, a power of two from 32 on, from each of pointers start [n] on, where real [n]."""
    first = tl.where(real, start.to(tl.uint64), 0)[:, None]
    line = (tl.arange(0, BYTES // 32) * 32).to(tl.uint64)[None, :]
    prefetch(tl.where(first != 0, first + line, 0))


@triton.jit
def prefetch_whole(at, BYTES: tl.constexpr):
    """`prefetch` of BYTES, a multiple of 16, from each address on that is one, by one instruction."""
    tl.inline_asm_elementwise(
        "{ .reg .pred real; .reg .u64 off; .reg .u32 bytes; mov.u32 bytes, $2; and.b64 off, $1, 15; "
        "setp.eq.u64 real, off, 0; setp.ne.and.u64 real, $1, 0, real; "
        "@real cp.async.bulk.prefetch.L2.global [$1], bytes; mov.u32 $0, 0; }",
        "=r,l,r",
        [at, BYTES],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
