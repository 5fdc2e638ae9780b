"""Holds a server's answers against Hugging Face.

The bound is the rounding of float32 over a few layers: Hugging Face differs from itself by about 2e-5 when it sums in
another order. It can only be that sharp where rounding cannot flip a pick or an expert (tests/oracle/margins.py), so
texts are made of tokens of which none comes near such a tie, and of decoded tokens it is checked that they do not.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from tests.oracle import hf
from tests.oracle.margins import FLOOR
from tests.server.harness import Answer, ModelSpec, Server

TEXTS = Path(__file__).with_name("texts.json")
BOUND = 5e-5
LENGTHS = (8, 40, 63, 64, 65, 100, 200, 400, 1000)


def difference(server: Server, answer: Answer, text: list[int] | None = None, **variant: Any) -> torch.Tensor:
    """Largest absolute difference at each predicted position, [n].

    text: what the oracle reads when the answer's tokens are a prefix of it (default: the model's text).
    """
    seen, text = answer.tokens[:-1], text or text_of(server.spec.model)
    tokens = text if text[: len(seen)] == seen else seen
    expected = hf.hf_logprobs(server.spec.model.path(), tokens, start=answer.first - 1, **variant)
    expected = expected[: answer.rows.shape[0]]
    assert expected.shape == answer.rows.shape
    return (answer.rows - expected.double()).abs().amax(-1)


def worst(server: Server, answers: Sequence[Answer], text: list[int] | None = None) -> float:
    """Largest difference of all."""
    return max(float(difference(server, answer, text).max()) for answer in answers)


@functools.lru_cache
def text_of(model: ModelSpec, length: int = max(LENGTHS), seed: int = 0) -> list[int]:
    """A model's text of random bytes. Prompts are prefixes of it, so one run of the oracle answers for all of them.

    Made block by block: a block with a near tie is drawn again. Kept on disk beside the oracle's results; texts.json
    holds those that take minutes to make, by the same name, which changes with the model.
    """
    path = model.path()
    size = max(25, length // 25)
    name = hashlib.sha256(f"{hf.model_hash(path)} {length} {seed} {size} {FLOOR}".encode()).hexdigest()[:32]
    stored = hf.cache_dir() / f"text-{name}.json"
    if stored.exists():
        return json.loads(stored.read_text())
    if name in (made := json.loads(TEXTS.read_text())):
        return made[name]
    generator = torch.Generator().manual_seed(seed)
    text, past = [], None
    while len(text) < length:
        block = torch.randint(0, 256, (min(size, length - len(text)),), generator=generator).tolist()
        margin, after = _margin(model, block, copy.deepcopy(past))
        if margin >= FLOOR:
            text, past = text + block, after
    stored.parent.mkdir(parents=True, exist_ok=True)
    stored.write_text(json.dumps(text))
    return text


def settled(server: Server, ask: Callable[[int], list[Answer]]) -> list[Answer]:
    """The answers of ask(seed) for the first seed of which no token, decoded ones included, is decided by rounding."""
    for seed in range(8):
        answers = ask(seed)
        if all(margin_of(server.spec.model, tuple(answer.tokens[:-1])) >= FLOOR for answer in answers):
            return answers
    raise AssertionError("eight seeds in a row met a near tie")


@functools.lru_cache(maxsize=1024)
def margin_of(model: ModelSpec, tokens: tuple[int, ...]) -> float:
    """Smallest margin of a token sequence."""
    smallest, past = float("inf"), None
    for start in range(0, len(tokens), hf.CHUNK):
        margin, past = _margin(model, tokens[start : start + hf.CHUNK], past)
        smallest = min(smallest, margin)
    return smallest


@torch.no_grad()
def _margin(model: ModelSpec, tokens: Sequence[int], past: Any) -> tuple[float, Any]:
    """Smallest margin of the next tokens, and the cache after them."""
    network = hf.load(model.path())
    with _Choices() as choices:
        out = network(input_ids=torch.tensor([list(tokens)]), past_key_values=past, use_cache=True)
    return choices.margin, out.past_key_values


class _Choices(TorchFunctionMode):
    """The smallest distance between the last chosen and the first left out of all top-k calls, over the row's largest
    magnitude: picks of the indexer and experts of the router are both chosen by top-k."""

    margin = float("inf")

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") == "topk":
            scores, k = args[0].float(), args[1] if len(args) > 1 else kwargs["k"]
            if k < scores.shape[-1]:
                last, left_out = scores.topk(k + 1, dim=-1).values[..., -2:].unbind(-1)
                size = scores.where(scores > -1e30, torch.zeros(())).abs().amax(-1)
                # Rows with no more than k candidates choose nothing; masked scores are -inf or the lowest number.
                margin = ((last - left_out) / size)[left_out > -1e30]
                self.margin = min([self.margin, *margin.flatten().tolist()])
        return func(*args, **kwargs)
