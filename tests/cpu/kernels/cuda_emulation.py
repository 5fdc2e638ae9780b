"""Selection in CUDA C++ built by g++ with every CUDA thread a fiber (cuda_emulation.h), and held to torch's picks."""

from __future__ import annotations

import ctypes
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from sglang_dsa_plugin.kernels.cuda import program
from sglang_dsa_plugin.kernels.cuda.select import Form
from sglang_dsa_plugin.ops import select
from tests.cpu.ops import selection_inputs

needs = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ to build it with"),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="fibers by ucontext"),
]

FORCED = [(0, 0), (4, 64), (0, 3), (100, 1000), (5000, 5)]
RUN = """
extern "C" bool run(const float* scores, long long stride, const void* lengths, const void* starts, int* out,
                    int* slots_out, const void* table, long long table_stride, const void* requests,
                    const void* offsets, int width, int k, int init, int local, int wide, int rows, int seed) {
    return emulate(rows, seed, [=] {
        KERNEL(scores, stride, lengths, starts, out, slots_out, table, table_stride, requests, offsets, width, k, init,
               local, wide);
    });
}
"""


# In their place stand cuda_emulation.h and cuda_emulation_tiles.h.
IN_PTX = {"cluster.cuh", "compare.cuh", "copies.cuh", "tiles.cuh"}


def source_text(source: str) -> str:
    """As `program._text`, without those."""
    text = Path(program.__file__).with_name(source).read_text()
    include = r'(?m)^#include "([\w.]+)"$'
    return re.sub(include, lambda found: "" if found[1] in IN_PTX else source_text(found[1]), text)


SHARED = "extern __shared__ __align__(128) char shared[];\n    Shared& sh = *(Shared*)shared;"


def build(folder: Path, form: Form) -> Callable[..., bool]:
    """The kernel with its own arguments, rows and a seed."""
    file, kernel, defines, _ = form
    source = source_text(file)
    assert source.count(SHARED) == 1 and "asm" not in source
    source = source.replace(SHARED, "Shared& sh = *(Shared*)shared_memory();")
    built = folder / "select.so"
    options = ["-std=c++17", "-O1", "-w", "-ffp-contract=off", "-fno-strict-aliasing", "-fPIC", "-shared"]
    macros = [f"-D{name}={value}" for name, value in defines.items()]
    subprocess.run(
        ["g++", *options, *macros, "-o", str(built), "-x", "c++", "-"],
        input=Path(__file__).with_name("cuda_emulation.h").read_text() + source + RUN.replace("KERNEL", kernel),
        check=True,
        text=True,
    )
    run = ctypes.CDLL(str(built)).run
    number, address, wide = ctypes.c_int, ctypes.c_void_p, ctypes.c_longlong
    run.argtypes = [address, wide, *[address] * 5, wide, address, address, *[number] * 7]
    run.restype = ctypes.c_bool
    return run


def assert_picks(
    run: Callable[..., bool],
    scores: torch.Tensor,
    lengths: torch.Tensor,
    k: int,
    starts: torch.Tensor | None = None,
    forced: tuple[int, int] = (0, 0),
    offsets: torch.Tensor | None = None,
    wide: int = 0,
    seed: int = 0,
) -> None:
    """Positions and slots of one emulated launch are those of the torch implementation. wide: which are int64."""
    rows, width = scores.shape
    init = min(forced[0], k)
    local = min(forced[1], k - init)
    g = torch.Generator().manual_seed(seed)
    table, owner = torch.randint(0, 99999, (3, width // 64 + 2), generator=g), torch.arange(rows) % 3
    given = [
        None if t is None else t.to(torch.int64 if wide >> bit & 1 else torch.int32).contiguous()
        for bit, t in enumerate((lengths, starts, table, owner, offsets))
    ]
    lengths, starts, table, owner, offsets = given
    out, slots = torch.full((2, rows, k), 7, dtype=torch.int32)
    at = [None if t is None else t.data_ptr() for t in (lengths, starts, out, slots, table, owner, offsets)]
    more = (width, k, init, local, wide, rows, seed)
    assert run(scores.data_ptr(), scores.stride(0), *at[:5], table.stride(0), *at[5:], *more), "threads wait forever"
    size, first = cut(lengths, starts, width)
    want = select.topk(scores, size, k, first, *forced, impl="torch")
    moved = want if offsets is None else torch.where(want >= 0, want + offsets.unsqueeze(1), -1)
    assert torch.equal(out, moved.int())
    assert torch.equal(slots, select.positions_to_slots(want, table, owner, 64, impl="torch"))


def cut(lengths: torch.Tensor, starts: torch.Tensor | None, width: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Lengths and starts of windows, cut to `width` columns."""
    if starts is None:
        return lengths.clamp(0, width), None
    first = starts.clamp(0, width)
    return ((starts + lengths.clamp(0, width)).clamp(max=width) - first).clamp(min=0), first


def assert_cut_windows(run: Callable[..., bool], width: int, k: int) -> None:
    """Windows that begin or end outside the columns, by little, and by more than int32 holds."""
    scores = selection_inputs.scores("normal", 4, width, torch.Generator().manual_seed(3))
    far = 2**32 + 3
    for wide, starts, lengths in (
        (0, None, [width + 9, 2**31 - 1, -5, width]),
        (1, None, [far, 2**31, -far, width + 1]),
        (0, [-20, 5, width + 7, -width], [width, width, 30, 2 * width]),
        (3, [-far, far, 2**31, 7], [width, 40, far, 2**40]),
    ):
        starts = None if starts is None else torch.tensor(starts)
        assert_picks(run, scores, torch.tensor(lengths), k, starts, wide=wide)


def assert_random_windows(run: Callable[..., bool], number: random.Random, width: int, k: int, trial: int) -> None:
    """Four rows of any kind of scores, with windows and offsets in some trials, forced tokens and int64 tensors."""
    kind = number.choice(list(selection_inputs.KINDS))
    scores = selection_inputs.scores(kind, 4, width, torch.Generator().manual_seed(trial))
    starts = torch.tensor([number.randrange(width // 3 + 1) for _ in range(4)]) if trial % 2 else None
    room = width - (torch.zeros(4, dtype=torch.int64) if starts is None else starts)
    lengths = torch.minimum(torch.tensor([width, k, k + 1, number.randrange(width + 1)]), room)
    offsets = torch.tensor([0, 5, 10**6, 77]) if trial % 3 == 0 else None
    forced = number.choice(FORCED)
    assert_picks(run, scores, lengths, k, starts, forced, offsets, wide=number.randrange(32), seed=trial)
