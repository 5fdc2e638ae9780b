"""What the Hopper kernels for more than 32 heads share: softmax and output where heads are the left side of a product
(`sparse_mla_hopper_wide`, `sparse_mla_hopper_wide_fp8`).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# Triton 3.6 has it under another name.
barrier = getattr(gl, "barrier", None) or gl.thread_barrier


@gluon.jit
def softmax_step(s, valid, scale_log2, m):
    """One tile of the running softmax over axis 1: s f32 [H, 64] -> (weights p, new max m [H], factor [H] of what was
    summed so far). A tile without valid picks leaves m at -inf.
    """
    s = gl.where(gl.expand_dims(valid, 0), s * scale_log2, float("-inf"))
    m_new = gl.maximum(m, gl.max(s, axis=1))
    lift = gl.where(m_new == float("-inf"), 0.0, m_new)
    p = gl.exp2(s - gl.expand_dims(lift, 1))
    return p, m_new, gl.exp2(m - lift)


@gluon.jit
def store_columns(acc, weight, out_ptr, where, strides, keep, FIRST: gl.constexpr, PARTIAL, SPREAD: gl.constexpr):
    """acc [H, WIDTH] * weight -> columns FIRST .. FIRST + WIDTH of the output, or of the partial result. SPREAD: they
    are in the order of `sparse_mla_hopper_codes.spread`.

    Straight from the accumulators' layout: four lanes write 32 consecutive bytes of a partial result.
    """
    row, split, splits, tile, heads = where
    HEADS: gl.constexpr = acc.shape[0]
    OUT: gl.constexpr = acc.type.layout
    out = acc * gl.expand_dims(weight, 1)
    head = tile * HEADS + gl.arange(0, HEADS, layout=gl.SliceLayout(1, OUT))
    at = row * strides[0] + head.to(gl.int64) * strides[1]
    if PARTIAL:
        at = ((row * splits + split) * heads + head) * 512
    column = gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, OUT))
    if SPREAD:
        column = (column & 7) + ((column >> 6) << 3) + (((column >> 3) & 7) << 4)
    keep = gl.expand_dims((head < heads) & keep, 1)
    at = out_ptr + gl.expand_dims(at, 1) + gl.expand_dims(FIRST + column, 0)
    gl.store(at, out.to(out_ptr.dtype.element_ty), mask=keep)
