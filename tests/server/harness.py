"""Starts real SGLang servers on small random models and asks them over HTTP.

A `ServerSpec` names a model, flags and environment. `ServerSlot` holds at most one running server, since two do not fit
a small machine: asking for another spec stops the one that runs. Models are written once into .models/tests, under a
name that changes with their parameters and with the tool that makes them.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import math
import os
import random
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import torch

from sglang_dsa_plugin.tools import make_model, tokenizer

ROOT = Path(__file__).resolve().parents[2]
MODELS = ROOT / ".models" / "tests"
VOCAB = 320
GPU = torch.cuda.is_available()
# On a GPU the first start compiles kernels.
START_LIMIT_S = 600 if GPU else 240
# Long enough for a 2500-token prefill on two busy cores.
ANSWER_LIMIT_S = 600
# Threads that sleep while they wait: on few cores the default, spinning, costs other processes several times the work.
ENVIRONMENT = {"OMP_WAIT_POLICY": "PASSIVE"}


@dataclass(frozen=True)
class ModelSpec:
    """Arguments of make_model, hashable; arch "llama" is make_llama's."""

    arch: str = "deepseek_v32"
    options: tuple[tuple[str, Any], ...] = (("dtype", "float32"),)

    @classmethod
    def of(cls, arch: str = "deepseek_v32", dtype: str = "float32", **options: Any) -> ModelSpec:
        return cls(arch, tuple(sorted({"dtype": dtype, **options}.items())))

    def path(self) -> Path:
        """The checkpoint's directory, made on first use."""
        make = make_llama if self.arch == "llama" else functools.partial(make_model.make_model, arch=self.arch)
        text = repr(self) + inspect.getsource(make_llama) + inspect.getsource(make_model)
        directory = MODELS / f"{self.arch}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
        if not (directory / "config.json").exists():
            partial = directory.with_suffix(f".{os.getpid()}")
            make(partial, **dict(self.options))
            with contextlib.suppress(OSError):
                partial.rename(directory)
        return directory


def make_llama(out: Path, dtype: str) -> None:
    """A small random model without sparse attention, to see that the package leaves such models alone."""
    from transformers import LlamaConfig, LlamaForCausalLM

    tokens = {"bos_token_id": tokenizer.BOS, "eos_token_id": tokenizer.EOS, "pad_token_id": tokenizer.PAD}
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    # Wide weights, or the logits would be nearly flat.
    config = LlamaConfig(vocab_size=VOCAB, max_position_embeddings=2048, initializer_range=0.15, **sizes, **tokens)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).to(getattr(torch, dtype))
    model.save_pretrained(out)
    tokenizer.byte_tokenizer(VOCAB, config.max_position_embeddings).save_pretrained(out)


@dataclass(frozen=True)
class ServerSpec:
    """One way to start a server. args: flags past the model and the port; env: added to the environment."""

    name: str
    model: ModelSpec
    args: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    dsa_flag: bool = True

    def command(self, port: int) -> list[str]:
        command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(self.model.path())]
        command += ["--port", str(port), "--max-total-tokens", "16384", "--max-running-requests", "16"]
        command += ["--attention-backend", "dsa"] if self.dsa_flag else []
        # On a GPU the default compiles kernels of its own, for answers that are greedy here. On a CPU a scheduler that
        # waits for requests would keep a core busy, beside the oracle.
        command += ["--sampling-backend", "pytorch"] if GPU else ["--sleep-on-idle"]
        return command + list(self.args)

    def devices(self) -> int:
        """Ranks, and so GPUs where there are any, that the server asks for."""
        sizes = [int(size) for flag, size in zip(self.args, self.args[1:]) if flag in ("--tp-size", "--pp-size")]
        return math.prod(sizes)


@dataclass
class Answer:
    """A /generate answer. rows f64 [n, vocab] are log-probabilities; row i of all n predicts `tokens[first + i]`.

    tokens: prompt and output. first: position of the first predicted token. meta: SGLang's meta_info.
    """

    tokens: list[int]
    prompt: int
    first: int
    rows: torch.Tensor
    text: str
    meta: dict[str, Any] = field(repr=False)

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt :]


