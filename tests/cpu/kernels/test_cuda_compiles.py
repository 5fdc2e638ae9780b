"""CUDA C++ sources compile, without a GPU, for every target they are meant for, within registers and shared memory."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import triton

pytest.importorskip("cuda.core")

from sglang_dsa_plugin.kernels.cuda import program, select, sparse_mla, sparse_mla_portable, tables
from sglang_dsa_plugin.kernels.triton.index_tables import Gpu

CLUSTER_ARCHS = ["sm_90a", "sm_100a", "sm_103a", "sm_120a", "sm_121a"]


def gpu_of(arch):
    sm = int(arch[3:-1])
    return Gpu("cuda", sm, 132, 99 if sm >= 120 else 227)


def assert_select_fits(shape, arch):
    """A launch of selection compiles to what a processor has room for, with nothing spilled."""
    source, name, defines, _ = select.form(shape, select.BOTH, 64)
    takes = program.compile_only(source, arch, defines)[1][name]
    fits = takes.registers * shape.threads * shape.blocks <= 65536
    assert fits and takes.shared == 0 and takes.spilled == 0, (shape, takes)


@pytest.mark.parametrize(
    ("arch", "rows", "columns"),
    [
        *(("sm_90a", rows, columns) for rows, columns in ((1, 8192), (1, 131072), (16, 131072), (63, 131072))),
        *((arch, 1, 131072) for arch in CLUSTER_ARCHS if arch != "sm_90a"),
    ],
)
def test_select(arch, rows, columns):
    """Held in shared memory and longer than it; `test_every_select_of_an_h200` has the other batches and clusters."""
    shape = tables.select_shape(gpu_of(arch), rows, columns)
    assert_select_fits(shape, arch)


@pytest.mark.full
def test_every_select_of_an_h200():
    shapes = tables.select_shapes(gpu_of("sm_90a"), 1 << 20, 2048, 64)
    few = [shape for shape in shapes if isinstance(shape, tables.SelectShape)]
    # Rows that one vector a thread would hold are those of select_short.cuh.
    assert {shape.batch for shape in few} == {2, 4, 8} and {shape.cluster for shape in few} >= {1, 2, 4, 8, 16}
    for shape in few:
        assert_select_fits(shape, "sm_90a")


@pytest.mark.parametrize(
    ("arch", "columns", "k"),
    [("sm_90a", 32768, 2048), *((arch, 131072, 2048) for arch in CLUSTER_ARCHS), ("sm_90a", 1 << 20, 4096)],
)
def test_select_of_many_rows(arch, columns, k):
    shape = tables.many_shape(gpu_of(arch), columns, k)
    assert_select_fits(shape, arch)


@pytest.mark.parametrize("layout", sorted(sparse_mla.FORMS))
@pytest.mark.parametrize(("cluster", "heads"), [(1, 8), (1, 16), (5, 16), (sparse_mla.MOST_BLOCKS, 16)])
def test_sparse_mla(layout, cluster, heads):
    form = sparse_mla.FORMS[layout]
    assert form.shared_bytes <= 227 * 1024
    every = {"lengths": cluster > 1, "sink": cluster < 8, "wide_slots": cluster == 5, "heads": heads}
    _, found = program.compile_only(form.source, "sm_90a", form.defines(cluster, **every))
    takes = found[form.name]
    # Registers at the start; the groups then share them out (setmaxnreg).
    # What is spilled (84 at most) belongs to the join at a row's end.
    assert takes.registers * 384 <= 65536 and takes.shared == 0 and takes.spilled <= 96


def test_sparse_mla_as_racecheck_follows_it(monkeypatch):
    def made(form, cluster):
        defines = form.defines(cluster, lengths=True, sink=True, wide_slots=False)
        return defines["LANES_ARRIVE"], defines["READERS_FENCE"]

    for form in sparse_mla.FORMS.values():
        assert [made(form, cluster) for cluster in (1, 2, 8)] == [(0, 0), (1, 0), (1, 0)]
    monkeypatch.setattr(sparse_mla, "LANES_ARRIVE", True)
    for form in sparse_mla.FORMS.values():
        assert [made(form, cluster) for cluster in (1, 2, 8)] == [(1, 1)] * 3
        defines = form.defines(1, lengths=True, sink=True, wide_slots=False)
        assert form.name in program.compile_only(form.source, "sm_90a", defines)[1]


def test_a_lane_speaks_for_its_warp_through_warp_arrive_only():
    """It has the __syncwarp() that racecheck cannot miss. The others tell of what the lane wrote itself."""
    own = {
        "sparse_mla_fp8.cu": ["if (lane == 0) barrier_arrive(full);"],
        "sparse_mla_quarters.cuh": ["if (lane == 0) barrier_arrive(place.full(s));"],
        "warps.cuh": [
            "__device__ __forceinline__ void barrier_arrive(u32 at) {",
            'asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(at) : "memory");',
            "__device__ __forceinline__ void barrier_arrive(u32 at, u32 times) {",
            'asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(at), "r"(times) : "memory");',
        ],
    }
    for source in Path(program.__file__).parent.glob("*.cu*"):
        lines = [line.strip() for line in source.read_text().splitlines()]
        found = [line for line in lines if re.search(r"\bbarrier_arrive\(|mbarrier\.arrive\.shared", line)]
        if source.name == "sparse_mla_parts.cuh":
            assert len(found) == 5 and lines.count("__syncwarp();") == 3
        else:
            assert found == own.get(source.name, []), source.name


# Shared memory of a block in KiB, by compute capability.
SHARED_KIB = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}


@pytest.mark.parametrize("layout", sparse_mla_portable.LAYOUTS)
@pytest.mark.parametrize(("heads", "rows"), [(32, 4096), (128, 4096), (128, 64), (128, 16)])
@pytest.mark.parametrize("sm", SHARED_KIB)
def test_portable_sparse_mla(sm, heads, rows, layout):
    plan = sparse_mla_portable.choose(Gpu("cuda", sm, 132, SHARED_KIB[sm]), layout, rows, heads, 2048)
    assert plan.shared_bytes <= SHARED_KIB[sm] << 10 and (plan.splits > 1) == (rows == 16)
    every = plan.defines(lengths=rows == 16, sink=rows > 16, wide_slots=heads == 32, pdl=sm >= 90)
    takes = program.compile_only(sparse_mla_portable.SOURCE, program.arch_of(sm), every)[1][sparse_mla_portable.NAME]
    # What is spilled are addresses, read once a tile, and the exact way's: most of it where warps share columns, for
    # which a lane of a warp of scores has twice as many sums.
    most = 1024 if plan.together == 2 else 256
    assert takes.registers * plan.threads <= 65536 and takes.shared == 0 and takes.spilled <= most


@pytest.mark.parametrize("layout", sparse_mla_portable.LAYOUTS)
@pytest.mark.parametrize("shared", [99, 163])
def test_warps_of_two_kinds_come_to_barriers_of_one_kind(layout, shared, tmp_path):
    """No vote among them: of one with a constant vote the compiler made two barriers, and the GPU stopped with an
    illegal instruction.
    """
    plan = sparse_mla_portable.choose(Gpu("cuda", 90, 132, shared), layout, 4096, 128, 2048)
    macros = plan.defines(lengths=True, sink=False, wide_slots=False, pdl=True)
    path = tmp_path / "kernel.cubin"
    path.write_bytes(program.compile_only(sparse_mla_portable.SOURCE, "sm_90a", macros)[0])
    disassemble = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    text = subprocess.check_output([disassemble, "-c", path], text=True)
    assert "BAR.RED" not in text and "BAR.ARV" not in text
    in_source = 28 if layout == "fp8_656" else 27  # fast and exact way of both kinds, inlined once each
    assert len(re.findall(r"BAR\.SYNC\S* 0x0 ;", text)) <= in_source


def launched_early():
    """(source, arch, macros) of kernels that are launched before the one ahead is done."""
    for arch in CLUSTER_ARCHS:
        gpu = Gpu("cuda", int(arch[3:-1]), 132, 99 if arch >= "sm_12" else 227)
        for shape in (tables.select_shape(gpu, 1, 131072), tables.many_shape(gpu, 131072, 2048)):
            for write, page in ((select.BOTH, 64), (select.POSITIONS, 1))[: 2 if arch == "sm_90a" else 1]:
                source, _, defines, _ = select.form(shape, write, page)
                yield source, arch, defines
    for sm in (90, 120):
        plan = sparse_mla_portable.choose(Gpu("cuda", sm, 132, SHARED_KIB[sm]), "bf16_1152", 64, 64, 2048)
        defines = plan.defines(lengths=True, sink=True, wide_slots=False, pdl=True)
        yield sparse_mla_portable.SOURCE, program.arch_of(sm), defines
    for form in sparse_mla.FORMS.values():
        for cluster in (1, 8):
            yield form.source, "sm_90a", form.defines(cluster, lengths=True, sink=True, wide_slots=True)


def test_no_memory_is_touched_ahead_of_the_wait(tmp_path):
    """In the machine code: the compiler may move read-only loads past a wait (griddepcontrol.wait, ACQBULK)."""
    disassemble = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    for source, arch, defines in launched_early():
        (tmp_path / "kernel.cubin").write_bytes(program.compile_only(source, arch, defines)[0])
        text = subprocess.check_output([disassemble, "-c", tmp_path / "kernel.cubin"], text=True)
        found = re.findall(r"\b(ACQBULK|LDG|STG|LDGSTS|UBLKCP|UTMALDG|ATOMG|REDG|EXIT)\b", text)
        assert found[0] == "ACQBULK", (source, arch, defines, found[:3])
        assert ".CONSTANT" not in "".join(re.findall(r"\bLDG\S*", text)), (source, arch, defines)


def test_a_cubin_depends_on_what_its_source_includes(monkeypatch, tmp_path):
    monkeypatch.setattr(program, "_FOLDER", tmp_path)
    (tmp_path / "a.cu").write_text('// a\n#include "b.cuh"\nint last;\n')
    (tmp_path / "b.cuh").write_text("int first;")
    assert program._text("a.cu") == "// a\nint first;\nint last;\n"


def test_an_error_names_the_file_and_the_compilers_reason():
    with pytest.raises(RuntimeError, match=r"select.cu does not compile for sm_90a(.|\n)*THREADS"):
        program.compile_only("select.cu", "sm_90a", {})


def test_cubins_are_kept_on_disk_where_there_is_a_place(monkeypatch, tmp_path):
    compiled = []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(program, "_compile", lambda *what: compiled.append(what) or b"cubin")
    for defines in ((), (), (("THREADS", "512"),)):
        assert program._cubin("select.cu", "sm_90a", defines) == b"cubin"
    kept = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(compiled) == 2 and [path.suffix for path in kept] == [".cubin", ".cubin"]
    for damage in (b"", b"cubin", kept[0].read_bytes()[:-1]):
        for path in kept:
            path.write_bytes(damage)
        before = len(compiled)
        assert program._cubin("select.cu", "sm_90a", ()) == program._cubin("select.cu", "sm_90a", ()) == b"cubin"
        assert len(compiled) == before + 1
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/none")
    before = len(compiled)
    assert program._cubin("select.cu", "sm_90a", ()) == b"cubin" and len(compiled) == before + 1


def test_a_user_without_a_home_compiles_every_time(monkeypatch):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(program.Path, "home", no_home)
    monkeypatch.setattr(program, "_compile", lambda *what: b"cubin")
    assert program._cubin("select.cu", "sm_90a", ()) == b"cubin"


def test_several_threads_compile_in_a_process_that_has_not_imported_the_compiler():
    code = """
from concurrent.futures import ThreadPoolExecutor
import sys
from sglang_dsa_plugin.kernels.cuda import program
assert "cuda.core" not in sys.modules
kernels = [("cluster.cuh", "sm_90a", (("A", str(i)),)) for i in range(8)]
with ThreadPoolExecutor(8) as pool:
    print(len(list(pool.map(lambda what: program._compile(*what), kernels))))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "8", done.stderr
