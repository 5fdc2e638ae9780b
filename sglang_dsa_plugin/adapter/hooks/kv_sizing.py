"""Bytes planned equal bytes allocated, in every row layout and index-key dtype, and leave room for index scores.

Why: SGLang derives the row width from its own kernels' names and always counts 132 bytes an index key. What it leaves
free beside the KV pool is a guess from the chunk size; the scores' budget is a number, and a promise.
Upstream: mem_cache/kv_cache_configurator.py calculate_mla_kv_cache_dim, KVCacheConfigurator._profile_available_bytes;
model_executor/pool_configurator.py DefaultPoolConfigurator._compute_dsa_indexer_cell_size.
Can go: when the pool class is asked for its bytes per token, and the backend for its working memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_dsa_plugin import plan, settings
from sglang_dsa_plugin.adapter import state
from sglang_dsa_plugin.cache.layouts import FP8, index_token_bytes
from sglang_dsa_plugin.config import is_dsa_config


def register() -> None:
    """Queue the hooks."""
    HookRegistry.register(
        "sglang.srt.mem_cache.kv_cache_configurator.calculate_mla_kv_cache_dim", row_width, HookType.AROUND
    )
    HookRegistry.register(
        "sglang.srt.model_executor.pool_configurator.DefaultPoolConfigurator._compute_dsa_indexer_cell_size",
        indexer_bytes,
        HookType.AROUND,
    )
    HookRegistry.register(
        "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._profile_available_bytes",
        without_scores,
        HookType.AROUND,
    )


def row_width(original: Callable[..., int], *, model_config: Any, kv_cache_dtype: torch.dtype) -> int:
    """Elements of a latent row; SGLang multiplies by the element size of the KV dtype."""
    if not is_dsa_config(model_config.hf_config):
        return original(model_config=model_config, kv_cache_dtype=kv_cache_dtype)
    return plan.latent_layout(kv_cache_dtype, state.kernel_flags()).width


def indexer_bytes(original: Callable[..., int], configurator: Any, *, kvc: Any, **kwargs: Any) -> int:
    """Index bytes of one token over the layers SGLang counted, at the true size of a key."""
    counted = original(configurator, kvc=kvc, **kwargs)
    layers, rest = divmod(counted, index_token_bytes(FP8))
    if rest:
        raise RuntimeError(
            f"SGLang counted {counted} index bytes a token, not a multiple of {index_token_bytes(FP8)}: its formula "
            "has changed; "
            "run `sglang-dsa doctor`"
        )
    return layers * index_token_bytes(plan.index_key_dtype(kvc.model_config.dtype))


def without_scores(original: Callable[..., int], configurator: Any, pre_model_load_memory: float) -> int:
    """Bytes for the KV pool of a DSA model on a GPU: what SGLang found, less the budget of index scores.

    Raises plan.Refusal where that leaves nothing.
    """
    available = original(configurator, pre_model_load_memory)
    if configurator.device != "cuda" or not is_dsa_config(configurator.model_config.hf_config):
        return available
    budget = settings.scores_budget_bytes()
    if available <= budget:
        raise plan.Refusal(
            f"{available >> 20} MiB are left for the KV cache, and SGLANG_DSA_PLUGIN_SCORES_MB={budget >> 20} takes "
            "all of them; lower it, or raise --mem-fraction-static"
        )
    return available - budget
