"""`sglang-dsa bench kernels`: this package's operators beside what SGLang's built-in DSA launches, in one run.

Method: bench_timing. Cases: bench_cases. What the built-in launches: bench_rivals. A case that fails, or whose rival
cannot run here, is named and the others go on; the JSON file is written anew after every case.
"""

from __future__ import annotations

import contextlib
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from sglang_dsa_plugin.tools.bench_cases import Case
    from sglang_dsa_plugin.tools.bench_run import Result

NO_GPU = (
    "measures on a CUDA GPU and torch sees none here: run it where `nvidia-smi` lists one and torch is a CUDA "
    "build (`sglang-dsa doctor` says what torch sees)"
)


class Stopped(BaseException):
    """A signal asked the run to end; args[0] is its number."""


def bench_kernels(
    only: Annotated[str, typer.Option(help="cases in whose name this regular expression is found")] = "",
    quick: Annotated[bool, typer.Option("--quick", help="one or a few cases of every family")] = False,
    rounds: Annotated[int, typer.Option(min=5, help="rounds in which all contestants take their turn")] = 7,
    json_out: Annotated[Path | None, typer.Option("--json", help="also write all samples to this file")] = None,
    plot: Annotated[Path | None, typer.Option(help="also draw time against S as a PNG")] = None,
    seen: Annotated[
        Path | None,
        typer.Option(
            "--from",
            exists=True,
            dir_okay=False,
            help="measure nothing: show, and draw, what --json wrote in an earlier run",
        ),
    ] = None,
    list_cases: Annotated[bool, typer.Option("--list", help="name the cases and measure nothing")] = False,
) -> None:
    """Time kernels against the built-in's; exit status 1 when one is slower in every round, fails or disagrees."""
    from sglang_dsa_plugin.tools import bench_header, bench_plot, bench_report
    from sglang_dsa_plugin.tools.bench_cases import Sizes, cases

    try:
        wanted = re.compile(only)
    except re.error as error:
        raise typer.BadParameter(f"--only {only}: not a regular expression: {error}") from error
    chosen = [case for case in cases(Sizes()) if (case.quick or not quick) and wanted.search(case.name)]
    if not chosen:
        raise typer.BadParameter(f"--only {only}: found in the name of no case; --list names them")
    if list_cases:
        for case in chosen:
            print(case.name)
        return
    if plot is not None and not bench_plot.available():
        raise typer.BadParameter(bench_plot.NEEDED)
    if seen is not None:
        try:
            results, device, ended = bench_report.read(seen)
        except ValueError as error:
            raise typer.BadParameter(f"--from: {error}") from error
        names = {case.name for case in chosen}
        _finish([result for result in results if result.name in names], device, ended, plot)
        return
    device = device_facts()
    results = []
    ended, status, began = "complete", 0, time.monotonic()
    try:
        with stopping():
            for result in measure_all(chosen, device, rounds):
                results.append(result)
                at = f"[{len(results)}/{len(chosen)}, {time.monotonic() - began:.0f} s]"
                print(at, bench_report.line(result), file=sys.stderr, flush=True)
                if json_out is not None:
                    bench_header.write(json_out, bench_report.record(results, device, rounds, "not yet complete"))
    except Stopped as stop:
        ended, status = f"cut short by {signal.Signals(stop.args[0]).name}", 128 + stop.args[0]
    except LostDevice as lost:
        ended, status = f"cut short: {lost}", 1
    if json_out is not None:
        bench_header.write(json_out, bench_report.record(results, device, rounds, ended))
    _finish(results, device, ended, plot, status)


def _finish(results: list[Result], device: dict[str, Any], ended: str, plot: Path | None, status: int = 0) -> None:
    """Table, picture and exit status."""
    from sglang_dsa_plugin.tools import bench_plot, bench_report

    bench_report.show(results, device, ended)
    if plot is not None and not bench_plot.draw(results, plot, f"{device['name']}, bf16 queries"):
        print("--plot: no case was measured at two lengths, nothing is drawn", file=sys.stderr)
    if status or any(result.slower or result.failed or result.disagrees for result in results):
        raise typer.Exit(status or 1)


class LostDevice(Exception):
    """An earlier case broke the CUDA context; nothing can be measured in this process any more."""


def measure_all(chosen: list[Case], device: dict[str, Any], rounds: int) -> Iterator[Result]:
    """One result a case, in order. Raises LostDevice once a failure has taken the CUDA context with it."""
    import torch

    from sglang_dsa_plugin.tools import bench_floors, bench_run
    from sglang_dsa_plugin.tools.bench_timing import GraphClock

    where, gpu = torch.device("cuda", torch.cuda.current_device()), bench_floors.gpu_of(device["name"])
    as_in_a_server()
    for case in chosen:
        with torch.inference_mode():
            result = bench_run.measure(case, GraphClock(), where, rounds, l2_bytes=device["l2_bytes"], gpu=gpu)
        yield result
        if result.failed or result.missing:
            try:
                torch.cuda.synchronize()
            except Exception as error:
                message = f"{result.name} broke the CUDA context ({bench_run.in_words(error)}); measure the others "
                raise LostDevice(message + "with --only") from error


def as_in_a_server() -> None:
    """Have DeepGEMM launch its kernels as programmatic dependents, both sides', as SGLang does in every worker
    (SGLANG_DEEPGEMM_PDL).
    """
    with contextlib.suppress(ImportError, OSError):
        import deep_gemm

        if hasattr(deep_gemm, "set_pdl"):
            deep_gemm.set_pdl(True)


def require_gpu(command: str) -> None:
    """A usage error that says what is needed where there is no CUDA GPU."""
    import torch

    if not torch.cuda.is_available():
        raise typer.BadParameter(f"{command} {NO_GPU}")


def device_facts(command: str = "bench kernels") -> dict[str, Any]:
    """Name, capability, L2 and memory of the GPU in use; raises as `require_gpu` where there is none."""
    import torch

    from sglang_dsa_plugin.tools.bench_header import gpu_name

    require_gpu(command)
    found = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "name": found.name,
        "sm": 10 * found.major + found.minor,
        "processors": found.multi_processor_count,
        "l2_bytes": found.L2_cache_size,
        "memory_bytes": found.total_memory,
        "cuda": torch.version.cuda,
        "nvidia_smi": gpu_name(),
    }


@contextlib.contextmanager
def stopping() -> Iterator[None]:
    """SIGTERM and SIGINT raise Stopped within, once; what was measured can then still be written."""

    def stop(number: int, _frame: FrameType | None) -> None:
        for one in before:
            signal.signal(one, signal.SIG_IGN)
        raise Stopped(number)

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
