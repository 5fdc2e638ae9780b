"""Prompts at start that make every prefill kernel compile before the server takes requests.

Why: a Triton kernel compiles when it first runs. Decode's do so while CUDA graphs are captured, but SGLang's own
warm-up sends one prompt of a few tokens, so the first prompt longer than k compiles the indexer's and sparse
attention's kernels, and everyone waits (sgl-project/sglang#19313). Here SGLang's registry of custom
warm-ups (--warmups) gets one more: prompts as traffic brings them, through the whole server, so that other kernels of
the model compile too. They run before the port opens; what they left in the cache is dropped.
Upstream: entrypoints/warmup.py, entrypoints/http_server.py lifespan. Can go: when the backend is asked at start for the
shapes it wants to see.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.arg_groups.model_override_base import attention_backends_of, resolving_view
from sglang.srt.arg_groups.overrides import declare_resolution
from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook

from sglang_dsa_plugin import settings
from sglang_dsa_plugin.adapter.hooks.arguments import SOURCE, hf_config_of
from sglang_dsa_plugin.cache.layouts import PAGE_SIZE
from sglang_dsa_plugin.config import DsaConfig, is_dsa_config

logger = logging.getLogger(__name__)
NAME = "sglang_dsa_plugin"
# Kernels choose their tiles by the rows of a step and by the longest context in it. New tokens after a cached prefix,
# multiples of 16 and not, since SGLang's own kernels may be compiled for each; 3, since that many rows may have another
# form of attention than 2 and 4, and no graph of decode is of 3; 7, which 32 heads of fp8 rows split as no other number
# does. And the parts of the long prompt that are cached, with which of the new tokens.
NEW_TOKENS = (1, 2, 3, 4, 5, 7, 9, 16, 33, 50, 64, 100, 150, 256, 500, 1024)
FEW = NEW_TOKENS[:8]  # that requests of one step have, each another number
# Requests at once with two new tokens each; one more than a power of two holds, since the first may run alone.
TOGETHER = (4, 7, 13)
# Requests at once and new tokens of each: many rows in all, but too few a request for DeepGEMM, and enough for it.
# Where it is taken (support_vendor.MEASURED) it scores the long prompt, too, but by another kernel of its own. Again
# the first may run alone.
CROWDS = ((4, 130), (9, 200), (3, 300))
PREFIXES = ((1, NEW_TOKENS), (2, (1, 16, 33, 64, 150)), (4, (1, 33, 64, 256, 500)))
# Left free below the longest prompt that SGLang takes: the tokens of the answer, and its own reserve.
_ROOM = 16
# A selection of so many scores is split over the GPU in another way than one of a few thousand.
_LONG = 17 * 1024
# More tokens than this take time and say little.
_LONGEST = 36 * 1024


def register() -> None:
    """Queue the step hook."""
    register_resolution_hook("handle_other_validations")(declare)


def declare(server_args: Any, previous: Callable[[Any], None]) -> None:
    """Run the built-in step, then add this warm-up to --warmups where it is wanted."""
    previous(server_args)
    config = resolving_view(server_args)
    if not {"dsa", "nsa"} & set(attention_backends_of(config)):
        return
    model, why_not = hf_config_of(server_args), _why_not(config)
    if why_not is not None or model is None or not is_dsa_config(model):
        logger.info("sglang-dsa-plugin does not warm up prefill: %s", why_not or "the model has no sparse attention")
        return
    chunk = config.chunked_prefill_size or -1
    _register(DsaConfig.from_hf(model).index_topk, chunk, not config.disable_radix_cache)
    declare_resolution(server_args, SOURCE, warmups=",".join(filter(None, (config.warmups, NAME))))


def _why_not(config: Any) -> str | None:
    """Why this server is not warmed up, or None. config: the arguments so far."""
    from sglang.srt.environ import envs

    asked = settings.prefill_warmup()
    if asked == "off":
        return "SGLANG_DSA_PLUGIN_WARMUP=off"
    if asked == "auto" and not torch.cuda.is_available():
        return "nothing is compiled without CUDA"
    if config.skip_server_warmup:
        return "--skip-server-warmup"
    if (config.tokenizer_worker_num or 1) > 1:
        return "--tokenizer-worker-num: each worker would do it"
    if envs.SGLANG_CRASH_ON_TRITON_LOAD_AFTER_READY.get():
        return "SGLANG_CRASH_ON_TRITON_LOAD_AFTER_READY forbids kernels that are loaded by a prompt"
    return None


def _register(topk: int, chunk: int, cached: bool) -> None:
    """Put the warm-up into SGLang's registry, in the process that resolves arguments and later serves HTTP."""
    from sglang.srt.entrypoints.warmup import warmup

    @warmup(NAME)
    async def prefill_shapes(_disaggregation: str, tokenizer_manager: Any) -> None:
        await run(tokenizer_manager, topk, chunk, cached)


