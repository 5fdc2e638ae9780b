"""Quantisation of index keys and of latent rows (DeepSeek-V3.2 report, section 2; OCP 8-bit floating point, e4m3).

    scale  = 2^ceil(log2(max(amax, 1e-4) / 448))     one per 128 values, a power of two (ue8m0), rounded up
    stored = e4m3(clamp(x / scale, -448, 448))       round to nearest even; 448 is the largest e4m3 value
    read   = stored * scale                          with any scale, power of two or not

A power of two divides exactly, so the only rounding is e4m3's own, and vendor kernels that read scales as exponents
lose nothing on them. Rounded up, so that the largest value never saturates.

Latent rows [R, width] per `cache.layouts`: `bf16_1152` and `fp32_2304` are casts; `fp8_656` holds 512 e4m3 values with
four such scales and the rope part in bf16; `fp8_576` divides all 576 values by one `kv_scale` and saturates at 448.

Values that are not numbers: NaN stays NaN and touches no other row. In a scaled block, inf or NaN forces the largest
scale, 2^120: inf is stored as 448 and reads back as inf, and the finite values beside it mostly flush to 0. Without a
block scale (`fp8_576`) inf saturates like any large value: it reads back as 448 * kv_scale.
"""

from __future__ import annotations

import math

import torch

from sglang_dsa_plugin import support
from sglang_dsa_plugin.cache.layouts import (
    FP8,
    FP8_MAX,
    INDEX_DIM,
    LATENT_DIM,
    LATENT_LAYOUTS,
    QUANT_BLOCK,
    ROPE_DIM,
    LatentLayout,
)
from sglang_dsa_plugin.ops import _check


