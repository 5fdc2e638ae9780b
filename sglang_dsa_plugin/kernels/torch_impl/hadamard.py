"""Hadamard rotation as a butterfly of additions; see ops/hadamard.py."""

from __future__ import annotations

import torch


def rotate(x: torch.Tensor) -> torch.Tensor:
    """x [..., 128] -> [..., 128] in x's dtype, computed in fp32."""
    y = x.float()
    shape = y.shape
    size = shape[-1]
    half = 1
    # Additions only: unlike a matmul, no TF32 or bf16 switch of the process can cost precision here.
    while half < size:
        pairs = y.reshape(-1, size // (2 * half), 2, half)
        a, b = pairs[:, :, 0], pairs[:, :, 1]
        y = torch.stack((a + b, a - b), dim=2)
        half *= 2
    return (y.reshape(shape) * size**-0.5).to(x.dtype)
