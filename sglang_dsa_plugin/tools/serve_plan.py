"""From the arguments of scripts/serve.sh to the server command: model, port, backend, and what a CPU needs.

SGLang's own arguments pass through untouched, and whatever the user gives, on the command line or in a --config file,
is kept; only what is missing is added, with a note.
"""

from __future__ import annotations

import errno
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

PORT = 30000
# Added on a machine without CUDA unless the user gives a value. SGLang sizes both for a GPU server: the KV cache to
# what memory is left, the request tables to at least 2048 requests of the longest context.
CPU_DEFAULTS = {"--max-total-tokens": "32768", "--max-running-requests": "16"}
# Likewise, without a value: an idle scheduler otherwise asks for work all the time, which takes most of a core.
CPU_SWITCHES = ("--sleep-on-idle",)
# Formats of weights that SGLang finds in a folder unasked.
WEIGHTS = ("*.safetensors", "*.bin", "*.pt")


class Failure(Exception):
    """What went wrong and what to do about it, for the person at the terminal."""


@dataclass(frozen=True)
class Launch:
    """A server about to start: its command, where it will answer, and what was decided on the user's behalf.

    model_note: what the model's name was taken for, when that was a guess; a server that fails should say so again.
    """

    command: list[str]
    host: str
    port: int
    scheme: str
    api_key: str | None
    notes: tuple[str, ...]
    model_note: str | None = None

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


def plan_launch(
    arguments: Sequence[str], *, on_cpu: bool, tiny_model: Path, claim: Callable[[int], bool] = lambda port: True
) -> Launch:
    """The server command for SGLang's `arguments`, completed with model, port and the CPU's defaults.

    claim: whether a free port is this command's; a server binds its own only after most of a minute.
    Raises Failure when a flag lacks its value, a model's folder is not there or lacks a part, the port asked for is
    taken or the host is not this machine's.
    """
    config = config_values(value_of(arguments, "--config"))

    def asked(*flags: str) -> str | None:
        on_line = value_of(arguments, *flags)
        return on_line if on_line is not None else next((config[f] for f in flags if f in config), None)

    added: list[str] = []
    notes: list[str] = []
    model = asked("--model-path", "--model")
    model_note = _check_model(model, asked("--load-format") or "auto") if model is not None else None
    if model_note is not None:
        notes.append(model_note)
    if model is None:
        added += ["--model-path", str(tiny_model)]
        notes.append(f"no --model given: serving the small random model {tiny_model} (its text means nothing)")
    host = asked("--host") or "127.0.0.1"
    wanted = asked("--port")
    port = _port(host, wanted, claim)
    if wanted is None:
        added += ["--port", str(port)]
        if port != PORT:
            notes.append(f"port {PORT} is taken: using {port}")
    if on_cpu:
        extra = [[flag, value] for flag, value in CPU_DEFAULTS.items() if asked(flag) is None]
        extra += [[flag] for flag in CPU_SWITCHES if flag not in arguments and flag not in config]
        added += [word for words in extra for word in words]
        if extra:
            notes.append("no CUDA device: " + ", ".join(map(" ".join, extra)))
    return Launch(
        command=[sys.executable, "-m", "sglang.launch_server", *arguments, *added],
        host=host,
        port=port,
        scheme="https" if asked("--ssl-certfile") else "http",
        api_key=asked("--api-key"),
        notes=tuple(notes),
        model_note=model_note,
    )


def _check_model(model: str, load_format: str) -> str | None:
    """A note when the model is no folder or file here; raises Failure for a path to nothing and half a folder."""
    path = Path(model).expanduser()
    if not path.exists():
        if model.startswith(("/", "./", "../", "~")):
            raise Failure(
                f"--model {model} is not there: give a folder with config.json and weights, or a name on Hugging Face"
            )
        return None if "://" in model else f"no folder {model} here: taken as a Hugging Face name"
    if path.is_dir():
        # Mistral's own format has params.json instead.
        if not any((path / name).exists() for name in ("config.json", "params.json")):
            raise Failure(f"--model {model} is a folder without config.json, so no checkpoint")
        if load_format in ("auto", "safetensors") and not any(any(path.glob(form)) for form in WEIGHTS):
            raise Failure(
                f"--model {model} is a folder without *.safetensors: its weights are missing (--load-format dummy "
                "serves random ones)"
            )
    return None


def _port(host: str, wanted: str | None, claim: Callable[[int], bool]) -> int:
    """The port asked for if it is free; when none was asked for, 30000 or else one the system hands out."""
    if wanted is not None:
        if not wanted.isdigit() or not 0 < int(wanted) < 65536:
            raise Failure(f"--port {wanted} is not a port number")
        if not _free(host, int(wanted)):
            raise Failure(
                f"--port {wanted} is taken on {host}; give another one, or leave --port out to get a free one"
            )
        if not claim(int(wanted)):
            raise Failure(
                f"--port {wanted}: another server of this checkout is starting or stopping there; give another one, or "
                "leave --port out to get a free one"
            )
        return int(wanted)
    port = PORT
    while not (_free(host, port) and claim(port)):
        with socket.socket(_family(host)) as probe:
            probe.bind((host, 0))
            port = int(probe.getsockname()[1])
    return port


def _free(host: str, port: int) -> bool:
    with socket.socket(_family(host)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except socket.gaierror as error:
            raise Failure(f"--host {host} is not an address of this machine: {error}") from error
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                raise Failure(f"--host {host} is not an address of this machine; 0.0.0.0 is all of them") from error
            if isinstance(error, PermissionError):
                raise Failure(f"--port {port} may not be used by this user; take one above 1023") from error
            return False
    return True


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
