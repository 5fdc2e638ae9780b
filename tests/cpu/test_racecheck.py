"""The judgement on racecheck's reports (tests/gpu/racecheck.py)."""

from pathlib import Path

import pytest

from sglang_dsa_plugin.kernels import triton as our_kernels
from tests.gpu import racecheck

WIDE = "sparse_mla_hopper_wide.py"
SOURCE = Path(our_kernels.__path__[0], WIDE).read_text().splitlines()


def place(text):
    """`in FILE:LINE` of a line of the wide kernel, as racecheck prints it."""
    return f"in {WIDE}:{1 + [line.strip() for line in SOURCE].index(text)}"


def log(first, *others, errors=1):
    reports = [f"========= Error: Race reported between {first}"]
    reports += [f"=========     and {other} [256 hazards]" for other in others]
    return [
        "========= COMPUTE-SANITIZER",
        *(reports if first else []),
        "========= ",
        f"========= RACECHECK SUMMARY: {errors} hazards displayed ({errors} errors, 0 warnings)",
    ]


def factor(at):
    return place(racecheck.KNOWN["gather_bf16_wide"][0][at])


def test_every_known_line_stands_once_in_its_kernel():
    lines = [line.strip() for line in SOURCE]
    assert [lines.count(text) for both in racecheck.KNOWN["gather_bf16_wide"] for text in both] == [1] * 4


def test_a_log_without_reports_is_clean():
    assert racecheck.complaints(log("", errors=0)) == []


def test_known_pairs_pass_in_either_order():
    written = f"Write access at gather_bf16_wide+0x4310 {factor(0)}"
    read = f"Read access at gather_bf16_wide+0x7890 {factor(1)}"
    assert racecheck.complaints(log(written, read)) == racecheck.complaints(log(read, written)) == []


@pytest.mark.parametrize(
    ("first", "other"),
    [
        (f"Write access at gather_bf16_wide+0x10 {factor(0)}", f"Write access at gather_bf16_wide+0x20 {factor(0)}"),
        (f"Write access at gather_bf16_wide+0x10 {factor(1)}", f"Read access at gather_bf16_wide+0x20 {factor(0)}"),
        (f"Write access at gather_fp8_wide+0x10 {factor(0)}", f"Read access at gather_fp8_wide+0x20 {factor(1)}"),
        ("Write access at sparse_mla_bf16+0x2b40", "Read access at sparse_mla_bf16+0x56c0"),
        ("Write access at f(int *, int)+0x10 in f.cu:3", "Read access at f(int *, int)+0x20 in f.cu:3"),
    ],
)
def test_other_pairs_do_not(first, other):
    assert len(racecheck.complaints(log(first, other))) == 1


def test_one_other_pair_among_known_ones_is_found():
    read = [f"Read access at gather_bf16_wide+0x7890 {factor(at)}" for at in (1, 0)]
    found = racecheck.complaints(log(f"Write access at gather_bf16_wide+0x4310 {factor(0)}", *read))
    assert len(found) == 1 and "'Read', 'gather_bf16_wide', 'factors.index(stage).store(factor)'" in found[0]


def test_reports_that_are_left_out_are_missed():
    assert "--print-limit" in racecheck.complaints(log("", errors=3))[0]
    assert "no summary" in racecheck.complaints(["========= COMPUTE-SANITIZER"])[0]
