"""The client of the server benchmarks: streams random prompts and times what comes back."""

from __future__ import annotations

import json
import random
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from sglang_dsa_plugin.tools.serve_plan import Launch


@dataclass(frozen=True)
class Stream:
    """One streamed answer: seconds (monotonic clock) of the request, the first token and the last, and tokens
    received.
    """

    asked: float
    first: float
    last: float
    tokens: int


def decode_rate(streams: list[Stream]) -> float:
    """Tokens per second over all streams while all of them decode."""
    start, end = max(s.first for s in streams), min(s.last for s in streams)
    if end <= start:
        raise RuntimeError("the streams did not overlap: decode more tokens (--new-tokens)")
    rates = ((s.tokens - 1) / (s.last - s.first) for s in streams)
    return sum(rates)


class Client:
    """Streams random prompts from one server."""

    def __init__(self, launch: Launch, seed: int) -> None:
        import httpx

        self._url = f"{launch.url}/generate"
        self._http = httpx.Client(timeout=600, trust_env=False)
        self._random = random.Random(seed)

    def stream(self, prompt: int, new_tokens: int, ids: list[int] | None = None) -> Stream:
        """Ask for `new_tokens` after a random prompt of `prompt` tokens and time the stream."""
        body: dict[str, Any] = {
            "input_ids": ids or self.prompt(prompt),
            "sampling_params": {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True},
            "stream": True,
        }
        asked = time.monotonic()
        first, tokens = 0.0, 0
        with self._http.stream("POST", self._url, json=body) as answer:
            answer.raise_for_status()
            for line in answer.iter_lines():
                if not line.startswith("data: {"):
                    continue
                first = first or time.monotonic()
                tokens = json.loads(line[6:])["meta_info"]["completion_tokens"]
        return Stream(asked, first, time.monotonic(), tokens)

    def together(self, requests: int, prompt: int, new_tokens: int) -> list[Stream]:
        """`requests` streams at once."""
        prompts = [self.prompt(prompt) for _ in range(requests)]
        with ThreadPoolExecutor(requests) as pool:
            return list(pool.map(lambda ids: self.stream(prompt, new_tokens, ids), prompts))

    def prompt(self, tokens: int) -> list[int]:
        """Random byte tokens."""
        return [self._random.randrange(256) for _ in range(tokens)]
