"""A refusal in a worker ends the server as one in the launcher does: its line comes last, and the status is 1.

Why: some things are known only where the weights are, or the GPU. SGLang logs what a scheduler process raises under
some forty lines of traceback, and its launcher kills itself then: status 137, as if memory had run out, and a Python
program that asked for an engine is gone. Here a scheduler leaves the sentence with the launcher, which looks while it
waits for its schedulers, ends them and raises it. Where another process starts the schedulers or resolved the
arguments (--dp-size above 1 without DP attention, SGLang's launch_server_process) SGLang tells it as before.
Upstream: managers/scheduler.py run_scheduler_process, entrypoints/engine.py _wait_for_scheduler_ready.
Can go: when the launcher raises what a scheduler raised.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_dsa_plugin.adapter import refusals
from sglang_dsa_plugin.plan import Refusal

# Where a launcher's processes find the memory it looks into: a path below /proc. Not a user's switch.
PLACE = "_SGLANG_DSA_PLUGIN_REFUSED"
_LOOKS_EVERY_S = 0.5
# A worker that has refused waits to be ended: other ranks would fail in a collective with one that is gone, and say so.
_WAITS_S = 60.0
_LEAVES_S = 10.0  # until a process that was killed has given back its memory

_memory: int | None = None


def register() -> None:
    """Queue the hooks."""
    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.__init__", in_worker, HookType.AROUND)
    HookRegistry.register("sglang.srt.entrypoints.engine._wait_for_scheduler_ready", in_launcher, HookType.AROUND)


def listen() -> None:
    """In a launcher, before it starts processes: from here on their refusals have a place."""
    global _memory
    if _memory is None:
        _memory = os.memfd_create("sglang-dsa-plugin-refused")  # has no name in any folder that could be left behind
    os.ftruncate(_memory, 0)
    os.environ[PLACE] = f"/proc/{os.getpid()}/fd/{_memory}"


def in_worker(original: Callable[..., None], scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """Build the scheduler; a refusal goes to the launcher, and to SGLang where none listens, as all other errors do."""
    try:
        original(scheduler, *args, **kwargs)
    except Exception as error:
        if not refusals.is_refusal(error) or not _left(str(error)):
            raise
        time.sleep(_WAITS_S)
        os._exit(1)


def in_launcher(original: Callable[..., Any], readers: Sequence[Any], processes: Sequence[Any]) -> Any:
    """Wait for the schedulers; where one refuses, end them all and raise its Refusal."""
    if _memory is None:
        return original(readers, processes)
    try:
        return original([Reader(reader) for reader in readers], processes)
    except Refusal:
        for process in processes:
            process.kill()
        for process in processes:
            process.join(_LEAVES_S)
        os.ftruncate(_memory, 0)  # what this process starts next may be a model that nobody listens for
        raise


class Reader:
    """A scheduler's pipe with what the wait for it calls; raises a worker's refusal meanwhile."""

    def __init__(self, pipe: Any) -> None:
        self._pipe = pipe

    def poll(self, timeout: float) -> bool:
        """Whether there is something to receive, after `timeout` seconds at most."""
        until = time.monotonic() + timeout
        while (text := _found()) is None:
            if self._pipe.poll(min(_LOOKS_EVERY_S, max(0.0, until - time.monotonic()))):
                return True
            if time.monotonic() >= until:
                return False
        raise Refusal(text)

    def recv(self) -> Any:
        """What the scheduler sent."""
        return self._pipe.recv()


def _left(text: str) -> bool:
    """Leave a refusal with the process that started this one; False where that is no launcher that listens."""
    place = os.environ.get(PLACE, "")
    if not place.startswith(f"/proc/{os.getppid()}/"):
        return False
    with contextlib.suppress(OSError), open(place, "a") as launcher:
        launcher.write(f"{text}\0")  # one write, so that those of several ranks lie one behind the other
        return True
    return False


def _found() -> str | None:
    """The first refusal that was left here, once all of it is there."""
    if _memory is None or not (size := os.fstat(_memory).st_size):
        return None
    text, end, _ = os.pread(_memory, size, 0).partition(b"\0")
    return text.decode() if end else None
