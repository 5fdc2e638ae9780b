"""Hadamard rotation as a product with the matrix of signs; see ops/hadamard.py.

A butterfly of additions needs 18 times fewer operations and takes three times as long on a CPU: each of its 7 steps
walks through memory. The signs are exact in every dtype, so the scale is applied after the sum.
"""

from __future__ import annotations

import functools

import torch

from . import matmul

_TILE_ROWS = 4096  # fp32 copies of a tile stay in the cache


def rotate(x: torch.Tensor) -> torch.Tensor:
    """x [..., 128] -> [..., 128] in x's dtype, computed in fp32."""
    size = x.shape[-1]
    flat = x.reshape(-1, size)
    out = torch.empty(flat.shape, dtype=x.dtype, device=x.device)
    signs = _signs(size, x.device).unsqueeze(0)
    for top in range(0, len(flat), _TILE_ROWS):
        tile = matmul.pad_rows(flat[top : top + _TILE_ROWS].float())
        rotated = torch.empty_like(tile)
        matmul.multiply(tile.unsqueeze(0), signs, rotated.unsqueeze(0), x.dtype)
        target = out[top : top + _TILE_ROWS]
        target.copy_(rotated[: len(target)].mul_(size**-0.5))
    return out.view(x.shape)


@functools.cache
def _signs(size: int, device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):
        signs = torch.ones((1, 1), device=device)
        step = torch.tensor([[1.0, 1.0], [1.0, -1.0]], device=device)
        while len(signs) < size:
            signs = torch.kron(step, signs)
        return signs
