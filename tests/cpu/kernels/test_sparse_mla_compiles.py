"""Every sparse MLA kernel compiles for every GPU it is meant for, within that GPU's shared memory. No GPU needed.

Triton caches what it compiled, so only the first run takes long.
"""

import re

import pytest
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as compile_kernel
from triton.experimental.gluon._runtime import GluonASTSource

from sglang_dsa_plugin.kernels.triton import (
    sparse_mla_hopper,
    sparse_mla_hopper_fp8,
    sparse_mla_hopper_wide,
    sparse_mla_hopper_wide_fp8,
)
from sglang_dsa_plugin.kernels.triton import sparse_mla_tiles as tiles
from sglang_dsa_plugin.kernels.triton.sparse_mla_gather import gather_kernel
from sglang_dsa_plugin.kernels.triton.sparse_mla_merge import merge_kernel

# Minutes with an empty kernel cache: in the long form only.
pytestmark = pytest.mark.full

NVIDIA = [80, 86, 89, 90, 100, 120]
# Local data share of a workgroup, in bytes.
AMD = {"gfx942": 64 << 10, "gfx950": 160 << 10}
WORDS = {"bf16_1152": (False, False), "fp8_656": (True, False), "fp8_576": (True, True)}
# What a caller usually passes: pointers and strides on 16-byte bounds. The row stride counts 16 bytes already.
ROUND = {"q_row_stride", "q_head_stride", "q_rope_row_stride", "q_rope_head_stride", "slots_stride", "out_row_stride"}
ROUND |= {"out_head_stride", "picks", "split_picks"}


def built(kernel, target, constants, types, plan, gluon=False):
    """The compiled kernel. types: of pointers; other arguments are f32 where they say so, else int32."""
    signature, attributes = {}, {}
    for i, name in enumerate(kernel.arg_names):
        kind = types.get(name, "fp32" if name in ("scale_log2", "value_scale") else "i32")
        signature[name] = "constexpr" if name in constants else kind
        if signature[name].startswith("*") or name in ROUND:
            attributes[(i,)] = [["tt.divisibility", 16]]
    values = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = (GluonASTSource if gluon else ASTSource)(kernel, signature, values, attributes)
    options = {"num_warps": plan.warps}
    if not gluon:
        options["num_stages"] = plan.stages
    return compile_kernel(source, target=target, options=options)


def pointers(layout, partial, q="bf16"):
    nope, rope = WORDS[layout]
    integers = {name: "*i32" for name in ("slots_ptr", "lengths_ptr", "words_ptr")}
    floats = {name: "*fp32" for name in ("scales_ptr", "sink_ptr", "lse_ptr", "part_ptr", "part_lse_ptr")}
    rows = {"nope_ptr": "*i32" if nope else "*bf16", "rope_ptr": "*i32" if rope else "*bf16", "kv_ptr": "*bf16"}
    queries = dict.fromkeys(("q_ptr", "q_rope_ptr"), "*" + q)
    return integers | floats | rows | queries | {"out_ptr": "*fp32" if partial else "*" + q}


def flags(partial, sm, scan):
    """Few rows come with their lengths, as in decode; many are looked through for their last pick."""
    lengths = dict(HAS_LENGTHS=partial, SCAN=0 if partial else scan)
    return lengths | dict(HAS_SINK=True, PARTIAL=partial, PDL=bool(sm) and sm >= 90)


def portable(target, sm, layout, rows, heads, q="bf16", hopper=False):
    parts = {"bf16": 1, "fp16": 2, "fp32": 3}[q]
    plan = tiles.choose(sm, 132, layout, rows, heads, 2048, hopper, parts)
    nope, rope = WORDS[layout]
    constants = flags(plan.splits > 1, sm, 2048) | dict(
        UNIT=16,
        ROPE_COLUMN={"bf16_1152": 512, "fp8_656": 264, "fp8_576": 128}[layout],
        SCALES_COLUMN=128,
        NOPE_WORDS=nope,
        ROPE_WORDS=rope,
        HAS_SCALES=layout == "fp8_656",
        Q_PARTS=parts,
        DECODE="ops" if sm is None else "cvt" if sm >= 89 else "bits",
        BLOCK_H=plan.block_h,
        BLOCK_N=plan.block_n,
    )
    return built(gather_kernel, target, constants, pointers(layout, plan.splits > 1, q), plan)


