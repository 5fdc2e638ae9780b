"""After all arguments are resolved: both phases of a DSA model and the classes in use are ours, or the server does not
start.

Why: SGLang logs a hook that could not be applied and goes on without it, and a later step may choose another backend.
Upstream: plugins/hook_registry.py apply_hooks; the step is the last one that can be hooked (arg_groups/pipeline.py).
Can go: when a failing hook stops the server.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.arg_groups.model_override_base import attention_backends_of, resolving_view
from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook

from sglang_dsa_plugin import plan
from sglang_dsa_plugin.adapter.hooks import arguments
from sglang_dsa_plugin.config import is_dsa_config


def register() -> None:
    """Queue the step hook."""
    register_resolution_hook("validate_deepep_v2_dispatch_token_budget")(check)


def check(server_args: Any, previous: Callable[[Any], None]) -> None:
    """Run the built-in step, then the self-check when this server uses dsa."""
    previous(server_args)
    phases = dict(zip(("prefill", "decode"), attention_backends_of(resolving_view(server_args)), strict=True))
    ours = [phase for phase, name in phases.items() if name in arguments.DSA_NAMES]
    config = arguments.hf_config_of(server_args)
    if not ours and (config is None or not is_dsa_config(config)):
        return
    if len(ours) < len(phases):
        phase, name = next((phase, name) for phase, name in phases.items() if phase not in ours)
        raise plan.Refusal(
            f"attention of {phase} would run on {name}, and a DSA model needs dsa for prefill and decode: leave out "
            f"the flag that asks for {name}, or give --attention-backend dsa and neither of "
            "--prefill-attention-backend and --decode-attention-backend"
        )
    from sglang_dsa_plugin.adapter import selfcheck

    selfcheck.require_classes()
