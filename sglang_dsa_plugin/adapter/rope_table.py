"""The rope table of the indexer: float32, whatever the model's dtype is."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch

from sglang_dsa_plugin.cache.layouts import ROPE_DIM
from sglang_dsa_plugin.config import UnsupportedModel

_tables: WeakKeyDictionary[torch.nn.Module, torch.Tensor] = WeakKeyDictionary()


def float_table(rotary: torch.nn.Module) -> torch.Tensor:
    """cos_sin f32 [max positions, 64] of a rotary embedding, one copy for all layers that share it.

    Computed anew, since off CUDA SGLang keeps the module's own table in the model's dtype.
    """
    table = _tables.get(rotary)
    if table is None:
        table = rotary._compute_cos_sin_cache().float().to(rotary.cos_sin_cache.device).contiguous()
        if table.shape[1] != ROPE_DIM:
            raise UnsupportedModel(
                f"qk_rope_head_dim: the rope table has {table.shape[1]} values a row, expected {ROPE_DIM}"
            )
        _tables[rotary] = table
    return table
