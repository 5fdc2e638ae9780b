"""Keys of every head from their own parts and the part that all share, in torch; see ops/mha_keys.py."""

from __future__ import annotations

import torch


def join(nope: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
    """`ops.mha_keys.join`."""
    return torch.cat([nope, rope.unsqueeze(1).expand(-1, nope.shape[1], -1)], dim=-1)
