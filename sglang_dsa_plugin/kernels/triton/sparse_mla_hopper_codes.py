"""fp8 rows as Hopper's matrix unit (SM90) is fed them, in f16: codes decoded and put where threads do not meet, and the
queries beside them. For `sparse_mla_hopper_fp8` and `sparse_mla_hopper_wide_fp8`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from sglang_dsa_plugin.kernels.triton.sparse_mla_hopper import q_columns

# What a weight of 1 is in f16. There is no number above it, so f16's range lies below: without it, weights lost bits
# from 2^-14 on, and 2047 picks of 2^-25 each beside a heavy one were lost whole.
WEIGHT_ONE = gl.constexpr(2.0**15)


@gluon.jit
def to_f16(codes):
    """int32 [n, w] of four e4m3 codes each -> int32 [n, 2 * w] of two f16 values each, exact; NaN stays NaN."""
    low, high = gl.inline_asm_elementwise(
        """
        {
        .reg .b16 a, b;
        mov.b32 {a, b}, $2;
        cvt.rn.f16x2.e4m3x2 $0, a;
        cvt.rn.f16x2.e4m3x2 $1, b;
        }
        """,
        "=r,=r,r",
        [codes],
        dtype=(gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )
    return gl.reshape(gl.join(low, high), [codes.shape[0], 2 * codes.shape[1]])


@gluon.jit
def spread(x):
    """Columns of x [n, w], eighths of two halves each, -> all first halves, then all second halves.

    A thread decodes 16 neighbouring codes to 32 bytes. Stored in place, eight threads would meet in half of the banks.
    Neither product minds the order of the columns, as long as q has the same, and the output is put back.
    """
    HALF: gl.constexpr = x.shape[1] // 16
    x = gl.permute(gl.reshape(x, [x.shape[0], 8, 2, HALF]), (0, 2, 1, 3))
    return gl.reshape(x, [x.shape[0], 16 * HALF])


@gluon.jit
def gathered(acc):
    """Undoes `spread` on the rows of acc [128, H]."""
    HEADS: gl.constexpr = acc.shape[1]
    return gl.reshape(gl.permute(gl.reshape(acc, [2, 8, 8, HEADS]), (1, 0, 2, 3)), [128, HEADS])


@gluon.jit
def row_max(x):
    """Largest magnitude per head: f32 [H]."""
    return gl.max(gl.abs(x.to(gl.float32)), axis=1)


@gluon.jit
def lift(largest):
    """Powers of two that bring `largest` to 2^14 .. 2^15, where f16 holds a bf16 q exactly, and back: f32 [H] each."""
    exponent = gl.maximum(largest.to(gl.int32, bitcast=True) >> 23, 15)
    up = ((268 - exponent) << 23).to(gl.float32, bitcast=True)
    down = ((exponent - 14) << 23).to(gl.float32, bitcast=True)
    return up, down


@gluon.jit
def lifted(x, up):
    return (x.to(gl.float32) * gl.expand_dims(up, 1)).to(gl.float16)


@gluon.jit
def q_to_shared(q_ptr, q_rope_ptr, row, head, heads, strides, rope_strides, COPY: gl.constexpr, HAS_SCALES):
    """q [H, 576] of a row to shared memory: four blocks of 128 columns as f16, lifted and spread, and the rope part, as
    f16 where rows have no scales; and what takes the lift back, f32 [H].
    """
    KEYS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], gl.bfloat16)
    HEADS: gl.constexpr = head.shape[0]
    q0 = q_columns(q_ptr, row, head, heads, strides[0], strides[1], 0, 128, COPY)
    q1 = q_columns(q_ptr, row, head, heads, strides[0], strides[1], 128, 128, COPY)
    q2 = q_columns(q_ptr, row, head, heads, strides[0], strides[1], 256, 128, COPY)
    q3 = q_columns(q_ptr, row, head, heads, strides[0], strides[1], 384, 128, COPY)
    qr = q_columns(q_rope_ptr, row, head, heads, rope_strides[0], rope_strides[1], 0, 64, COPY)
    largest = gl.maximum(gl.maximum(row_max(q0), row_max(q1)), gl.maximum(row_max(q2), row_max(q3)))
    if not HAS_SCALES:
        largest = gl.maximum(largest, row_max(qr))
    up, down = lift(largest)
    if not HAS_SCALES:
        qr = lifted(qr, up)
    # Separate buffers, so that the compiler sees that no store touches another one and needs no barrier between them.
    q0_shared = gl.allocate_shared_memory(gl.float16, [1, HEADS, 128], KEYS)
    q1_shared = gl.allocate_shared_memory(gl.float16, [1, HEADS, 128], KEYS)
    q2_shared = gl.allocate_shared_memory(gl.float16, [1, HEADS, 128], KEYS)
    q3_shared = gl.allocate_shared_memory(gl.float16, [1, HEADS, 128], KEYS)
    qr_shared = gl.allocate_shared_memory(qr.dtype, [1, HEADS, 64], KEYS)
    q0_shared.index(0).store(spread(lifted(q0, up)))
    q1_shared.index(0).store(spread(lifted(q1, up)))
    q2_shared.index(0).store(spread(lifted(q2, up)))
    q3_shared.index(0).store(spread(lifted(q3, up)))
    qr_shared.index(0).store(qr)
    return q0_shared, q1_shared, q2_shared, q3_shared, qr_shared, down
