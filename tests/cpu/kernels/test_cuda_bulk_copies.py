"""Between reads of a place in shared memory and the bulk copies that fill it next stands a fence of the async proxy.

What orders them is an arrival after the reads and a wait before the copies; the fence must lie between the two, on
either side of that hand-over (docs/architecture.md). Where it is, is read from the compiled kernel.
"""

import re
import subprocess
from pathlib import Path

import pytest
import triton

pytest.importorskip("cuda.core")

from sglang_dsa_plugin.kernels.cuda import program, select, sparse_mla, tables
from sglang_dsa_plugin.kernels.triton.index_tables import Gpu

FORM = sparse_mla.FORMS["fp8_656"]
DISASSEMBLE = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
# Waits, arrivals, reads of the ring by ldmatrix, fences, bulk copies and the group's end; places in order.
WORDS = re.compile(r"\b(SYNCS\.PHASECHK|SYNCS\.ARRIVE|LDSM|LDS|FENCE\.VIEW\.ASYNC|UBLKCP|EXIT)\b(.*)")
H200 = Gpu("cuda", 90, 132, 227)


def words(tmp_path, source, macros):
    """(word, operands) in order."""
    (tmp_path / "kernel.cubin").write_bytes(program.compile_only(source, "sm_90a", macros)[0])
    return WORDS.findall(subprocess.check_output([DISASSEMBLE, "-c", tmp_path / "kernel.cubin"], text=True))


def steps(tmp_path, cluster, heads):
    """Those of sparse attention up to the copying group's end: what lies behind are waits that go round again."""
    macros = FORM.defines(cluster, lengths=True, sink=True, wide_slots=False, heads=heads)
    found = words(tmp_path, FORM.source, macros)
    copy = [word for word, _ in found].index("UBLKCP")
    end = next(i for i, (word, _) in enumerate(found) if i > copy and word == "EXIT")
    return found[:end]


def back(found, at, *words):
    """The nearest of these words before a place."""
    return next(word for word, _ in reversed(found[:at]) if word in words)


@pytest.mark.parametrize(("cluster", "heads"), [(1, 8), (1, 16), (sparse_mla.MOST_BLOCKS, 16)])
@pytest.mark.parametrize("racecheck", [False, True])
def test_a_fence_stands_between_the_wait_and_the_copies(tmp_path, monkeypatch, cluster, heads, racecheck):
    monkeypatch.setattr(sparse_mla, "LANES_ARRIVE", racecheck)
    found = steps(tmp_path, cluster, heads)
    copies = [i for i, (word, _) in enumerate(found) if word == "UBLKCP"]
    assert len(copies) == 1
    assert back(found, copies[0], "FENCE.VIEW.ASYNC", "SYNCS.PHASECHK") == "FENCE.VIEW.ASYNC"


@pytest.mark.parametrize(("cluster", "heads"), [(1, 8), (1, 16), (sparse_mla.MOST_BLOCKS, 16)])
def test_for_racecheck_one_stands_behind_the_reads_too(tmp_path, monkeypatch, cluster, heads):
    monkeypatch.setattr(sparse_mla, "LANES_ARRIVE", True)
    found = steps(tmp_path, cluster, heads)
    # Behind the barriers `empty` come but two for each of two turns.
    empty = FORM.shared_bytes - 4 * 8 - 8 * FORM.slots
    arrivals = [i for i, (word, to) in enumerate(found) if word == "SYNCS.ARRIVE" and f"+{empty:#x}]" in to]
    # Of queries and of tiles by the group of scores, of tiles by that of sums, which does not read queries.
    behind = [back(found, i, "FENCE.VIEW.ASYNC", "LDSM", "SYNCS.PHASECHK") for i in arrivals]
    assert sorted(behind) == ["FENCE.VIEW.ASYNC"] * 3 + ["SYNCS.PHASECHK"]


@pytest.mark.parametrize(("rows", "columns"), [(150, 131072), (255, 8192), (1, 1 << 20)])
def test_selection_has_one_behind_its_reads(tmp_path, rows, columns):
    """Rows that come piece by piece: the second copy goes where the piece before was read."""
    source, _, macros, _ = select.form(tables.launch_shape(H200, rows, columns, 64, 64), select.SLOTS, 64)
    found = words(tmp_path, source, macros)
    again = [i for i, (word, _) in enumerate(found) if word == "UBLKCP"][1]
    assert back(found, again, "LDS", "FENCE.VIEW.ASYNC") == "FENCE.VIEW.ASYNC"
