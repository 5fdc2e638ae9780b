"""A second prefill graph for each size, without breaks, for batches whose requests all fit in index_topk.

Why: between the segments of a prefill graph the host launches index keys, picks and attention of every layer, which for
short prompts takes longer than the GPU (adapter/whole_prefill.py).
Upstream: model_executor/runner_backend/breakable_cuda_graph_backend.py BreakableCudaGraphBackend.capture_one, replay.
Can go: when a prefill graph may have attention variants, as SGLang's decode graphs have.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.state_capturer.indexer_topk import get_global_indexer_capturer

from sglang_dsa_plugin import settings
from sglang_dsa_plugin.adapter.whole_prefill import WholePrefills
from sglang_dsa_plugin.backend import dense_fallback

logger = logging.getLogger(__name__)

VARIANT = "sglang_dsa_whole"
_GRAPHS = "sglang.srt.model_executor.runner_backend.breakable_cuda_graph_backend.BreakableCudaGraphBackend"


def register() -> None:
    """Queue the hooks, where the setting asks for them."""
    if settings.whole_prefill():
        HookRegistry.register(f"{_GRAPHS}.capture_one", record, HookType.AROUND)
        HookRegistry.register(f"{_GRAPHS}.replay", replay, HookType.AROUND)


def record(
    original: Callable[..., None], graphs: Any, shape_key: Any, forward_fn: Callable[[], Any], *rest: Any, **more: Any
) -> None:
    """Record SGLang's graph of this size, and the one without breaks."""
    from sglang.srt.model_executor.runner.prefill_cuda_graph_runner import PrefillCudaGraphRunner

    original(graphs, shape_key, forward_fn, *rest, **more)
    if not isinstance(graphs._cuda_graph_runner, PrefillCudaGraphRunner):
        return  # decode may be recorded by the same class
    runner = graphs._cuda_graph_runner.model_runner
    whole = _whole_of(runner.attn_backend)
    # Larger prefills attend on expanded keys outside of graphs; picks that are handed out are copied between segments.
    if whole is None or whole.broken or get_global_indexer_capturer() is not None:
        return
    if shape_key.size > dense_fallback.GRAPH_TOKENS:
        return
    variant = _variant(shape_key)
    with whole.recording(runner.attn_backend, runner.model, shape_key.size):
        original(graphs, variant, forward_fn, *rest, **more)
    breaks = len(graphs._graphs[variant]._break_fns)
    if breaks == 0:
        whole.sizes.append(shape_key.size)
        return
    # What runs at a break asks for its batch, of which a whole graph's rows know nothing.
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
    size = None if whole is None else whole.take()
    if size is None:
        return original(graphs, shape_key, static_forward_batch, **more)
    if size != shape_key.size:
        raise RuntimeError(
            f"a prefill was planned for the whole graph of {size} rows and SGLang replays that of {shape_key.size}: "
            "set SGLANG_DSA_PLUGIN_WHOLE_PREFILL=off"
        )
    return original(graphs, _variant(shape_key), static_forward_batch, **more)


def _variant(shape_key: Any) -> Any:
    return dataclasses.replace(shape_key, attention_variant=VARIANT)


def _whole_of(backend: Any) -> WholePrefills | None:
    """Of this package's backend, which alone has it."""
    return getattr(getattr(backend, "prefill", None), "whole", None)
