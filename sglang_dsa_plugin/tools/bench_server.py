"""`sglang-dsa bench server`: this package against SGLang's built-in DSA, both served on the same GPU in one run.

Method: one server after the other on a model of real attention shapes with dummy weights and dense MLPs, so that the
GPU's time is seen and not the scheduler's; every prompt is new random tokens. Time to first token: of one request
alone. Time per token: of `concurrency` streams together, over the time in which all of them decode. Medians of the
repeats; the first round of every case is not counted. The sides run in the order given; a side may come twice, which
shows drift.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from sglang_dsa_plugin.tools import bench_header
from sglang_dsa_plugin.tools.bench_client import Client, decode_rate
from sglang_dsa_plugin.tools.bench_kernels import require_gpu
from sglang_dsa_plugin.tools.make_model import make_model
from sglang_dsa_plugin.tools.serve import running, stop_with_this_command
from sglang_dsa_plugin.tools.serve_plan import Failure, Launch, plan_launch
from sglang_dsa_plugin.tools.serve_wait import in_use, say, wait_ready

SIDES = {"plugin": {"SGLANG_DSA_PLUGIN": "on"}, "builtin": {"SGLANG_DSA_PLUGIN": "off"}}


def bench_server(
    arch: Annotated[str, typer.Option(help="deepseek_v32 or glm_moe_dsa")] = "deepseek_v32",
    heads: Annotated[int, typer.Option(help="attention heads, all on one GPU")] = 16,
    layers: Annotated[int, typer.Option(help="layers; below 16 the scheduler hides the GPU")] = 16,
    hidden: Annotated[int, typer.Option(help="hidden size")] = 7168,
    index_topk: Annotated[int, typer.Option(help="picks per token")] = 2048,
    kv_cache_dtype: Annotated[str, typer.Option(help="auto, bf16 or fp8_e4m3")] = "auto",
    prompts: Annotated[str, typer.Option(help="prompt lengths, comma-separated")] = "1024,8192,32768",
    concurrency: Annotated[str, typer.Option(help="requests at once, comma-separated")] = "1,16",
    new_tokens: Annotated[int, typer.Option(min=8, help="tokens decoded per request")] = 64,
    repeats: Annotated[int, typer.Option(help="counted repeats of every case")] = 3,
    sides: Annotated[str, typer.Option(help="servers to run, in order: plugin, builtin")] = "plugin,builtin",
    start_limit: Annotated[int, typer.Option(help="seconds a server may take to start")] = 600,
    log_dir: Annotated[Path | None, typer.Option(help="keep the servers' logs here")] = None,
    json_out: Annotated[Path | None, typer.Option("--json", help="also write the figures to this file")] = None,
    extra: Annotated[str, typer.Option(help="more SGLang arguments, for both sides")] = "",
) -> None:
    """Time to first token and time per token of the plugin and of the built-in (starts and stops both servers)."""
    order = [side.strip() for side in sides.split(",")]
    unknown = [side for side in order if side not in SIDES]
    if unknown:
        raise typer.BadParameter(f"--sides {unknown[0]}: use {' and '.join(SIDES)}, comma-separated")
    lengths, together = _numbers("--prompts", prompts), _numbers("--concurrency", concurrency)
    # On a CPU the model takes 17 GB and minutes an answer, and there is no built-in to compare with.
    require_gpu("bench server")
    stop_with_this_command()
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="sglang-dsa-bench-") as work:
        model = Path(work) / "model"
        make_shape(model, arch, heads, layers, hidden, index_topk, max(lengths) + new_tokens + 64)
        for number, side in enumerate(order):
            arguments = [
                *("--model-path", str(model), "--load-format", "dummy", "--sampling-backend", "pytorch"),
                *("--attention-backend", "dsa"),  # for both sides the same words
                *("--kv-cache-dtype", kv_cache_dtype, "--max-running-requests", str(max(together))),
                *("--cuda-graph-max-bs-decode", str(max(together)), *extra.split()),
            ]
            launch = plan_launch(arguments, on_cpu=False, tiny_model=model)
            log = (log_dir or Path(work)) / f"server-{number}-{side}.log"
            try:
                with running(launch, log, SIDES[side]) as server:
                    startup = wait_ready(server, launch, log, start_limit)
                    if (in_use(log) is None) != (side == "builtin"):
                        raise Failure(f"the log {log} does not say that this is the {side}")
                    figures = measure(launch, lengths, together, new_tokens, repeats)
                runs.append({"side": side, "startup_s": round(startup, 1), "in_use": in_use(log), "ms": figures})
            except (Failure, RuntimeError) as failure:
                say(f"{side}: {failure!r}")
                runs.append({"side": side, "failed": str(failure)[:2000]})
    record = bench_header.header(bench_header.gpu_name()) | {"runs": runs}
    if json_out is not None:
        bench_header.write(json_out, record)
    show(record)
    if any("failed" in run for run in runs):
        raise typer.Exit(1)


def make_shape(out: Path, arch: str, heads: int, layers: int, hidden: int, index_topk: int, context: int) -> None:
    """A checkpoint directory of the given shape without weights worth loading: config, tokenizer and a small file."""
    make_model(
        out, arch=arch, layers=1, dense_layers=1, hidden=256, heads=heads, index_topk=index_topk, max_position=context
    )
    path = out / "config.json"
    config = json.loads(path.read_text())
    # One entry a layer: the one layer that was made stands for all, with a dense MLP.
    by_layer = {key: value * layers for key, value in config.items() if key.endswith("_types") and len(value) == 1}
    config |= by_layer | {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "first_k_dense_replace": layers,
        "q_lora_rank": 1536 if arch == "deepseek_v32" else 2048,
        "intermediate_size": 2048,
    }
    path.write_text(json.dumps(config, indent=1))


def measure(
    launch: Launch, lengths: list[int], together: list[int], new_tokens: int, repeats: int
) -> dict[str, dict[str, float]]:
    """Milliseconds by case: median, least and most over the repeats."""
    client = Client(launch, seed=0)
    figures: dict[str, list[float]] = {}
    for prompt in lengths:
        for repeat in range(repeats + 1):
            stream = client.stream(prompt, 1)
            if repeat:
                figures.setdefault(f"first token, S={prompt}", []).append(1e3 * (stream.first - stream.asked))
        for requests in together:
            for repeat in range(repeats + 1):
                rate = decode_rate(client.together(requests, prompt, new_tokens))
                if repeat:
                    figures.setdefault(f"per token, S={prompt}, B={requests}", []).append(1e3 * requests / rate)
    return {
        name: {"median": statistics.median(values), "least": min(values), "most": max(values)}
        for name, values in figures.items()
    }


def _numbers(flag: str, text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise typer.BadParameter(f"{flag} {text}: whole numbers above 0, comma-separated")
    return numbers


def show(record: dict[str, Any]) -> None:
    """One row a case, one column a run, and the ratio of the first built-in run to the first plugin run."""
    from rich.console import Console
    from rich.table import Table

    runs = [run for run in record["runs"] if "ms" in run]
    table = Table(title=f"{record['device']}; {record['date']}; milliseconds", title_justify="left")
    table.add_column("case")
    for run in runs:
        table.add_column(run["side"], justify="right")
    first = {run["side"]: run["ms"] for run in reversed(runs)}
    if len(first) == len(SIDES):
        table.add_column("built-in / plugin", justify="right")
    for case in runs[0]["ms"] if runs else []:
        cells = [f"{run['ms'][case]['median']:.2f}" for run in runs]
        if len(first) == len(SIDES):
            cells.append(f"{first['builtin'][case]['median'] / first['plugin'][case]['median']:.2f}")
        table.add_row(case, *cells)
    console = Console()
    console.print(table)
    for run in record["runs"]:
        console.print(f"{run['side']}: {run.get('in_use') or run.get('failed') or 'built-in'}", soft_wrap=True)
