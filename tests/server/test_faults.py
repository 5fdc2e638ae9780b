"""Faults that other sparse-attention servers had and that show over HTTP: each is tried here against the oracle.

Not covered by test_equality: lengths around multiples of a page and of k, every way to split a prompt, a prompt beside
long neighbours, warm against cold, a long chat with tools, and a mixed load with clients that go away.
"""

import concurrent.futures
import random

import httpx
import openai
import pytest

from tests.server.oracle import BOUND, settled, text_of, worst
from tests.server.specs import PLAIN

pytestmark = [pytest.mark.server, pytest.mark.parametrize("server", [PLAIN], indirect=True)]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": f"look_up_{topic}",
            "description": f"Find what is known about {topic}, newest first, with the source of each statement.",
            "parameters": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
        },
    }
    for topic in ("weather", "trains", "birds", "law")
]


@pytest.fixture
def text(server):
    return text_of(server.spec.model)


def test_quality_does_not_break_at_a_length(server, text):
    """One text cut around k and its multiples (https://github.com/ml-explore/mlx-lm/pull/1453): a batch of prefixes."""
    server.flush()
    answers = server.generate([text[:n] for n in (62, 63, 64, 65, 66, 96, 127, 128, 129, 191, 192, 193, 257)])
    assert worst(server, answers) <= BOUND


def test_every_split_of_a_prompt(server, text):
    """A prefix that is cached, the rest prefilled after it; what is picked must not depend on where the cut is
    (https://github.com/ml-explore/mlx-lm/issues/1189)."""
    for split in (1, 63, 64, 65, 127, 128, 192, 256, 299):
        server.flush()
        server.generate([text[:split]])
        cached = split // 64 * 64
        (answer,) = server.generate([text[:300]], start=cached)
        assert answer.meta["cached_tokens"] == cached
        assert worst(server, [answer]) <= BOUND, split


def test_alone_and_beside_long_neighbours(server, text):
    """One prompt beside seven others that start with it, differ from it and are prefilled and decoded with it
    (https://github.com/vllm-project/vllm/pull/46715)."""
    others = [text_of(server.spec.model, n, seed=1) for n in (300, 64, 200, 128, 170)]

    def ask(seed):
        prompt = text[: 90 + seed]
        server.flush()
        (alone,) = server.generate([prompt], new=8)
        server.flush()
        return [alone, server.generate([prompt, *others, text[:130], text[:40]], new=8)[0]]

    alone, beside = settled(server, ask)
    assert beside.tokens == alone.tokens
    assert worst(server, [alone, beside]) <= BOUND


def test_warm_equals_cold(server, text):
    """The same prompt twice: the second is served from the cache, says so, and answers the same
    (https://github.com/vllm-project/vllm/issues/36441)."""

    def ask(seed):
        server.flush()
        prompt = text[: 450 + seed]
        return [server.generate([prompt], new=16, start=len(prompt) - 1)[0] for _ in range(2)]

    cold, warm = settled(server, ask)
    assert cold.meta["cached_tokens"] == 0
    assert warm.meta["cached_tokens"] == 448
    assert warm.tokens == cold.tokens
    assert worst(server, [cold, warm]) <= BOUND


def test_long_chat_with_tools(server):
    """A system prompt of 1800 tokens and a tool schema, streamed and not
    (https://github.com/NVIDIA/TensorRT-LLM/issues/15295)."""
    server.flush()
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=600)
    rules = " ".join(f"Rule {i}: say {i * 7919 % 1000} before {i * 104729 % 1000}." for i in range(60))
    messages = [{"role": "system", "content": rules}, {"role": "user", "content": "Which rule comes first?"}]
    # The model is random: a tool call in its text would not parse, so none is asked for.
    options = {"model": "default", "messages": messages, "tools": TOOLS, "tool_choice": "none"}
    options |= {"max_tokens": 12, "temperature": 0, "extra_body": {"ignore_eos": True}}
    whole = client.chat.completions.create(**options)
    assert whole.usage.prompt_tokens > len(rules)
    parts = client.chat.completions.create(**options, stream=True)
    assert "".join(p.choices[0].delta.content or "" for p in parts if p.choices) == whole.choices[0].message.content
    again = client.chat.completions.create(**options)
    assert again.choices[0].message.content == whole.choices[0].message.content


def test_mixed_load_with_aborts(server, text):
    """Forty requests of random lengths, eight at a time, a third of which hang up early: the others answer as when
    alone, and afterwards the server is idle with all of its memory back."""
    chance = random.Random(32)
    lengths = (3, 20, 63, 64, 65, 90, 130)
    expected = {n: server.generate([text[:n]], new=10, start=n - 1)[0].output for n in lengths}

    def ask(job):
        length, leaves = job
        parameters = {"temperature": 0, "max_new_tokens": 400 if leaves else 10, "ignore_eos": True}
        body = {"input_ids": text[:length], "sampling_params": parameters, "stream": leaves}
        if leaves:
            with httpx.stream("POST", f"{server.url}/generate", json=body, timeout=300) as reply:
                next(reply.iter_lines())
            return True
        return httpx.post(f"{server.url}/generate", json=body, timeout=300).json()["output_ids"] == expected[length]

    jobs = [(chance.choice(lengths), chance.random() < 1 / 3) for _ in range(40)]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert all(pool.map(ask, jobs))
    server.flush()
    load = server.http.get("/v1/loads").json()["loads"]
    assert sum(rank["num_running_reqs"] + rank["num_waiting_reqs"] + rank["num_used_tokens"] for rank in load) == 0
