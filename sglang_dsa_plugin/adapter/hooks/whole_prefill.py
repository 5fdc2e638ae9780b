"""Prefill graphs of each size without breaks, for batches whose requests all fit in index_topk.

Why: between the segments of a prefill graph the host launches index keys, picks and attention of every layer, which for
short prompts takes longer than the GPU (adapter/whole_prefill.py).
Upstream: model_executor/runner_backend/breakable_cuda_graph_backend.py BreakableCudaGraphBackend.capture_one, replay.
Can go: when a prefill graph may have attention variants, as SGLang's decode graphs have.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.state_capturer.indexer_topk import get_global_indexer_capturer

from sglang_dsa_plugin import settings
from sglang_dsa_plugin.adapter.whole_prefill import WholePrefills
from sglang_dsa_plugin.backend.dense_fallback import Path

logger = logging.getLogger(__name__)

_VARIANT = "sglang_dsa_"
_GRAPHS = "sglang.srt.model_executor.runner_backend.breakable_cuda_graph_backend.BreakableCudaGraphBackend"


def register() -> None:
    """Queue the hooks, unless the setting rules such graphs out."""
    if settings.whole_prefill():
        HookRegistry.register(f"{_GRAPHS}.capture_one", record, HookType.AROUND)
        HookRegistry.register(f"{_GRAPHS}.replay", replay, HookType.AROUND)


def record(
    original: Callable[..., None], graphs: Any, shape_key: Any, forward_fn: Callable[[], Any], *rest: Any, **more: Any
) -> None:
    """Record SGLang's graph of this size, and those without breaks."""
    from sglang.srt.model_executor.runner.prefill_cuda_graph_runner import PrefillCudaGraphRunner

    original(graphs, shape_key, forward_fn, *rest, **more)
    if not isinstance(graphs._cuda_graph_runner, PrefillCudaGraphRunner):
        return  # decode may be recorded by the same class
    runner = graphs._cuda_graph_runner
    backend, model = runner.model_runner.attn_backend, runner.model_runner.model
    whole = _whole_of(backend)
    # Picks that are handed out are copied between segments.
    if whole is None or get_global_indexer_capturer() is not None:
        return
    for path in whole.paths_for(shape_key.size):
        if whole.broken:
            return
        variant, began, reserved = _variant(shape_key, path), time.monotonic(), _reserved(whole)
        with whole.recording(backend, model, path, shape_key.size, forward_fn) as on_held_memory:
            original(graphs, variant, on_held_memory, *rest, **more)
        _keep_or_drop(whole, graphs, variant, path)
        whole.seconds += time.monotonic() - began
        whole.reserved += _reserved(whole) - reserved
    if shape_key.size == min(runner.capture_num_tokens) and not whole.broken:
        logger.info("%s", whole.describe())


def _keep_or_drop(whole: WholePrefills, graphs: Any, variant: Any, path: Path) -> None:
    """Count the size in, unless its graph breaks after all: what runs at a break asks for its batch, of which held
    memory knows nothing.
    """
    breaks = len(graphs._graphs[variant]._break_fns)
    if breaks == 0:
        whole.sizes[path].append(variant.size)
        return
    whole.broken = True
    del graphs._graphs[variant], graphs._outputs[variant], graphs._capture_inputs[variant]
    logger.warning(
        "no whole prefill graphs: this model breaks them %d times for other parts than picks and attention; prefills "
        "of short requests take the ordinary ones (SGLANG_DSA_PLUGIN_WHOLE_PREFILL)",
        breaks,
    )


def replay(original: Callable[..., Any], graphs: Any, shape_key: Any, static_forward_batch: Any, **more: Any) -> Any:
    """Replay the graph without breaks if the batch was planned for it. Raises RuntimeError for one of another size."""
    whole = _whole_of(graphs._cuda_graph_runner.model_runner.attn_backend)
    planned = None if whole is None else whole.take()
    if planned is None:
        return original(graphs, shape_key, static_forward_batch, **more)
    path, size = planned
    if size != shape_key.size:
        raise RuntimeError(
            f"a prefill was planned for the whole graph of {size} rows and SGLang replays that of {shape_key.size}: "
            "set SGLANG_DSA_PLUGIN_WHOLE_PREFILL=off"
        )
    return original(graphs, _variant(shape_key, path), static_forward_batch, **more)


def _variant(shape_key: Any, path: Path) -> Any:
    return dataclasses.replace(shape_key, attention_variant=f"{_VARIANT}{path}")


def _reserved(whole: WholePrefills) -> int:
    return torch.cuda.memory_reserved(whole.device) if whole.device.type == "cuda" else 0


def _whole_of(backend: Any) -> WholePrefills | None:
    """Of this package's backend, which alone has it."""
    return getattr(getattr(backend, "prefill", None), "whole", None)
