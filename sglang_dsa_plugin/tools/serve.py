"""Start SGLang with this plugin, wait until it answers, say how to ask it; with --smoke ask it and stop it.

Run by scripts/serve.sh as `python -m sglang_dsa_plugin.tools.serve PROJECT_ROOT [arguments]`. The server runs in a
session of its own, so that Ctrl-C reaches this program alone and the whole server is then stopped by its process group.
Neither torch nor sglang is imported here: the waiting process should cost nothing next to the server.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PORT = 30000
# Added on a machine without CUDA unless the user gives a value. SGLang sizes both for a GPU server: the KV cache to
# what memory is left, the request tables to at least 2048 requests of the longest context.
CPU_DEFAULTS = {"--max-total-tokens": "32768", "--max-running-requests": "16"}
SMOKE_LIMIT_S = 600
STOP_GRACE_S = 20
# The line adapter/report.py logs once the backend is built.
IN_USE = re.compile(r"sglang-dsa-plugin \S+ serves .*")


class Failure(Exception):
    """What went wrong and what to do about it, for the person at the terminal."""


@dataclass(frozen=True)
class Launch:
    """A server about to start: its command, where it will answer, and what was decided on the user's behalf."""

    command: list[str]
    host: str
    port: int
    scheme: str
    api_key: str | None
    notes: tuple[str, ...]

    @property
    def url(self) -> str:
        """Address a client on this machine uses."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(self.host, self.host)
        return f"{self.scheme}://{f'[{host}]' if ':' in host else host}:{self.port}"


def split_arguments(arguments: Sequence[str]) -> tuple[bool, list[str]]:
    """Whether --smoke was given, and the arguments that are SGLang's."""
    return "--smoke" in arguments, [a for a in arguments if a != "--smoke"]


def value_of(arguments: Sequence[str], *flags: str) -> str | None:
    """The value of a flag in either form (--flag value, --flag=value), the last one as argparse has it, or None."""
    found = None
    for i, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name in flags:
            if not equals and (i + 1 == len(arguments) or arguments[i + 1].startswith("--")):
                raise Failure(f"{name} needs a value")
            found = value if equals else arguments[i + 1]
    return found


