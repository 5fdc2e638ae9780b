"""Prefill's warm-up at start: which servers get it, which prompts are sent, and that a failure stops nothing."""

import asyncio
import logging
import types

import pytest

pytest.importorskip("sglang")

from sglang.srt.entrypoints import warmup as registry
from sglang.srt.environ import envs

from sglang_dsa_plugin.adapter.hooks import warmup


class Manager:
    """What the warm-up asks of SGLang's tokenizer manager."""

    context_len, max_req_input_len = 20_000, 16_000
    model_config = types.SimpleNamespace(vocab_size=320)

    def __init__(self, fails_at=None):
        self.fails_at, self.requests, self.flushed = fails_at, [], 0

    async def generate_request(self, request, _http):
        if len(self.requests) == self.fails_at:
            raise ValueError("the input is too long")
        self.requests.append(request)
        yield {}

    async def flush_cache(self):
        self.flushed += 1


def arguments(**more):
    defaults = {"skip_server_warmup": False, "tokenizer_worker_num": 1, "warmups": None, "chunked_prefill_size": 4096}
    return types.SimpleNamespace(**defaults | {"disable_radix_cache": False} | more)


@pytest.fixture
def declared(monkeypatch):
    """declare() on arguments of a DSA server with CUDA; gives what was declared."""
    monkeypatch.delenv("SGLANG_DSA_PLUGIN_WARMUP", raising=False)
    monkeypatch.setattr(registry, "_warmup_registry", {})
    monkeypatch.setattr(warmup.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(warmup, "resolving_view", lambda args: args)
    monkeypatch.setattr(warmup, "hf_config_of", lambda args: "a config")
    monkeypatch.setattr(warmup, "is_dsa_config", lambda config: True)
    monkeypatch.setattr(warmup.DsaConfig, "from_hf", lambda config: types.SimpleNamespace(index_topk=2048))
    found = []
    monkeypatch.setattr(warmup, "declare_resolution", lambda args, source, **fields: found.append(fields))

    def declare(backends=("dsa", "dsa"), **more):
        monkeypatch.setattr(warmup, "attention_backends_of", lambda config: backends)
        before = []
        warmup.declare(arguments(**more), before.append)
        assert len(before) == 1
        return found[-1]["warmups"] if found else None

    return declare


def test_a_dsa_server_with_cuda_is_warmed_up(declared):
    assert declared() == warmup.NAME
    assert warmup.NAME in registry._warmup_registry


def test_warmups_of_the_user_stay(declared):
    assert declared(warmups="voice_chat") == f"voice_chat,{warmup.NAME}"


@pytest.mark.parametrize(
    "case",
    [
        {"backends": ("fa3", "fa3")},
        {"skip_server_warmup": True},
        {"tokenizer_worker_num": 4},
    ],
)
def test_servers_that_are_not(declared, case):
    assert declared(**case) is None and not registry._warmup_registry


def test_switched_off_or_without_cuda(declared, monkeypatch):
    monkeypatch.setenv("SGLANG_DSA_PLUGIN_WARMUP", "off")
    assert declared() is None
    monkeypatch.setattr(warmup.torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("SGLANG_DSA_PLUGIN_WARMUP", "auto")
    assert declared() is None
    monkeypatch.setenv("SGLANG_DSA_PLUGIN_WARMUP", "on")
    assert declared() == warmup.NAME


def test_not_where_late_kernels_end_the_server(declared):
    with envs.SGLANG_CRASH_ON_TRITON_LOAD_AFTER_READY.override(True):
        assert declared() is None


@pytest.mark.parametrize("topk", [64, 256, 2048])
@pytest.mark.parametrize("chunk", [-1, 128, 8192, 32768])
@pytest.mark.parametrize("limit", [100, 2100, 5000, 100_000])
def test_prompts_fit_and_pass_topk(topk, chunk, limit):
    batches = warmup.prompts(topk, chunk, limit, 320)
    if limit <= topk:
        assert batches == []
        return
    every = [prompt for batch in batches for prompt in batch]
    assert all(0 < len(prompt) <= limit for prompt in every)
    assert all(0 <= token < 320 for prompt in every for token in prompt)
    assert len(every[0]) <= topk < len(every[1])
    # What follows begins with whole pages of the long prompt, which the cache then has.
    for prompt in every[2:]:
        shared = next((i for i, (a, b) in enumerate(zip(prompt, every[1])) if a != b), len(prompt))
        assert shared >= (len(prompt) - 1024) // 64 * 64
    assert batches == warmup.prompts(topk, chunk, limit, 320)


def test_a_step_of_many_sizes_follows_a_long_prompt():
    batches = warmup.prompts(2048, 8192, 100_000, 320)
    assert len(batches[1][0]) == 17 * 1024
    assert len(warmup.prompts(2048, 16384, 100_000, 320)[1][0]) == 16384 + 2048 + 64
    assert len(batches) == 3 + sum(len(news) for _, news in warmup.PREFIXES) + len(warmup.TOGETHER + warmup.CROWDS)
    assert [len(batch) for batch in batches[-7:]] == [4, 7, 13, 8, 4, 9, 3]


def test_without_a_prefix_cache_only_the_first_two_prompts_are_sent():
    manager = Manager()
    asyncio.run(warmup.run(manager, 2048, 4096, cached=False))
    assert len(manager.requests) == 2


def test_all_prompts_are_sent_the_cache_is_dropped_and_the_time_told(caplog):
    manager = Manager()
    with caplog.at_level(logging.INFO, warmup.logger.name):
        asyncio.run(warmup.run(manager, 2048, 4096))
    assert len(manager.requests) == len(warmup.prompts(2048, 4096, 15_984, 320)) and manager.flushed == 1
    assert all(request.sampling_params["max_new_tokens"] == 1 for request in manager.requests)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("sglang-dsa-plugin warmed up prefill with 76 prompts of up to 15984 tokens in")


def test_a_failure_is_told_and_stops_nothing(caplog):
    manager = Manager(fails_at=2)
    with caplog.at_level(logging.INFO, warmup.logger.name):
        asyncio.run(warmup.run(manager, 2048, 4096))
    told = " ".join(record.getMessage() for record in caplog.records)
    assert "ended early: ValueError: the input is too long" in told and "with 2 prompts" in told


def test_nothing_is_sent_where_no_prompt_can_pass_topk():
    manager = Manager()
    manager.max_req_input_len = 2000
    asyncio.run(warmup.run(manager, 2048, 4096))
    assert not manager.requests