class Server:
    """A running server, from `start` to `stop`."""

    def __init__(self, spec: ServerSpec, log: Path) -> None:
        self.spec, self.log_path = spec, log
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.http = httpx.Client(base_url=self.url, timeout=ANSWER_LIMIT_S)
        self.process: subprocess.Popen | None = None

    def start(self) -> None:
        """Start and wait until /health answers; RuntimeError with the end of the log when the server dies."""
        environment = environment_with(self.spec.env)
        with open(self.log_path, "wb") as log:
            self.process = subprocess.Popen(
                self.spec.command(self.port), stdout=log, stderr=log, env=environment, start_new_session=True, cwd=ROOT
            )
        limit = time.monotonic() + START_LIMIT_S
        while time.monotonic() < limit:
            if self.process.poll() is not None:
                raise RuntimeError(f"{self.spec.name} ended with {self.process.returncode}:\n{self.log()[-4000:]}")
            with contextlib.suppress(httpx.TransportError):
                if self.http.get("/health", timeout=20).status_code == 200:
                    return
            time.sleep(0.5)
        self.stop()
        raise RuntimeError(f"{self.spec.name} was not ready after {START_LIMIT_S} s:\n{self.log()[-4000:]}")

    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def stop(self) -> None:
        """End the server and every process it started, by pid."""
        if self.process is None:
            return
        with contextlib.suppress(psutil.NoSuchProcess):
            family = [psutil.Process(self.process.pid), *self.children()]
            # At once: there is nothing to save, and a graceful end takes seconds.
            for member in family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    member.kill()
            psutil.wait_procs(family, timeout=10)
        self.process.wait(timeout=10)
        self.process = None

    def children(self) -> list[psutil.Process]:
        """Every process the server started."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def metrics(self) -> str:
        return self.http.get("/metrics").text

    def prefills(self) -> dict[str, int]:
        """Prefill batches by path, as /metrics counts them."""
        found = re.findall(r'^sglang_dsa_prefill_batches_total\{path="(\w+)"\} ([\d.e+]+)$', self.metrics(), re.M)
        paths = dict.fromkeys(("dense", "masked", "sparse", "graph", "whole", "whole_dense", "whole_scored"), 0)
        return paths | {path: int(float(value)) for path, value in found}

    def flush(self) -> None:
        """Forget every cached prefix."""
        for _ in range(50):
            if self.http.post("/flush_cache").status_code == 200:
                return
            time.sleep(0.2)
        raise RuntimeError("the cache could not be flushed: requests are still running")

    def generate(self, prompts: Sequence[Sequence[int]], new: int = 1, start: int = 0) -> list[Answer]:
        """Greedy answers to all prompts in one request, with log-probabilities of the whole vocabulary.

        new: tokens to decode. start: rows before this position are not asked for, which lets cached prefixes be used.
        """
        body = {
            "input_ids": [list(p) for p in prompts],
            "sampling_params": {"temperature": 0, "max_new_tokens": new, "ignore_eos": True},
            "return_logprob": True,
            "logprob_start_len": start,
            "token_ids_logprob": [list(range(VOCAB))] * len(prompts),
        }
        reply = self.http.post("/generate", json=body)
        if reply.status_code != 200:
            raise RuntimeError(f"/generate answered {reply.status_code}: {reply.text[:2000]}")
        return [_answer(list(p), a) for p, a in zip(prompts, reply.json(), strict=True)]


class ServerSlot:
    """The one running server of a session."""

    def __init__(self, logs: Path) -> None:
        self.logs, self.server, self.started = logs, None, 0

    def get(self, spec: ServerSpec) -> Server:
        """The running server if it is of this spec and alive, else a new one."""
        if self.server is not None and (self.server.spec != spec or not self.server.alive()):
            self.close()
        if self.server is None:
            self.started += 1
            self.server = Server(spec, self.logs / f"{self.started:02d}-{spec.name}.txt")
            self.server.start()
        return self.server

    def close(self) -> None:
        """Stop the server if one runs."""
        if self.server is not None:
            self.server.stop()
            self.server = None


def environment_with(added: Sequence[tuple[str, str]]) -> dict[str, str]:
    """This process's environment and what is added to it. PYTHONPATH goes in front of the one that is there, through
    which SGLang itself may be found.
    """
    environment = {**os.environ, **ENVIRONMENT, **dict(added)}
    paths = [dict(added).get("PYTHONPATH"), os.environ.get("PYTHONPATH")]
    if any(paths):
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    return environment


def free_port() -> int:
    """A port nobody listens on, below the range from which the system hands out ports to whoever asks for any."""
    for port in random.SystemRandom().sample(range(20000, 32000), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise RuntimeError("no free port among a hundred tried")


def random_prompt(length: int, seed: int) -> list[int]:
    """`length` token ids of the byte range, the same ones for the same seed."""
    generator = torch.Generator().manual_seed(seed * 100_003 + length)
    return torch.randint(0, 256, (length,), generator=generator).tolist()


def _answer(prompt: list[int], reply: dict[str, Any]) -> Answer:
    meta = reply["meta_info"]
    # The first entry is null when it would predict the first token of all.
    known = [row for row in meta["input_token_ids_logprobs"] if row is not None]
    rows = known + meta["output_token_ids_logprobs"]
    values = torch.tensor([[v for v, _, _ in sorted(row, key=lambda entry: entry[1])] for row in rows])
    tokens = prompt + [token for _, token, _ in meta["output_token_logprobs"]]
    return Answer(tokens, len(prompt), len(tokens) - len(rows), values.double(), reply["text"], meta)


@contextlib.contextmanager
def running(spec: ServerSpec, log: Path) -> Iterator[Server]:
    """A server for the length of a block."""
    server = Server(spec, log)
    try:
        server.start()
        yield server
    finally:
        server.stop()
