"""Rope without YaRN on a CPU.

Why: the CPU variant of SGLang's rope factory asserts that a YaRN scaling is given; GLM-5 and small models have none.
Upstream: layers/rotary_embedding/factory.py, get_rope_cpu.
Can go: when that assertion is gone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType


def register() -> None:
    """Queue the hook."""
    HookRegistry.register("sglang.srt.layers.rotary_embedding.factory.get_rope_cpu", without_scaling, HookType.AROUND)


def without_scaling(
    original: Callable[..., Any],
    head_size: int,
    rotary_dim: int,
    max_position: int,
    base: float,
    is_neox_style: bool = True,
    rope_scaling: dict[str, Any] | None = None,
    dtype: Any = None,
    partial_rotary_factor: float = 1.0,
    device: str | None = None,
) -> Any:
    """The general factory when there is no scaling; otherwise SGLang's own CPU variant."""
    args = (head_size, rotary_dim, max_position, base, is_neox_style, rope_scaling, dtype, partial_rotary_factor)
    if rope_scaling is not None:
        return original(*args, device)
    from sglang.srt.layers.rotary_embedding.factory import get_rope

    return get_rope(*args)
