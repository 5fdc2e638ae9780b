"""Every lane of a warp that comes to an mbarrier.init has the barrier's address where that instruction takes it from.

A compiled kernel tells tools where its barriers are handled, in a table of places and registers. compute-sanitizer's
racecheck reads the register of an init in all lanes that come there, those among them for which its predicate is false
(2026.4). What such a lane happens to have there it takes for an address that is written.
"""

import re
import subprocess
from pathlib import Path

import pytest
import triton

pytest.importorskip("cuda.core")

from sglang_dsa_plugin.kernels.cuda import program, select, sparse_mla, tables
from sglang_dsa_plugin.kernels.triton.index_tables import Gpu

H200 = Gpu("cuda", 90, 132, 227)
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
INIT = re.compile(r"0x([0-9a-f]+)\s*:\s*Instruction Kind : MBARRIER_INIT\s*\(R(\d+) \+")
INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+((?:@!?U?P\d+ )?)\s*([A-Z][\w.]*) ([^;]*);")
NO_REGISTER = "255"  # reads as zero: the address is in a uniform register, which lanes share


def places(cubin: bytes, path: Path) -> tuple[list[tuple[int, str]], list[tuple[int, bool, str]]]:
    """((place, register) of every init; (place, whether predicated, first operand) of every instruction)."""
    path.write_bytes(cubin)
    table = subprocess.run([TOOLS / "cuobjdump", "-elf", path], capture_output=True, text=True, check=True).stdout
    code = subprocess.run([TOOLS / "nvdisasm", "-c", path], capture_output=True, text=True, check=True).stdout
    inits = [(int(place, 16), register) for place, register in INIT.findall(table)]
    instructions = [
        (int(place, 16), bool(predicate), operands.split(",")[0].strip().partition(".")[0])
        for place, predicate, _, operands in INSTRUCTION.findall(code)
    ]
    return inits, instructions


def without_address(cubin: bytes, path: Path) -> list[str]:
    """Inits before which only some lanes put the address into its register."""
    inits, instructions = places(cubin, path)
    assert inits and instructions
    wrong = []
    for at, register in inits:
        if register == NO_REGISTER:
            continue
        writes = [(place, predicated) for place, predicated, to in instructions if place < at and to == f"R{register}"]
        if not writes or writes[-1][1]:
            wrong.append(f"init at {at:#x}, R{register}")
    return wrong


@pytest.mark.parametrize("write", [select.POSITIONS, select.SLOTS, select.BOTH])
@pytest.mark.parametrize(
    ("rows", "columns"), [(1, 8192), (7, 5000), (16, 5760), (64, 8192), (64, 32768), (1, 131072), (150, 5760)]
)
def test_selection(tmp_path, rows, columns, write):
    shape = tables.launch_shape(H200, rows, columns, 64, 64)
    source, _, macros, _ = select.form(shape, write, 64)
    cubin, _ = program.compile_only(source, "sm_90a", macros)
    assert without_address(cubin, tmp_path / "select.cubin") == []


@pytest.mark.parametrize("layout", sorted(sparse_mla.FORMS))
@pytest.mark.parametrize(("cluster", "heads"), [(1, 16), (1, 8), (sparse_mla.MOST_BLOCKS, 16)])
def test_sparse_mla(tmp_path, layout, cluster, heads):
    form = sparse_mla.FORMS[layout]
    macros = form.defines(cluster, lengths=True, sink=False, wide_slots=False, heads=heads)
    assert macros["HEADS"] == heads
    cubin, _ = program.compile_only(form.source, "sm_90a", macros)
    assert without_address(cubin, tmp_path / "sparse_mla.cubin") == []


def test_a_lane_without_the_address_is_found(tmp_path, monkeypatch):
    """The form that racecheck complained about."""
    plain = "    if (lane == 0) barrier_init(sh.arrived[warp]);\n"
    whole = program._text("select.cu")
    assert whole.count("    warp_barrier_init(sh.arrived[warp], lane);\n") == 1
    text = whole.replace("    warp_barrier_init(sh.arrived[warp], lane);\n", plain)
    monkeypatch.setattr(program, "_text", lambda _: text)
    shape = tables.launch_shape(H200, 16, 5760, 64, 64)
    source, _, macros, _ = select.form(shape, select.SLOTS, 64)
    cubin, _ = program.compile_only(source, "sm_90a", macros)
    assert len(without_address(cubin, tmp_path / "select.cubin")) == 1
