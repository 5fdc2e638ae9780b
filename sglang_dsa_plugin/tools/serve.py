"""Start SGLang with this plugin, wait until it answers, say how to ask it; with --smoke ask it and stop it.

Run by scripts/serve.sh as `python -m sglang_dsa_plugin.tools.serve PROJECT_ROOT [arguments]`. The server runs in a
session of its own, so that Ctrl-C reaches this program alone and the whole server is then stopped by its process group.
Neither torch nor sglang is imported here: the waiting process should cost nothing next to the server.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TextIO

from sglang_dsa_plugin.tools import smoke
from sglang_dsa_plugin.tools.serve_plan import Failure, Launch, plan_launch, split_arguments
from sglang_dsa_plugin.tools.serve_wait import died, in_use, say, wait_ready

SMOKE_LIMIT_S = 600
STOP_GRACE_S = 20
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main(arguments: Sequence[str]) -> int:
    """Serve until stopped, or run the smoke test. Returns the exit status."""
    root, (smoke_test, server_arguments) = Path(arguments[0]), split_arguments(arguments[1:])
    logs = root / ".logs"
    ports = Ports(logs)
    stop_with_this_command()
    try:
        tiny = root / ".models" / "tiny"
        launch = plan_launch(server_arguments, on_cpu=runs_on_cpu(), tiny_model=tiny, claim=ports.claim)
        for note in launch.notes:
            say(note)
        if str(tiny) in launch.command:
            make_tiny_model(tiny)
        log = logs / f"serve-{launch.port}.log"
        say(f"server log: {log}")
        with running(launch, log) as server:
            ready_s = wait_ready(server, launch, log, SMOKE_LIMIT_S if smoke_test else None)
            say(f"the server answers after {ready_s:.0f} s")
            line = in_use(log)
            say(line or "the server's log has no line of sglang-dsa-plugin: the plugin is NOT in use")
            print(how_to_ask(launch), flush=True)
            if not smoke_test:
                status = server.wait()
                raise Failure(died(status, log, launch))
            if line is None:
                raise Failure("the plugin is not in use; `sglang-dsa doctor` says why")
            smoke.ask(launch)
        say("\nsmoke test passed")
        return 0
    except Failure as failure:
        say(f"error: {failure}")
        return 1
    except BrokenPipeError:
        # The interpreter flushes standard output once more when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        say("error: nobody reads the standard output any more")
        return 1


class Ports:
    """The ports, and with them the logs, of this checkout's servers; a claim ends with the process that made it.

    A server binds its port only after most of a minute, until when another one would find it free.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._locks: list[TextIO] = []

    def claim(self, port: int) -> bool:
        """Whether the port is now this process's."""
        self._directory.mkdir(parents=True, exist_ok=True)
        lock = (self._directory / f"port-{port}.lock").open("w")  # not inherited by the server
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            return False
        self._locks.append(lock)
        return True


def runs_on_cpu() -> bool:
    """Whether the plugin will serve on the CPU here; asked in a process of its own, which may import torch."""
    code = "from sglang_dsa_plugin.adapter.platform import CPU_PLATFORM, activate; print(activate() == CPU_PLATFORM)"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if answer.returncode:
        raise Failure(
            f"the installation does not work ({''.join(answer.stderr.strip().splitlines()[-1:])}); `sglang-dsa doctor` "
            "says more, and removing .venv makes the next run install everything again"
        )
    return answer.stdout.strip() == "True"


def make_tiny_model(directory: Path) -> None:
    """Make the small random checkpoint unless it is there; never leaves half of one behind."""
    if (directory / "config.json").exists():
        return
    say(f"making the small random model {directory}")
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="making-", dir=directory.parent) as work:
        made = Path(work) / "model"
        command = [sys.executable, "-m", "sglang_dsa_plugin.cli", "make-model", str(made)]
        run = subprocess.run(command, capture_output=True, text=True)
        if run.returncode:
            raise Failure(f"the small model could not be made:\n{run.stdout}{run.stderr}")
        try:
            made.rename(directory)
        except OSError as error:
            # Another first start was faster; nothing else may lie there.
            if not (directory / "config.json").exists():
                raise Failure(
                    f"the small model could not be put at {directory}: {error}; remove what is there"
                ) from error


@contextlib.contextmanager
def running(
    launch: Launch, log: Path, environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """The server in a process group of its own, stopped as a whole on the way out, whatever the way.

    environment: variables to set besides this process's own.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        server = subprocess.Popen(
            launch.command,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, **(environment or {})},
        )
    try:
        yield server
    finally:
        stop(server)


def stop(server: subprocess.Popen[bytes]) -> None:
    """Ask the launcher to end, then end whatever is left of its group. A second Ctrl-C skips the asking."""

    def kill(*_args: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)

    before = {number: signal.signal(number, kill) for number in SIGNALS}
    if server.poll() is None:
        server.terminate()
        say("stopping the server")
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(STOP_GRACE_S)
    kill()
    server.wait()
    for number, handler in before.items():  # the group's number may soon be another's
        signal.signal(number, handler)


def stop_with_this_command() -> None:
    """Turn the signals that end a process into SystemExit, so that a server in `running` is stopped with it; not those
    that the caller had ignored, as `nohup` does with a closed terminal's.
    """
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _leave)


def how_to_ask(launch: Launch) -> str:
    """The address and a curl command to paste."""
    tls = "-k " if launch.scheme == "https" else ""
    key = " \\\n  -H 'Authorization: Bearer YOUR_API_KEY'" if launch.api_key else ""
    body = '{"model": "default", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 32}'
    return (
        f"ready: {launch.url}\n\n"
        f"curl {tls}{launch.url}/v1/chat/completions -H 'Content-Type: application/json'{key} \\\n  -d '{body}'\n"
    )


def _leave(number: int, _frame: object) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
