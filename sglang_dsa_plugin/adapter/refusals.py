"""What a user hears of a refusal at start: the sentence that names flag, key or variable and the remedy, on one line.

A refusal is raised, so that whoever starts a server from Python can catch it. Uncaught it would end the command under a
traceback of SGLang's own steps, with a class name in front, as if something were broken. Only the standard library is
imported at the top, as in plugin.py.
"""

from __future__ import annotations

import sys
from types import TracebackType

PREFIX = "sglang-dsa-plugin: error: "


def is_refusal(error: BaseException) -> bool:
    """Whether its text says all there is to know: it was raised to refuse a flag, a model or a switch."""
    from sglang_dsa_plugin.config_keys import UnsupportedModel
    from sglang_dsa_plugin.kernel_flags import Refusal
    from sglang_dsa_plugin.settings import BadSetting

    return isinstance(error, (BadSetting, Refusal, UnsupportedModel))


def print_in_one_line() -> None:
    """From here on this process ends with one line for an uncaught refusal, and as before for all else."""
    if getattr(sys.excepthook, "of_refusals", False):
        return
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        if is_refusal(error):
            print(f"{PREFIX}{error}", file=sys.stderr, flush=True)
        else:
            previous(kind, error, traceback)

    hook.of_refusals = True  # type: ignore[attr-defined]
    sys.excepthook = hook
