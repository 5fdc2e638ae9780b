"""Rotary embedding in torch; see ops/rope.py.

Both layouts are x * cos + partner(x) * signed sin, where the partner of a value is the other one of its pair: a roll by
half, or a flip of neighbours. Products and sum are separate operations: a fused one would round differently in the last
few values of a tensor, and a row would depend on its batch.
"""

from __future__ import annotations

import torch

_TILE_ELEMENTS = 1 << 18  # CPU: fp32 copies of a tile stay in the cache


def apply(x: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, layout: str) -> torch.Tensor:
    """x [..., 64], positions [prefix], cos_sin [max, 64] -> [..., 64] in x's dtype, computed in fp32."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel() == 0:
        return out
    size = x.shape[-1]
    rows = positions.numel()
    source, target, flat = x.reshape(rows, -1, size), out.view(rows, -1, size), positions.reshape(-1)
    tile = max(1, _TILE_ELEMENTS * rows // x.numel()) if x.device.type == "cpu" else rows
    for top in range(0, rows, tile):
        part = slice(top, top + tile)
        cos, sin = cos_sin.index_select(0, flat[part]).float().unsqueeze(1).chunk(2, dim=-1)
        value = source[part].float()
        if layout == "half":
            cos, sin = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
            partner = value.roll(size // 2, -1)
        else:
            cos, sin = (torch.stack(pair, -1).flatten(-2) for pair in ((cos, cos), (-sin, sin)))
            partner = value.unflatten(-1, (size // 2, 2)).flip(-1).flatten(-2)
        target[part] = (value * cos).add_(partner.mul_(sin))
    return out
