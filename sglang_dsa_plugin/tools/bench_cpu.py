"""`sglang-dsa bench cpu`: how fast the real server is on this CPU, asked over HTTP.

Method: one server on a random bf16 model of real attention head sizes; every prompt is new random tokens, so nothing
comes from the prefix cache. Decode rate: tokens after the first of each stream, over the time from the last stream's
first token to the first stream's end, so that all streams run throughout. Prefill rate: prompt tokens over the time to
the first token. Medians of the repeats. Memory: peak resident size of the largest server process after short and after
long prompts; scores are held under SGLANG_DSA_PLUGIN_SCORES_MB, so the difference must not grow with the prompt.
"""

from __future__ import annotations

import statistics
import subprocess
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from sglang_dsa_plugin.tools import bench_header
from sglang_dsa_plugin.tools.bench_client import Client, decode_rate
from sglang_dsa_plugin.tools.make_model import make_model
from sglang_dsa_plugin.tools.serve import running, stop_with_this_command
from sglang_dsa_plugin.tools.serve_plan import Launch, plan_launch
from sglang_dsa_plugin.tools.serve_wait import in_use, wait_ready


def bench_cpu(
    new_tokens: Annotated[int, typer.Option(min=8, help="tokens decoded per request")] = 128,
    repeats: Annotated[int, typer.Option(min=1, help="repeats of every case; medians are shown")] = 3,
    prefill_tokens: Annotated[int, typer.Option(min=1, help="length of the prefill prompt")] = 3000,
    long_tokens: Annotated[
        int, typer.Option(min=0, help="length of the long prompt whose memory is compared; 0 skips it")
    ] = 12000,
    layers: Annotated[int, typer.Option(min=1, help="layers of the model")] = 3,
    hidden: Annotated[int, typer.Option(min=1, help="hidden size of the model")] = 256,
    heads: Annotated[int, typer.Option(min=1, help="attention heads")] = 16,
    index_heads: Annotated[int, typer.Option(min=1, help="index heads")] = 64,
    index_topk: Annotated[int, typer.Option(min=1, help="picks per token")] = 2048,
    json_out: Annotated[Path | None, typer.Option("--json", help="also write the figures to this file")] = None,
) -> None:
    """Measure decode and prefill of the served model on this CPU (starts and stops a server)."""
    stop_with_this_command()
    with tempfile.TemporaryDirectory(prefix="sglang-dsa-bench-") as work:
        model = Path(work) / "model"
        shape = {
            "layers": layers,
            "hidden": hidden,
            "heads": heads,
            "index_heads": index_heads,
            "index_topk": index_topk,
        }
        make_model(model, max_position=max(16384, long_tokens + 1024), **shape)
        arguments = ["--model-path", str(model), "--attention-backend", "dsa"]
        arguments += ["--max-total-tokens", "65536", "--max-running-requests", "16"]
        launch = plan_launch(arguments, on_cpu=True, tiny_model=model)
        log = Path(work) / "server.log"
        with running(launch, log) as server:
            startup = wait_ready(server, launch, log, 600)
            figures = measure(launch, server.pid, new_tokens, repeats, prefill_tokens, long_tokens)
            line = in_use(log)
    record = bench_header.header(bench_header.cpu_name()) | {
        "model": shape,
        "startup_s": round(startup, 1),
        "in_use": line,
        "figures": figures,
    }
    if json_out is not None:
        bench_header.write(json_out, record)
    show(record)


def measure(
    launch: Launch, server_pid: int, new_tokens: int, repeats: int, prefill_tokens: int, long_tokens: int
) -> dict[str, float]:
    """All figures of a running server: tokens per second and MiB, by name."""
    client = Client(launch, seed=0)
    client.stream(64, 8)  # the first request of a process pays for lazy set-up
    client.together(8, 64, 8)
    figures: dict[str, float] = {}
    for requests in (1, 8):
        for prompt in (512, prefill_tokens):
            rates = [decode_rate(client.together(requests, prompt, new_tokens)) for _ in range(repeats)]
            figures[f"decode tokens/s, {requests} request(s), prompt {prompt}"] = statistics.median(rates)
    waits = [s.first - s.asked for s in (client.stream(prefill_tokens, 1) for _ in range(repeats))]
    figures[f"prefill tokens/s, prompt {prefill_tokens}"] = prefill_tokens / statistics.median(waits)
    figures[f"peak resident MiB, prompts to {prefill_tokens}"] = peak_mib(server_pid)
    if long_tokens:
        wait = (s := client.stream(long_tokens, 1)).first - s.asked
        figures[f"prefill tokens/s, prompt {long_tokens}"] = long_tokens / wait
        figures[f"peak resident MiB, prompts to {long_tokens}"] = peak_mib(server_pid)
    return {name: round(value, 1) for name, value in figures.items()}


def peak_mib(server_pid: int) -> float:
    """Largest peak resident size (VmHWM) among the processes of the server's group."""
    group = subprocess.run(["ps", "-o", "pid=", "-g", str(server_pid)], capture_output=True, text=True, check=True)
    peaks = []
    for pid in group.stdout.split():
        status = Path("/proc") / pid / "status"
        if status.exists():
            found = [line for line in status.read_text().splitlines() if line.startswith("VmHWM")]
            peaks += [int(found[0].split()[1]) / 1024] if found else []
    return max(peaks)


def show(record: dict[str, Any]) -> None:
    """The figures as a table."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{record['device']}; {record['date']}", title_justify="left")
    table.add_column("figure")
    table.add_column("value", justify="right")
    for name, value in record["figures"].items():
        table.add_row(name, f"{value:,.1f}")
    console = Console()
    console.print(table)
    console.print(record["in_use"] or "the plugin is NOT in use", soft_wrap=True)
