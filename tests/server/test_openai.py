"""The OpenAI surface, asked with the `openai` client."""

import concurrent.futures
import math
import threading
import time

import httpx
import openai
import pytest

from tests.server.harness import random_prompt
from tests.server.oracle import text_of
from tests.server.specs import PLAIN

pytestmark = [pytest.mark.server, pytest.mark.parametrize("server", [PLAIN], indirect=True)]
MODEL = "default"
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Count to ten."}]


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=300) as client:
        yield client


def complete(client, prompt, tokens=6, **options):
    options = {"temperature": 0, "max_tokens": tokens, "extra_body": {"ignore_eos": True}} | options
    return client.completions.create(model=MODEL, prompt=prompt, **options)


def test_completion(client):
    answer = complete(client, "The quick brown fox")
    assert answer.object == "text_completion"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.prompt_tokens == len("The quick brown fox")
    assert answer.usage.completion_tokens == 6
    # Greedy: the same again, as text and as token ids.
    assert complete(client, "The quick brown fox").choices[0].text == answer.choices[0].text
    assert complete(client, list(b"The quick brown fox")).choices[0].text == answer.choices[0].text


def test_chat(client):
    answer = client.chat.completions.create(model=MODEL, messages=CHAT, max_tokens=8, temperature=0)
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason in ("length", "stop")
    assert 1 <= answer.usage.completion_tokens <= 8
    # <|bos|>, two tagged messages with their ends, and the assistant's tag.
    assert answer.usage.prompt_tokens == 1 + sum(2 + len(m["content"]) for m in CHAT) + 1


@pytest.mark.parametrize("length", [20, 100])
def test_streaming_gives_the_same_text(client, length):
    prompt = random_prompt(length, seed=10)
    whole = complete(client, prompt, tokens=24)
    parts = list(complete(client, prompt, tokens=24, stream=True, stream_options={"include_usage": True}))
    assert len([p for p in parts if p.choices]) > 3
    assert "".join(p.choices[0].text for p in parts if p.choices) == whole.choices[0].text
    assert [p.usage.completion_tokens for p in parts if p.usage][-1] == 24


def test_streamed_chat(client):
    options = {"model": MODEL, "messages": CHAT, "max_tokens": 12, "temperature": 0}
    whole = client.chat.completions.create(**options).choices[0].message.content
    parts = client.chat.completions.create(**options, stream=True)
    assert "".join(p.choices[0].delta.content or "" for p in parts if p.choices) == whole


def test_logprobs(client):
    answer = complete(client, "abc" * 30, tokens=5, logprobs=3, echo=True).choices[0].logprobs
    assert len(answer.token_logprobs) == 90 + 5
    assert answer.token_logprobs[0] is None
    assert all(math.isfinite(value) and value <= 0 for value in answer.token_logprobs[1:])
    # Greedy output is the most likely of the alternatives.
    for value, top in zip(answer.token_logprobs[-5:], answer.top_logprobs[-5:]):
        assert value == max(top.values())
    chat = client.chat.completions.create(
        model=MODEL, messages=CHAT, max_tokens=4, temperature=0, logprobs=True, top_logprobs=4
    )
    for entry in chat.choices[0].logprobs.content:
        assert len(entry.top_logprobs) == 4
        assert entry.logprob == max(t.logprob for t in entry.top_logprobs)


def test_stop(client):
    text = complete(client, "stop here", tokens=40).choices[0].text
    printable = [c for c in text if c.isascii() and c.isprintable()]
    stop = printable[len(printable) // 2]
    answer = complete(client, "stop here", tokens=40, stop=[stop]).choices[0]
    assert answer.finish_reason == "stop"
    assert answer.text == text[: text.index(stop)]


def test_several_choices(client):
    answer = complete(client, "n choices", n=3, tokens=12, temperature=1.0)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.text for choice in answer.choices}) == 3
    assert len({choice.text for choice in complete(client, "n choices", n=3).choices}) == 1


def test_eight_at_once(server, client):
    prompts = [text_of(server.spec.model)[:length] for length in (5, 30, 64, 65, 90, 128, 150, 200)]
    alone = [complete(client, prompt).choices[0].text for prompt in prompts]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda prompt: complete(client, prompt).choices[0].text, prompts))
    assert together == alone


def test_a_client_that_goes_away(server, client):
    """It is cut off in the middle of its stream: its request ends early, and one running beside it is unharmed."""
    expected = complete(client, random_prompt(70, seed=12), tokens=60).choices[0].text
    beside: list[str] = []
    neighbour = threading.Thread(
        target=lambda: beside.append(complete(client, random_prompt(70, seed=12), tokens=60).choices[0].text)
    )
    body = {
        "model": MODEL,
        "prompt": random_prompt(80, seed=13),
        "max_tokens": 4000,
        "stream": True,
        "ignore_eos": True,
    }
    with (
        httpx.Client(timeout=300) as leaver,
        leaver.stream("POST", f"{server.url}/v1/completions", json=body) as stream,
    ):
        lines = stream.iter_lines()
        next(lines)
        neighbour.start()
        next(lines)
    neighbour.join(300)
    assert beside == [expected]
    for _ in range(100):
        if server.http.post("/flush_cache").status_code == 200:
            return  # only an idle server flushes, so the abandoned request is gone
        time.sleep(0.1)
    raise AssertionError("the abandoned request still runs")


def test_prompt_beyond_the_context(client):
    with pytest.raises(openai.BadRequestError, match="context length"):
        complete(client, random_prompt(8200, seed=14))
    assert complete(client, "still alive").choices[0].finish_reason == "length"


@pytest.mark.parametrize("prompt", ["", [], "\x00\x01\x7f", "\ufffd\ud7ff\U0010ffff", "é" * 70])
def test_odd_input_is_answered_or_refused(client, prompt):
    """Never a crash or a server error: an answer, or a 400 that says why."""
    try:
        assert complete(client, prompt).choices[0].finish_reason == "length"
    except openai.BadRequestError as error:
        assert error.message
    assert complete(client, "still alive").choices[0].finish_reason == "length"


def test_bytes_that_are_not_json(server):
    reply = server.http.post(
        "/v1/completions", content=b'{"prompt": "\xff\xfe"}', headers={"content-type": "application/json"}
    )
    assert 400 <= reply.status_code < 500
    assert server.http.get("/health").status_code == 200


def test_endpoints(server, client):
    assert server.http.get("/health").status_code == 200
    assert server.http.get("/health_generate").status_code == 200
    (model,) = client.models.list().data
    assert model.id == str(server.spec.model.path())
    assert model.max_model_len == 8192
    assert "sglang:prompt_tokens_total" in server.metrics()


def test_profiling_leaves_the_server_alive(server, client, tmp_path):
    options = {"output_dir": str(tmp_path), "num_steps": 2, "activities": ["CPU"]}
    httpx.post(f"{server.url}/start_profile", json=options, timeout=60).raise_for_status()
    complete(client, "profiled", tokens=8)
    assert complete(client, "profiled", tokens=2).usage.completion_tokens == 2
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("*trace*")):
        assert time.monotonic() < deadline, "no trace was written"
        time.sleep(0.2)
