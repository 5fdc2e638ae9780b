"""The rope part of a model's config: theta and YaRN, the same for MLA and the indexer.

A scaling other than YaRN is refused because the model class would run it as YaRN.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sglang_dsa_plugin import config_keys as keys
from sglang_dsa_plugin.config_keys import UnsupportedModel

FACTORS = (
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "extrapolation_factor",
    "attn_factor",
    "apply_yarn_scaling",
    "apply_scale",
)


@dataclass(frozen=True)
class YarnScaling:
    """YaRN factors of the rope table, as the DeepSeek form of YaRN names them."""

    factor: float
    original_max_position: int
    beta_fast: float = 32
    beta_slow: float = 1
    mscale: float = 1.0
    mscale_all_dim: float = 0.0
    scales_softmax: bool = True

    @property
    def positions(self) -> int:
        """Rows of the table that the model class makes."""
        return math.ceil(self.original_max_position * self.factor)


def read_rope(config: Any) -> tuple[float, YarnScaling | None]:
    """Theta and YaRN factors from the nested form (rope_parameters) or the flat one (rope_theta, rope_scaling)."""
    nested, scaling = keys.mapping(config, "rope_parameters"), keys.mapping(config, "rope_scaling")
    longest = keys.positive(config, "max_position_embeddings")
    # In an object SGLang's own classes leave both words, of which an override changes one; rope_type decides there.
    if isinstance(config, Mapping):
        for form, name in _forms(nested or {}, scaling or {}):
            _refuse_two_kinds(form, name)
    if nested and scaling:
        said, otherwise = ((_kind(form), _yarn(form, name, longest)) for form, name in _forms(nested, scaling))
        if said != otherwise:
            raise UnsupportedModel(
                f"rope_scaling={dict(scaling)} contradicts rope_parameters={dict(nested)}; remove the wrong one"
            )
    theta = _theta(nested or {}, "rope_parameters['rope_theta']")
    if theta is None:
        theta = _theta(scaling or {}, "rope_scaling['rope_theta']")
    flat = _theta(config, "rope_theta")
    if theta is not None and flat is not None and theta != flat:
        raise UnsupportedModel(
            f"rope_theta={flat!r} contradicts rope_parameters['rope_theta']={theta!r}; remove the wrong one"
        )
    theta = flat if theta is None else theta
    if theta is None:
        raise UnsupportedModel(
            "rope_theta is missing, both flat and in rope_parameters; take it from the model's published config.json"
        )
    return theta, _yarn(nested or scaling, "rope_parameters" if nested else "rope_scaling", longest)


def past_the_end(context: int, positions: int) -> str:
    """Why a context of more tokens than scaled rope has positions is refused, in words."""
    return (
        f"--context-length {context}: the scaled rope of this model ends at position {positions}, and SGLang "
        f"continues its table by the formula of rope without scaling; set --context-length to {positions} or less"
    )


def _forms(nested: Mapping[str, Any], scaling: Mapping[str, Any]) -> tuple[tuple[Mapping[str, Any], str], ...]:
    return (nested, "rope_parameters"), (scaling, "rope_scaling")


def _theta(config: Any, name: str) -> float | None:
    return None if keys.get(config, "rope_theta") is None else keys.number(config, "rope_theta", name=name)


def _kind(scaling: Mapping[str, Any]) -> str | None:
    kind = scaling.get("rope_type") or scaling.get("type")
    if kind is None and scaling.get("factor") is None:
        return "default"
    # The model class renames the type in place once it has built a layer.
    return "yarn" if kind == "deepseek_yarn" else kind


def _refuse_two_kinds(scaling: Mapping[str, Any], name: str) -> None:
    kind, older = scaling.get("rope_type"), scaling.get("type")
    if kind and older and _kind(scaling) != _kind({"type": older}):
        raise UnsupportedModel(
            f"{name}['type']={older!r} contradicts {name}['rope_type']={kind!r}; remove the wrong one"
        )


def _yarn(scaling: Mapping[str, Any] | None, name: str, max_position: int) -> YarnScaling | None:
    if not scaling:
        return None
    kind = _kind(scaling)
    if kind == "default":
        return None
    if kind != "yarn":
        raise UnsupportedModel(
            f"rope scaling of type {kind!r} in {name} is not served; DSA models use 'default' or 'yarn'"
        )
    if scaling.get("factor") is None:
        raise UnsupportedModel(
            f"rope scaling 'yarn' has no factor in {name}; take it from the model's published config.json"
        )
    for key in FACTORS:
        # The model class takes what is there, so that a null would be its factor and not the default.
        if key in scaling and scaling[key] is None:
            raise UnsupportedModel(f"{name}[{key!r}]=None has no value; remove the key or correct it in config.json")

    def number(key: str, default: float | None = None, zero: bool = False) -> float:
        return keys.number(scaling, key, default, zero=zero, name=f"{name}[{key!r}]")

    for key in ("extrapolation_factor", "attn_factor"):
        if number(key, 1) != 1:
            raise UnsupportedModel(f"rope scaling {key}={scaling[key]!r} in {name} is not served; it must be 1")
    original = number("original_max_position_embeddings", max_position)
    if original != int(original):
        raise UnsupportedModel(
            f"{name}['original_max_position_embeddings']={original!r} must be a whole number; correct it in config.json"
        )
    return YarnScaling(
        factor=number("factor"),
        original_max_position=int(original),
        beta_fast=number("beta_fast", 32),
        beta_slow=number("beta_slow", 1),
        mscale=number("mscale", 1, zero=True),
        mscale_all_dim=number("mscale_all_dim", 0, zero=True),
        scales_softmax=all(keys.flag(scaling, key, True) for key in ("apply_yarn_scaling", "apply_scale")),
    )
