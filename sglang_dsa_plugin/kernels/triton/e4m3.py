"""To e4m3 and back inside Triton kernels: scale, codes and values as ops/quant.py defines them, bit for bit.

Codes are made and stored as bytes: fp8 pointers do not compile below SM89. From there on the hardware rounds (`CVT`);
elsewhere, and in the interpreter, integer arithmetic gives the same codes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .index_tables import Gpu


def has_cvt(gpu: Gpu) -> bool:
    """Whether the device rounds to e4m3 in hardware: the `CVT` of `encode`."""
    return gpu.kind == "cuda" and gpu.sm >= 89


@triton.jit
def scale_bits(x):
    """f32 [n, 128] -> int32 [n], the bits of each row's scale, the smallest power of two >= max(amax, 1e-4) / 448.

    The maximum is taken over bit patterns, where inf is above every number and NaN above inf, so that either forces the
    largest scale, 2^120. How the sum finds the power of two is told in torch_impl/quant.py.
    """
    amax = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    amax = tl.minimum(tl.maximum(amax, 0x38D1B717), 0x7F800000)
    return (amax + (0x1FFFFF - (8 << 23))) & 0x7F800000


@triton.jit
def scale_of(bits):
    """The scale whose bits `scale_bits` gave, f32."""
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def inverse_of(bits):
    """1 / scale, f32: exact, so that multiplying by it is dividing by the scale."""
    return (0x7F000000 - bits).to(tl.float32, bitcast=True)


@triton.jit
def encode(x, CVT: tl.constexpr):
    """f32 -> e4m3 codes as u8: nearest, ties to even, saturating at 448; NaN becomes NaN."""
    if CVT:
        codes = x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        bits = x.to(tl.int32, bitcast=True)
        size = bits & 0x7FFFFFFF
        least = tl.minimum(size, 0x43E00000)  # 448
        # Three bits of mantissa stay of f32's 23, and the exponent's bias falls from 127 to 7.
        normal = ((least + 0x7FFFF + ((least >> 20) & 1)) >> 20) - (120 << 3)
        # Below 2^-6 codes are 2^-9 apart, as f32 numbers are from 2^14 on: the sum rounds.
        below = (least.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
        code = tl.where(least < 0x3C800000, below, normal)
        code = tl.where(size > 0x7F800000, 0x7F, code)
        codes = (code | ((bits >> 24) & 0x80)).to(tl.uint8)
    return codes


@triton.jit
def half_of_e4m3(codes):
    """uint8 e4m3 codes -> f16, 2^-8 times their value, exact; NaN codes become NaN.

    e4m3's bits moved up by 7 are the f16 bits of that number (the exponent biases are 7 and 15), subnormals included.
    """
    wide = codes.to(tl.uint16)
    bits = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
    return tl.where((wide & 0x7F) == 0x7F, 0x7E00, bits).to(tl.uint16).to(tl.float16, bitcast=True)


@triton.jit
def decode(codes):
    """uint8 e4m3 codes -> f32, exact; NaN codes become NaN."""
    return half_of_e4m3(codes).to(tl.float32) * 256.0
