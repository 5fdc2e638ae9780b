"""The results of the kernel benchmark as one table, and as a record for JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from sglang_dsa_plugin.tools.bench_header import header
from sglang_dsa_plugin.tools.bench_run import Result
from sglang_dsa_plugin.tools.bench_timing import Spread

COLUMNS = (
    "case",
    "sets",
    "empty",
    "ours",
    "built-in",
    "ours net",
    "built-in net",
    "floor",
    "share",
    "built-in / ours",
    "by",
    "the built-in's",
)
# A table that is read in a file should not be folded to 80 columns.
WIDTH = 230


def cells(result: Result) -> list[str]:
    """One row of the table; times in microseconds a call, net of an empty kernel where the column says so."""
    if result.failed is not None:
        return [result.name, str(result.sets), *["-"] * 7, f"failed: {result.failed}", "-", result.rival]
    ours, rival, empty = (_median(result.spread(name)) for name in ("ours", "rival", "empty"))
    gain = result.gain
    if gain is None:
        ratio = result.missing or "-"
    else:
        ratio = f"{gain.median:.2f} [{gain.least:.2f}, {gain.most:.2f}]{'  SLOWER' if result.slower else ''}"
        if result.disagrees:
            ratio += f"  OTHER RESULT ({result.difference:.2g})"
    # A floor that rounds to nothing says nothing, nor does a share of it.
    floor = result.floor is not None and result.floor[0] >= 0.05
    return [
        result.name,
        f"{result.sets}{'' if result.sets >= 20 else ' > L2'}",
        _us(empty),
        _us(ours),
        _us(rival),
        _us(_net(ours, empty)),
        _us(_net(rival, empty)),
        f"{_us(result.floor[0])} {result.floor[1]}" if floor and result.floor else "-",
        f"{result.share:.0%}" if floor and result.share is not None else "-",
        ratio,
        ", ".join(dict.fromkeys(result.by.values())) or "-",
        result.rival,
    ]


def _median(spread: Spread | None) -> float | None:
    return None if spread is None else spread.median


def _net(value: float | None, empty: float | None) -> float | None:
    return None if value is None or empty is None else value - empty


def _us(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


def line(result: Result) -> str:
    """A case in one line of text, as it is done."""
    shown = dict(zip(COLUMNS, cells(result)))
    return (
        f"{shown['case']}: ours {shown['ours']} ({shown['by']}), {result.rival} {shown['built-in']}, "
        f"floor {shown['floor']}, built-in / ours {shown['built-in / ours']}"
    )


def slower(results: Sequence[Result]) -> list[str]:
    """One line a case that took longer than it is allowed to."""
    return [
        f"{r.name}: {1 / r.gain.median:.2f} of {r.rival}'s time "
        f"[{1 / r.gain.most:.2f}, {1 / r.gain.least:.2f}], allowed {r.allowed:.2f}"
        for r in results
        if r.slower and r.gain is not None
    ]


def record(results: Sequence[Result], device: dict[str, Any], rounds: int, ended: str) -> dict[str, Any]:
    """All that is known about a run. ended: "complete", or what cut it short."""
    return header(device) | {
        "method": "CUDA graph of one call a set, microseconds a call; contestants interleaved, ratios by round",
        "rounds": rounds,
        "ended": ended,
        "cases": [result.record() for result in results],
    }


def read(path: Path) -> tuple[list[Result], dict[str, Any], str]:
    """Results, device and end of a run whose record was written to this file. ValueError if it is none."""
    names = [one.name for one in fields(Result)]
    try:
        whole = json.loads(path.read_text())
        results = [Result(**{name: case[name] for name in names}) for case in whole["cases"]]
        return results, whole["device"], whole["ended"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is not what `bench kernels --json` writes ({type(error).__name__}: {error})"
        ) from error


def show(results: Sequence[Result], device: dict[str, Any], ended: str) -> None:
    """The table; then what is missing, needs much memory, failed or is slower."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=WIDTH)
    table = Table(title=f"{device['name']}; microseconds a call, medians; run {ended}", title_justify="left")
    for column in COLUMNS:
        words = column in ("case", "built-in / ours", "by", "the built-in's")
        table.add_column(column, justify="left" if words else "right", no_wrap=column != "built-in / ours")
    for result in results:
        table.add_row(*map(_plain, cells(result)))
    console.print(table)
    for result in results:
        if max(result.peak_bytes.values(), default=0) >= 256 << 20:
            memory = ", ".join(f"{side} {size / (1 << 20):.0f} MiB" for side, size in result.peak_bytes.items())
            console.print(f"memory beyond the inputs, {result.name}: {memory}", soft_wrap=True)
    for title, lines in (
        ("failed", [r.name for r in results if r.failed is not None]),
        ("the two sides gave other results", [f"{r.name}: {r.difference:.2g}" for r in results if r.disagrees]),
        ("slower than allowed in every round", slower(results)),
    ):
        for text in lines:
            console.print(_plain(f"{title}: {text}"), soft_wrap=True)
    console.print(f"{len(results)} cases, {sum(r.gain is not None for r in results)} compared")


def _plain(text: str) -> str:
    from rich.markup import escape

    return escape(text)
