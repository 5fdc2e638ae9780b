"""`sglang-dsa bench tune` without a GPU: what is measured, the choices that follow, and how they are read."""

import json

import pytest
import torch
from typer.testing import CliRunner

from sglang_dsa_plugin import support, tuned
from sglang_dsa_plugin.cli import app
from sglang_dsa_plugin.support_row import ROW_STEPS
from sglang_dsa_plugin.tools import bench_cases, bench_index_cases, bench_kernels, bench_points, bench_step
from sglang_dsa_plugin.tools.bench_points import DENSE, SELECT, Point
from tests.cpu.test_bench_kernels import FakeClock

CPU = torch.device("cpu")


def point(heads=16, rows=1, tokens=1024, layout="bf16_1152", **us):
    return Point(layout, heads, rows, tokens, us)


def test_every_step_of_rows_and_number_of_heads_is_measured():
    cases = [(attention, one) for attention, _, one in bench_points.shapes(quick=False)]
    points = [one for _, one in cases]
    assert all(("decode step" in attention.name) == (one.rows < 16) for attention, one in cases)
    for layout in ("bf16_1152", "fp8_656"):
        for heads in (8, 16, 32, 64, 128):
            mine = [one for one in points if (one.layout, one.heads) == (layout, heads)]
            assert {max(s for s in ROW_STEPS if s <= one.rows) for one in mine} == set(ROW_STEPS)
    for attention, selection, one in bench_points.shapes(quick=True):
        assert f"S={one.tokens}" in attention.name and (selection is None) == (one.rows < 256)


def test_the_geometric_mean_of_a_step_decides_and_ours_wins_a_tie():
    points = [point(rows=16, triton=10, fa3=30), point(rows=48, triton=40, fa3=20)]
    (choice,) = bench_points.choices(points)
    assert (choice["implementation"], choice["min_rows"]) == ("triton", 16)
    (choice,) = bench_points.choices([point(triton=10, fa3=9.8)])
    assert choice["implementation"] == "triton"
    (choice,) = bench_points.choices([point(triton=10, fa3=9.6)])
    assert choice["implementation"] == "fa3" and choice["us"] == {"fa3": 9.6, "triton": 10.0}
    # Of two of ours the faster counts, by however little.
    (choice,) = bench_points.choices([point(triton=10, cuda=9.9, fa3=9.8)])
    assert choice["implementation"] == "cuda"
    (choice,) = bench_points.choices([point(triton=9.9, cuda=10, fa3=9.8)])
    assert choice["implementation"] == "triton"


def test_what_failed_somewhere_is_not_chosen():
    choices = bench_points.choices([point(rows=16, triton=10, fa3=5), point(rows=48, triton=40)])
    assert [choice["implementation"] for choice in choices] == ["triton"]
    assert bench_points.choices([point()]) == []


def test_dense_counts_up_to_the_first_length_at_which_it_is_slower():
    def prefill(tokens, dense):
        return point(rows=512, tokens=tokens, **{"triton": 6.0, "fa3": 5.0, SELECT: 5.0, DENSE: dense})

    lengths = [prefill(8192, 9.0), prefill(1024, 3.0), prefill(2048, 10.0), prefill(4096, 11.0)]
    assert bench_points.dense_up_to(lengths) == [{"layout": "bf16_1152", "heads": 16, "rows": 512, "tokens": 2048}]
    assert bench_points.dense_up_to([prefill(1024, 20.0)])[0]["tokens"] == 0


def test_a_point_is_measured(monkeypatch):
    sizes = bench_cases.Sizes(k=64, index_heads=4, cached=128, prefill=5)
    one = point(heads=8, rows=5, tokens=128)
    wanted = (bench_cases.prefill(sizes, "bf16_1152", 8), bench_index_cases.ragged_select(sizes, 128), one)
    monkeypatch.setattr(bench_points, "implementations", lambda *_: ["torch", "triton"])
    clock = FakeClock(4e-6, 3e-6, 2e-6)
    assert list(bench_points.measure_all(iter([wanted]), clock, CPU, 5, 1)) == [one]
    assert one.us == pytest.approx({"torch": 4.0, SELECT: 3.0, DENSE: 2.0})
    assert one.sparse == {"torch": pytest.approx(4.0)} and "cpu" in one.failed["triton"]
    assert "torch 4.0" in bench_points.line(one) and "triton failed" in bench_points.line(one)


def test_of_few_rows_attention_alone_is_another_implementation():
    sizes = bench_cases.Sizes(k=64, index_heads=4, cached=128, context=256)
    inputs = bench_step.step(sizes, "bf16_1152", 4, 128, 2).make(bench_points.Maker(CPU, 0))
    out, _ = bench_step.run_with_attention(inputs, "torch")
    assert torch.equal(out, bench_step.run(inputs, "torch")[0])
    with pytest.raises(ValueError, match="sparse_mla: impl='fa3' cannot run here"):
        bench_step.run_with_attention(inputs, "fa3")


def test_dense_attention_of_the_tuning_is_attention():
    attention = bench_cases.prefill(bench_cases.Sizes(cached=64, prefill=5), "bf16_1152", 4)
    case = bench_points.dense_case(attention, point(heads=4, rows=5, tokens=64))
    out, _ = bench_points.dense(case.make(bench_points.Maker(CPU, 0)))
    assert out.shape == (5, 4, 128) and out.isfinite().all()


