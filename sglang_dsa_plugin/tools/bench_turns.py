"""Servers that stand side by side on one GPU and are asked in turn, so that no side has the better half of a run."""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from sglang_dsa_plugin.tools.bench_client import Client, Stream, decode_rate
from sglang_dsa_plugin.tools.serve_plan import Launch
from sglang_dsa_plugin.tools.serve_wait import say

# Fewer are not divided between servers and client.
_CORES = 4
# A case is asked again in the same turn until it has taken so many seconds, but not more often than this: the shortest
# vary most, and cost least.
_AGAIN_S, _MOST = 0.4, 5

Answer = TypeVar("Answer")


@dataclass
class Contestant:
    """A server of one side. figures: milliseconds by case, a value or more a turn. failed: why it is out, or None."""

    side: str
    number: int
    launch: Launch
    server: subprocess.Popen[bytes]
    in_use: str | None = None
    figures: dict[str, list[float]] = field(default_factory=dict)
    failed: str | None = None


@contextlib.contextmanager
def side_by_side(contestants: Sequence[Contestant]) -> Iterator[None]:
    """All servers on the same cores and stopped, which costs those that are asked nothing; they go on afterwards.

    A host's cores are not equally fast while others share the machine: with cores of its own a server would keep
    good or bad ones for the whole run.
    """
    with _same_cores([contestant.server.pid for contestant in contestants]):
        for contestant in contestants:
            _signal(contestant, signal.SIGSTOP)
        try:
            yield
        finally:
            for contestant in contestants:
                _signal(contestant, signal.SIGCONT)


def take_turns(
    contestants: Sequence[Contestant], lengths: Sequence[int], together: Sequence[int], new_tokens: int, turns: int
) -> None:
    """Ask all for every case, `turns` times and once before that does not count, every other time in the reverse order.

    A server that does not answer as it should is out from then on.
    """
    clients = {id(one): Client(one.launch, seed) for seed, one in enumerate(contestants)}
    for turn in range(turns + 1):
        order = contestants if turn % 2 == 0 else contestants[::-1]
        for one in order:
            if one.failed is not None:
                continue
            _signal(one, signal.SIGCONT)
            try:
                found = ask(clients[id(one)], lengths, together, new_tokens)
            except RuntimeError as error:
                one.failed = str(error)[:2000]
                say(f"{one.side} {one.number}: {one.failed}")
                continue
            finally:
                _signal(one, signal.SIGSTOP)
            if turn:
                for case, milliseconds in found.items():
                    one.figures.setdefault(case, []).extend(milliseconds)
        say(f"turn {turn} of {turns} done")


def ask(client: Client, lengths: Sequence[int], together: Sequence[int], new_tokens: int) -> dict[str, list[float]]:
    """Milliseconds by case, once or a few times: to the first token of one prompt alone, and of several at once (the
    median of them and the last); per token of each of those that decode together.
    """
    client.stream(lengths[0], 2)  # it was stopped a moment ago
    found: dict[str, list[float]] = {}
    for prompt in lengths:
        alone = _repeated(lambda s=prompt: client.stream(s, 1))
        found[f"first token, S={prompt}"] = [_first(stream) for stream in alone]
        for requests in together:
            answers = _repeated(lambda s=prompt, b=requests: client.together(b, s, new_tokens))
            if requests > 1:
                firsts = [[_first(stream) for stream in streams] for streams in answers]
                found[f"first token, S={prompt}, B={requests}, median"] = [statistics.median(some) for some in firsts]
                found[f"first token, S={prompt}, B={requests}, last"] = [max(some) for some in firsts]
            rates = [1e3 * requests / decode_rate(streams) for streams in answers]
            found[f"per token, S={prompt}, B={requests}"] = rates
    return found


def _repeated(question: Callable[[], Answer]) -> list[Answer]:
    """Its answers, asked until that has taken a while; at least one."""
    began, answers = time.monotonic(), [question()]
    while len(answers) < _MOST and time.monotonic() - began < _AGAIN_S:
        answers.append(question())
    return answers


def _first(stream: Stream) -> float:
    return 1e3 * (stream.first - stream.asked)


def _signal(contestant: Contestant, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):  # it may have ended, which the next question shows
        os.killpg(contestant.server.pid, number)


@contextlib.contextmanager
def _same_cores(servers: Sequence[int]) -> Iterator[None]:
    """Three quarters of the cores for each of the servers (process ids) and what belongs to it, the rest for this
    process, which gets all of its own back.
    """
    import psutil  # type: ignore[import-untyped]

    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < _CORES:
        yield
        return
    split = len(cores) - len(cores) // 4
    for pid in servers:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            for thread in (t for one in (process, *process.children(recursive=True)) for t in one.threads()):
                with contextlib.suppress(ProcessLookupError):
                    os.sched_setaffinity(thread.id, cores[:split])
    os.sched_setaffinity(0, cores[split:])
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)
