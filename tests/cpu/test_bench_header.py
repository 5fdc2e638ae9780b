"""What heads the JSON of every benchmark is the same."""

import contextlib
import json
import types

import pytest
import torch
from typer.testing import CliRunner

from sglang_dsa_plugin import __version__
from sglang_dsa_plugin.cli import app
from sglang_dsa_plugin.tools import bench_cpu, bench_header, bench_report, bench_server

HEADER = {"command", "date", "device", "versions"}


@contextlib.contextmanager
def no_server(*_args):
    yield types.SimpleNamespace(pid=1)


def no_turns(contestants, *_):
    for one in contestants:
        one.figures = {"case": [1.0, 2.0]}


@pytest.mark.parametrize(("bench", "name"), [(bench_cpu, "cpu"), (bench_server, "server")])
def test_server_benchmarks(monkeypatch, tmp_path, bench, name):
    fakes = {
        "running": no_server,
        "wait_ready": lambda *_: 1.0,
        "measure": lambda *_: {"tokens/s": 1.0},
        "side_by_side": lambda _: contextlib.nullcontext(),
        "take_turns": no_turns,
        "in_use": lambda log: None if "builtin" in str(log) else "in use",
        "plan_launch": lambda *_args, **_kwargs: types.SimpleNamespace(port=1),
        "stop_with_this_command": lambda: None,
        "make_model": lambda *_args, **_kwargs: None,
        "make_shape": lambda *_: None,
        "require_gpu": lambda command: None,
    }
    for one, fake in fakes.items():
        monkeypatch.setattr(bench, one, fake, raising=False)
    out = tmp_path / "figures.json"
    result = CliRunner().invoke(app, ["bench", name, "--json", str(out)])
    assert result.exit_code == 0, result.output
    check(json.loads(out.read_text()))
    assert [path.name for path in tmp_path.iterdir()] == ["figures.json"]


def test_kernels():
    check(bench_report.record([], {"name": "some GPU"}, 5, "complete"))


def check(record):
    assert record.keys() > HEADER and next(iter(record)) == "command"
    # As it was called here: by pytest, which may have no arguments.
    assert record["command"].split()[0] == "sglang-dsa" and record["device"]
    assert record["versions"]["sglang-dsa-plugin"] == __version__
    assert record["versions"].keys() > set(bench_header.PACKAGES)


def test_the_server_benchmark_says_that_it_needs_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = CliRunner().invoke(app, ["bench", "server"])
    assert result.exit_code == 2 and "bench server" in result.output and "CUDA GPU" in result.output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["bench", "cpu", "--repeats", "0"], "--repeats"),
        (["bench", "cpu", "--heads", "0"], "--heads"),
        (["bench", "kernels", "--from", "nowhere.json"], "nowhere.json"),
        (["check", "--only", "nothing"], "sparse_mla"),
    ],
)
def test_a_value_that_cannot_be_is_said_by_its_option(words, said):
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2 and said in result.output
