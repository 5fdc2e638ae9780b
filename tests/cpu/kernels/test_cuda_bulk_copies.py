"""Between reads of a place in shared memory and the bulk copies that fill it next stands a fence of the async proxy.

What orders them is an arrival after the reads and a wait before the copies; the fence must lie between the two, on
either side of that hand-over (docs/racecheck.md). Where it is, is read from the compiled kernel.
"""

import re
import subprocess
from pathlib import Path

import pytest
import triton

pytest.importorskip("cuda.core")

from sglang_dsa_plugin.kernels.cuda import program, select, sparse_mla, tables
from sglang_dsa_plugin.kernels.triton.index_tables import Gpu

# What comes by bulk copies, of packed rows or of the tensor unit: (layout, blocks of a cluster, heads).
BULK = [
    *(("fp8_656", cluster, heads) for cluster, heads in ((1, 8), (1, 16), (sparse_mla.MOST_BLOCKS, 16))),
    *(("bf16_1152", 1, heads) for heads in (8, 16)),
]
COPY = {"fp8_656": "UBLKCP", "bf16_1152": "UTMALDG"}
DISASSEMBLE = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
# Waits, arrivals, reads of the ring by ldmatrix, fences, bulk copies and the group's end; places in order.
WORDS = re.compile(r"\b(SYNCS\.PHASECHK|SYNCS\.ARRIVE|LDSM|LDS|FENCE\.VIEW\.ASYNC|UBLKCP|UTMALDG|EXIT)\b(.*)")
H200 = Gpu("cuda", 90, 132, 227)


def words(tmp_path, source, macros):
    """(word, operands) in order."""
    (tmp_path / "kernel.cubin").write_bytes(program.compile_only(source, "sm_90a", macros)[0])
    return WORDS.findall(subprocess.check_output([DISASSEMBLE, "-c", tmp_path / "kernel.cubin"], text=True))


def steps(tmp_path, layout, cluster, heads):
    """Those of sparse attention up to the copying group's end: what lies behind are waits that go round again."""
    form = sparse_mla.FORMS[layout]
    macros = form.defines(cluster, lengths=True, sink=True, wide_slots=False, heads=heads)
    found = words(tmp_path, form.source, macros)
    copy = [word for word, _ in found].index(COPY[layout])
    end = next(i for i, (word, _) in enumerate(found) if i > copy and word == "EXIT")
    return found[:end]


def back(found, at, *words):
    """The nearest of these words before a place."""
    return next(word for word, _ in reversed(found[:at]) if word in words)


@pytest.mark.parametrize(("layout", "cluster", "heads"), BULK)
@pytest.mark.parametrize("racecheck", [False, True])
def test_a_fence_stands_between_the_wait_and_the_copies(tmp_path, monkeypatch, layout, cluster, heads, racecheck):
    monkeypatch.setattr(sparse_mla, "LANES_ARRIVE", racecheck)
    found = steps(tmp_path, layout, cluster, heads)
    copies = [i for i, (word, _) in enumerate(found) if word == COPY[layout]]
    assert len(copies) == 1
    assert back(found, copies[0], "FENCE.VIEW.ASYNC", "SYNCS.PHASECHK") == "FENCE.VIEW.ASYNC"


@pytest.mark.parametrize(("layout", "cluster", "heads"), [one for one in BULK if one[0] == "fp8_656"])
def test_for_racecheck_one_stands_behind_the_reads_too(tmp_path, monkeypatch, layout, cluster, heads):
    monkeypatch.setattr(sparse_mla, "LANES_ARRIVE", True)
    found, form = steps(tmp_path, layout, cluster, heads), sparse_mla.FORMS[layout]
    # Behind the barriers `empty` come five for each of two turns at most, and what a row begins with.
    empty = form.shared_bytes - 16 * 16 - 10 * 8 - 8 * form.slots
    arrivals = [i for i, (word, to) in enumerate(found) if word == "SYNCS.ARRIVE" and f"+{empty:#x}]" in to]
    # Of queries and of tiles by the group of scores, of tiles by that of sums, which does not read queries.
    behind = [back(found, i, "FENCE.VIEW.ASYNC", "LDSM", "SYNCS.PHASECHK") for i in arrivals]
    assert sorted(behind) == ["FENCE.VIEW.ASYNC"] * 3 + ["SYNCS.PHASECHK"]


@pytest.mark.parametrize("heads", [8, 16])
@pytest.mark.parametrize("racecheck", [False, True])
def test_of_bf16_rows_six_stand_behind_reads(tmp_path, monkeypatch, heads, racecheck):
    """Of queries, of a tile's four quarters by the group of sums, which gives each back, of rows by that of scores."""
    monkeypatch.setattr(sparse_mla, "LANES_ARRIVE", racecheck)
    found = [word for word, _ in steps(tmp_path, "bf16_1152", 1, heads)]
    hand_over = ("SYNCS.ARRIVE", "SYNCS.PHASECHK")
    then = []
    for i, word in enumerate(found):
        if word == "FENCE.VIEW.ASYNC" and [w for w in found[:i] if w == "LDSM" or w in hand_over][-1:] == ["LDSM"]:
            then.append(next(w for w in found[i:] if w in hand_over))
    assert sorted(then) == (["SYNCS.ARRIVE"] * 5 + ["SYNCS.PHASECHK"] if racecheck else [])


@pytest.mark.parametrize(("rows", "columns"), [(150, 131072), (255, 8192), (1, 1 << 20)])
def test_selection_has_one_behind_its_reads(tmp_path, rows, columns):
    """Rows that come piece by piece: the second copy goes where the piece before was read."""
    source, _, macros, _ = select.form(tables.launch_shape(H200, rows, columns, 64, 64), select.SLOTS, 64)
    found = words(tmp_path, source, macros)
    again = [i for i, (word, _) in enumerate(found) if word == "UBLKCP"][1]
    assert back(found, again, "LDS", "FENCE.VIEW.ASYNC") == "FENCE.VIEW.ASYNC"
