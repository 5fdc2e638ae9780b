"""The plugin's own switches: environment variables SGLANG_DSA_PLUGIN*, in one table.

Everything SGLang already has a flag for stays SGLang's flag; only what it cannot say is here. Values are read from the
environment at every call, never at import, so a launcher may set them late and child processes inherit them. An unset
or empty variable means the default. A value outside the table raises BadSetting: a mistyped switch must not quietly
measure or serve something else. Standard library only, because the plugin's entry module imports this file in every
process.
"""

from __future__ import annotations

import difflib
import os
from dataclasses import dataclass


class BadSetting(ValueError):
    """A value that a switch does not take. The message names the variable, the value and what is allowed."""


@dataclass(frozen=True)
class Setting:
    """One switch.

    name: short name, as the functions below and the doctor call it.
    env: environment variable.
    kind: "choice" (one of `allowed`), "positive int" or "name" (a free word).
    default: text of the default, as it would be written in the environment.
    allowed: the accepted values, in words when they cannot be listed.
    doc: what it does.
    most: the largest "positive int".
    """

    name: str
    env: str
    kind: str
    default: str
    allowed: tuple[str, ...]
    doc: str
    most: int = 0

    def text(self) -> str:
        """The value in force, checked. Raises BadSetting."""
        value = os.environ.get(self.env, "").strip() or self.default
        if self.kind == "choice" and value not in self.allowed:
            raise BadSetting(f"{self.env}={value!r} is not allowed; use one of {', '.join(self.allowed)}")
        if (
            self.kind == "positive int"
            and value != self.default
            and not (value.isascii() and value.isdigit() and 0 < int(value) <= self.most)
        ):
            raise BadSetting(f"{self.env}={value!r} is not allowed; use {self.allowed[0]}")
        if self.kind == "name" and value and not value.replace("_", "a").isalnum():
            raise BadSetting(f"{self.env}={value!r} is not allowed; use {self.allowed[0]}")
        return value


SETTINGS: dict[str, Setting] = {
    setting.name: setting
    for setting in (
        Setting(
            "enabled",
            "SGLANG_DSA_PLUGIN",
            "choice",
            "on",
            ("on", "off"),
            "off leaves SGLang as it is without the plugin",
        ),
        Setting(
            "index_keys",
            "SGLANG_DSA_PLUGIN_INDEX_KEYS",
            "choice",
            "auto",
            ("auto", "fp8", "model"),
            "storage of the index keys: fp8 e4m3 with one scale per key (132 bytes a token and indexing layer), or the "
            "model's dtype; auto is the model's dtype when the model runs in float32, else fp8",
        ),
        Setting(
            "scores_mb",
            "SGLANG_DSA_PLUGIN_SCORES_MB",
            "positive int",
            "512",
            ("a positive whole number of MiB, at most 1048576",),
            "memory the index scores of one step may hold at once, in MiB; longer batches are worked off in tiles",
            most=1 << 20,
        ),
        Setting(
            "impl",
            "SGLANG_DSA_PLUGIN_IMPL",
            "name",
            "",
            ("the name of an implementation, for example torch",),
            "force one implementation, for every operator that has it, instead of the support table's choice",
        ),
        Setting(
            "latent_layout",
            "SGLANG_DSA_PLUGIN_LATENT_LAYOUT",
            "choice",
            "auto",
            ("auto", "fp8_656", "fp8_576"),
            "row layout of the latent cache when the KV dtype is fp8; auto follows SGLang's own backend flags",
        ),
        Setting(
            "masked_prefill",
            "SGLANG_DSA_PLUGIN_MASKED_PREFILL",
            "choice",
            "auto",
            ("auto", "on", "off"),
            "on a CPU, sparse prefill over expanded keys and values with a mask of the picks: where it is cheaper "
            "(auto), wherever it is possible, or never",
        ),
        Setting(
            "decode_threads",
            "SGLANG_DSA_PLUGIN_DECODE_THREADS",
            "positive int",
            "auto",
            ("auto or a positive whole number, at most 4096",),
            "on a CPU, threads of a decode step; auto is one for a small model and few requests, else all of SGLang's",
            most=1 << 12,
        ),
        Setting(
            "whole_prefill",
            "SGLANG_DSA_PLUGIN_WHOLE_PREFILL",
            "choice",
            "on",
            ("on", "off", "long"),
            "on a GPU, prefill CUDA graphs without breaks for batches whose requests all fit in index_topk; long: and "
            "for up to 256 new tokens behind any context, which has not run on a GPU yet",
        ),
        Setting(
            "warmup",
            "SGLANG_DSA_PLUGIN_WARMUP",
            "choice",
            "auto",
            ("auto", "on", "off"),
            "prompts at start that make the kernels of prefill compile before the first request: with CUDA (auto), "
            "always, or never",
        ),
    )
}


def plugin_enabled() -> bool:
    """Whether the plugin acts at all."""
    return SETTINGS["enabled"].text() == "on"


def index_keys() -> str:
    """How index keys are stored: "auto", "fp8" or "model"."""
    return SETTINGS["index_keys"].text()


def scores_budget_bytes() -> int:
    """Bytes the index scores of one step may hold at once."""
    return int(SETTINGS["scores_mb"].text()) << 20


def forced_impl() -> str | None:
    """The implementation every operator must use, or None when the support table chooses."""
    return SETTINGS["impl"].text() or None


def latent_layout() -> str:
    """The fp8 latent row layout asked for: "auto", "fp8_656" or "fp8_576"."""
    return SETTINGS["latent_layout"].text()


def masked_prefill() -> str:
    """When sparse prefill runs on expanded keys and values: "auto", "on" or "off"."""
    return SETTINGS["masked_prefill"].text()


def decode_threads() -> int | None:
    """Threads of a decode step on a CPU; None is auto."""
    text = SETTINGS["decode_threads"].text()
    return None if text == "auto" else int(text)


def whole_prefill() -> bool:
    """Whether prefills of short requests have CUDA graphs without breaks."""
    return SETTINGS["whole_prefill"].text() != "off"


def scored_prefill() -> bool:
    """Whether a few new tokens behind a long context have such graphs, too."""
    return SETTINGS["whole_prefill"].text() == "long"


def prefill_warmup() -> str:
    """Whether prompts at start make the kernels of prefill compile: "auto", "on" or "off"."""
    return SETTINGS["warmup"].text()


def refuse_unknown() -> None:
    """Raise BadSetting for a variable that begins as ours do and is none of them: mistyped, it would do nothing."""
    known = [setting.env for setting in SETTINGS.values()]
    for name in sorted(os.environ):
        if name.startswith(SETTINGS["enabled"].env) and name not in known:
            near = difflib.get_close_matches(name, known, 1)
            meant = f"{near[0]}, if that is meant" if near else f"one of {', '.join(known)}"
            raise BadSetting(f"{name} is no variable of sglang-dsa-plugin; use {meant}, or unset it")


def table() -> list[dict[str, str]]:
    """Every setting as a row for docs and the doctor: name, env, type, default, allowed, value, set, doc.

    `value` is the value in force and `set` says whether the environment gives it. Raises BadSetting on a bad value
    and on a variable that is not in the table.
    """
    refuse_unknown()
    return [
        {
            "name": s.name,
            "env": s.env,
            "type": s.kind,
            "default": s.default,
            "allowed": ", ".join(s.allowed),
            "value": s.text(),
            "set": "yes" if os.environ.get(s.env, "").strip() else "no",
            "doc": s.doc,
        }
        for s in SETTINGS.values()
    ]
