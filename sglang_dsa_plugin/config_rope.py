"""The rope part of a model's config: theta and YaRN, the same for MLA and the indexer.

A scaling other than YaRN is refused because the model class would run it as YaRN.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sglang_dsa_plugin import config_keys as keys
from sglang_dsa_plugin.config_keys import UnsupportedModel


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


def read_rope(config: Any) -> tuple[float, YarnScaling | None]:
    """Theta and YaRN factors from the nested form (rope_parameters) or the flat one (rope_theta, rope_scaling)."""
    nested = keys.get(config, "rope_parameters")
    theta = nested.get("rope_theta") if nested else None
    scaling = keys.get(config, "rope_scaling")
    if nested and scaling and _kind(nested) != _kind(scaling):
        raise UnsupportedModel(
            f"rope_scaling={dict(scaling)} contradicts rope_parameters={dict(nested)}; remove the wrong one"
        )
    scaling = nested or scaling
    flat = keys.get(config, "rope_theta")
    if theta is not None and flat is not None and float(theta) != float(flat):
        raise UnsupportedModel(
            f"rope_theta={flat!r} contradicts rope_parameters['rope_theta']={theta!r}; remove the wrong one"
        )
    theta = flat if theta is None else theta
    if theta is None:
        raise UnsupportedModel(
            "rope_theta is missing, both flat and in rope_parameters; take it from the model's published config.json"
        )
    return float(theta), _yarn(scaling, keys.positive(config, "max_position_embeddings"))


def _kind(scaling: Mapping[str, Any]) -> str | None:
    kind = scaling.get("rope_type") or scaling.get("type")
    if kind is None and scaling.get("factor") is None:
        return "default"
    # The model class renames the type in place once it has built a layer.
    return "yarn" if kind == "deepseek_yarn" else kind


def _yarn(scaling: Mapping[str, Any] | None, max_position: int) -> YarnScaling | None:
    if not scaling:
        return None
    kind = _kind(scaling)
    if kind == "default":
        return None
    if kind != "yarn":
        raise UnsupportedModel(f"rope scaling of type {kind!r} is not served; DSA models use 'default' or 'yarn'")
    if scaling.get("factor") is None:
        raise UnsupportedModel("rope scaling 'yarn' has no factor; take it from the model's published config.json")
    for key in ("extrapolation_factor", "attn_factor"):
        if scaling.get(key, 1) != 1:
            raise UnsupportedModel(f"rope scaling {key}={scaling[key]!r} is not served; it must be 1")
    return YarnScaling(
        factor=float(scaling["factor"]),
        original_max_position=int(scaling.get("original_max_position_embeddings") or max_position),
        beta_fast=scaling.get("beta_fast", 32),
        beta_slow=scaling.get("beta_slow", 1),
        mscale=float(scaling.get("mscale", 1)),
        mscale_all_dim=float(scaling.get("mscale_all_dim", 0)),
        scales_softmax=bool(scaling.get("apply_yarn_scaling", True) and scaling.get("apply_scale", True)),
    )
