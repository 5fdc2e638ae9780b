"""Mixed load on a running server: lengths from 10 tokens up, shared prefixes, several at once, some given up midway."""

import concurrent.futures
import json
import math
import random
from dataclasses import dataclass

from tests.server.harness import VOCAB, Server


@dataclass(frozen=True)
class Request:
    """One request: its prompt, how many tokens it wants, and whether the client leaves after the first of them."""

    prompt: tuple[int, ...]
    new: int
    leaves: bool = False


def requests(count: int, longest: int, seed: int = 0, leaving: int = 2, new: int = 16) -> list[Request]:
    """`count` requests of 10 to `longest` tokens, evenly spread over the orders of magnitude between.

    Every fourth begins with the first half of an earlier one. `leaving` of them are given up by their client.
    """
    rng = random.Random(seed)
    made: list[Request] = []
    for i in range(count):
        length = round(10 * (longest / 10) ** rng.random())
        begin: tuple[int, ...] = ()
        if i % 4 == 3:
            earlier = rng.choice(made).prompt
            begin = earlier[: len(earlier) // 2][: length - 1]
        rest = tuple(rng.randrange(VOCAB - 64) for _ in range(length - len(begin)))
        made.append(Request(begin + rest, rng.randint(1, new)))
    for i in rng.sample(range(count), leaving):
        made[i] = Request(made[i].prompt, 400, leaves=True)
    return made


def run(server: Server, load: list[Request], at_once: int) -> list[int]:
    """Send all, `at_once` at a time; tokens that came back for each. Raises for an answer that is not 200 or whose
    log-probabilities are no numbers.
    """
    with concurrent.futures.ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(lambda request: _ask(server, request), load))


def _ask(server: Server, request: Request) -> int:
    body = {
        "input_ids": list(request.prompt),
        "sampling_params": {"temperature": 0, "max_new_tokens": request.new, "ignore_eos": True},
        "stream": True,
        "return_logprob": True,
    }
    came, seen = 0, []
    with server.http.stream("POST", "/generate", json=body) as answer:
        if answer.status_code != 200:
            raise RuntimeError(f"{len(request.prompt)} tokens: {answer.status_code}: {answer.read()[:500]!r}")
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                meta = json.loads(line[6:])["meta_info"]
                came, seen = meta["completion_tokens"], meta["output_token_logprobs"]
                if request.leaves:
                    break
    # A greedy answer is made of logits that are no numbers as well.
    if not all(math.isfinite(value) for value, *_ in seen):
        raise RuntimeError(f"{len(request.prompt)} tokens: log-probabilities that are no numbers: {seen[:5]}")
    return came


def check(server: Server, load: list[Request], came: list[int]) -> None:
    """Everyone who stayed got all tokens, the server lives and gives its memory back."""
    for request, tokens in zip(load, came, strict=True):
        assert tokens >= 1 if request.leaves else tokens == request.new, (len(request.prompt), request.new, tokens)
    assert server.alive() and server.http.get("/health").status_code == 200
    server.flush()  # refused while a request still runs
