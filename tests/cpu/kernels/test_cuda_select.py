"""select.cu on a CPU, built by g++ with every CUDA thread a fiber (cuda_emulation.h): picks bit for bit.

What this cannot see is memory that only a GPU orders; tests/gpu/test_cuda_select.py runs it there.
"""

import ctypes
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sglang_dsa_plugin.kernels.cuda import program, tables
from sglang_dsa_plugin.kernels.cuda import select as cuda_select
from sglang_dsa_plugin.ops import select
from tests.cpu.ops import selection_inputs

pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ to build it with"),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="fibers by ucontext"),
]

RUN = """
extern "C" bool run(const float* scores, long long stride, const void* lengths, const void* starts, int* out,
                    int* slots_out, const void* table, long long table_stride, const void* requests,
                    const void* offsets, int width, int k, int init, int local, int wide, int rows, int seed) {
    return emulate(rows, seed, [=] {
        select_rows(scores, stride, lengths, starts, out, slots_out, table, table_stride, requests, offsets, width, k,
                    init, local, wide);
    });
}
"""
# (threads, cluster, held): each way through the source with few threads, then what is launched on an H200.
SMALL = [(128, 2, 4), (256, 1, 0), (128, 8, 4)]
MORE = [(128, 4, 0), (128, 16, 1), (1024, 2, 4), (512, 8, 8), (512, 4, 4)]
FORCED = [(0, 0), (4, 64), (0, 3), (100, 1000), (5000, 5)]


@pytest.fixture(
    scope="module", params=[*SMALL, *(pytest.param(form, marks=pytest.mark.full) for form in MORE)], ids=str
)
def form(request, tmp_path_factory):
    """(the kernel with the arguments of select.cu, rows and a seed; the most columns it holds)."""
    threads, cluster, held = request.param
    there = Path(program.__file__).parent
    source, shared = program._text(cuda_select.SOURCE), "__shared__ __align__(16) Shared sh;"
    ptx = (there / "cluster.cuh").read_text()
    assert source.count(shared) == source.count(ptx) == 1
    source = source.replace(ptx, "").replace(shared, "Shared& sh = *(Shared*)shared_memory();")
    defines = cuda_select.defines(tables.SelectShape(threads, cluster, held, 1), cuda_select.BOTH, 64)
    built = tmp_path_factory.mktemp("emulated") / "select.so"
    options = ["-std=c++17", "-O1", "-w", "-ffp-contract=off", "-fno-strict-aliasing", "-fPIC", "-shared"]
    macros = [f"-D{name}={value}" for name, value in defines.items()]
    subprocess.run(
        ["g++", *options, *macros, "-o", str(built), "-x", "c++", "-"],
        input=(Path(__file__).parent / "cuda_emulation.h").read_text() + source + RUN,
        check=True,
        text=True,
    )
    run = ctypes.CDLL(str(built)).run
    number, address, wide = ctypes.c_int, ctypes.c_void_p, ctypes.c_longlong
    run.argtypes = [address, wide, *[address] * 5, wide, address, address, *[number] * 7]
    run.restype = ctypes.c_bool
    return run, 4 * threads * cluster * (held or 6)


def assert_picks(run, scores, lengths, k, starts=None, forced=(0, 0), offsets=None, wide=0, seed=0):
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
    want = select.topk(scores, lengths, k, starts, *forced, impl="torch")
    moved = want if offsets is None else torch.where(want >= 0, want + offsets.unsqueeze(1), -1)
    assert torch.equal(out, moved.int())
    assert torch.equal(slots, select.positions_to_slots(want, table, owner, 64, impl="torch"))


@pytest.mark.parametrize("kind", selection_inputs.KINDS)
def test_all_kinds_of_scores(form, kind):
    run, most = form
    scores = selection_inputs.scores(kind, 3, most, torch.Generator().manual_seed(1))
    k = min(700, most // 3)
    assert_picks(run, scores, torch.tensor([most, most - 4, max(k + 1, most // 2)]), k, seed=3)


@pytest.mark.parametrize("trial", range(12))
def test_windows_forced_tokens_offsets_and_widths(form, trial):
    run, most = form
    number = random.Random(trial)
    width, k = number.randrange(2, most - 3), number.choice([1, 64, number.randrange(1, 1500)])
    kind = number.choice(list(selection_inputs.KINDS))
    scores = selection_inputs.scores(kind, 4, width, torch.Generator().manual_seed(trial))
    starts = torch.tensor([number.randrange(width // 3 + 1) for _ in range(4)]) if trial % 2 else None
    room = width - (torch.zeros(4, dtype=torch.int64) if starts is None else starts)
    lengths = torch.minimum(torch.tensor([width, k, k + 1, number.randrange(width + 1)]), room)
    offsets = torch.tensor([0, 5, 10**6, 77]) if trial % 3 == 0 else None
    forced = number.choice(FORCED)
    assert_picks(run, scores, lengths, k, starts, forced, offsets, wide=number.randrange(32), seed=trial)
