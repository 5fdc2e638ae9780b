"""Experts of a float32 model on a GPU are scaled as those of other models are.

Why: a float32 model runs SGLang's operators in torch (hooks/arguments.py), experts too. On CUDA the model leaves
`routed_scaling_factor` (2.5 in DeepSeek-V3.2) to the experts' kernel, and the torch form, written for CPUs, where the
model applies it, does not know it.
Upstream: layers/quantization/unquant.py UnquantizedFusedMoEMethod.forward_native; models/deepseek_v2.py,
DeepseekV2MoE.forward_normal.
Can go: when the torch form applies the factor on CUDA, or the Triton form takes float32 without rounding it to TF32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_dsa_plugin.adapter import state

TARGET = "sglang.srt.layers.quantization.unquant.UnquantizedFusedMoEMethod.forward_native"


def register() -> None:
    """Queue the hook."""
    HookRegistry.register(TARGET, scaled, HookType.AROUND)


def scaled(original: Callable[..., Any], method: Any, layer: Any, dispatch_output: Any) -> Any:
    """The experts' sum times the factor, where the model does not multiply by it and the top-k has not done so. Models
    of other dtypes, which only a user's own switch brings here, and models that are not this package's are left as
    SGLang has them.
    """
    combined = original(method, layer, dispatch_output)
    if not state.serving():
        return combined
    factor = method.moe_runner_config.routed_scaling_factor
    in_topk = getattr(layer, "should_fuse_routed_scaling_factor_in_topk", False)
    summed = combined.hidden_states
    if summed.is_cuda and summed.dtype == torch.float32 and factor is not None and not in_topk:
        summed.mul_(factor)
    return combined
