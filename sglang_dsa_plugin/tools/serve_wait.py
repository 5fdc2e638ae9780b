"""Waiting for a server that is starting: is it ready, what does it say meanwhile, and what did it die of."""

from __future__ import annotations

import contextlib
import re
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

from sglang_dsa_plugin.tools.serve_plan import Failure, Launch

# The line adapter/report.py logs once the backend is built.
IN_USE = re.compile(r"sglang-dsa-plugin \S+ serves .*")


def say(text: str) -> None:
    """A message for the person; standard output is kept for answers and addresses."""
    _write(f"{text}\n")


def _write(text: str) -> None:
    """To standard error, if it is still there: with its terminal closed or its pipe ended a server is stopped all the
    same, and nobody reads how.
    """
    with contextlib.suppress(OSError):
        print(text, end="", file=sys.stderr, flush=True)


def wait_ready(server: subprocess.Popen[bytes], launch: Launch, log: Path, limit_s: float | None) -> float:
    """Seconds until the server answered /health, with a progress line meanwhile. Raises Failure when it died.

    An answer counts only while the server itself listens on the port: until it does, another program may.
    """
    start = time.monotonic()
    progress = Progress()
    other = ""
    while not ((healthy := _healthy(launch.url)) and listens(server.pid, launch.port)):
        waited = time.monotonic() - start
        if healthy:
            other = f"\nport {launch.port} is answered by another program: give another --port, or end that program"
        if server.poll() is not None:
            progress.clear()
            raise Failure(died(server.returncode, log, launch) + other)
        if limit_s is not None and waited > limit_s:
            progress.clear()
            raise Failure(f"the server was not ready after {limit_s:.0f} s; its log: {log}{other}")
        progress.show(waited, _last_line(log))
        time.sleep(0.5)
    progress.clear()
    return time.monotonic() - start


class Progress:
    """`starting, 12 s: <what the server said last>`, in place on a terminal, else a line every ten seconds."""

    def __init__(self) -> None:
        self._next = 0.0
        self._terminal = sys.stderr.isatty()

    def show(self, seconds: float, what: str) -> None:
        """Show it, if it is time to."""
        line = f"starting, {seconds:3.0f} s: {what[:90]}"
        if self._terminal:
            _write(f"\r\033[K{line}")
        elif seconds >= self._next:
            say(line)
            self._next = seconds + 10

    def clear(self) -> None:
        """Leave an empty line for what comes next."""
        if self._terminal:
            _write("\r\033[K")


def _healthy(url: str) -> bool:
    try:
        with _opener().open(f"{url}/health", timeout=30) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def listens(pid: int, port: int) -> bool:
    """Whether the process or one below it accepts connections on the port.

    The log does not say so under every --log-level, and not in the same words with every HTTP server of SGLang's.
    """
    import psutil  # type: ignore[import-untyped]

    try:
        process = psutil.Process(pid)
        return any(
            connection.status == psutil.CONN_LISTEN and connection.laddr.port == port
            for one in (process, *process.children(recursive=True))
            for connection in one.net_connections("tcp")
        )
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return False


def _opener() -> urllib.request.OpenerDirector:
    """Straight to this machine: no proxy, and its own certificate (if any) is not questioned."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context))


def _last_line(log: Path) -> str:
    """What SGLang logged last, without its time stamp; the warnings of the packages it imports are left out, and that
    somebody asked whether it is ready yet.
    """
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 8192))
        lines = file.read().decode(errors="replace").splitlines()
    logged = [stamped.group(1) for line in lines if (stamped := _LOGGED.match(line)) and not _ASKED.search(line)]
    return logged[-1] if logged else "importing SGLang"


_LOGGED = re.compile(r"\[\d{4}-\d\d-\d\d [^]]*\] (.*)")
_ASKED = re.compile(r'"GET /health\w* HTTP/')
# What ends a traceback, and the ways a launcher speaks without one.
_RAISED = re.compile(r"(?:[a-z_]\w*\.)*[A-Z]\w*: \S.*")
_SAID = re.compile(r"sglang-dsa-plugin could not start: .*|(?:sglang-dsa-plugin|sglang serve|\S+\.py): error: .*")


def died(status: int, log: Path, launch: Launch | None = None) -> str:
    """What a dead server's log gives as the cause: the last different exceptions, or its last lines when none; with
    launch, what its model's name was taken for.
    """
    lines = log.read_text(errors="replace").splitlines()
    in_traceback = False
    causes: list[str] = []
    for line in lines:
        if "Traceback (most recent call last)" in line:
            in_traceback = True
        elif _SAID.fullmatch(line) or (in_traceback and _RAISED.fullmatch(line)):
            causes = [c for c in causes if c != line] + [line]
            in_traceback = False
    shown = causes[-4:] or [line for line in lines if line.strip()][-20:]
    note = f"\n{launch.model_note}" if launch is not None and launch.model_note else ""
    return "\n  ".join([f"the server ended with status {status}; its log: {log}", *shown]) + note


def in_use(log: Path) -> str | None:
    """The plugin's own start-up line in the server's log, which names backend, pool, indexer and layout in use."""
    found = IN_USE.search(log.read_text(errors="replace"))
    return found.group(0) if found else None
