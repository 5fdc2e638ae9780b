"""Sparse MLA in CUDA C++ over bf16 and packed fp8 rows built by g++ (cuda_emulation.h), and held to fp64: every wait
for a place of the ring, for weights and between blocks, with copies and warps that are late in any order.
"""

from __future__ import annotations

import ctypes
import math
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from sglang_dsa_plugin.kernels.cuda import program, sparse_mla
from sglang_dsa_plugin.ops import quant
from sglang_dsa_plugin.ops import sparse_mla as op
from tests.cpu.ops.bounds import assert_attention

from .cuda_emulation import needs

pytestmark = needs

SCALE, TOKENS = 576**-0.5, 500
LAYOUTS = sorted(sparse_mla.FORMS)
IN_PTX = {"warps.cuh"}
MEMORY = r"extern __shared__ __align__\((128|1024)\) char memory\[\];"
RUN = """
extern "C" bool run(const u16* q, const u16* rope, const char* rows, const slot_t* slots, const int* lengths,
                    const float* sink, u16* out, float* lse, int count, int heads, int picks, int items, float scale,
                    int clusters, int seed) {
    grid_now = clusters;
    return emulate(clusters, seed, [=] {
        KERNEL(q, rope, rows, slots, lengths, sink, out, lse, 512 * heads, 512, 64 * heads, 64, ROW, picks,
               512 * heads, 512, count, heads, picks, items, scale
#if TENSOR_COPIES
               , TensorMap{rows, ROW, count}
#endif
        );
    });
}
"""
# What is PTX in the kernel itself, and what stands for it.
PLAIN = [
    (
        r'asm volatile\("st\.shared\.(?:b32|f32) \[%0\], %1;" ::"r"\((.*?)\), "[rf]"\((\w+)\) : "memory"\)',
        r"store_shared(\1, \2)",
    ),
    (
        r'asm volatile\("st\.shared\.v2\.f32 \[%0\], \{%1, %2\};" ::"r"\(to\), "f"\(p0\), "f"\(p1\) : "memory"\)',
        "store_shared(to, p0), store_shared(to + 4, p1)",
    ),
    (
        r'asm volatile\("ld\.shared\.v2\.b32 \{%0, %1\}, \[%2\];" : "=r"\((.*?)\), "=r"\((.*?)\) : "r"\(at\) '
        r': "memory"\)',
        r"\1 = load_shared(at), \2 = load_shared(at + 4)",
    ),
    (r'asm volatile\("cp\.async\.wait_all;" ::: "memory"\)', "wait_for_copies()"),
    (r'(?m)^ *asm volatile\("setmaxnreg.*$', ""),
    (r"__device__ __forceinline__ void (copy16|arrive_when_copied|decode)\(.*?\n}\n", ""),
]


def text(source: str) -> str:
    found = Path(program.__file__).with_name(source).read_text()
    return re.sub(r'(?m)^#include "([\w.]+)"$', lambda x: "" if x[1] in IN_PTX else text(x[1]), found)


def build(folder: Path, layout: str, defines: dict[str, int]) -> Callable[..., bool]:
    form = sparse_mla.FORMS[layout]
    source = text(form.source)
    source, kernels = re.subn(MEMORY, "char* memory = shared_memory();", source)
    assert kernels == 1
    for found, put in PLAIN:
        source = re.sub(found, put, source, flags=re.S if "copy16" in found else 0)
    assert "asm" not in source
    before = "".join(Path(__file__).with_name(f"cuda_emulation{x}.h").read_text() for x in ("", "_mla"))
    options = ["-std=c++17", "-O1", "-w", "-ffp-contract=off", "-fno-strict-aliasing", "-fPIC", "-shared"]
    macros = {"THREADS": 384, "SHARED": form.shared_bytes, **defines}
    subprocess.run(
        [
            "g++",
            *options,
            *(f"-D{name}={value}" for name, value in macros.items()),
            "-o",
            folder / "mla.so",
            "-x",
            "c++",
            "-",
        ],
        input=before + source + RUN.replace("KERNEL", form.name).replace("ROW", str(form.row_bytes)),
        check=True,
        text=True,
    )
    run = ctypes.CDLL(str(folder / "mla.so")).run
    number, address = ctypes.c_int, ctypes.c_void_p
    run.argtypes = [*[address] * 8, *[number] * 4, ctypes.c_float, number, number]
    run.restype = ctypes.c_bool
    return run


