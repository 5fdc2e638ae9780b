"""The `sglang.srt.plugins` entry point: SGLang calls `register()` once in every process it starts, before arguments
are resolved.

SGLang logs an exception raised here and goes on with its built-in DSA. So nothing but the standard library is imported
at the top, every failure is caught and remembered, and a resolution hook then stops the server when it would have
needed this plugin.
"""

from __future__ import annotations

import logging
import os
import sys
import traceback
from dataclasses import dataclass

logger = logging.getLogger(__name__)


@dataclass
class Status:
    """What became of the plugin in this process: "not loaded", "off", "active" or "failed" with the error. refused:
    nothing is broken, and the error says all there is to know.
    """

    state: str = "not loaded"
    error: str = ""
    details: str = ""
    refused: bool = False


STATUS = Status()


def register() -> None:
    """Check the contract with SGLang and queue every hook; never raises."""
    try:
        from sglang_dsa_plugin import settings

        if not settings.plugin_enabled():
            STATUS.state = "off"
            logger.info("sglang-dsa-plugin is off in process %d: SGLANG_DSA_PLUGIN=off", os.getpid())
            return
        from sglang_dsa_plugin.adapter import contract

        contract.require()
        from sglang_dsa_plugin.adapter import hooks

        hooks.register_all()
        STATUS.state = "active"
        # SGLang has not set up logging yet: seen only where logging is set up earlier, as the server tests do.
        logger.info("sglang-dsa-plugin is active in process %d", os.getpid())
    except BaseException as error:
        STATUS.state = "failed"
        says_all = _is_own(error)
        STATUS.error = str(error) if says_all else f"{type(error).__name__}: {error}"
        STATUS.details = "" if says_all else traceback.format_exc()
        STATUS.refused = _is_bad_setting(error)
        _refuse_to_serve_dsa()


def _is_own(error: BaseException) -> bool:
    """Whether it is one of this package's exceptions, whose text says what is wrong and where."""
    return type(error).__module__.startswith("sglang_dsa_plugin.")


def _is_bad_setting(error: BaseException) -> bool:
    """Without an import, which may be what failed."""
    settings = sys.modules.get("sglang_dsa_plugin.settings")
    return settings is not None and isinstance(error, settings.BadSetting)


def _stop() -> None:
    sys.exit("\n".join(filter(None, (failure_message(), STATUS.details))))


def _refuse_to_serve_dsa() -> None:
    """Queue resolution hooks that stop a server which would need the plugin; end the process where even that cannot be
    done.
    """
    try:
        from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook
    except Exception:
        _stop()

    # The first step that can be hooked: no model, device or file has been touched yet.
    @register_resolution_hook("handle_deprecated_dp_attention")
    def stop_if_asked_for(server_args: object, previous: object) -> None:
        names = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")
        if any(getattr(server_args, name, None) in ("dsa", "nsa") for name in names):
            _stop()
        previous(server_args)

    # Without the flag SGLang picks its own DSA for these models by itself; that would be a silent fallback.
    @register_resolution_hook("handle_cuda_graph_config")
    def stop_if_model_needs_it(server_args: object, previous: object) -> None:
        if _model_has_index_topk(server_args):
            _stop()
        previous(server_args)


def _model_has_index_topk(server_args: object) -> bool:
    from sglang.srt.arg_groups.model_override_base import model_config_of

    return getattr(model_config_of(server_args).hf_text_config, "index_topk", None) is not None


def failure_message() -> str:
    """One sentence on what failed and the two ways out; of a refusal what every refusal is told as."""
    if STATUS.refused:
        from sglang_dsa_plugin.adapter import refusals

        return f"{refusals.PREFIX}{STATUS.error}"
    return (
        f"sglang-dsa-plugin could not start: {STATUS.error}. The server does not start, because it would silently run "
        "another attention backend. Remedy: run `sglang-dsa doctor` and install the versions it names, or set "
        "SGLANG_DSA_PLUGIN=off to use SGLang without this plugin."
    )