def config_values(path: str | None) -> dict[str, str]:
    """SGLang's --config file as {"--flag": value}; empty when there is none."""
    if path is None:
        return {}
    import yaml

    try:
        content = yaml.safe_load(Path(path).read_text()) or {}
    except (OSError, yaml.YAMLError) as error:
        raise Failure(f"--config {path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise Failure(f"--config {path} must hold one mapping of argument names to values")
    return {f"--{str(key).replace('_', '-')}": str(value) for key, value in content.items()}


def plan_launch(arguments: Sequence[str], *, on_cpu: bool, tiny_model: Path) -> Launch:
    """The server command for SGLang's `arguments`, completed with model, port, backend and the CPU's defaults.

    Raises Failure when a flag lacks its value or the port asked for is taken.
    """
    config = config_values(value_of(arguments, "--config"))

    def asked(*flags: str) -> str | None:
        on_line = value_of(arguments, *flags)
        return on_line if on_line is not None else next((config[f] for f in flags if f in config), None)

    added: list[str] = []
    notes: list[str] = []
    if asked("--model-path", "--model") is None:
        added += ["--model-path", str(tiny_model)]
        notes.append(f"no --model given: serving the small random model {tiny_model} (its text means nothing)")
    if asked("--attention-backend") is None:
        added += ["--attention-backend", "dsa"]
    host = asked("--host") or "127.0.0.1"
    wanted = asked("--port")
    port = _port(host, wanted)
    if wanted is None:
        added += ["--port", str(port)]
        if port != PORT:
            notes.append(f"port {PORT} is taken: using {port}")
    if on_cpu:
        extra = {flag: value for flag, value in CPU_DEFAULTS.items() if asked(flag) is None}
        added += [word for pair in extra.items() for word in pair]
        if extra:
            notes.append("no CUDA device: " + ", ".join(f"{flag} {value}" for flag, value in extra.items()))
    return Launch(
        command=[sys.executable, "-m", "sglang.launch_server", *arguments, *added],
        host=host,
        port=port,
        scheme="https" if asked("--ssl-certfile") else "http",
        api_key=asked("--api-key"),
        notes=tuple(notes),
    )


def _port(host: str, wanted: str | None) -> int:
    """The port asked for if it is free; when none was asked for, 30000 or else one the system hands out."""
    if wanted is not None:
        if not wanted.isdigit() or not 0 < int(wanted) < 65536:
            raise Failure(f"--port {wanted} is not a port number")
        if not _free(host, int(wanted)):
            raise Failure(
                f"--port {wanted} is taken on {host}; give another one, or leave --port out to get a free one"
            )
        return int(wanted)
    if _free(host, PORT):
        return PORT
    with socket.socket(_family(host)) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def _free(host: str, port: int) -> bool:
    with socket.socket(_family(host)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except socket.gaierror as error:
            raise Failure(f"--host {host} is not an address of this machine: {error}") from error
        except OSError as error:
            if isinstance(error, PermissionError):
                raise Failure(f"--port {port} may not be used by this user; take one above 1023") from error
            return False
    return True


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def runs_on_cpu() -> bool:
    """Whether the plugin will serve on the CPU here; asked in a process of its own, which may import torch."""
    code = "from sglang_dsa_plugin.adapter.platform import CPU_PLATFORM, activate; print(activate() == CPU_PLATFORM)"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if answer.returncode:
        raise Failure(
            f"the installation does not work: {answer.stderr.strip().splitlines()[-1:]}; `sglang-dsa doctor` says more, "
            "and removing .venv makes the next run install everything again"
        )
    return answer.stdout.strip() == "True"


def make_tiny_model(directory: Path) -> None:
    """Make the small random checkpoint unless it is there; never leaves half of one behind."""
    if (directory / "config.json").exists():
        return
    say(f"making the small random model {directory}")
    partial = directory.with_name(f"{directory.name}.partial-{os.getpid()}")
    directory.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "sglang_dsa_plugin.cli", "make-model", str(partial)]
    made = subprocess.run(command, capture_output=True, text=True)
    if made.returncode:
        raise Failure(f"the small model could not be made:\n{made.stdout}{made.stderr}")
    partial.rename(directory)


@contextlib.contextmanager
def running(launch: Launch, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The server in a process group of its own, stopped as a whole on the way out, whatever the way."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        server = subprocess.Popen(launch.command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        yield server
    finally:
        stop(server)


def stop(server: subprocess.Popen[bytes]) -> None:
    """Ask the launcher to end, then end whatever is left of its group. A second Ctrl-C skips the asking."""

    def kill(*_args: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, kill)
    if server.poll() is None:
        say("stopping the server")
        server.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(STOP_GRACE_S)
    kill()
    server.wait()


def wait_ready(server: subprocess.Popen[bytes], launch: Launch, log: Path, limit_s: float | None) -> float:
    """Seconds until the server answered /health, with a progress line meanwhile. Raises Failure when it died."""
    start = time.monotonic()
    progress = Progress()
    while not _healthy(launch.url):
        waited = time.monotonic() - start
        if server.poll() is not None:
            progress.clear()
            raise Failure(died(server.returncode, log))
        if limit_s is not None and waited > limit_s:
            progress.clear()
            raise Failure(f"the server was not ready after {limit_s:.0f} s; its log: {log}")
        progress.show(waited, _last_line(log))
        time.sleep(0.5)
    progress.clear()
    return time.monotonic() - start


class Progress:
    """`starting, 12 s: <what the server said last>`: rewritten in place on a terminal, else a line every ten seconds."""

    def __init__(self) -> None:
        self._next = 0.0
        self._terminal = sys.stderr.isatty()

    def show(self, seconds: float, what: str) -> None:
        """Show it, if it is time to."""
        line = f"starting, {seconds:3.0f} s: {what[:90]}"
        if self._terminal:
            print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)
        elif seconds >= self._next:
            say(line)
            self._next = seconds + 10

    def clear(self) -> None:
        """Leave an empty line for what comes next."""
        if self._terminal:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def _healthy(url: str) -> bool:
    try:
        with _opener().open(f"{url}/health", timeout=30) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _opener() -> urllib.request.OpenerDirector:
    """Straight to this machine: no proxy, and its own certificate (if any) is not questioned."""
    import ssl

    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context))


def _last_line(log: Path) -> str:
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 4096))
        lines = file.read().decode(errors="replace").replace("\r", "\n").splitlines()
    spoken = [line for line in lines if line.strip() and not line.startswith(" ")]
    return re.sub(r"^\[[^]]*\] ", "", spoken[-1]) if spoken else "python"


_EXCEPTION = re.compile(r"(?:[a-z_]\w*\.)*[A-Z]\w*: \S.*|sglang-dsa-plugin could not start: .*|\S+\.py: error: .*")


def died(status: int, log: Path) -> str:
    """What a dead server's log gives as the cause: the last different exceptions, or its last lines when none."""
    lines = log.read_text(errors="replace").splitlines()
    in_traceback = False
    causes: list[str] = []
    for line in lines:
        if "Traceback (most recent call last)" in line:
            in_traceback = True
        elif _EXCEPTION.fullmatch(line) and (in_traceback or not line[0].isupper()):
            causes = [c for c in causes if c != line] + [line]
            in_traceback = False
    shown = causes[-4:] or [line for line in lines if line.strip()][-20:]
    return "\n  ".join([f"the server ended with status {status}; its log: {log}", *shown])


