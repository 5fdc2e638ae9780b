"""The smoke test's two questions to a running server, through the OpenAI client."""

from __future__ import annotations

import time
from typing import Any

from sglang_dsa_plugin.tools.serve_plan import Failure, Launch
from sglang_dsa_plugin.tools.serve_wait import say

TIMEOUT_S = 300


def ask(launch: Launch) -> None:
    """One completion and one streamed chat, printed as they come. Raises Failure unless both bring tokens."""
    import httpx
    import openai

    http = httpx.Client(trust_env=False, verify=False, timeout=TIMEOUT_S)
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
            messages=question,
            max_tokens=32,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        ):
            usage = part.usage or usage
            for choice in part.choices:
                thought = getattr(choice.delta, "reasoning_content", None)
                print(printable(choice.delta.content or thought or ""), end="", flush=True)
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
