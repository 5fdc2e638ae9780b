"""Lets Triton's interpreter run kernels that compute in bf16. Import before any kernel runs, with TRITON_INTERPRET=1.

The interpreter keeps bf16 as raw 16 bits: `tl.dot` multiplies those bits as integers, and a cast from f32 cuts off
instead of rounding to nearest even as every GPU does. Both are mended here.
"""

import numpy as np
import torch
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

_dot = InterpreterBuilder.create_dot
_cast = InterpreterBuilder.cast_impl


def _widened(handle):
    if handle.dtype.scalar != tl.bfloat16:
        return handle
    return TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


def _create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
    return _dot(self, _widened(a), _widened(b), d, input_precision, max_num_imprecise_acc)


def _cast_impl(self, source, kind):
    if source.dtype.scalar == tl.bfloat16 and kind.scalar == tl.float32:
        return TensorHandle(_widened(source).data, tl.float32)
    if source.dtype.scalar in (tl.float32, tl.float16) and kind.scalar == tl.bfloat16:
        values = torch.from_numpy(np.ascontiguousarray(source.data)).to(torch.bfloat16)
        return TensorHandle(values.view(torch.uint16).numpy(), tl.bfloat16)
    return _cast(self, source, kind)


InterpreterBuilder.create_dot = _create_dot
InterpreterBuilder.cast_impl = _cast_impl