@pytest.mark.parametrize("sm", NVIDIA)
@pytest.mark.parametrize(("layout", "rows", "heads"), [("bf16_1152", 1, 16), ("fp8_656", 4096, 64)])
def test_portable_on_nvidia(sm, layout, rows, heads):
    kernel = portable(GPUTarget("cuda", sm, 32), sm, layout, rows, heads)
    assert 0 < kernel.metadata.shared <= tiles.SHARED_BYTES.get(sm, tiles.SMALL_SHARED)


@pytest.mark.parametrize("heads", [8, 32])
def test_portable_for_a_single_row_on_hopper(heads):
    ptx = portable(GPUTarget("cuda", 90, 32), 90, "bf16_1152", 1, heads, hopper=True).asm["ptx"]
    assert ptx.index("prefetch.global.L2") < ptx.index("griddepcontrol.wait") < ptx.index("ld.global")


@pytest.mark.full
@pytest.mark.parametrize("sm", [80, 86, 90])
@pytest.mark.parametrize(
    ("layout", "rows", "heads"),
    [("bf16_1152", 4096, 128), ("fp8_656", 1, 16), ("fp8_576", 1, 8), ("fp8_576", 4096, 32)],
)
def test_portable_in_other_shapes(sm, layout, rows, heads):
    kernel = portable(GPUTarget("cuda", sm, 32), sm, layout, rows, heads)
    assert 0 < kernel.metadata.shared <= tiles.SHARED_BYTES.get(sm, tiles.SMALL_SHARED)


@pytest.mark.parametrize("q", ["fp16", "fp32"])
def test_portable_with_wide_queries_fits_the_smallest_gpu(q):
    for layout in ("bf16_1152", "fp8_656"):
        kernel = portable(GPUTarget("cuda", 86, 32), 86, layout, 1, 128, q)
        assert kernel.metadata.shared <= tiles.SMALL_SHARED


@pytest.mark.parametrize("arch", AMD)
@pytest.mark.parametrize("layout", ["bf16_1152", "fp8_656"])
def test_portable_on_amd(arch, layout):
    assert portable(GPUTarget("hip", arch, 64), None, layout, 1, 16).metadata.shared <= AMD[arch]


@pytest.mark.parametrize(
    ("rows", "heads"), [(4, 8), (4096, 8), (4, 16), (4096, 16), (16, 32), (4096, 32)], ids=lambda v: str(v)
)
def test_hopper_bf16(rows, heads):
    plan = tiles.choose(90, 132, "bf16_1152", rows, heads, 2048, True, 1)
    partial = plan.splits > 1
    constants = flags(partial, 90, 512) | dict(BLOCK_H=plan.block_h, STAGES=plan.stages)
    target, types = GPUTarget("cuda", 90, 32), pointers("bf16_1152", partial)
    kernel = built(sparse_mla_hopper.gather_bf16, target, constants, types, plan, gluon=True)
    assert plan.kernel == "hopper" and kernel.metadata.shared <= tiles.SHARED_BYTES[90]
    # One stage is chosen so that two programs share a multiprocessor, which has 228 KB and keeps 1 KB of each.
    assert plan.stages == 2 or 2 * (kernel.metadata.shared + 1024) <= 228 << 10


@pytest.mark.parametrize("layout", ["fp8_656", "fp8_576"])
@pytest.mark.parametrize("rows", [1, 4096])
def test_hopper_fp8(layout, rows):
    plan = tiles.choose(90, 132, layout, rows, 16, 2048, True, 1)
    partial = plan.splits > 1
    constants = flags(partial, 90, 512) | dict(BLOCK_H=plan.block_h, HAS_SCALES=layout == "fp8_656")
    target, types = GPUTarget("cuda", 90, 32), pointers(layout, partial)
    kernel = built(sparse_mla_hopper_fp8.gather_fp8, target, constants, types, plan, gluon=True)
    assert plan.kernel == "hopper" and 2 * (kernel.metadata.shared + 1024) <= 228 << 10


