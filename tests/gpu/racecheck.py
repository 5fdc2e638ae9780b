"""What racecheck wrote about the paths of `tests.gpu.sanitize`, judged: exit code 1 if it reports a race that is not
known to be none, or did not report all.

    python -m tests.gpu.racecheck race.*

racecheck follows threads that arrive on an mbarrier each for itself. Where one thread arrives for others that a warp's
or a group's barrier ordered before it, it reports a race, whether that barrier is there or not (docs/racecheck.md).
Our CUDA C++ kernels are or can be built without such hand-overs. Gluon's `mbarrier.arrive` is always one thread's, so
what it hands over stands here, as the pairs of source lines that touch it. That every such arrival has its barrier is
read from the compiled kernels (tests/cpu/kernels/test_sparse_mla_compiles.py).
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from sglang_dsa_plugin.kernels import triton as our_kernels

# By kernel: the line that writes and the one that reads.
KNOWN = {
    "gather_bf16_wide": (
        ("factors.index(stage).store(factor)", "factor = gl.expand_dims(factors.index(stage).load(HEADS), 1)"),
        ("factors.index(2).store(weight)", "weight = factors.index(2).load(HEADS)"),
    ),
}

_ACCESS = r"(Read|Write) access at (.+?)\+0x[0-9a-f]+(?: in (\S+):(\d+))?(?: \[\d+ hazards?\])?$"
_FIRST = re.compile(r"^=+ (?:Error|Warning|Info): Race reported between " + _ACCESS)
_OTHER = re.compile(r"^=+ +and " + _ACCESS)
_SUMMARY = re.compile(r"^=+ RACECHECK SUMMARY: \d+ hazards? displayed \((\d+) errors?, (\d+) warnings?\)")
# (Read or Write, kernel, source line or where none is told its absence)
Access = tuple[str, str, str]


def pairs(log: Iterable[str]) -> Iterator[tuple[Access, Access]]:
    """The two accesses of every race in a log of racecheck's analysis reports."""
    first = None
    for line in log:
        if found := _FIRST.match(line.rstrip()):
            first = _access(found)
        elif first and (found := _OTHER.match(line.rstrip())):
            yield first, _access(found)


def _access(found: re.Match[str]) -> Access:
    kind, kernel, file, number = found.groups()
    return kind, kernel, _source_line(file, int(number)) if file else "no line"


def _source_line(file: str, number: int) -> str:
    """The text of a line of one of our Triton files, stripped; of another file its place."""
    path = Path(our_kernels.__path__[0]) / Path(file).name
    lines = path.read_text().splitlines() if path.is_file() else []
    return lines[number - 1].strip() if number <= len(lines) else f"{file}:{number}"


def known(one: Access, other: Access) -> bool:
    """Whether these two are a pair of KNOWN. Which of them racecheck names first says nothing of their order."""
    (_, kernel, written), (kind, other_kernel, read) = (one, other) if one[0] == "Write" else (other, one)
    return kernel == other_kernel and kind == "Read" and (written, read) in KNOWN.get(kernel, ())


def complaints(log: list[str]) -> list[str]:
    """What is wrong in a log: races that are not known to be none, or reports that are not in it."""
    wrong = sorted({f"{one} and {other}" for one, other in pairs(log) if not known(one, other)})
    summary = next((found for line in log if (found := _SUMMARY.match(line))), None)
    if summary is None:
        return [*wrong, "no summary: racecheck did not come to its end"]
    reports = sum(_FIRST.match(line.rstrip()) is not None for line in log)
    if reports != int(summary[1]) + int(summary[2]):
        wrong.append(f"{reports} reports of {summary[1]} errors and {summary[2]} warnings: run it with --print-limit 0")
    return wrong


def main() -> int:
    """Judge the logs of the command line; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("logs", nargs="+", type=Path)
    wrong = 0
    for path in parser.parse_args().logs:
        found = complaints(path.read_text(errors="replace").splitlines())
        wrong += len(found)
        print(f"{'WRONG' if found else 'ok   '} {path}", *found, sep="\n      ")
    return int(wrong > 0)


if __name__ == "__main__":
    raise SystemExit(main())
