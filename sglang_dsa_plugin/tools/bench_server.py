"""`sglang-dsa bench server`: this package against SGLang's built-in DSA, both served on the same GPU in one run.

Method: several servers of each side on a model of real attention shapes with dummy weights and dense MLPs, so that the
GPU's time is seen and not the scheduler's. All stand on the GPU at once and are asked in turn, the others stopped
meanwhile (bench_turns): what a host takes to launch a step changes by half within a minute, and from process to
process, so one server after the other would compare two moments. Every prompt is new random tokens. Time per token: of
`concurrency` streams together, over the time in which all of them decode. The first turn does not count.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer

from sglang_dsa_plugin.tools import bench_header
from sglang_dsa_plugin.tools.bench_kernels import require_gpu
from sglang_dsa_plugin.tools.bench_turns import Contestant, side_by_side, take_turns
from sglang_dsa_plugin.tools.make_model import make_model
from sglang_dsa_plugin.tools.serve import running, stop_with_this_command
from sglang_dsa_plugin.tools.serve_plan import Failure, plan_launch
from sglang_dsa_plugin.tools.serve_wait import in_use, say, wait_ready

_WIDTH = 140  # of the table in a file
_PAGE = 64  # tokens; cache.layouts would bring torch
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
    turns: Annotated[
        int, typer.Option(min=1, help="counted turns of every server; short cases are asked up to 5 times in each")
    ] = 4,
    each: Annotated[int, typer.Option(min=1, help="servers of each side")] = 2,
    sides: Annotated[str, typer.Option(help="plugin, builtin or both")] = "plugin,builtin",
    start_limit: Annotated[int, typer.Option(help="seconds until all servers have started")] = 900,
    log_dir: Annotated[Path | None, typer.Option(help="keep the servers' logs here")] = None,
    json_out: Annotated[Path | None, typer.Option("--json", help="also write the figures to this file")] = None,
    extra: Annotated[str, typer.Option(help="more SGLang arguments, for both sides")] = "",
) -> None:
    """Time to first token and time per token of the plugin and of the built-in (starts and stops the servers)."""
    order = list(dict.fromkeys(side.strip() for side in sides.split(",")))
    unknown = [side for side in order if side not in SIDES]
    if unknown:
        raise typer.BadParameter(f"--sides {unknown[0]}: use {' and '.join(SIDES)}, comma-separated")
    lengths, together = _numbers("--prompts", prompts), _numbers("--concurrency", concurrency)
    # On a CPU the model takes 17 GB and minutes an answer, and there is no built-in to compare with.
    require_gpu("bench server")
    stop_with_this_command()
    with tempfile.TemporaryDirectory(prefix="sglang-dsa-bench-") as work, contextlib.ExitStack() as servers:
        model = Path(work) / "model"
        longest = max(lengths) + new_tokens + _PAGE
        make_shape(model, arch, heads, layers, hidden, index_topk, longest)
        arguments = [
            *("--model-path", str(model), "--load-format", "dummy", "--sampling-backend", "pytorch"),
            *("--attention-backend", "dsa"),  # for both sides the same words
            *("--kv-cache-dtype", kv_cache_dtype, "--max-running-requests", str(max(together))),
            *("--cuda-graph-max-bs-decode", str(max(together))),
            # Or the first would take most of the GPU for its cache.
            *("--max-total-tokens", str(max(together) * longest + 2 * _PAGE)),
            *extra.split(),
        ]
        contestants = started(order, each, arguments, model, log_dir or Path(work), start_limit, servers)
        asked = [one for one in contestants if one.failed is None]
        with side_by_side(asked):
            take_turns(asked, lengths, together, new_tokens, turns)
    runs = [
        {"side": one.side, "number": one.number, "in_use": one.in_use}
        | ({"ms": one.figures} if one.failed is None else {"failed": one.failed})
        for one in contestants
    ]
    record = bench_header.header(bench_header.gpu_name()) | {"runs": runs}
    if json_out is not None:
        bench_header.write(json_out, record)
    show(record)
    if any("failed" in run for run in runs):
        raise typer.Exit(1)


def started(
    sides: list[str], each: int, arguments: list[str], model: Path, logs: Path, limit_s: float, stack: ExitStack
) -> list[Contestant]:
    """`each` servers of every side, started together, in turn of the sides; the stack stops them. A server that does
    not start, or is not what its side says, is marked as failed.
    """
    taken: set[int] = set()
    contestants, began = [], time.monotonic()
    for number in range(each):
        for side in sides:
            launch = plan_launch(arguments, on_cpu=False, tiny_model=model, claim=lambda port: port not in taken)
            taken.add(launch.port)
            server = stack.enter_context(running(launch, logs / f"{side}-{number}.log", SIDES[side]))
            contestants.append(Contestant(side, number, launch, server))
    for one in contestants:
        log = logs / f"{one.side}-{one.number}.log"
        try:
            wait_ready(one.server, one.launch, log, max(1.0, began + limit_s - time.monotonic()))
            one.in_use = in_use(log)
            if (one.in_use is None) != (one.side == "builtin"):
                raise Failure(f"the log {log} does not say that this is the {one.side}")
        except Failure as failure:
            one.failed = str(failure)[:2000]
            say(f"{one.side} {one.number}: {one.failed}")
    return contestants


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


def _numbers(flag: str, text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise typer.BadParameter(f"{flag} {text}: whole numbers above 0, comma-separated")
    return numbers


def show(record: dict[str, Any]) -> None:
    """One row a case: of each side the median, least and most over all turns of all its servers, and the ratio of the
    medians.
    """
    from rich.console import Console
    from rich.table import Table

    samples: dict[str, dict[str, list[float]]] = {}
    servers: dict[str, int] = {}
    for run in record["runs"]:
        servers[run["side"]] = servers.get(run["side"], 0) + ("ms" in run)
        for case, values in run.get("ms", {}).items():
            samples.setdefault(case, {}).setdefault(run["side"], []).extend(values)
    table = Table(title=f"{record['device']}; {record['date']}; milliseconds", title_justify="left")
    table.add_column("case")
    for side, count in servers.items():
        table.add_column(f"{side}, {count} server{'s' * (count != 1)}", justify="right")
    if len(servers) == len(SIDES):
        table.add_column("built-in / plugin", justify="right")
    for case, by_side in samples.items():
        middle = {side: statistics.median(values) for side, values in by_side.items()}
        cells = [
            f"{middle[side]:.2f} ({min(by_side[side]):.2f}-{max(by_side[side]):.2f})" if side in by_side else "-"
            for side in servers
        ]
        if len(servers) == len(SIDES):
            cells.append(f"{middle['builtin'] / middle['plugin']:.2f}" if len(middle) == len(SIDES) else "-")
        table.add_row(case, *cells)
    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH)
    console.print(table)
    for run in record["runs"]:
        console.print(
            f"{run['side']} {run['number']}: {run.get('failed') or run['in_use'] or 'built-in'}", soft_wrap=True
        )
