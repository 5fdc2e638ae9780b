"""Reading latent rows inside Triton kernels: how a layout looks to a kernel, and the e4m3 decode.

A kernel sees a row as bf16 values that it can feed to the matrix unit as they are, plus factors that it applies to
scores and weights instead: the four block scales of `fp8_656` and the `kv_scale` of `fp8_576`. e4m3 fits into bf16
exactly, so nothing is rounded on the way, whatever the scales are.

fp8 rows are read as 32-bit words of four codes. Besides being the widest portable access, this keeps fp8 pointers out
of the kernels: they do not compile below SM89.
"""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl

from sglang_dsa_plugin.cache.layouts import LATENT_DIM, QUANT_BLOCK

LAYOUTS = ("bf16_1152", "fp8_656", "fp8_576")


@dataclasses.dataclass(frozen=True)
class RowViews:
    """One latent cache as a kernel reads it: views of the same memory.

    nope: bf16 [N, *] or int32 words [N, *] of four codes each; the latent part starts at column 0.
    rope: the same or, for `fp8_656`, a bf16 view; the rope part starts at `rope_column` of it.
    scales: f32 [N, *], one scale per 128 values from `scales_column`; used by `fp8_656` only.
    unit: bytes that the row stride is counted in: 16 where every row starts on a 16-byte bound. A kernel that
        multiplies by it knows how wide its copies may be; from a stride in elements the compiler would have to guess.
    stride: from row to row, in units.
    """

    nope: torch.Tensor
    rope: torch.Tensor
    scales: torch.Tensor
    rope_column: int
    scales_column: int
    nope_words: bool
    rope_words: bool
    has_scales: bool
    unit: int
    stride: int


