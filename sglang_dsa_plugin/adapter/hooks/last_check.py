"""After all arguments are resolved: the classes in use are ours, or the server does not start.

Why: SGLang logs a hook that could not be applied and goes on without it.
Upstream: plugins/hook_registry.py apply_hooks; the step is the last one that can be hooked (arg_groups/pipeline.py).
Can go: when a failing hook stops the server.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.arg_groups.model_override_base import attention_backends_of, resolving_view
from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook


def register() -> str:
    """Queue the step hook."""
    register_resolution_hook("validate_deepep_v2_dispatch_token_budget")(check)
    return "applied"


def check(server_args: Any, previous: Callable[[Any], None]) -> None:
    """Run the built-in step, then the self-check when this server uses dsa."""
    previous(server_args)
    if {"dsa", "nsa"} & set(attention_backends_of(resolving_view(server_args))):
        from sglang_dsa_plugin.adapter import selfcheck

        selfcheck.require_classes()
