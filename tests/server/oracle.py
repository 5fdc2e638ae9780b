"""Holds a server's answers against Hugging Face.

The bound is the rounding of float32 over a few layers: Hugging Face differs from itself by about 2e-5 when it sums in
another order. It can only be that sharp where rounding cannot flip a pick or an expert, so prompts are steady ones
(tests/oracle/margins.py), and of decoded tokens it is checked that they are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tests.oracle.hf import hf_logprobs
from tests.oracle.margins import FLOOR, margins, steady_prompt
from tests.server.harness import Answer, ModelSpec, Server

BOUND = 5e-5
LENGTHS = (8, 40, 63, 64, 65, 100, 200, 400, 1000)


@functools.lru_cache
def text_of(model: ModelSpec, length: int = max(LENGTHS)) -> list[int]:
    """A model's text. Prompts are prefixes of it, so that one run of the oracle answers for all of them."""
    return steady_prompt(model.path(), length)


def difference(server: Server, answer: Answer, text: list[int] | None = None, **variant: Any) -> torch.Tensor:
    """Largest absolute difference at each predicted position, [n].

    text: what the oracle reads when the answer's tokens are a prefix of it (default: the model's text).
    """
    seen, text = answer.tokens[:-1], text or text_of(server.spec.model)
    tokens = text if text[: len(seen)] == seen else seen
    expected = hf_logprobs(server.spec.model.path(), tokens, start=answer.first - 1, **variant)[: answer.rows.shape[0]]
    assert expected.shape == answer.rows.shape
    return (answer.rows - expected.double()).abs().amax(-1)


def worst(server: Server, answers: Sequence[Answer], text: list[int] | None = None) -> float:
    """Largest difference of all."""
    return max(float(difference(server, answer, text).max()) for answer in answers)


def settled(server: Server, ask: Callable[[int], list[Answer]]) -> list[Answer]:
    """The answers of ask(seed) for the first seed of which no token, decoded ones included, is decided by rounding."""
    for seed in range(8):
        answers = ask(seed)
        if all(_margin(server.spec.model, tuple(answer.tokens[:-1])) >= FLOOR for answer in answers):
            return answers
    raise AssertionError("eight seeds in a row met a near tie")


@functools.lru_cache(maxsize=1024)
def _margin(model: ModelSpec, tokens: tuple[int, ...]) -> float:
    return min(float(margin.min()) for margin in margins(model.path(), tokens).values())