def in_use(log: Path) -> str | None:
    """The plugin's own start-up line in the server's log, which names backend, pool, indexer and layout in use."""
    found = IN_USE.search(log.read_text(errors="replace"))
    return found.group(0) if found else None


def ask(launch: Launch) -> None:
    """One completion and one streamed chat, printed as they come. Raises Failure unless both bring tokens."""
    import httpx
    import openai

    http = httpx.Client(trust_env=False, verify=False, timeout=SMOKE_LIMIT_S)
    client = openai.OpenAI(
        base_url=f"{launch.url}/v1", api_key=launch.api_key or "none", max_retries=0, http_client=http
    )
    try:
        model = client.models.list().data[0].id
        # Longer than the small model's 64 picks a row, so that selection really leaves tokens out.
        prompt = "Sparse attention reads, for every new token, only the cached tokens that an indexer scored highest. "
        say(f"\ncompletion of {prompt!r}:")
        start = time.monotonic()
        answer = client.completions.create(model=model, prompt=prompt, max_tokens=32, temperature=0)
        print(printable(answer.choices[0].text))
        _report(answer.usage, start, "completion")

        question = [{"role": "user", "content": "In one sentence: what does a sparse attention indexer do?"}]
        say(f"\nstreamed chat, asked {question[0]['content']!r}:")
        start = time.monotonic()
        usage: Any = None
        for part in client.chat.completions.create(
            model=model,
            messages=question,  # type: ignore[arg-type]
            max_tokens=32,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        ):
            usage = part.usage or usage
            for choice in part.choices:
                print(printable(choice.delta.content or ""), end="", flush=True)
        print()
        _report(usage, start, "streamed chat")
    except openai.OpenAIError as error:
        raise Failure(f"the server is up but did not answer: {type(error).__name__}: {error}") from error


def _report(usage: Any, start: float, what: str) -> None:
    if usage is None or not usage.completion_tokens:
        raise Failure(f"the {what} brought no tokens (usage: {usage})")
    say(f"[{usage.prompt_tokens} tokens in, {usage.completion_tokens} out, {time.monotonic() - start:.1f} s]")


def printable(text: str) -> str:
    """Text safe for a terminal: a random model also emits control characters."""
    return "".join(c if c.isprintable() or c == "\n" else "\N{MIDDLE DOT}" for c in text)


def how_to_ask(launch: Launch) -> str:
    """The address and a curl command to paste."""
    tls = "-k " if launch.scheme == "https" else ""
    key = " \\\n  -H 'Authorization: Bearer YOUR_API_KEY'" if launch.api_key else ""
    body = '{"model": "default", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 32}'
    return (
        f"ready: {launch.url}\n\n"
        f"curl {tls}{launch.url}/v1/chat/completions -H 'Content-Type: application/json'{key} \\\n  -d '{body}'\n"
    )


def say(text: str) -> None:
    """A message for the person; standard output is kept for answers and addresses."""
    print(text, file=sys.stderr, flush=True)


def main(arguments: Sequence[str], environment: Mapping[str, str] = os.environ) -> int:
    """Serve until stopped, or run the smoke test. Returns the exit status."""
    root, (smoke, server_arguments) = Path(arguments[0]), split_arguments(arguments[1:])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _leave)
    try:
        tiny = root / ".models" / "tiny"
        launch = plan_launch(server_arguments, on_cpu=runs_on_cpu(), tiny_model=tiny)
        if str(tiny) in launch.command:
            make_tiny_model(tiny)
        log = root / ".logs" / f"serve-{launch.port}.log"
        for note in launch.notes:
            say(note)
        say(f"server log: {log}")
        with running(launch, log) as server:
            ready_s = wait_ready(server, launch, log, SMOKE_LIMIT_S if smoke else None)
            say(f"the server answers after {ready_s:.0f} s")
            line = in_use(log)
            say(line or "the server's log has no line of sglang-dsa-plugin: the plugin is NOT in use")
            print(how_to_ask(launch), flush=True)
            if not smoke:
                status = server.wait()
                raise Failure(died(status, log))
            if line is None:
                raise Failure("the plugin is not in use; `sglang-dsa doctor` says why")
            ask(launch)
        say("\nsmoke test passed")
        return 0
    except Failure as failure:
        say(f"error: {failure}")
        return 1


def _leave(number: int, _frame: object) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