def quantize_keys(k: torch.Tensor, impl: str | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Index keys [R, 128] (bf16, f16 or f32) -> e4m3 [R, 128] and f32 scale [R].

    Raises ValueError for another shape or dtype, or an `impl` that cannot run here.
    """
    _check.tensor("quantize_keys", "k", k, (None, INDEX_DIM), _check.FLOATS)
    return support.resolve("quantize_keys", device=k.device, impl=impl)(k)


def quantize_latent(
    latent: torch.Tensor, rope: torch.Tensor, layout: str, kv_scale: float = 1.0, impl: str | None = None
) -> torch.Tensor:
    """latent [R, 512] and rope [R, 64] (bf16, f16 or f32) -> rows [R, width] of `layout`.

    kv_scale: what one stored unit is worth; only `fp8_576` uses it.
    Raises ValueError for another shape, dtype, layout or scale, or an `impl` that cannot run here.
    """
    op = "quantize_latent"
    check_layout(op, layout)
    check_kv_scale(op, kv_scale)
    _check.tensor(op, "latent", latent, (None, LATENT_DIM), _check.FLOATS)
    _check.tensor(op, "rope", rope, (latent.shape[0], ROPE_DIM), _check.FLOATS, latent.device, "latent")
    return support.resolve(op, device=latent.device, impl=impl, layout=layout)(latent, rope, layout, kv_scale)


def dequantize_latent(rows: torch.Tensor, layout: str, kv_scale: float = 1.0, impl: str | None = None) -> torch.Tensor:
    """rows [R, width] of `layout` -> f32 [R, 576]: 512 latent values, then 64 rope values.

    Raises ValueError for another shape, dtype, layout or scale, or an `impl` that cannot run here.
    """
    op = "dequantize_latent"
    check_rows(op, "rows", rows, layout)
    check_kv_scale(op, kv_scale)
    return support.resolve(op, device=rows.device, impl=impl, layout=layout)(rows, layout, kv_scale)


def check_layout(operator: str, layout: str) -> LatentLayout:
    """The `LatentLayout` of that name, or the ValueError of the contract."""
    found = LATENT_LAYOUTS.get(layout)
    if found is None:
        _check.fail(operator, "layout", "one of " + ", ".join(LATENT_LAYOUTS), layout)
    return found


def check_rows(operator: str, argument: str, rows: torch.Tensor, layout: str) -> torch.Tensor:
    """Check rows [N, width] of a latent cache; the scales inside an `fp8_656` row must lie on 4-byte bounds."""
    found = check_layout(operator, layout)
    _check.tensor(operator, argument, rows, (None, found.width), (found.dtype,))
    if layout == "fp8_656" and (rows.stride(0) % 4 or rows.data_ptr() % 4):
        _check.fail(operator, argument, "on 4-byte bounds row by row (call .clone())", rows)
    return rows


def check_kv_scale(operator: str, kv_scale: float) -> None:
    """Check that a cache-wide scale is a positive finite number."""
    if kv_scale != 1.0 and not (isinstance(kv_scale, (int, float)) and 0 < kv_scale < math.inf):
        _check.fail(operator, "kv_scale", "a positive finite number", kv_scale)


# fp64 references: from the formulas above, sharing no code with any implementation.


def reference_e4m3(x: torch.Tensor) -> torch.Tensor:
    """Round fp64 values to the nearest e4m3 value, ties to even, saturating at 448; NaN stays. fp64 in, fp64 out."""
    magnitude = x.abs().clamp(max=FP8_MAX)
    exponent = (torch.frexp(magnitude).exponent - 1).double()
    step = torch.exp2(exponent.clamp(min=-6.0) - 3)
    return torch.copysign((torch.round(magnitude / step) * step).clamp(max=FP8_MAX), x)


def reference_scale(amax: torch.Tensor) -> torch.Tensor:
    """The smallest power of two not below max(amax, 1e-4) / 448, by search; at most 2^120 (inf or NaN). fp64 [...]."""
    amax = torch.where(amax.isnan(), math.inf, amax).clamp(min=float(torch.tensor(1e-4, dtype=torch.float32)))
    scale = torch.full_like(amax, 2.0**120)
    for exponent in range(119, -25, -1):
        scale = torch.where(amax <= FP8_MAX * 2.0**exponent, 2.0**exponent, scale)
    return scale


def reference_quantize_keys(k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """fp64 reference of `quantize_keys`."""
    x = k.double()
    scale = reference_scale(x.abs().amax(dim=1))
    return reference_e4m3(x / scale[:, None]).to(FP8), scale.float()


def reference_quantize_latent(
    latent: torch.Tensor, rope: torch.Tensor, layout: str, kv_scale: float = 1.0
) -> torch.Tensor:
    """fp64 reference of `quantize_latent`."""
    spec = LATENT_LAYOUTS[layout]
    if layout == "fp8_576":
        # The stored unit is defined by the f32 quotient: the fp64 one may fall on the other side of a tie.
        divisor = torch.tensor(kv_scale, dtype=torch.float32).double()
        quotient = (torch.cat((latent.double(), rope.double()), dim=1) / divisor).float()
        return reference_e4m3(quotient.double()).to(FP8)
    if layout != "fp8_656":
        return torch.cat((latent.to(spec.dtype), rope.to(spec.dtype)), dim=1)
    blocks = latent.double().reshape(latent.shape[0], LATENT_DIM // QUANT_BLOCK, QUANT_BLOCK)
    scales = reference_scale(blocks.abs().amax(dim=2))
    stored = reference_e4m3(blocks / scales[:, :, None]).to(FP8).reshape(latent.shape)
    parts = (stored, scales.float(), rope.to(torch.bfloat16).contiguous())
    return torch.cat([part.view(torch.uint8) for part in parts], dim=1)


def reference_dequantize_latent(rows: torch.Tensor, layout: str, kv_scale: float = 1.0) -> torch.Tensor:
    """fp64 reference of `dequantize_latent`: fp64 [R, 576]."""
    if layout == "fp8_576":
        return rows.double() * kv_scale
    if layout != "fp8_656":
        return rows.double()
    nope, scales, rope = (part.contiguous() for part in rows.split((LATENT_DIM, 16, 2 * ROPE_DIM), dim=1))
    scale = scales.view(torch.float32).double().repeat_interleave(QUANT_BLOCK, dim=1)
    return torch.cat((nope.view(FP8).double() * scale, rope.view(torch.bfloat16).double()), dim=1)