@pytest.mark.parametrize("layout", ["bf16_1152", "fp8_656", "fp8_576"])
@pytest.mark.parametrize("rows", [16, 4096])
def test_hopper_of_many_heads(layout, rows):
    plan = tiles.choose(90, 132, layout, rows, 128, 2048, True, 1)
    partial = plan.splits > 1
    constants = flags(partial, 90, 512) | dict(BLOCK_H=plan.block_h)
    module, name = sparse_mla_hopper_wide, "gather_bf16_wide"
    if layout != "bf16_1152":
        module, name = sparse_mla_hopper_wide_fp8, "gather_fp8_wide"
        constants |= dict(HAS_SCALES=layout == "fp8_656")
    target, types = GPUTarget("cuda", 90, 32), pointers(layout, partial)
    kernel = built(getattr(module, name), target, constants, types, plan, gluon=True)
    assert plan.kernel == "wide" and kernel.metadata.shared <= tiles.SHARED_BYTES[90]
    # Sixteen warps fit into the registers of a multiprocessor with no more than this.
    assert layout != "bf16_1152" or ".maxnreg 128" in kernel.asm["ptx"]
    if layout == "bf16_1152":
        assert_arrivals_have_their_barrier(kernel.asm["ptx"])


def assert_arrivals_have_their_barrier(ptx):
    """A thread that tells an mbarrier what a group did does so right behind the group's own barrier, which orders the
    others' loads and stores before it. racecheck cannot tell (tests/gpu/racecheck.py).
    """
    code = [line.strip() for line in ptx.splitlines()]
    code = [line for line in code if line and not line.startswith((".loc", "//", "$L__tmp"))]
    arrivals = [i for i, line in enumerate(code) if re.search(r"(?<!async\.)mbarrier\.arrive", line)]
    assert len(arrivals) == 5
    for i in arrivals:
        while not re.search(r"\bbar(rier)?(\.cta)?\.sync", code[i - 1]):
            i -= 1
            assert not re.search(r"shared|matrix|wgmma|async|\bbra\b|\$L__BB", code[i - 1]), code[i - 8 : i + 1]


@pytest.mark.parametrize("layout", ["bf16_1152", "fp8_656"])
@pytest.mark.parametrize("heads", [16, 128])
def test_hopper_with_int64_slots_and_lengths(layout, heads):
    plan = tiles.choose(90, 132, layout, 16, heads, 2048, True, 1)
    modules = {"hopper": (sparse_mla_hopper, sparse_mla_hopper_fp8)}
    modules["wide"] = (sparse_mla_hopper_wide, sparse_mla_hopper_wide_fp8)
    module, suffix = modules[plan.kernel][layout == "fp8_656"], "_wide" if plan.kernel == "wide" else ""
    constants = flags(True, 90, 512) | dict(BLOCK_H=plan.block_h)
    constants |= dict(HAS_SCALES=True) if layout == "fp8_656" else {} if suffix else dict(STAGES=plan.stages)
    kernel = getattr(module, f"gather_{'fp8' if layout == 'fp8_656' else 'bf16'}{suffix}")
    types = pointers(layout, True) | dict(slots_ptr="*i64", lengths_ptr="*i64")
    built(kernel, GPUTarget("cuda", 90, 32), constants, types, plan, gluon=True)


@pytest.mark.parametrize("target", [("cuda", 80, 32), ("cuda", 90, 32), ("hip", "gfx942", 64)], ids=lambda t: str(t[1]))
def test_merge(target):
    plan = tiles.Plan("gather", 16, 32, 4, 2, 256, 8)
    constants = dict(HAS_SINK=True, PDL=target[1] == 90, SPLITS=64, COLUMNS=64)
    built(merge_kernel, GPUTarget(*target), constants, pointers("bf16_1152", False), plan)
