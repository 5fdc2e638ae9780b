"""Latent rows stored in CUDA C++: the source on a CPU, thread after thread (none waits for another), what it compiles
to, and what is left to Triton.
"""

import ctypes
import re
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import triton

from sglang_dsa_plugin import support
from sglang_dsa_plugin.kernels.cuda import latent_rows as cuda_rows
from sglang_dsa_plugin.kernels.cuda import program
from sglang_dsa_plugin.kernels.triton import latent_rows as triton_rows
from sglang_dsa_plugin.ops import latent_rows

SHIM = """
struct uint4 { unsigned x, y, z, w; };
struct { unsigned x; } blockIdx, threadIdx;
#define __global__
#define __launch_bounds__(n)
inline void wait_for_earlier() {}
inline void let_next_start() {}
"""
RUN = """
extern "C" void run(const uint4* l, const uint4* p, const Slot* s, char* o, int ls, int ps, int os, int t, int n,
                    int b) {
    for (unsigned i = 0; i < (unsigned)b * 32 * WARPS; i++) {
        blockIdx.x = i / (32 * WARPS), threadIdx.x = i % (32 * WARPS);
        store_rows(l, p, s, o, ls, ps, os, t, n);
    }
}
"""


@pytest.fixture(scope="module", params=[torch.int32, torch.int64], ids=["int32", "int64"])
def kernel(request, tmp_path_factory):
    """The dtype of slots, and the kernel for them built by g++."""
    if shutil.which("g++") is None:
        pytest.skip("no g++ to build it with")
    text = Path(program.__file__).with_name(cuda_rows.SOURCE).read_text()
    source, includes = re.subn(r'(?m)^#include "cluster.cuh"$', "", text)
    assert includes == 1 and "asm" not in source
    built = tmp_path_factory.mktemp("rows") / "rows.so"
    macros = [f"-D{name}={value}" for name, value in cuda_rows.defines(request.param == torch.int64).items()]
    command = ["g++", "-std=c++17", "-O1", "-fPIC", "-shared", *macros, "-o", str(built), "-x", "c++", "-"]
    subprocess.run(command, input=SHIM + source + RUN, check=True, text=True)
    run = ctypes.CDLL(str(built)).run

    def launch(grid, block, args, pdl):
        assert pdl and block == (32 * cuda_rows.WARPS,)
        run(*map(ctypes.c_void_p, args[:4]), *args[4:], *map(ctypes.c_int, grid))

    return request.param, SimpleNamespace(launch=launch)


@pytest.fixture
def left_to_triton(monkeypatch):
    taken = []
    monkeypatch.setattr(triton_rows, "store", lambda rows, slots, *_: taken.append(len(slots)))
    return taken


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ to build it with")
@pytest.mark.parametrize(("rows", "width"), [(16, 576), (17, 576), (301, 584)])
def test_rows_slots_out_of_range_and_strides(kernel, monkeypatch, left_to_triton, rows, width):
    index, launched = kernel
    monkeypatch.setattr(program, "kernel", lambda source, name, device, macros: launched)
    g = torch.Generator().manual_seed(rows)
    both = torch.randn(rows, 2112, generator=g).bfloat16()
    slots = torch.randperm(400, generator=g)[:rows].to(index)
    slots[2::6] = -1
    pool = torch.full((400, width), 7.0).bfloat16()
    got, beyond = pool.clone(), slots.clone()
    beyond[5::7] = 400
    cuda_rows.store(got[:, :576], beyond, both[:, 1536:2048], both[:, 2048:], "bf16_1152")
    slots[5::7] = -1
    latent_rows.reference_store(pool[:, :576], slots, both[:, 1536:2048], both[:, 2048:], "bf16_1152")
    assert torch.equal(got, pool) and not left_to_triton


def inputs(rows=64, width=576, latent=torch.bfloat16, at=0):
    whole = torch.zeros(rows, 1024, dtype=latent)
    return torch.zeros(128, width).bfloat16()[:, :576], torch.arange(rows), whole[:, at : at + 512], whole[:, 960:]


@pytest.mark.parametrize(
    ("given", "served"),
    [
        ({}, True),
        ({"rows": 16}, True),
        ({"rows": 15}, False),  # Triton is the faster
        ({"rows": 0}, False),
        ({"width": 580}, False),  # rows that begin within a unit
        ({"at": 4}, False),
        ({"latent": torch.float32}, False),  # has to be rounded
    ],
)
def test_what_is_no_copy_of_whole_units_goes_to_triton(monkeypatch, left_to_triton, given, served):
    launched = []
    monkeypatch.setattr(program, "kernel", lambda *_: SimpleNamespace(launch=lambda *_, pdl: launched.append(pdl)))
    rows, slots, latent, rope = inputs(**given)
    cuda_rows.store(rows, slots, latent, rope, "bf16_1152")
    assert (bool(launched), bool(left_to_triton)) == (served, not served)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a", "sm_103a", "sm_120a", "sm_121a"])
@pytest.mark.parametrize("wide", [False, True])
def test_it_compiles(arch, wide):
    pytest.importorskip("cuda.core")
    cubin, takes = program.compile_only(cuda_rows.SOURCE, arch, cuda_rows.defines(wide))
    takes = takes[cuda_rows.NAME]
    # All warps that a processor holds fit.
    assert cubin and takes.registers <= 32 and takes.spilled == takes.stack == takes.shared == 0


def test_nothing_waits_for_what_is_read_until_the_next_kernel_may_start(tmp_path):
    """What does puts the start off by the time that memory takes: 64 rows took 1.6 microseconds instead of 1.2."""
    pytest.importorskip("cuda.core")
    cubin = tmp_path / "rows.cubin"
    cubin.write_bytes(program.compile_only(cuda_rows.SOURCE, "sm_90a", cuda_rows.defines(True))[0])
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    code = subprocess.run([tool, "-c", cubin], check=True, capture_output=True, text=True).stdout
    assert waiting(code) == []
    late = re.sub(
        r"(?m)^(.*LDG.E.128 (R\d+).*)$", r"\1\n        /*0fff*/                   MOV R40, \2 ;", code, count=1
    )
    assert len(waiting(late)) == 1


def waiting(code):
    """Instructions between the loads and PREEXIT that read a register a load writes."""
    loaded, found, before = set(), [], code.partition("PREEXIT")[0]
    assert "ACQBULK" in before and "PREEXIT" in code
    for name, operands in re.findall(r"/\*[0-9a-f]+\*/\s+(?:@!?P\d\s+)?([A-Z][\w.]*)\s*(.*?)\s*;", before):
        result, *read = re.findall(r"\bR(\d+)\b", operands) or [None]
        found += [f"{name} {operands}" for register in read if int(register) in loaded]
        if name.startswith("LDG"):
            width = 4 if ".128" in name else 2 if ".64" in name else 1
            loaded.update(range(int(result), int(result) + width))
    assert loaded
    return found


def test_a_hopper_takes_it_for_rows_of_bf16_and_no_other_unasked():
    pytest.importorskip("cuda.core")
    taken = {
        (sm, layout): support.choose("latent_rows_store", device="cuda", sm=sm, layout=layout).name
        for sm in (80, 89, 90, 100, 120)
        for layout in ("bf16_1152", "fp8_656")
    }
    assert {key for key, name in taken.items() if name == "cuda"} == {(90, "bf16_1152")}
    assert set(taken.values()) == {"cuda", "triton"}
