"""Storing latent rows in Triton: one launch, a program per row; see ops/latent_rows.py."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_dsa_plugin.cache.layouts import FP8, LATENT_DIM, QUANT_BLOCK, ROPE_DIM

from . import index_tables, pdl
from .e4m3 import encode, has_cvt, inverse_of, scale_bits, scale_of
from .pdl import let_next_start, wait_for_earlier

_SCALES = LATENT_DIM // QUANT_BLOCK
_SCALES_AT = LATENT_DIM // 4
_ROPE_AT = (LATENT_DIM + 4 * _SCALES) // 2


@triton.jit(do_not_specialize=["count"])
def store_kernel(
    latent,
    rope,
    slots,
    rows,
    scales,
    turned,
    latent_stride,
    rope_stride,
    rows_stride,
    scales_stride,
    turned_stride,
    count,
    kv_scale,
    KIND: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROPE: tl.constexpr,
    SCALES_AT: tl.constexpr,
    ROPE_AT: tl.constexpr,
    CVT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Row r of latent [R, 512] and rope [R, 64] into row slots[r] of the cache, if that is in [0, count).

    rows, scales, turned: views of the cache for the latent part, the scales and the rope part; strides in elements.
    KIND: "cast" (rows in a float dtype), "unit" (one kv_scale for all), "blocks" (a scale per 128 values, rope bf16).
    """
    wait_for_earlier(PDL)
    let_next_start(PDL)
    r = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + r).to(tl.int64)
    if (slot >= 0) & (slot < count):
        blocks = tl.arange(0, BLOCKS)
        columns = blocks[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
        turn = tl.arange(0, ROPE)
        x = tl.load(latent + r * latent_stride + columns).to(tl.float32)
        y = tl.load(rope + r * rope_stride + turn).to(tl.float32)
        to = rows + slot * rows_stride + columns
        to_rope = turned + slot * turned_stride + ROPE_AT + turn
        if KIND == "blocks":
            bits = scale_bits(x)
            tl.store(to, encode(x * inverse_of(bits)[:, None], CVT))
            tl.store(scales + slot * scales_stride + SCALES_AT + blocks, scale_of(bits))
            tl.store(to_rope, y.to(turned.dtype.element_ty))
        elif KIND == "unit":
            tl.store(to, encode(tl.div_rn(x, kv_scale), CVT))
            tl.store(to_rope, encode(tl.div_rn(y, kv_scale), CVT))
        else:
            tl.store(to, x.to(rows.dtype.element_ty))
            tl.store(to_rope, y.to(turned.dtype.element_ty))


def store(
    rows: torch.Tensor,
    slots: torch.Tensor,
    latent: torch.Tensor,
    rope: torch.Tensor,
    layout: str,
    kv_scale: float = 1.0,
) -> None:
    """`ops.latent_rows.store`."""
    count = rows.shape[0]
    if not slots.shape[0] or not count:
        return
    kind, values, scales, turned, rope_at = "cast", rows, rows, rows, LATENT_DIM
    if layout == "fp8_656":
        kind, rope_at = "blocks", _ROPE_AT
        scales, turned = rows.view(torch.float32), rows.view(torch.bfloat16)
    elif rows.dtype == FP8:
        kind = "unit"
        values = scales = turned = rows.view(torch.uint8)
    gpu = index_tables.gpu_of(rows.device)
    store_kernel[(slots.shape[0],)](
        latent,
        rope,
        slots,
        values,
        scales,
        turned,
        latent.stride(0),
        rope.stride(0),
        values.stride(0),
        scales.stride(0),
        turned.stride(0),
        count,
        float(kv_scale),
        KIND=kind,
        BLOCKS=_SCALES,
        BLOCK=QUANT_BLOCK,
        ROPE=ROPE_DIM,
        SCALES_AT=_SCALES_AT,
        ROPE_AT=rope_at,
        CVT=has_cvt(gpu),
        num_warps=1,
        **pdl.arguments(gpu),
    )
