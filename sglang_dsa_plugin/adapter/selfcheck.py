"""Is what SGLang will run really ours? Asked by the launcher at the end of argument resolution and by each worker
after loading.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

from sglang_dsa_plugin.config import DsaConfig, UnsupportedModel, is_dsa_config
from sglang_dsa_plugin.kernel_flags import Refusal

_ATTENTION = "sglang.srt.layers.attention"


def replacements() -> dict[str, type]:
    """SGLang class (module.Class below layers.attention) -> the class of ours that takes its place."""
    from sglang_dsa_plugin.adapter.backend import DsaBackend
    from sglang_dsa_plugin.adapter.indexer import DsaIndexer
    from sglang_dsa_plugin.adapter.not_served import DsaMultiStepBackend, PooledIndexerRefusal

    return {
        "dsa_backend.DeepseekSparseAttnBackend": DsaBackend,
        "dsa_backend.DeepseekSparseAttnMultiStepBackend": DsaMultiStepBackend,
        "dsa.dsa_indexer.Indexer": DsaIndexer,
        "dsa.dsa_indexer_kpool.IndexerKPool": PooledIndexerRefusal,
    }


def wrong_classes() -> list[str]:
    """The places where SGLang would still use another class, in words; empty when all are ours."""
    wrong = []
    for target, ours in replacements().items():
        module_name, _, name = target.rpartition(".")
        found = getattr(importlib.import_module(f"{_ATTENTION}.{module_name}"), name)
        if found is not ours:
            wrong.append(f"{_ATTENTION}.{target} is {found.__module__}.{found.__qualname__}")
    from sglang.srt.platforms import current_platform

    from sglang_dsa_plugin.adapter.pool import DsaPool

    if current_platform.get_kv_pool_cls(kind="dsa") is not DsaPool:
        wrong.append(f"the platform {type(current_platform).__name__} gives another KV pool class")
    return wrong


def require_classes() -> None:
    """Raise Refusal, which stops the server, unless every class in use is ours."""
    wrong = wrong_classes()
    if wrong:
        raise Refusal(
            "sglang-dsa-plugin is installed but would not be in use: "
            + "; ".join(wrong)
            + ". Another plugin or platform took its "
            "place (see SGLANG_PLUGINS, SGLANG_PLATFORM and the log above), or set SGLANG_DSA_PLUGIN=off to serve "
            "without it"
        )


def check_model(model: torch.nn.Module) -> None:
    """In a worker: classes, and layer by layer that each indexer is ours, or absent where the schedule says so.

    Does nothing for a model without DSA.
    """
    config = getattr(model, "config", None)
    if config is None or not is_dsa_config(config):
        return
    require_classes()
    dsa = DsaConfig.from_hf(config)
    wrong = [problem for layer in _attention_layers(model) if (problem := _layer_problem(layer, dsa))]
    if wrong:
        raise UnsupportedModel("the loaded model does not match its config: " + "; ".join(wrong))


def _attention_layers(model: torch.nn.Module) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "indexer") and hasattr(module, "layer_id")]


def _layer_problem(attention: Any, config: Any) -> str | None:
    from sglang_dsa_plugin.adapter.indexer import DsaIndexer

    indexer, layer = attention.indexer, attention.layer_id
    if config.layer_reuses_picks(layer):
        return None if indexer is None else f"layer {layer} reuses picks but built {type(indexer).__name__}"
    if not isinstance(indexer, DsaIndexer):
        return f"layer {layer} has {type(indexer).__name__} where DsaIndexer belongs"
    return None
