"""`sglang-dsa bench tune`: which implementation of sparse attention is fastest on this GPU, where dense meets sparse.

Every implementation that can run is timed as the server calls it, adapter included, by the rules of bench_timing, for
each number of heads, row layout and kind of step (bench_points), of few rows within a decode step of one layer. The
choices go into a table that the support table reads when it is shipped as `sglang_dsa_plugin/tuned/<gpu>.json`. For
prefill the dense way (keys and values expanded, then causal attention over all of them) is timed beside scores,
selection and sparse attention: the lengths up to which it is no slower are part of the table, but nothing takes dense
attention past k unasked, since it is another result: it attends to every token.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sglang_dsa_plugin.tools import bench_kernels

if TYPE_CHECKING:
    from sglang_dsa_plugin.tools.bench_points import Point


def bench_tune(
    out: Annotated[Path | None, typer.Option(help="where to write; default: the file that the package reads")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="16 and 128 heads and one length only")] = False,
    rounds: Annotated[int, typer.Option(min=5, help="rounds in which all contestants take their turn")] = 5,
) -> None:
    """Measure every implementation of sparse attention here and write the table of the fastest."""
    import torch

    from sglang_dsa_plugin import tuned
    from sglang_dsa_plugin.tools import bench_header, bench_points, bench_report
    from sglang_dsa_plugin.tools.bench_timing import GraphClock

    device = bench_kernels.device_facts("bench tune")
    target = out or tuned.path_of(device["name"])
    target.parent.mkdir(parents=True, exist_ok=True)
    where = torch.device("cuda", torch.cuda.current_device())
    points: list[Point] = []
    ended, status = "complete", 0
    try:
        with bench_kernels.stopping(), torch.inference_mode():
            wanted = bench_points.shapes(quick)
            for point in bench_points.measure_all(wanted, GraphClock(), where, rounds, device["l2_bytes"]):
                points.append(point)
                print(bench_points.line(point), file=sys.stderr, flush=True)
    except bench_kernels.Stopped as stop:
        ended, status = f"cut short by signal {stop.args[0]}", 128 + stop.args[0]
    whole = bench_report.record([], device, rounds, ended)
    del whole["cases"]
    table = {
        "device": device["name"],
        "sm": device["sm"],
        "run": whole,
        "choices": bench_points.choices(points),
        "dense_up_to": bench_points.dense_up_to(points),
        "points": [vars(point) for point in points],
    }
    if status:  # half a table must not be shipped by mistake
        target = target.with_suffix(".partial.json")
    bench_header.write(target, table)
    print(json.dumps({key: table[key] for key in ("choices", "dense_up_to")}, indent=1))
    print(f"written to {target}", file=sys.stderr)
    if status or not points:
        raise typer.Exit(status or 1)
