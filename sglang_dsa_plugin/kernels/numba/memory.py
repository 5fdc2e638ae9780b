"""What the kernels of this package share: tensors as flat bytes, and 8- and 16-bit floats read and written as bits."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import numpy as np
import torch

logger = logging.getLogger(__name__)

# Sums may be reordered, which lets loops over them become vectors. NaN and infinity keep their meaning.
FLOAT_RULES = {"reassoc", "contract", "nsz"}
_OPTIONS = {"nogil": True, "error_model": "numpy", "fastmath": FLOAT_RULES}
_SOURCES = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py"))))


def jit(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile at the first call, and keep the result on disk where there is a place for it.

    numba looks beside the source file, then in the user's cache directory, and raises when it may write to neither.
    What it keeps holds the code of other files' functions and the values of constants, too, but it only notices a
    change of the function's own file. So the name it is kept under has all sources here and the constants in it.
    """
    kept_under = _SOURCES.copy()
    for name, value in sorted(function.__globals__.items()):
        if isinstance(value, bool | int | float | np.generic):
            kept_under.update(f"{name}={value!r};".encode())
    function.__qualname__ += f"_{kept_under.hexdigest()[:12]}"
    try:
        return numba.njit(cache=True, **_OPTIONS)(function)
    except RuntimeError as error:
        logger.info("%s is compiled in every process: %s; set NUMBA_CACHE_DIR", function.__name__, error)
        return numba.njit(**_OPTIONS)(function)


# Exponent and mantissa of f32 that e4m3 keeps lie 20 bits up, its exponent bias is 120 lower.
_KEPT_SHIFT = 20
_BIAS = (127 - 7) << 3
_SMALLEST_NORMAL = np.float32(2.0**-6)
_SUBNORMAL_STEPS = np.float32(2.0**9)

E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()


def flat_bytes(x: torch.Tensor) -> tuple[np.ndarray[Any, np.dtype[np.uint8]], int]:
    """The bytes from x [N, width]'s first to its last, without a copy, and the bytes from one row to the next.

    x's last dimension is contiguous; rows may be strided.
    """
    rows, width = x.shape
    size, step = x.element_size(), x.stride(0)
    flat = torch.as_strided(x, (step * (rows - 1) + width if rows else 0,), (1,))
    return flat.view(torch.uint8).numpy(), step * size


@jit
def widen_bf16(bits: Any, out: Any) -> None:
    """bf16 as uint16 [n] -> f32 [n], where out is the f32 array's int32 view."""
    for i in range(bits.shape[0]):
        out[i] = np.int32(bits[i]) << 16


@jit
def encode_e4m3(x: Any, bits: Any, out: Any) -> None:
    """f32 [n] within +-448, with its int32 view, -> e4m3 bytes [n]; to the nearest, ties to even, NaN stays NaN."""
    for i in range(x.shape[0]):
        sign = (bits[i] >> 24) & 0x80
        size = bits[i] & 0x7FFFFFFF
        normal = ((size + 0x7FFFF + ((size >> _KEPT_SHIFT) & 1)) >> _KEPT_SHIFT) - _BIAS
        small = np.int32(np.rint(abs(x[i]) * _SUBNORMAL_STEPS)) if abs(x[i]) < _SMALLEST_NORMAL else 0
        code = small if abs(x[i]) < _SMALLEST_NORMAL else normal
        out[i] = np.uint8(sign | (0x7F if size > 0x7F800000 else code))
