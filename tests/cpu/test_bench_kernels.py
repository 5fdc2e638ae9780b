"""`sglang-dsa bench kernels` without a GPU: statistics, floors, table, record, and every case's own call in torch."""

import gc
import json
import signal

import pytest
import torch
from typer.testing import CliRunner

from sglang_dsa_plugin.cli import app
from sglang_dsa_plugin.tools import (
    bench_agreement,
    bench_cases,
    bench_floors,
    bench_kernels,
    bench_plot,
    bench_report,
    bench_run,
    bench_timing,
)
from sglang_dsa_plugin.tools.bench_floors import Work
from sglang_dsa_plugin.tools.bench_inputs import Maker
from sglang_dsa_plugin.tools.bench_rivals import Inputs, Rival, Unavailable
from tests.cpu.ops.bounds import assert_attention

CPU = torch.device("cpu")
TINY = bench_cases.Sizes(
    k=64,
    heads=(8, 16, 64),
    index_heads=4,
    batches=(1, 3),
    cached=128,
    prefill=5,
    lengths=(64, 130, 200),
    steps=(40, 64),
    context=256,
)
TINY_CASES = {case.name: case for case in bench_cases.cases(TINY)}


class FakeClock:
    """Runs what it is given and says that a call takes as many seconds as its contestant is given, round by round."""

    def __init__(self, *seconds):
        self.seconds_of = [iter(s) if isinstance(s, list) else s for s in seconds]
        self.recordings = 0
        self.timed = []

    def record(self, calls):
        for call in calls:
            call()
        number, self.recordings = self.recordings, self.recordings + 1
        return number, len(calls)

    def seconds(self, recorded, times):
        number, calls = recorded
        self.timed.append(number)
        one = self.seconds_of[number]
        return times * calls * (one if isinstance(one, float) else next(one))

    def peak_bytes(self, call):
        call()
        return 300 << 20


def case(name="made up", rival=lambda inputs: lambda: None, ours=lambda inputs, impl: None, **options):
    return bench_cases.Case(
        name,
        "B=1",
        options.pop("tokens", 64),
        Work(4.8e6),
        1 << 30,
        lambda maker: Inputs(),
        ours,
        Rival("theirs", rival) if callable(rival) else rival,
        lambda inputs: None,
        **options,
    )


class Anywhere(Rival):
    """A rival that is taken as it is, also without a GPU."""

    def prepare(self, inputs):
        return self.make(inputs)


HERE = Anywhere("theirs", lambda inputs: lambda: None)


def measured(clock, one, rounds=5):
    gpu = bench_floors.gpu_of("NVIDIA H200")
    return bench_run.measure(one, clock, CPU, rounds, l2_bytes=1 << 20, gpu=gpu)


@pytest.mark.parametrize("name", TINY_CASES)
def test_the_call_of_a_case_agrees_with_its_reference(name):
    one = TINY_CASES[name]
    inputs = one.make(Maker(CPU, 1))
    if one.panel.startswith("sparse"):  # what is promised of them
        first = torch.arange(inputs.slots.shape[1]) < inputs.counts.unsqueeze(1)
        assert torch.equal(inputs.slots >= 0, first) and (inputs.slots[~first] == -1).all()
    got = one.ours(inputs, "torch")
    want = one.reference(one.make(Maker(CPU, 1)))
    if one.panel.startswith(("dense", "sparse", "decode step")):
        assert got[1] is None  # as the layer asks
        assert_attention((got[0], want[1].float()), want)
    elif one.panel.startswith("index scores"):
        assert torch.equal(got == -torch.inf, want == -torch.inf)
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
    else:
        pairs = zip(got, want, strict=True) if isinstance(want, tuple) else ((got, want),)
        assert all(torch.equal(one, other) for one, other in pairs)


