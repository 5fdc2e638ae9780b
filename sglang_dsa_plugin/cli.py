"""The sglang-dsa command. Each subcommand lives in its own module under tools/ and is only registered here."""

from __future__ import annotations

import typer

from sglang_dsa_plugin.tools import (
    bench_cpu,
    bench_kernels,
    bench_server,
    bench_tune,
    check,
    doctor,
    make_model_command,
)

app = typer.Typer(
    name="sglang-dsa",
    help="DeepSeek Sparse Attention for SGLang: tools around the plugin.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)


@app.callback()
def main() -> None:
    """DeepSeek Sparse Attention for SGLang: tools around the plugin."""
    # A callback keeps subcommands subcommands even while there is only one.


app.command("make-model")(make_model_command.make_model)
app.command("doctor")(doctor.doctor)
app.command("check")(check.check)

bench = typer.Typer(help="Benchmarks.", no_args_is_help=True)
bench.command("cpu")(bench_cpu.bench_cpu)
bench.command("server")(bench_server.bench_server)
bench.command("kernels")(bench_kernels.bench_kernels)
bench.command("tune")(bench_tune.bench_tune)
app.add_typer(bench, name="bench")


@bench.callback()
def bench_main() -> None:
    """Benchmarks: figures with device, shape, command and date; never run as tests."""


if __name__ == "__main__":
    app()
