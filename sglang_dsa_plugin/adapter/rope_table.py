"""The rope table of the indexer: float32, whatever the model's dtype is, a row for every position that is served."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding

from sglang_dsa_plugin.cache.layouts import ROPE_DIM
from sglang_dsa_plugin.config import UnsupportedModel
from sglang_dsa_plugin.config_rope import past_the_end
from sglang_dsa_plugin.plan import Refusal

_tables: WeakKeyDictionary[torch.nn.Module, torch.Tensor] = WeakKeyDictionary()


def float_table(rotary: torch.nn.Module, positions: int = 0) -> torch.Tensor:
    """cos_sin f32 [at least `positions`, 64] of a rotary embedding, one copy for all layers that share it.

    Computed anew, since off CUDA SGLang keeps the module's own table in the model's dtype. Raises Refusal where the
    table cannot be as long.
    """
    table = _tables.get(rotary)
    if table is None:
        table = _on_device_of(rotary, rotary._compute_cos_sin_cache())
        if table.shape[1] != ROPE_DIM:
            raise UnsupportedModel(
                f"qk_rope_head_dim: the rope table has {table.shape[1]} values a row, expected {ROPE_DIM}"
            )
        _tables[rotary] = table
    if len(table) < positions:
        table = _tables[rotary] = _on_device_of(rotary, _longer(rotary, len(table), positions))
    return table


def _on_device_of(rotary: torch.nn.Module, table: torch.Tensor) -> torch.Tensor:
    return table.float().to(rotary.cos_sin_cache.device).contiguous()


def _longer(rotary: torch.nn.Module, rows: int, positions: int) -> torch.Tensor:
    """The table of plain rope for so many positions. SGLang extends that of the main attention, too, but by the formula
    of plain rope whatever the scaling is.
    """
    if type(rotary)._compute_cos_sin_cache is not RotaryEmbedding._compute_cos_sin_cache:
        raise Refusal(past_the_end(positions, rows))
    first = rotary.position_start
    at = torch.arange(first, first + positions, dtype=torch.float32)
    angles = torch.outer(at, rotary._compute_inv_freq(rotary.base).float().to(at.device))
    return torch.cat((angles.cos(), angles.sin()), dim=1)
