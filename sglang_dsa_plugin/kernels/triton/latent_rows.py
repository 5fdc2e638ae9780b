"""Storing and reading latent rows in Triton: one launch each, a few rows a program; see ops/latent_rows.py."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from sglang_dsa_plugin.cache.layouts import FP8, LATENT_DIM, QUANT_BLOCK, ROPE_DIM

from . import index_tables, pdl
from .e4m3 import decode, encode, has_cvt, inverse_of, scale_bits, scale_of
from .pdl import let_next_start, wait_for_earlier

ROWS = 4  # of a program, a warp each: with one, starting 8192 programs took longer than moving their bytes
_SCALES = LATENT_DIM // QUANT_BLOCK
_SCALES_AT = LATENT_DIM // 4
_ROPE_AT = (LATENT_DIM + 4 * _SCALES) // 2


@triton.jit
def _rows_of(slots, tokens, count, ROWS: tl.constexpr, EACH: tl.constexpr):
    """Rows of this program, each EACH times, their slots, and whether such a row, and such a slot, is there."""
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS * EACH) // EACH
    real = r < tokens
    slot = tl.load(slots + r, mask=real, other=-1).to(tl.int64)
    return r, slot, real, (slot >= 0) & (slot < count)


@triton.jit(do_not_specialize=["tokens", "count"])
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
    tokens,
    count,
    kv_scale,
    KIND: tl.constexpr,
    ROWS: tl.constexpr,
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

    Nothing is read back here: of codes that are stored and used in the same kernel ptxas (of Triton 3.8) took a quarter
    from registers that were not written yet (docs/tried.md).
    """
    wait_for_earlier(PDL)
    let_next_start(PDL)
    # Blocks of 128 values, those of one row one below the other.
    r, slot, real, keep = _rows_of(slots, tokens, count, ROWS, BLOCKS)
    block = tl.arange(0, ROWS * BLOCKS) % BLOCKS
    columns = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    x = tl.load(latent + r[:, None] * latent_stride + columns, mask=real[:, None], other=0.0).to(tl.float32)
    whose, rope_slot, rope_real, rope_keep = _rows_of(slots, tokens, count, ROWS, 1)
    turn = tl.arange(0, ROPE)[None, :]
    y = tl.load(rope + whose[:, None] * rope_stride + turn, mask=rope_real[:, None], other=0.0).to(tl.float32)
    if KIND == "blocks":
        bits = scale_bits(x)
        code = encode(x * inverse_of(bits)[:, None], CVT)
        code_rope = y.to(turned.dtype.element_ty)
        tl.store(scales + slot * scales_stride + SCALES_AT + block, scale_of(bits), mask=keep)
    elif KIND == "unit":
        code = encode(tl.div_rn(x, kv_scale), CVT)
        code_rope = encode(tl.div_rn(y, kv_scale), CVT)
    else:
        code = x.to(rows.dtype.element_ty)
        code_rope = y.to(turned.dtype.element_ty)
    tl.store(rows + slot[:, None] * rows_stride + columns, code, mask=keep[:, None])
    tl.store(turned + rope_slot[:, None] * turned_stride + ROPE_AT + turn, code_rope, mask=rope_keep[:, None])


@triton.jit(do_not_specialize=["tokens", "count"])
def load_kernel(
    slots,
    rows,
    scales,
    turned,
    out,
    out_rope,
    rows_stride,
    scales_stride,
    turned_stride,
    out_stride,
    out_rope_stride,
    tokens,
    count,
    kv_scale,
    KIND: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROPE: tl.constexpr,
    SCALES_AT: tl.constexpr,
    ROPE_AT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Row slots[r] of the cache, dequantised, into row r of out [R, 512] and out_rope [R, 64]; zeros where it is not in
    [0, count). The rest as in `store_kernel`.
    """
    wait_for_earlier(PDL)
    let_next_start(PDL)
    r, slot, real, keep = _rows_of(slots, tokens, count, ROWS, BLOCKS)
    block = tl.arange(0, ROWS * BLOCKS) % BLOCKS
    columns = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    x = tl.load(rows + slot[:, None] * rows_stride + columns, mask=keep[:, None], other=0)
    whose, rope_slot, rope_real, rope_keep = _rows_of(slots, tokens, count, ROWS, 1)
    turn = tl.arange(0, ROPE)[None, :]
    y = tl.load(turned + rope_slot[:, None] * turned_stride + ROPE_AT + turn, mask=rope_keep[:, None], other=0)
    if KIND == "blocks":
        x = decode(x) * tl.load(scales + slot * scales_stride + SCALES_AT + block, mask=keep, other=0.0)[:, None]
    elif KIND == "unit":
        x, y = decode(x) * kv_scale, decode(y) * kv_scale
    tl.store(out + r[:, None] * out_stride + columns, x.to(out.dtype.element_ty), mask=real[:, None])
    to = out_rope + whose[:, None] * out_rope_stride + turn
    tl.store(to, y.to(out_rope.dtype.element_ty), mask=rope_real[:, None])


def _views(
    rows: torch.Tensor, layout: str
) -> tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor], tuple[int, int, int], dict[str, Any]]:
    """(latent part, scales, rope part) of the cache, their row strides, and the constants that say what they are."""
    kind, parts, rope_at = "cast", (rows, rows, rows), LATENT_DIM
    if layout == "fp8_656":
        kind, rope_at = "blocks", _ROPE_AT
        parts = rows, rows.view(torch.float32), rows.view(torch.bfloat16)
    elif rows.dtype == FP8:
        kind, parts = "unit", (rows.view(torch.uint8),) * 3
    constants = {"KIND": kind, "ROWS": ROWS, "BLOCKS": _SCALES, "BLOCK": QUANT_BLOCK, "ROPE": ROPE_DIM}
    constants |= {"SCALES_AT": _SCALES_AT, "ROPE_AT": rope_at, "num_warps": ROWS}
    return parts, tuple(part.stride(0) for part in parts), constants


def store(
    rows: torch.Tensor,
    slots: torch.Tensor,
    latent: torch.Tensor,
    rope: torch.Tensor,
    layout: str,
    kv_scale: float = 1.0,
) -> None:
    """`ops.latent_rows.store`."""
    tokens, count = slots.shape[0], rows.shape[0]
    if not tokens or not count:
        return
    parts, strides, constants = _views(rows, layout)
    gpu = index_tables.gpu_of(rows.device)
    store_kernel[(triton.cdiv(tokens, ROWS),)](
        latent,
        rope,
        slots,
        *parts,
        latent.stride(0),
        rope.stride(0),
        *strides,
        tokens,
        count,
        float(kv_scale),
        CVT=has_cvt(gpu),
        **constants,
        **pdl.arguments(gpu),
    )


def load(
    rows: torch.Tensor, slots: torch.Tensor, layout: str, kv_scale: float, latent: torch.Tensor, rope: torch.Tensor
) -> None:
    """`ops.latent_rows.load_parts` into latent [R, 512] and rope [R, 64]."""
    tokens = slots.shape[0]
    if not tokens:
        return
    parts, strides, constants = _views(rows, layout)
    gpu = index_tables.gpu_of(rows.device)
    load_kernel[(triton.cdiv(tokens, ROWS),)](
        slots,
        *parts,
        latent,
        rope,
        *strides,
        latent.stride(0),
        rope.stride(0),
        tokens,
        rows.shape[0],
        float(kv_scale),
        **constants,
        **pdl.arguments(gpu),
    )