def test_the_cases_are_those_of_the_acceptance_table():
    names = [one.name for one in bench_cases.cases(bench_cases.Sizes())]
    assert len(set(names)) == len(names)
    for layout in ("bf16", "fp8 656"):
        for heads in (8, 16, 64, 128):
            assert f"sparse prefill, {layout}, {heads} heads, T=4096, S=32768" in names
            for batch in (1, 16, 64):
                assert f"sparse decode, {layout}, {heads} heads, B={batch}, S=32768" in names
        for tokens in (1024, 8192, 32768, 131072):
            assert f"decode step, {layout}, 16 heads, B=1, S={tokens}" in names
        assert f"sparse decode, {layout}, portable, 128 heads, B=16, S=32768" in names
    for tokens in (8192, 32768, 131072):
        assert f"scores and selection, decode, B=64, S={tokens}" in names
        assert f"index scores, decode, portable, B=64, S={tokens}" in names
    for tokens in (32768, 131072):
        assert f"selection, prefill, 4096 rows, S={tokens}" in names
    assert "scores and selection, prefill, T=4096, S=131072" in names
    assert "scores and selection, every row <= k, B=64, S=2048" in names
    assert "index scores, prefill, T=4096, S=32768" in names


def test_few_cases_are_quick_and_every_family_has_one():
    every = list(bench_cases.cases(bench_cases.Sizes()))
    quick = [one for one in every if one.quick]
    assert len(quick) < len(every) / 3
    families = {one.panel for one in every if not one.panel.endswith(", portable")}
    assert {one.panel for one in quick} == families - {"dense prefill", "selection, ragged prefill"}