async def run(tokenizer_manager: Any, topk: int, chunk: int, cached: bool = True) -> None:
    """Send the prompts, drop what they left in the cache, log one line with the time. Never raises: a server that
    compiles late is better than none.

    cached: whether there is a prefix cache. Without it every prompt is computed whole, a million tokens of them, and
    none makes a step of few rows: then only the first two are sent.
    """
    limit = min(tokenizer_manager.context_len, tokenizer_manager.max_req_input_len or tokenizer_manager.context_len)
    batches = prompts(topk, chunk, limit - _ROOM, tokenizer_manager.model_config.vocab_size)
    batches = batches if cached else batches[:2]
    begun, sent, longest = time.monotonic(), 0, 0
    try:
        for batch in batches:
            await _send(tokenizer_manager, batch)
            sent, longest = sent + len(batch), max(longest, *map(len, batch))
        await tokenizer_manager.flush_cache()
    except Exception as error:
        logger.warning("sglang-dsa-plugin: warm-up of prefill ended early: %s: %s", type(error).__name__, error)
    logger.info(
        "sglang-dsa-plugin warmed up prefill with %d prompts of up to %d tokens in %.1f s",
        sent,
        longest,
        time.monotonic() - begun,
    )


def prompts(topk: int, chunk: int, limit: int, vocab: int) -> list[list[list[int]]]:
    """Batches of prompts (token ids below `vocab`), none longer than `limit` tokens; empty when none can exceed topk.

    chunk: tokens of one prefill step, -1 for any number. First one that fits dense, then a long one, a chunk and a rest
    past topk tokens at least; then the first part of it again, with few or many new ones, which the cache makes steps
    of so many rows; last several requests in one step.
    """
    longest = min(limit, max(max(chunk, 0) + topk + PAGE_SIZE, 2 * topk, _LONG), _LONGEST)
    if longest <= topk:
        return []
    draw = random.Random(0)

    def tokens(count: int) -> list[int]:
        return [draw.randrange(vocab) for _ in range(count)]

    text = tokens(longest)
    batches = [[tokens(max(1, topk // 2))], [text]]
    for part, news in PREFIXES:
        for new in news:
            # Whole pages are what the cache keeps.
            kept = (longest // part - new) // PAGE_SIZE * PAGE_SIZE
            if kept > 0 and kept + new > topk:
                batches.append([text[:kept] + tokens(new)])
    kept = (longest - max(FEW)) // PAGE_SIZE * PAGE_SIZE
    if kept + 2 > topk and kept > 0:
        batches += [[text[:kept] + tokens(2) for _ in range(count)] for count in TOGETHER]
        batches.append([text[:kept] + tokens(new) for new in FEW])
    for count, new in CROWDS:
        kept = (longest - new) // PAGE_SIZE * PAGE_SIZE
        if kept > 0 and kept + new > topk:
            batches.append([text[:kept] + tokens(new) for _ in range(count)])
    return batches


async def _send(tokenizer_manager: Any, batch: list[list[int]]) -> None:
    """One request with all prompts of a batch; a token each is asked for, which prefill itself gives."""
    from sglang.srt.managers.io_struct import GenerateReqInput

    sampling = {"max_new_tokens": 1, "temperature": 0.0, "ignore_eos": True}
    ids: Any = batch if len(batch) > 1 else batch[0]
    async for _ in tokenizer_manager.generate_request(GenerateReqInput(input_ids=ids, sampling_params=sampling), None):
        pass
