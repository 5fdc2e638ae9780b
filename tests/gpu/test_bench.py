"""The kernel benchmark on a CUDA device: the built-in's kernels answer what ours answer, and one case is measured."""

import json

import pytest
import torch
from typer.testing import CliRunner

from sglang_dsa_plugin.cli import app
from sglang_dsa_plugin.tools import bench_agreement, bench_cases, bench_timing
from sglang_dsa_plugin.tools.bench_inputs import Maker
from sglang_dsa_plugin.tools.bench_rivals import Unavailable

pytestmark = pytest.mark.gpu

# Small, but with the k and the heads that the kernels of other packages are made for.
SMALL = bench_cases.Sizes(
    batches=(1, 3), cached=4096, prefill=300, lengths=(4096, 4160, 8192), steps=(1024, 2048), context=8192
)
CASES = {case.name: case for case in bench_cases.cases(SMALL)}


@pytest.mark.parametrize("name", CASES)
def test_both_sides_give_one_result(name):
    case = CASES[name]
    inputs = case.make(Maker(torch.device("cuda"), 1))
    try:
        theirs = case.rival.prepare(inputs)
    except Unavailable as reason:
        pytest.skip(str(reason))
    with torch.inference_mode():
        ours = case.ours(inputs, None)
        assert bench_agreement.difference(case.kind, ours, theirs()) <= bench_agreement.LIMITS[case.kind]


def test_a_graph_gives_times():
    case = CASES["sparse decode, bf16, 16 heads, B=3, S=4096"]
    inputs = [case.make(Maker(torch.device("cuda"), seed)) for seed in range(4)]
    clock = bench_timing.GraphClock()
    recorded = {"ours": clock.record([lambda i=i: case.ours(i, None) for i in inputs])}
    samples = bench_timing.interleave(clock, recorded, 4, 3)["ours"]
    assert len(samples) == 3 and all(us > 1 for us in samples)
    # Where the allocator finds a hole of at most a MiB more, it gives the whole of it.
    assert 1 << 22 <= clock.peak_bytes(lambda: torch.empty(1 << 20, device="cuda")) <= (1 << 22) + (1 << 20)


def test_the_command_measures_a_case(tmp_path):
    out = tmp_path / "kernels.json"
    only = "sparse decode, bf16, 16 heads, B=1, S"
    result = CliRunner().invoke(app, ["bench", "kernels", "--only", only, "--rounds", "5", "--json", str(out)])
    (case,) = json.loads(out.read_text())["cases"]
    assert case["failed"] is None and len(case["samples"]["ours"]) == 5, result.output