def row_views(kv_rows: torch.Tensor, layout: str) -> RowViews:
    """kv_rows [N, width] of one of LAYOUTS -> its views.

    Raises ValueError for fp8 rows that do not start on 4-byte bounds.
    """
    row_bytes = kv_rows.stride(0) * kv_rows.element_size()
    finest = 2 if layout == "bf16_1152" else 4
    unit = next((u for u in (16, finest) if row_bytes % u == 0 and kv_rows.data_ptr() % u == 0), 0)
    if not unit:
        raise ValueError(
            f"sparse_mla: kv_rows must be on 4-byte bounds row by row (call .clone()), got a row stride of "
            f"{row_bytes} bytes at address {kv_rows.data_ptr():#x}"
        )
    stride = row_bytes // unit
    if layout == "bf16_1152":
        return RowViews(kv_rows, kv_rows, kv_rows, LATENT_DIM, 0, False, False, False, unit, stride)
    words = kv_rows.view(torch.uint8).view(torch.int32)
    if layout == "fp8_576":
        return RowViews(words, words, words, LATENT_DIM // 4, 0, True, True, False, unit, stride)
    scales_column = LATENT_DIM // 4
    rope_column = 2 * (scales_column + LATENT_DIM // QUANT_BLOCK)
    rope, scales = words.view(torch.bfloat16), words.view(torch.float32)
    return RowViews(words, rope, scales, rope_column, scales_column, True, False, True, unit, stride)


@triton.jit
def _decode_ops(words, SHIFT: tl.constexpr):
    """The code at bits SHIFT .. SHIFT + 7 of each word -> bf16."""
    code = (words.to(tl.uint32, bitcast=True) >> SHIFT) & 0xFF
    magnitude = code & 0x7F
    # Exponent and mantissa move to f32's places; 2^120 makes up for the exponent biases (127 against 7), and turns
    # e4m3's subnormals into normals.
    value = (((code & 0x80) << 24) | (magnitude << 20)).to(tl.float32, bitcast=True) * 1.329227995784916e36
    return tl.where(magnitude == 0x7F, float("nan"), value).to(tl.bfloat16)


@triton.jit
def decode_words(words, DECODE: tl.constexpr):
    """int32 [n, w] of four e4m3 codes a word, the first in the low byte -> bf16 [n, 4 * w], exact; NaN stays NaN.

    DECODE: "cvt" converts in hardware (SM89 and newer), "bits" with packed integer instructions (any NVIDIA GPU from
    SM80), "ops" with plain Triton operations (the interpreter).
    """
    if DECODE == "cvt":
        b0, b1, b2, b3 = tl.inline_asm_elementwise(
            """
            {
            .reg .b16 a, b, h0, h1;
            .reg .b32 h;
            .reg .f32 x;
            mov.b32 {a, b}, $4;
            cvt.rn.f16x2.e4m3x2 h, a;
            mov.b32 {h0, h1}, h;
            cvt.f32.f16 x, h0;
            cvt.rn.bf16.f32 $0, x;
            cvt.f32.f16 x, h1;
            cvt.rn.bf16.f32 $1, x;
            cvt.rn.f16x2.e4m3x2 h, b;
            mov.b32 {h0, h1}, h;
            cvt.f32.f16 x, h0;
            cvt.rn.bf16.f32 $2, x;
            cvt.f32.f16 x, h1;
            cvt.rn.bf16.f32 $3, x;
            }
            """,
            "=h,=h,=h,=h,r",
            [words],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=1,
        )
    elif DECODE == "bits":
        # Two codes a register, as in `_decode_ops` but in bf16 from the start: after the shift a code of all ones gets
        # a NaN's exponent (the sum carries into bit 11 for it alone), and an fma by 2^120 finishes.
        b0, b1, b2, b3 = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 v, s, t, k, z;
            mov.b32 k, 0x7b807b80;
            mov.b32 z, 0x80008000;
            prmt.b32 v, $4, 0, 0x1404;
            and.b32 s, v, 0x80008000;
            shr.b32 v, v, 4;
            and.b32 v, v, 0x07f007f0;
            or.b32 s, s, v;
            add.u32 t, v, 0x00100010;
            and.b32 t, t, 0x08000800;
            mul.lo.u32 t, t, 15;
            or.b32 s, s, t;
            fma.rn.bf16x2 s, s, k, z;
            mov.b32 {$0, $1}, s;
            prmt.b32 v, $4, 0, 0x3424;
            and.b32 s, v, 0x80008000;
            shr.b32 v, v, 4;
            and.b32 v, v, 0x07f007f0;
            or.b32 s, s, v;
            add.u32 t, v, 0x00100010;
            and.b32 t, t, 0x08000800;
            mul.lo.u32 t, t, 15;
            or.b32 s, s, t;
            fma.rn.bf16x2 s, s, k, z;
            mov.b32 {$2, $3}, s;
            }
            """,
            "=h,=h,=h,=h,r",
            [words],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=1,
        )
    else:
        b0 = _decode_ops(words, 0)
        b1 = _decode_ops(words, 8)
        b2 = _decode_ops(words, 16)
        b3 = _decode_ops(words, 24)
    pairs = tl.join(tl.join(b0, b2), tl.join(b1, b3))
    return tl.reshape(pairs, [words.shape[0], 4 * words.shape[1]])


@triton.jit
def load_values(pointer, offsets, first, WIDTH: tl.constexpr, valid, WORDS: tl.constexpr, DECODE: tl.constexpr):
    """`WIDTH` values of each row as bf16 [rows, WIDTH]; rows that are not valid are not read and give 0.

    offsets: int64 [rows], the start of each row in elements of the view.  first: the column, in the same elements.
    """
    if WORDS:
        columns = first + tl.arange(0, WIDTH // 4)
        words = tl.load(pointer + offsets[:, None] + columns[None, :], mask=valid[:, None], other=0)
        values = decode_words(words, DECODE)
    else:
        columns = first + tl.arange(0, WIDTH)
        values = tl.load(pointer + offsets[:, None] + columns[None, :], mask=valid[:, None], other=0)
    return values