def check(run, layout, rows, heads, k, clusters, lengths=None, sink=None, wide=False, seed=0, grow=0):
    """An emulated launch of so many blocks or clusters against fp64. grow: picks in the order of their scores, with
    queries as many times as large.
    """
    g = torch.Generator().manual_seed(seed)
    q = (torch.randn(rows, heads, 576, generator=g) * max(1, grow)).bfloat16()
    kv = torch.randn(TOKENS, 576, generator=g).bfloat16()
    if layout == "fp8_656":  # whose scales differ
        kv *= torch.rand(TOKENS, 1, generator=g).mul(4).exp2()
        kv = quant.quantize_latent(kv[:, :512], kv[:, 512:], layout)
    kv[0] = 127 if layout == "fp8_656" else math.nan  # nobody's pick, and not to be read for those that are masked
    slots = torch.rand(rows, max(k, TOKENS), generator=g).argsort(1)[:, :k] % (TOKENS - 1) + 1
    if grow:
        values = quant.dequantize_latent(kv, layout).double()
        slots = slots.gather(1, (q[:, 0].double() @ values.T).gather(1, slots).argsort(1))
        slots[1::2] = slots[1::2].flip(1)
    slots[:, 3:20], slots[-1, 5:] = -1, TOKENS
    slots = slots if wide else slots.int()
    nope, rope = q[..., :512].contiguous(), q[..., 512:].contiguous()
    out, lse = torch.full((rows, heads, 512), 9.0).bfloat16(), torch.full((rows, heads), 9.0)
    at = [0 if t is None else t.data_ptr() for t in (nope, rope, kv, slots, lengths, sink, out, lse)]
    items = rows * -(-heads // 16)
    assert run(*at, TOKENS, heads, k, items, SCALE * sparse_mla._LOG2E, clusters, seed), "threads wait forever"
    masked = slots.masked_fill(slots >= TOKENS, -1)
    counted = None if lengths is None else lengths.clamp(0, k)
    assert_attention((out, lse), op.reference(q, kv, masked, SCALE, layout, 1.0, sink, counted))


# (layout, heads, whether the tensor unit copies rows, whether there are more rows than blocks)
WHOLE_ROWS = [
    *(("bf16_1152", heads, tensor, True) for heads in (16, 8) for tensor in (False, True)),
    ("bf16_1152", 16, True, False),
    *(("fp8_656", heads, False, True) for heads in (16, 8)),
]


@pytest.mark.parametrize(("layout", "heads", "tensor", "walks"), WHOLE_ROWS)
def test_blocks_that_walk_over_rows(tmp_path, layout, heads, tensor, walks):
    asked = {"lengths": False, "sink": False, "wide_slots": False, "heads": heads}
    defines = sparse_mla.FORMS[layout].defines(1, tensor_copies=tensor, walks=walks, **asked)
    assert defines["TENSOR_COPIES"] == tensor and defines["OWN_MAXIMA"] == (walks and layout == "bf16_1152")
    run = build(tmp_path, layout, defines)
    for seed, (rows, k, blocks) in enumerate([(1, 64, 1), (3, 200, 1), (6, 130, 2), (2, 700, 2), (9, 10, 1)]):
        check(run, layout, rows, heads - seed % 3, k, blocks, seed=seed)
    if heads == 16:
        check(run, layout, 2, 24, 65, 1)


@pytest.mark.parametrize(("layout", "heads", "tensor", "walks"), WHOLE_ROWS)
def test_scores_that_grow_from_pick_to_pick(tmp_path, layout, heads, tensor, walks):
    """Every quarter of a tile has a larger maximum than those before, or a smaller one."""
    asked = {"lengths": False, "sink": False, "wide_slots": False, "heads": heads}
    run = build(tmp_path, layout, sparse_mla.FORMS[layout].defines(1, tensor_copies=tensor, walks=walks, **asked))
    for seed, grow in enumerate((1, 10, 30)):
        check(run, layout, 3, heads, 330, 2, seed=seed, grow=grow)


@pytest.mark.parametrize(("layout", "heads", "tensor", "walks"), WHOLE_ROWS)
def test_lengths_and_a_sink(tmp_path, layout, heads, tensor, walks):
    asked = {"lengths": True, "sink": True, "wide_slots": True, "heads": heads}
    run = build(tmp_path, layout, sparse_mla.FORMS[layout].defines(1, tensor_copies=tensor, walks=walks, **asked))
    lengths = torch.tensor([150, 0, 64, 2**31 - 1, -3], dtype=torch.int32)
    check(run, layout, 5, heads, 150, 2, lengths, torch.randn(heads), wide=True)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("cluster", [2, 3])
def test_blocks_that_share_a_row(tmp_path, layout, cluster):
    run = build(
        tmp_path, layout, sparse_mla.FORMS[layout].defines(cluster, lengths=False, sink=False, wide_slots=False)
    )
    for seed, (rows, k) in enumerate([(1, 64), (2, 700), (2, 200)]):
        check(run, layout, rows, 16 - 3 * seed, k, rows, seed=seed)
