"""Quantisation in torch, any device: no branch on values, so no host synchronisation."""

from __future__ import annotations

import torch

from sglang_dsa_plugin.cache.layouts import FP8, FP8_MAX, LATENT_DIM, LATENT_LAYOUTS, QUANT_BLOCK, ROPE_DIM, ROW_DIM

_SCALES = LATENT_DIM // QUANT_BLOCK
_ROPE_AT = LATENT_DIM + 4 * _SCALES
SMALLEST_AMAX = 1e-4
_CPU_CHUNK_ROWS = 2048
# Sign, then 14 bits without the copy of the sign that widening an int8 leaves in bit 14.
_HALF_BITS = ~0x4000
# Exponent of f32, all of it set for infinity.
EXPONENT_BITS = 0x7F800000
# Added to the bits of a largest value, it leaves its scale in the exponent (power_of_two_scale).
TO_SCALE = 0x1FFFFF - (8 << 23)


def power_of_two_scale(amax: torch.Tensor) -> torch.Tensor:
    """f32 amax [...] -> the smallest power of two not below max(amax, 1e-4) / 448.

    Done on the bits, where it is exact: 448 = 1.75 * 2^8, so amax = m * 2^e needs 2^(e - 8), and one more when
    m > 1.75, that is when its mantissa exceeds 0x600000 and carries.
    """
    bits = amax.clamp_min(SMALLEST_AMAX).view(torch.int32).clamp_max_(EXPONENT_BITS)
    return bits.add_(TO_SCALE).bitwise_and_(EXPONENT_BITS).view(torch.float32)


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
        blocks = latent.float().reshape(latent.shape[0], _SCALES, QUANT_BLOCK)
        scale = power_of_two_scale(blocks.abs().amax(dim=-1))
        nope.copy_(_to_fp8(blocks / scale.unsqueeze(-1)).view(nope.shape))
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


def dequantize_latent(
    rows: torch.Tensor, layout: str, kv_scale: float = 1.0, out: torch.Tensor | None = None
) -> torch.Tensor:
    """`ops.quant.dequantize_latent`; out: f32 [R, 576] to write to."""
    if out is None:
        out = torch.empty(rows.shape[0], ROW_DIM, dtype=torch.float32, device=rows.device)
    if rows.dtype.itemsize > 1:
        return out.copy_(rows)
    # In chunks on a CPU, so that what lies between bytes and floats stays in cache.
    step = _CPU_CHUNK_ROWS if rows.device.type == "cpu" else max(1, rows.shape[0])
    for at in range(0, rows.shape[0], step):
        part, to = rows[at : at + step], out[at : at + step]
        if layout == "fp8_576":
            torch.mul(widen_e4m3(part), kv_scale, out=to)
            continue
        nope, scales, turn = split_656(part)
        shape = (part.shape[0], _SCALES, QUANT_BLOCK)
        torch.mul(widen_e4m3(nope).view(shape), scales.unsqueeze(-1), out=to[:, :LATENT_DIM].view(shape))
        to[:, LATENT_DIM:].copy_(turn)
    return out


def widen_e4m3(x: torch.Tensor) -> torch.Tensor:
    """e4m3 [...] -> f32 [...], exact.

    On a CPU torch converts one value at a time. The bits of an e4m3 value, moved to where float16 has them, are that
    value times 2^-8 (the exponent biases are 7 and 15), subnormals included, and float16 widens in vectors.
    """
    if x.device.type != "cpu":
        return x.float()
    signed = x.view(torch.int8)
    halves = signed.to(torch.int16).bitwise_left_shift_(7).bitwise_and_(_HALF_BITS).view(torch.float16)
    out = halves.float().mul_(256.0)
    # The two NaN codes, 0x7f and 0xff, lie where float16 has numbers.
    if x.numel() and (int(signed.amax()) == 0x7F or int(x.view(torch.uint8).amax()) == 0xFF):
        out.masked_fill_(signed.bitwise_and(0x7F) == 0x7F, float("nan"))
    return out


def split_656(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Views into u8 rows [R, 656]: e4m3 [R, 512], f32 scales [R, 4], bf16 rope [R, 64]."""
    return (
        rows[:, :LATENT_DIM].view(FP8),
        rows[:, LATENT_DIM:_ROPE_AT].view(torch.float32),
        rows[:, _ROPE_AT : _ROPE_AT + 2 * ROPE_DIM].view(torch.bfloat16),
    )


def _to_fp8(x: torch.Tensor) -> torch.Tensor:
    # Not every version of torch saturates in the cast; elsewhere values past 464 become NaN.
    return x.clamp_(-FP8_MAX, FP8_MAX).to(FP8)
