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
    """One streamed answer: seconds (monotonic clock) at which it was asked for, and at which each token had come."""

    asked: float
    times: tuple[float, ...]

    @property
    def first(self) -> float:
        return self.times[0]

    @property
    def last(self) -> float:
        return self.times[-1]

    def between(self, start: float, end: float) -> int:
        """Tokens that came after `start` and not after `end`."""
        return sum(start < at <= end for at in self.times)


def decode_rate(streams: list[Stream]) -> float:
    """Tokens per second over all streams, from the last stream's first token to the first stream's end."""
    start, end = max(s.first for s in streams), min(s.last for s in streams)
    tokens = sum(s.between(start, end) for s in streams)
    if end <= start or tokens < 4 * len(streams):
        raise RuntimeError(
            f"only {tokens} tokens of {len(streams)} streams came while all decoded: decode more tokens (--new-tokens)"
        )
    return tokens / (end - start)


class Client:
    """Streams random prompts from one server."""

    def __init__(self, launch: Launch, seed: int) -> None:
        import httpx

        self._url = f"{launch.url}/generate"
        self._http = httpx.Client(timeout=600, trust_env=False)
        self._random = random.Random(seed)

    def stream(self, prompt: int, new_tokens: int, ids: list[int] | None = None) -> Stream:
        """Ask for `new_tokens` after a random prompt of `prompt` tokens and time the stream.

        Raises RuntimeError when the server does not answer as it should.
        """
        import httpx

        body: dict[str, Any] = {
            "input_ids": ids or self.prompt(prompt),
            "sampling_params": {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True},
            "stream": True,
        }
        asked = time.monotonic()
        times: list[float] = []
        try:
            with self._http.stream("POST", self._url, json=body) as answer:
                answer.raise_for_status()
                for line in answer.iter_lines():
                    if not line.startswith("data: {"):
                        continue
                    tokens = json.loads(line[6:])["meta_info"]["completion_tokens"]
                    times += [time.monotonic()] * (tokens - len(times))
        except httpx.HTTPError as error:
            raise RuntimeError(f"{self._url}: {error!r}") from error
        return Stream(asked, tuple(times))

    def together(self, requests: int, prompt: int, new_tokens: int) -> list[Stream]:
        """`requests` streams at once."""
        prompts = [self.prompt(prompt) for _ in range(requests)]
        with ThreadPoolExecutor(requests) as pool:
            return list(pool.map(lambda ids: self.stream(prompt, new_tokens, ids), prompts))

    def prompt(self, tokens: int) -> list[int]:
        """Random byte tokens."""
        return [self._random.randrange(256) for _ in range(tokens)]
