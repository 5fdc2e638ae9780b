"""Everything changed inside SGLang, one module per hook: why, what, the upstream place, and when the hook can go."""

from __future__ import annotations

from importlib import import_module

MODULES = (
    "classes",
    "arguments",
    "cpu_backend",
    "cpu_fp8_blocks",
    "cpu_rope",
    "float32_experts",
    "kv_sizing",
    "whole_prefill",
    "warmup",
    "worker_refusals",
    "last_check",
)


def register_all() -> None:
    """Queue every hook that applies to this process."""
    for name in MODULES:
        import_module(f"{__name__}.{name}").register()
