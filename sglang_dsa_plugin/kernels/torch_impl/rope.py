"""Rotary embedding in torch; see ops/rope.py."""

from __future__ import annotations

import torch


def apply(x: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, layout: str) -> torch.Tensor:
    """x [..., 64], positions [prefix], cos_sin [max, 64] -> [..., 64] in x's dtype, computed in fp32."""
    half = x.shape[-1] // 2
    table = cos_sin.index_select(0, positions.reshape(-1)).float()
    table = table.view(*positions.shape, *(1,) * (x.dim() - 1 - positions.dim()), 2 * half)
    cos, sin = table[..., :half], table[..., half:]
    if layout == "half":
        a, b = x[..., :half].float(), x[..., half:].float()
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)
    a, b = x[..., 0::2].float(), x[..., 1::2].float()
    return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2).to(x.dtype)
