"""Typed reading of single keys of a model config: present, of the right type, or refused by name.

A config is a dict (config.json) or any object with attributes (a PretrainedConfig). A key set to None counts as absent,
as it does in every published config.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


class UnsupportedModel(ValueError):
    """A model config that DSA cannot serve; the message names the key, the value and the remedy."""


def get(config: Any, key: str) -> Any:
    return config.get(key) if isinstance(config, Mapping) else getattr(config, key, None)


def positive(config: Any, key: str) -> int:
    value = get(config, key)
    if value is None:
        raise UnsupportedModel(f"{key} is missing from the config; take it from the model's published config.json")
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise UnsupportedModel(f"{key}={value!r} must be a positive integer; correct it in config.json")
    return value


def count(config: Any, key: str, default: int) -> int:
    value = get(config, key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise UnsupportedModel(f"{key}={value!r} must be an integer of at least 0; correct it in config.json")
    return value


def number(config: Any, key: str, default: float | None = None, *, zero: bool = False, name: str = "") -> float:
    """A finite number above 0, or of at least 0 with `zero`; `name` is what a refusal calls the key."""
    value, name = get(config, key), name or key
    if value is None:
        if default is None:
            raise UnsupportedModel(f"{name} is missing; take it from the model's published config.json")
        return default
    real = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not real or value < 0 or (value == 0 and not zero):
        wanted = "a number of at least 0" if zero else "a positive number"
        raise UnsupportedModel(f"{name}={value!r} must be {wanted}; correct it in config.json")
    return float(value)


def mapping(config: Any, key: str) -> Mapping[str, Any] | None:
    value = get(config, key)
    if value is not None and not isinstance(value, Mapping):
        raise UnsupportedModel(f"{key}={value!r} must be an object with keys of its own; correct it in config.json")
    return value


def flag(config: Any, key: str, default: bool) -> bool:
    value = get(config, key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise UnsupportedModel(f"{key}={value!r} must be true or false; correct it in config.json")
    return value


def fixed(config: Any, key: str, expected: int, why: str) -> None:
    value = positive(config, key)
    if value != expected:
        raise UnsupportedModel(f"{key}={value!r} is not served: {why}, so it must be {expected}")
