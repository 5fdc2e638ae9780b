"""One case of the kernel benchmark measured: what came out, or why nothing did."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from sglang_dsa_plugin import support
from sglang_dsa_plugin.tools import bench_agreement, bench_floors, bench_timing
from sglang_dsa_plugin.tools.bench_cases import Case
from sglang_dsa_plugin.tools.bench_floors import Gpu
from sglang_dsa_plugin.tools.bench_inputs import Maker
from sglang_dsa_plugin.tools.bench_rivals import Inputs, Unavailable
from sglang_dsa_plugin.tools.bench_timing import Call, Clock, Spread


@dataclass
class Result:
    """What a case gave.

    calls: in one graph, over the sets as often as it takes.  samples: microseconds a call, one a round, for "ours",
    "rival" and "empty" (a kernel that adds one number, in a graph of as many calls).  floor: microseconds and what sets
    it.  peak_bytes: memory beyond the inputs, of one call outside a graph.  by: operator -> implementation that ours
    took.  difference: of the two results, see bench_agreement; None where they are not compared.  missing: why there is
    no rival.  failed: why there are no figures at all.
    """

    name: str
    panel: str
    line: str
    tokens: int
    rival: str
    allowed: float
    sets: int = 0
    calls: int = 0
    set_bytes: int = 0
    samples: dict[str, list[float]] = field(default_factory=dict)
    floor: tuple[float, str] | None = None
    peak_bytes: dict[str, int] = field(default_factory=dict)
    by: dict[str, str] = field(default_factory=dict)
    difference: float | None = None
    disagrees: bool = False
    missing: str | None = None
    failed: str | None = None

    def spread(self, contestant: str) -> Spread | None:
        """Microseconds a call of "ours", "rival" or "empty"; None where it was not measured."""
        values = self.samples.get(contestant)
        return Spread.of(values) if values else None

    @property
    def gain(self) -> Spread | None:
        """The rival's time over ours, by round."""
        if not (self.samples.get("ours") and self.samples.get("rival")):
            return None
        return bench_timing.speed_up(self.samples["ours"], self.samples["rival"])

    @property
    def share(self) -> float | None:
        """The floor over our time."""
        ours = self.spread("ours")
        return None if ours is None or self.floor is None else self.floor[0] / ours.median

    @property
    def slower(self) -> bool:
        """Whether ours takes longer than it is allowed to, in every round."""
        return self.gain is not None and bench_timing.is_slower(self.gain, self.allowed)

    def record(self) -> dict[str, Any]:
        """All of it for JSON, derived figures included."""
        gain = self.gain
        return asdict(self) | {
            "us": {name: asdict(Spread.of(values)) for name, values in self.samples.items() if values},
            "rival_over_ours": None if gain is None else asdict(gain),
            "share_of_floor": self.share,
            "slower": self.slower,
        }


def measure(
    case: Case,
    clock: Clock,
    device: torch.device,
    rounds: int,
    *,
    l2_bytes: int,
    gpu: Gpu | None = None,
    impl: str | None = None,
) -> Result:
    """The figures of one case. impl: an implementation of ours by name; None for the support table's choice.

    An exception becomes `failed` of the result, that of the rival `missing`; only what ends a process gets through.
    """
    result = Result(case.name, case.panel, case.line, case.tokens, case.rival.name, case.allowed)
    result.sets = bench_timing.sets_for(case.set_bytes, l2_bytes)
    result.set_bytes = case.set_bytes
    result.floor = bench_floors.floor(case.work, gpu)
    try:
        _measure(case, result, clock, device, rounds, impl)
    except Exception as error:
        result.failed = in_words(error)
        result.samples = {}
    free()
    return result


def _measure(case: Case, result: Result, clock: Clock, device: torch.device, rounds: int, impl: str | None) -> None:
    sets = [case.make(Maker(device, seed)) for seed in range(result.sets)]
    calls = [_bound(case, inputs, impl) for inputs in sets]
    with noting(result.by):
        calls[0]()
    result.peak_bytes["ours"] = clock.peak_bytes(calls[0])
    passes = bench_timing.passes_for(len(sets), case.set_bytes)
    recorded = {"ours": clock.record(calls * passes)}
    try:
        theirs = [case.rival.prepare(inputs) for inputs in sets]
        if case.kind:
            result.difference = bench_agreement.difference(case.kind, calls[0](), theirs[0]())
            result.disagrees = result.difference > bench_agreement.LIMITS[case.kind]
        result.peak_bytes["rival"] = clock.peak_bytes(theirs[0])
        recorded["rival"] = clock.record(theirs * passes)
    except Exception as error:
        result.missing = str(error) if isinstance(error, Unavailable) else in_words(error)
    result.calls = len(calls) * passes
    recorded["empty"] = clock.record(empty_calls(device, result.calls))
    result.samples = bench_timing.interleave(clock, recorded, result.calls, rounds)


@contextlib.contextmanager
def noting(by: dict[str, str]) -> Iterator[None]:
    """Note in `by` what the support table chooses for each operator that is called within."""
    real = support.choose

    def choose(operator: str, **features: Any) -> support.Choice:
        choice = real(operator, **features)
        by[operator] = choice.name
        return choice

    support.choose = choose
    try:
        yield
    finally:
        support.choose = real


def _bound(case: Case, inputs: Inputs, impl: str | None) -> Call:
    return lambda: case.ours(inputs, impl)


def empty_calls(device: torch.device, count: int) -> Sequence[Call]:
    """As little as a kernel can do, `count` times."""
    one = torch.zeros(1, device=device)
    return [lambda: one.add_(1)] * count


def in_words(error: BaseException) -> str:
    """An exception in one line."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:300]


def free() -> None:
    """Give back what the last case held."""
    # Calls and inputs refer to each other, and one case may fill most of the GPU.
    gc.collect()
    if torch.cuda.is_available():
        # On a broken context this raises as well; the caller looks for that itself.
        with contextlib.suppress(RuntimeError):
            torch.cuda.empty_cache()