def gpu_run(monkeypatch, tmp_path, points, stop=False):
    """The command with a made-up GPU, the points in place of measuring, and its files in tmp_path."""
    monkeypatch.setattr(tuned, "FOLDER", tmp_path / "tuned")
    monkeypatch.setattr(bench_kernels, "device_facts", lambda command: {"name": "NVIDIA H200", "sm": 90, "l2_bytes": 1})
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)

    def measure_all(*_):
        yield from points
        if stop:
            raise bench_kernels.Stopped(15)

    monkeypatch.setattr(bench_points, "measure_all", measure_all)
    return CliRunner().invoke(app, ["bench", "tune"])


def test_the_command_writes_what_the_table_reads(monkeypatch, tmp_path):
    result = gpu_run(monkeypatch, tmp_path, [point(triton=10, fa3=5), point(heads=128, rows=16, triton=1, fa3=2)])
    assert result.exit_code == 0, result.output
    path = tuned.path_of("NVIDIA H200")
    assert path == tmp_path / "tuned" / "nvidia_h200.json"
    choices = tuned.read(path)
    assert tuned.nearest(choices, "sparse_mla", "bf16_1152", 16, 0) == "fa3"
    assert tuned.nearest(choices, "sparse_mla", "bf16_1152", 24, 0) == "fa3"  # nearest, within a factor of two
    assert tuned.nearest(choices, "sparse_mla", "bf16_1152", 64, 0) is None
    assert tuned.nearest(choices, "sparse_mla", "bf16_1152", 128, 16) == "triton"
    assert tuned.nearest(choices, "sparse_mla", "bf16_1152", 128, 64) == "triton"  # the last step that was measured
    assert tuned.nearest(choices, "sparse_mla", "fp8_656", 16, 0) is None
    assert json.loads(path.read_text())["run"]["ended"] == "complete"


def test_half_a_run_is_not_where_the_table_looks(monkeypatch, tmp_path):
    result = gpu_run(monkeypatch, tmp_path, [point(triton=10, fa3=5)], stop=True)
    path = tuned.path_of("NVIDIA H200")
    assert result.exit_code == 143 and not path.exists() and path.with_suffix(".partial.json").exists()


def test_without_a_gpu_it_says_what_it_needs():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    result = CliRunner().invoke(app, ["bench", "tune"])
    assert result.exit_code == 2 and "bench tune" in result.output and "CUDA GPU" in result.output


def test_a_damaged_file_is_named(tmp_path):
    path = tmp_path / "some_gpu.json"
    for text in ('{"device": "some GPU", "choices": [{"operator": "sparse_mla"}]}', '{"choices": []}', "[]", "{"):
        path.write_text(text)
        for cached in (tuned.read, tuned._table):
            cached.cache_clear()
        with pytest.raises(ValueError, match=r"some_gpu\.json: not a table"):
            tuned.read(path)


def test_shipped_tables_name_rows_of_the_support_table():
    for path in tuned.FOLDER.glob("*.json"):
        choices = tuned.read(path)
        assert choices
        for (operator, layout, rows), by_heads in choices.items():
            assert rows in ROW_STEPS
            for name in by_heads.values():
                (row,) = [row for row in support.rows(operator) if row.name == name]
                assert layout in row.layouts


def test_no_table_is_asked_without_a_gpu_or_about_another_one(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert tuned.preferred("sparse_mla", 90, 0, "bf16_1152", 16, 0) is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(tuned, "_device", lambda index: ("NVIDIA H200", 90))
    monkeypatch.setattr(tuned, "read", lambda path: {("sparse_mla", "bf16_1152", 0): {16: "fa3"}})
    assert tuned.preferred("sparse_mla", 90, 0, "bf16_1152", 16, 0) == ("fa3", "NVIDIA H200")
    assert tuned.preferred("sparse_mla", 80, 0, "bf16_1152", 16, 0) is None
    assert tuned.preferred("sparse_mla", 90, 0, "bf16_1152", None, 0) is None


def test_a_gpu_without_a_table_takes_one_of_its_compute_capability(monkeypatch, tmp_path):
    monkeypatch.setattr(tuned, "FOLDER", tmp_path)
    tuned.file_for.cache_clear()
    for name, sm in (("NVIDIA A100", 80), ("NVIDIA H200", 90), ("NVIDIA H100", 90)):
        tuned.path_of(name).write_text(json.dumps({"device": name, "sm": sm, "choices": []}))
    (tmp_path / "a.partial.json").write_text(json.dumps({"device": "half", "sm": 120, "choices": []}))
    found = {
        ("NVIDIA H200", 90): "nvidia_h200.json",
        ("NVIDIA GH200", 90): "nvidia_h100.json",
        ("NVIDIA A100-SXM4-80GB", 80): "nvidia_a100.json",
    }
    for (name, sm), file in found.items():
        assert tuned.file_for(name, sm).name == file
    assert tuned.file_for("NVIDIA B200", 100) is None
    assert tuned.file_for("NVIDIA RTX PRO 6000", 120) is None  # half a run is no table
    tuned.file_for.cache_clear()
