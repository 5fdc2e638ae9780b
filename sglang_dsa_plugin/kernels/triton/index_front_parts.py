"""What index keys and index queries have in common on their way from projections: parts of a vector, rope, rotation.

A program holds 16 vectors of 128, each in three parts: the first values of the pairs that rope turns, the second ones,
and the rest, so that no value has to move between threads. The Hadamard rotation is a product with the matrix of signs
on the matrix unit, part by part: an f32 value is the sum of three bf16 values, 8 bits of it each, and a sign times any
of them is exact.

A vector depends on its own input alone, not on how many come with it: tiles have one size whatever the number of rows,
sums run in one order, and multiply and add are not fused.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def part_columns(HALF: tl.constexpr, DIM: tl.constexpr, ROPE: tl.constexpr):
    """Where a vector's parts are: the first and the second values of the 32 pairs that rope turns, and the rest."""
    pair, rest = tl.arange(0, ROPE // 2), ROPE + tl.arange(0, DIM - ROPE)
    if HALF:
        first, second = pair, pair + ROPE // 2
    else:
        first, second = 2 * pair, 2 * pair + 1
    return first, second, rest


@triton.jit
def load_rows(start, valid, columns):
    """f32 [n, columns] of the vectors at pointers start [n]; 0 where not valid."""
    return tl.load(start[:, None] + columns[None, :], mask=valid[:, None], other=0.0).to(tl.float32)


@triton.jit
def load_cos_sin(cos_sin, cos_sin_stride, positions, max_position, valid, ROPE: tl.constexpr):
    """(cos, sin) of positions [n], f32 [n, 32] each. A position outside the table is not read; it has zeros."""
    inside = (valid & (positions >= 0) & (positions < max_position))[:, None]
    at = cos_sin + positions[:, None] * cos_sin_stride + tl.arange(0, ROPE // 2)[None, :]
    return tl.load(at, mask=inside, other=0.0), tl.load(at + ROPE // 2, mask=inside, other=0.0)


@triton.jit
def signs_of(rows, DIM: tl.constexpr):
    """Rows of the matrix (-1)^popcount(i & j), bf16 [rows, 128]. 0x6996 holds the parities of 0 .. 15."""
    both = rows[:, None] & tl.arange(0, DIM)[None, :]
    odd = (0x6996 >> ((both ^ (both >> 4)) & 15)) & 1
    return (0x3F80 | odd << 15).to(tl.uint16).to(tl.bfloat16, bitcast=True)  # 1 with a sign


@triton.jit
def upper_of(x):
    """x without its lower 16 bits: what bf16 holds of it, cut off, since rounding up could overflow."""
    return (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)


@triton.jit
def in_three(x):
    """f32 as a sum of three bf16 values; infinities have the first alone."""
    high = upper_of(x)
    rest = tl.where((x.to(tl.int32, bitcast=True) & 0x7FFFFFFF) == 0x7F800000, 0.0, x - high)
    middle = upper_of(rest)
    return high.to(tl.bfloat16), middle.to(tl.bfloat16), (rest - middle).to(tl.bfloat16)


@triton.jit
def rotate(a, b, rest, signs_a, signs_b, signs_rest, REST_IS_BF16: tl.constexpr, NORM: tl.constexpr):
    """The vectors with parts a, b and rest times the matrix of signs, scaled by NORM after the sum, f32 [n, 128]: each
    part times its rows of the matrix. The small terms are added first.
    """
    a_high, a_middle, a_low = in_three(a)
    b_high, b_middle, b_low = in_three(b)
    total = tl.dot(a_low, signs_a)
    total = tl.dot(b_low, signs_b, total)
    if not REST_IS_BF16:
        rest_high, rest_middle, rest_low = in_three(rest)
        total = tl.dot(rest_low, signs_rest, total)
    total = tl.dot(a_middle, signs_a, total)
    total = tl.dot(b_middle, signs_b, total)
    if not REST_IS_BF16:
        total = tl.dot(rest_middle, signs_rest, total)
    else:
        rest_high = rest.to(tl.bfloat16)
    total = tl.dot(a_high, signs_a, total)
    total = tl.dot(b_high, signs_b, total)
    total = tl.dot(rest_high, signs_rest, total)
    return total * NORM
