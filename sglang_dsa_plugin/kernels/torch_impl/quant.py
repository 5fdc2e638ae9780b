"""Quantisation in torch, any device: no branch on values, so no host synchronisation."""

from __future__ import annotations

import torch

from sglang_dsa_plugin.cache.layouts import FP8, FP8_MAX, LATENT_DIM, LATENT_LAYOUTS, QUANT_BLOCK, ROPE_DIM, ROW_DIM

_SCALES = LATENT_DIM // QUANT_BLOCK
_ROPE_AT = LATENT_DIM + 4 * _SCALES
_SMALLEST_AMAX = 1e-4
_INF_BITS = 0x7F800000


def power_of_two_scale(amax: torch.Tensor) -> torch.Tensor:
    """f32 amax [...] -> the smallest power of two not below max(amax, 1e-4) / 448.

    Done on the bits, where it is exact: 448 = 1.75 * 2^8, so amax = m * 2^e needs 2^(e - 8), and one more when
    m > 1.75, that is when its mantissa exceeds 0x600000 and carries.
    """
    bits = amax.clamp_min(_SMALLEST_AMAX).view(torch.int32).clamp_max(_INF_BITS)
    return (bits.add_(0x1FFFFF).bitwise_right_shift_(23).sub_(8).bitwise_left_shift_(23)).view(torch.float32)


def quantize_keys(k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`ops.quant.quantize_keys`."""
    x = k.float()
    scale = power_of_two_scale(x.abs().amax(dim=-1))
    return _to_fp8(x / scale.unsqueeze(-1)), scale


def quantize_latent(latent: torch.Tensor, rope: torch.Tensor, layout: str, kv_scale: float = 1.0) -> torch.Tensor:
    """`ops.quant.quantize_latent`."""
    spec = LATENT_LAYOUTS[layout]
    rows = torch.empty(latent.shape[0], spec.width, dtype=spec.dtype, device=latent.device)
    if layout == "fp8_656":
        nope, scales, turn = split_656(rows)
        blocks = latent.float().unflatten(-1, (_SCALES, QUANT_BLOCK))
        scale = power_of_two_scale(blocks.abs().amax(dim=-1))
        nope.copy_(_to_fp8(blocks / scale.unsqueeze(-1)).flatten(-2))
        scales.copy_(scale)
        turn.copy_(rope)
    elif layout == "fp8_576":
        # A tensor, because CUDA multiplies by the reciprocal of a plain number, which is not the rounded quotient.
        divisor = torch.full((), kv_scale, dtype=torch.float32, device=rows.device)
        rows[:, :LATENT_DIM].copy_(_to_fp8(latent.float() / divisor))
        rows[:, LATENT_DIM:].copy_(_to_fp8(rope.float() / divisor))
    else:
        rows[:, :LATENT_DIM].copy_(latent)
        rows[:, LATENT_DIM:].copy_(rope)
    return rows


def dequantize_latent(rows: torch.Tensor, layout: str, kv_scale: float = 1.0) -> torch.Tensor:
    """`ops.quant.dequantize_latent`."""
    if layout == "fp8_656":
        nope, scales, turn = split_656(rows)
        out = torch.empty(rows.shape[0], ROW_DIM, dtype=torch.float32, device=rows.device)
        blocks = out[:, :LATENT_DIM].unflatten(-1, (_SCALES, QUANT_BLOCK))
        blocks.copy_(nope.unflatten(-1, (_SCALES, QUANT_BLOCK)))
        blocks.mul_(scales.unsqueeze(-1))
        out[:, LATENT_DIM:].copy_(turn)
        return out
    if layout == "fp8_576":
        return rows.float().mul_(kv_scale)
    return rows.to(torch.float32, copy=True)


def split_656(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Views into u8 rows [R, 656]: e4m3 [R, 512], f32 scales [R, 4], bf16 rope [R, 64]."""
    return (
        rows[:, :LATENT_DIM].view(FP8),
        rows[:, LATENT_DIM:_ROPE_AT].view(torch.float32),
        rows[:, _ROPE_AT : _ROPE_AT + 2 * ROPE_DIM].view(torch.bfloat16),
    )


def _to_fp8(x: torch.Tensor) -> torch.Tensor:
    # The cast alone turns values past 464 into NaN.
    return x.clamp_(-FP8_MAX, FP8_MAX).to(FP8)
