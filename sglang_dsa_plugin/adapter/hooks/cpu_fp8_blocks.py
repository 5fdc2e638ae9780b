"""Experts of a block-fp8 model may be divided over any number of ranks on a CPU.

Why: SGLang demands whole fp8 blocks per rank, read from config.json after loading; on a CPU the weights are dequantised
before they are divided (adapter/fp8_weights.py), so blocks no longer exist.
Upstream: model_executor/model_runner_components/moe_ep_setup.py, check_quantized_moe_compatibility.
Can go: when that check asks the quantisation config object instead of config.json.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType


def register() -> None:
    """Queue the hook where the CPU platform is ours."""
    from sglang_dsa_plugin.adapter.platform import CPU_PLATFORM, activate

    if activate() != CPU_PLATFORM:
        return
    HookRegistry.register(
        "sglang.srt.model_executor.model_runner_components.moe_ep_setup.check_quantized_moe_compatibility",
        without_blocks,
        HookType.AROUND,
    )


def without_blocks(original: Callable[..., None], *, model_config: Any, **sizes: Any) -> None:
    """Nothing for fp8; the built-in check for every other quantisation."""
    if model_config.quantization != "fp8":
        original(model_config=model_config, **sizes)
