"""How kernels are timed: CUDA graphs of many calls on cold inputs, contestants interleaved, ratios per round.

A graph holds one call for each input set. The sets are together larger than the L2 cache, so no call finds its input
there, and the host is not in the time: eager timing of small kernels measures the host. In every round each contestant
replays its graph, in alternating order, so that a GPU that grows warm or changes its clock does so for both. A ratio is
taken within a round; its median and range over the rounds are reported.

The clock is an argument, so that all but the GPU itself is tested without one.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

Call = Callable[[], Any]
Result = TypeVar("Result")

LEAST_SETS = 20
# Sets so small that more were needed would cost more to make than they bring.
MOST_SETS = 1024
# Where one set alone is larger than the L2, its neighbours have pushed it out before it comes again.
SETS_PAST_L2 = 3
MEASURE_S = 0.008
SLOWER = 1.05


class Clock(Protocol):
    """What turns calls into times."""

    def record(self, calls: Sequence[Call]) -> Any:
        """Prepare a run of all calls, one after the other."""

    def seconds(self, recorded: Any, times: int) -> float:
        """Time of `times` runs together."""

    def peak_bytes(self, call: Call) -> int:
        """Memory that one call needs beyond what is there before it."""


class GraphClock:
    """CUDA graphs on the current device, timed with events."""

    def record(self, calls: Sequence[Call]) -> torch.cuda.CUDAGraph:
        """Warm every call up on a side stream, as capture asks for, then capture them all in one graph."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for call in calls:
                call()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call()
        graph.replay()
        torch.cuda.synchronize()
        return graph

    def seconds(self, recorded: torch.cuda.CUDAGraph, times: int) -> float:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(times):
            recorded.replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3

    def peak_bytes(self, call: Call) -> int:
        call()  # what is set up once is not counted
        return peak_of(call)[1]


def peak_of(call: Callable[[], Result]) -> tuple[Result, int]:
    """Of one call: its result, and the most bytes allocated at a time beyond what was before it, on the current device.

    What others have left is given back before and not meanwhile, where it would count as memory that the call needs
    less: Python collects its garbage whenever a call makes objects.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # looks, too, for blocks that another stream has done with
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = call()
        torch.cuda.synchronize()
        return result, torch.cuda.max_memory_allocated() - before
    finally:
        if collecting:
            gc.enable()


def sets_for(set_bytes: int, l2_bytes: int) -> int:
    """Input sets for a call that touches `set_bytes`: at least 20 that are together larger than the L2 by half, or a
    few where one alone is larger than it.
    """
    if set_bytes > l2_bytes:
        return SETS_PAST_L2
    return max(LEAST_SETS, min(MOST_SETS, -(-3 * l2_bytes // (2 * max(1, set_bytes)))))


def passes_for(sets: int, set_bytes: int) -> int:
    """How often a graph goes through its sets: until it has 20 calls, so that starting it does not count, or has moved
    a gigabyte, beside which that is nothing. A set that comes again has been pushed out of the L2 by the others.
    """
    return max(1, min(-(-LEAST_SETS // sets), (1 << 30) // max(1, set_bytes)))


@dataclass(frozen=True)
class Spread:
    """Median and range."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of at least one value."""
        return cls(statistics.median(values), min(values), max(values))


def interleave(
    clock: Clock, recorded: Mapping[str, Any], calls: int, rounds: int, times: int | None = None
) -> dict[str, list[float]]:
    """Microseconds a call by contestant, one value a round.

    recorded: name -> what the clock recorded, `calls` calls each.  rounds: at least one.  times: runs that are timed
    together; None for as many as take some milliseconds.
    """
    together = dict.fromkeys(recorded, times or 1)
    if times is None:
        for name, one in recorded.items():
            once = min(clock.seconds(one, 1) for _ in range(2))
            together[name] = max(1, min(1000, round(MEASURE_S / max(once, 1e-9))))
    samples: dict[str, list[float]] = {name: [] for name in recorded}
    for number in range(rounds):
        for name in list(recorded)[:: 1 if number % 2 == 0 else -1]:
            seconds = clock.seconds(recorded[name], together[name])
            samples[name].append(1e6 * seconds / together[name] / calls)
    return samples


def speed_up(ours: Sequence[float], rival: Sequence[float]) -> Spread:
    """rival / ours of each round: above 1 where ours is faster."""
    return Spread.of([r / o for o, r in zip(ours, rival, strict=True)])


def is_slower(gain: Spread, allowed: float = SLOWER) -> bool:
    """Whether ours takes more than `allowed` of the rival's time in every round: the whole interval lies above it."""
    return 1 / gain.most > allowed