def test_input_sets_are_together_larger_than_the_l2():
    l2 = 50 << 20
    assert bench_timing.sets_for(l2 + 1, l2) == bench_timing.SETS_PAST_L2
    for size in (1 << 18, 1 << 20, 10 << 20, l2):
        sets = bench_timing.sets_for(size, l2)
        assert sets >= 20 and sets * size > l2 and bench_timing.passes_for(sets, size) == 1
    assert bench_timing.sets_for(0, l2) == bench_timing.MOST_SETS
    for one in bench_cases.cases(bench_cases.Sizes()):
        sets = bench_timing.sets_for(one.set_bytes, 60 << 20)
        assert sets * one.set_bytes > 60 << 20, one.name
        assert sets * bench_timing.passes_for(sets, one.set_bytes) >= min(20, sets * ((1 << 30) // one.set_bytes))


def test_contestants_take_turns_in_alternating_order():
    clock = FakeClock(1e-6, 2e-6)
    recorded = {"a": clock.record([int] * 4), "b": clock.record([int] * 4)}
    samples = bench_timing.interleave(clock, recorded, 4, 3, times=2)
    assert clock.timed == [0, 1, 1, 0, 0, 1]
    assert samples == {"a": pytest.approx([1.0] * 3), "b": pytest.approx([2.0] * 3)}


class FakeAllocator:
    """What torch.cuda counts of memory. `Block`s give theirs back when Python lets them go."""

    def __init__(self, monkeypatch):
        self.now = self.most = 0
        fakes = {"memory_allocated": lambda: self.now, "max_memory_allocated": lambda: self.most}
        fakes |= dict.fromkeys(("synchronize", "empty_cache"), lambda: None)
        for name, fake in (fakes | {"reset_peak_memory_stats": self.reset}).items():
            monkeypatch.setattr(torch.cuda, name, fake)

    def reset(self):
        self.most = self.now

    def change(self, size):
        self.now += size
        self.most = max(self.most, self.now)


class Block:
    def __init__(self, allocator, size):
        self.allocator, self.size = allocator, size
        allocator.change(size)

    def __del__(self):
        self.allocator.change(-self.size)


def test_what_others_left_is_no_memory_that_a_call_needs_less(monkeypatch):
    allocator = FakeAllocator(monkeypatch)
    left = Block(allocator, 7 << 20)
    left.itself = left  # garbage, which stays until Python looks for it
    del left
    seen = []

    def call():
        seen.append(gc.isenabled())
        gc.collect()
        return Block(allocator, 4 << 20)

    block, most = bench_timing.peak_of(call)
    assert (block.size, most, seen) == (4 << 20, 4 << 20, [False])
    assert bench_timing.GraphClock().peak_bytes(call) == 4 << 20 and gc.isenabled()
    with pytest.raises(ZeroDivisionError):
        bench_timing.peak_of(lambda: 1 // 0)
    assert gc.isenabled()


def test_a_ratio_is_taken_within_its_round():
    gain = bench_timing.speed_up([10.0, 20.0, 30.0], [20.0, 20.0, 90.0])
    assert (gain.least, gain.median, gain.most) == (1.0, 2.0, 3.0)


@pytest.mark.parametrize(("ours", "slower"), [([1.1, 1.2, 1.06], True), ([1.1, 1.2, 1.04], False), ([0.5] * 3, False)])
def test_slower_is_slower_in_every_round(ours, slower):
    assert bench_timing.is_slower(bench_timing.speed_up(ours, [1.0, 1.0, 1.0])) is slower


def test_floors_of_a_known_and_an_unknown_gpu():
    h200 = bench_floors.gpu_of("NVIDIA H200")
    assert h200.tb_s == 4.8 and bench_floors.gpu_of("NVIDIA H20").tb_s == 4.0
    assert bench_floors.gpu_of("some other GPU") is None
    assert bench_floors.floor(Work(4.8e6), None) is None
    assert bench_floors.floor(Work(9.6e6, 990e6), h200) == (2.0, "memory")
    assert bench_floors.floor(Work(4.8e6, 1980e6), h200) == (2.0, "matrix")
    assert bench_floors.floor(Work(0, 1979e6, fp8=True), h200) == (1.0, "matrix")
    with pytest.raises(ValueError, match="two floors"):
        Work(1, 1) + Work(1, 1, fp8=True)


def test_floors_of_shapes_known_from_a_roofline():
    decode = bench_floors.floor(bench_floors.sparse_mla(64, 16, 2048, 1152, 64 * 2048), bench_floors.gpu_of("H200"))
    assert decode[1] == "memory" and 31 < decode[0] < 33
    prefill = bench_floors.floor(bench_floors.sparse_mla(4096, 16, 2048, 1152, 32768), bench_floors.gpu_of("H200"))
    assert prefill[1] == "matrix" and 290 < prefill[0] < 300
    scores = bench_floors.floor(bench_floors.index_scores(64, 64, 1 << 23, 1 << 23), bench_floors.gpu_of("H200"))
    assert scores[1] == "memory" and 235 < scores[0] < 240


def test_a_result_holds_samples_ratio_floor_and_memory():
    result = measured(FakeClock(2e-6, 3e-6, 1e-6), case(rival=HERE))
    assert result.sets == bench_timing.SETS_PAST_L2
    assert result.gain.median == pytest.approx(1.5) and not result.slower
    assert result.share == pytest.approx(0.5) and result.floor[1] == "memory"
    shown = dict(zip(bench_report.COLUMNS, bench_report.cells(result)))
    assert shown["ours"] == "2.0" and shown["ours net"] == "1.0" and shown["built-in net"] == "2.0"
    assert shown["built-in / ours"] == "1.50 [1.50, 1.50]" and shown["share"] == "50%" and shown["sets"] == "3 > L2"


def test_a_real_case_is_measured_and_says_what_ours_took():
    one = TINY_CASES["decode step, bf16, 16 heads, B=3, S=40"]
    # Sets are seeds, so that all of them differ.
    assert not torch.equal(one.make(Maker(CPU, 0)).q_rope, one.make(Maker(CPU, 1)).q_rope)
    result = bench_run.measure(one, FakeClock(2e-6, 1e-6), CPU, 5, l2_bytes=1, impl="torch")
    assert result.failed is None and result.missing == "no CUDA device"
    operators = {"index_front", "index_select_paged", "sparse_mla"}
    assert operators <= set(result.by) and set(result.by.values()) == {"torch"}


def test_two_sides_that_did_other_work_are_told():
    picks = torch.tensor([[5, 1, 9, -1], [2, 0, 7, 4]])
    assert bench_agreement.difference("picks", picks, picks.flip(1)) == 0
    assert bench_agreement.difference("picks", picks, picks + (picks == 9).int()) == pytest.approx(1 / 7)
    scores = torch.tensor([[1.0, -torch.inf], [4.0, 2.0]])
    assert bench_agreement.difference("scores", scores, torch.tensor([[1.0, 9.0], [4.0, 1.0]])) == 0.25
    out = torch.tensor([[1.0, -2.0]])
    assert bench_agreement.difference("attention", (out, None), torch.tensor([[1.0], [-1.0]])) == 0.5
    assert bench_agreement.difference("attention", (out, None), out * torch.nan) == float("inf")
    rival = Anywhere("theirs", lambda inputs: lambda: out * 1.5)
    result = measured(FakeClock(2e-6, 3e-6, 1e-6), case(rival=rival, ours=lambda *_: (out, None), kind="attention"))
    assert result.disagrees and "OTHER RESULT (0.5)" in bench_report.line(result)
    result = measured(
        FakeClock(2e-6, 3e-6, 1e-6), case(rival=rival, ours=lambda *_: (out * 1.5, None), kind="attention")
    )
    assert not result.disagrees and result.difference == 0


def test_an_unknown_gpu_has_no_share():
    result = bench_run.measure(case(rival=HERE), FakeClock(2e-6, 3e-6, 1e-6), CPU, 5, l2_bytes=1)
    assert result.share is None and bench_report.cells(result)[7:9] == ["-", "-"]


def test_a_rival_that_cannot_run_is_named_and_ours_is_measured():
    def refuse(inputs):
        raise Unavailable("its package is not here")

    result = measured(FakeClock(2e-6, 1e-6), case(rival=Anywhere("theirs", refuse)))
    assert result.gain is None and not result.slower and result.failed is None
    assert "its package is not here" in bench_report.line(result) and "2.0" in bench_report.line(result)


def test_every_rival_says_why_it_cannot_run_without_a_gpu():
    for one in TINY_CASES.values():
        with pytest.raises(Unavailable, match="no CUDA device"):
            one.rival.prepare(Inputs())


def test_a_case_that_fails_is_a_result_too():
    def broken(inputs, impl):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory.\nTried to allocate more")

    result = measured(FakeClock(), case(ours=broken))
    assert result.failed == "OutOfMemoryError: CUDA out of memory." and not result.slower
    assert "failed: OutOfMemoryError" in bench_report.line(result)


def gpu_run(monkeypatch, results):
    """The command with a GPU made up, and `results` in place of measuring; an exception among them is raised."""
    facts = {"name": "NVIDIA H200", "l2_bytes": 1}
    monkeypatch.setattr(bench_kernels, "device_facts", lambda: facts)

    def measure_all(chosen, device, rounds):
        for one in results:
            if isinstance(one, int):
                signal.raise_signal(one)
            elif isinstance(one, BaseException):
                raise one
            else:
                yield one

    monkeypatch.setattr(bench_kernels, "measure_all", measure_all)


def test_the_command_writes_table_and_json(monkeypatch, tmp_path):
    good = measured(FakeClock(2e-6, 3e-6, 1e-6), case("good", rival=HERE))
    gpu_run(monkeypatch, [good])
    out = tmp_path / "kernels.json"
    result = CliRunner().invoke(app, ["bench", "kernels", "--quick", "--json", str(out)])
    assert result.exit_code == 0, result.output
    record = json.loads(out.read_text())
    assert record["ended"] == "complete" and record["device"]["name"] == "NVIDIA H200" and record["versions"]["torch"]
    (only,) = record["cases"]
    assert only["samples"]["ours"] == pytest.approx([2.0] * 5) and only["rival_over_ours"]["median"] == pytest.approx(
        1.5
    )
    assert only["peak_bytes"] == {"ours": 300 << 20, "rival": 300 << 20}
    assert "1.50 [1.50, 1.50]" in result.stdout and "memory beyond the inputs" in result.stdout
    (again,), device, ended = bench_report.read(out)
    assert bench_report.cells(again) == bench_report.cells(good) and device["l2_bytes"] == 1 and ended == "complete"
    (tmp_path / "else.json").write_text('{"cases": [{}]}')
    result = CliRunner().invoke(app, ["bench", "kernels", "--from", str(tmp_path / "else.json")])
    assert result.exit_code == 2 and "is not what" in result.output and "--json" in result.output
    # A name that no case has any more is left out.
    result = CliRunner().invoke(app, ["bench", "kernels", "--from", str(out)])
    assert result.exit_code == 0 and "0 cases" in result.stdout


def test_a_slower_case_or_a_failed_one_makes_the_exit_status(monkeypatch):
    slow = measured(FakeClock(3e-6, 2e-6, 1e-6), case("slow one", rival=HERE))
    gpu_run(monkeypatch, [slow])
    result = CliRunner().invoke(app, ["bench", "kernels"])
    assert result.exit_code == 1 and "slower than allowed in every round: slow one" in result.stdout
    gpu_run(monkeypatch, [measured(FakeClock(3e-6, 2e-6, 1e-6), case("portable", rival=HERE, allowed=2.0))])
    assert CliRunner().invoke(app, ["bench", "kernels"]).exit_code == 0
    gpu_run(monkeypatch, [measured(FakeClock(), case("broken", rival=HERE))])
    result = CliRunner().invoke(app, ["bench", "kernels"])
    assert result.exit_code == 1 and "failed: broken" in result.stdout


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_leaves_what_was_measured(monkeypatch, tmp_path, number):
    before = signal.getsignal(number)
    good = measured(FakeClock(2e-6, 3e-6, 1e-6), case("good", rival=HERE))
    gpu_run(monkeypatch, [good, int(number), good])
    out = tmp_path / "kernels.json"
    result = CliRunner().invoke(app, ["bench", "kernels", "--json", str(out)])
    record = json.loads(out.read_text())
    assert result.exit_code == 128 + number and len(record["cases"]) == 1
    assert record["ended"] == f"cut short by {signal.Signals(number).name}" and "good" in result.stdout
    assert signal.getsignal(number) == before


def test_a_lost_device_ends_the_run_with_what_is_there(monkeypatch):
    good = measured(FakeClock(2e-6, 3e-6, 1e-6), case("good", rival=HERE))
    gpu_run(monkeypatch, [good, bench_kernels.LostDevice("it is gone")])
    result = CliRunner().invoke(app, ["bench", "kernels"])
    assert result.exit_code == 1 and "it is gone" in result.stdout and "good" in result.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_what_it_needs():
    result = CliRunner().invoke(app, ["bench", "kernels"])
    assert result.exit_code == 2 and "CUDA GPU" in result.output and "doctor" in result.output


def test_cases_are_listed_and_chosen_by_name():
    result = CliRunner().invoke(app, ["bench", "kernels", "--list", "--only", "B=64, S=8192$|dense prefill"])
    assert result.exit_code == 0
    names = result.stdout.splitlines()
    assert len(names) == 6 and all(name.endswith("B=64, S=8192") or name.startswith("dense") for name in names)
    for nothing in ("no such case", "["):
        assert CliRunner().invoke(app, ["bench", "kernels", "--only", nothing]).exit_code == 2


def test_plot_needs_its_extra_and_two_lengths(monkeypatch, tmp_path):
    gpu_run(monkeypatch, [])
    monkeypatch.setattr(bench_plot, "available", lambda: False)
    result = CliRunner().invoke(app, ["bench", "kernels", "--plot", str(tmp_path / "time.png")])
    assert result.exit_code == 2 and "plot]" in result.output
    some = [measured(FakeClock(2e-6, 3e-6, 1e-6), case("a", rival=HERE, tokens=tokens)) for tokens in (64, 32)]
    alone = measured(FakeClock(2e-6, 3e-6, 1e-6), case("b", rival=HERE))
    shown = bench_plot.panels([*some, alone])
    assert list(shown) == ["a"] and [point.tokens for point in shown["a"]["B=1"]] == [32, 64]


def test_plot_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    some = [measured(FakeClock(2e-6, 3e-6, 1e-6), case("a", rival=HERE, tokens=tokens)) for tokens in (64, 32)]
    assert bench_plot.draw(some, tmp_path / "time.png", "here")
    assert (tmp_path / "time.png").read_bytes().startswith(b"\x89PNG")
    assert not bench_plot.draw(some[:1], tmp_path / "none.png", "here")
