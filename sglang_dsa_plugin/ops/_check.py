"""Argument checks shared by the operators.

Every message names the operator, the argument, what was expected and what came.
"""

from __future__ import annotations

import itertools
import math

import torch

# What an operator takes where nothing is quantised.
FLOATS = (torch.bfloat16, torch.float32, torch.float16)
INDEX_DTYPES = (torch.int32, torch.int64)


def describe(value: object) -> str:
    """One line about a value for an error message."""
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)} on {value.device}"
    return repr(value)


def fail(operator: str, argument: str, expected: str, value: object) -> None:
    """Raise the ValueError of the operator contract."""
    raise ValueError(f"{operator}: {argument} must be {expected}, got {describe(value)}")


def tensor(
    operator: str,
    argument: str,
    value: object,
    shape: tuple[int | None, ...],
    dtypes: tuple[torch.dtype, ...] | None = None,
    device: torch.device | None = None,
    like: str = "the other arguments",
) -> torch.Tensor:
    """Check a tensor's rank and sizes (None: any), dtype, device and innermost contiguity; return it."""
    # The message is built only for a failure: this runs several times a layer on the decode path.
    if (
        not isinstance(value, torch.Tensor)
        or value.dim() != len(shape)
        or (dtypes is not None and value.dtype not in dtypes)
        or any(want is not None and got != want for got, want in zip(value.shape, shape))
    ):
        dims = "[" + ", ".join("*" if s is None else str(s) for s in shape) + "]"
        kinds = "" if dtypes is None else "/".join(str(d).removeprefix("torch.") for d in dtypes) + " "
        fail(operator, argument, f"a {kinds}tensor of shape {dims}", value)
    if device is not None and value.device != device:
        fail(operator, argument, f"on {device} like {like}", value)
    if value.dim() and value.shape[-1] > 1 and value.stride(-1) != 1:
        fail(operator, argument, "contiguous in its last dimension (call .contiguous())", value)
    return value


def index_tensor(
    operator: str, argument: str, value: object, shape: tuple[int | None, ...], device: torch.device | None = None
) -> torch.Tensor:
    """Check an int32/int64 index tensor."""
    return tensor(operator, argument, value, shape, INDEX_DTYPES, device)


def one_of(operator: str, argument: str, value: object, allowed: tuple[object, ...]) -> None:
    """Check membership in a short list."""
    if value not in allowed:
        fail(operator, argument, "one of " + ", ".join(map(str, allowed)), value)


def multi_head(
    operator: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    scale: float,
    out: torch.Tensor | None,
) -> None:
    """Check what attention on expanded keys and values takes: q [T, H, Dqk], k [S, H, Dqk], v [S, H, Dv], out
    [T, H, Dv] of one float dtype, cu_q and cu_k [B + 1] (on a CPU also that they rise from 0 to T and S), scale.
    """
    tensor(operator, "q", q, (None, None, None), FLOATS)
    tokens, heads, width = q.shape
    tensor(operator, "k", k, (None, heads, width), (q.dtype,), q.device, "q")
    tensor(operator, "v", v, (k.shape[0], heads, None), (q.dtype,), q.device, "q")
    index_tensor(operator, "cu_q", cu_q, (None,), q.device)
    if not cu_q.shape[0]:
        fail(operator, "cu_q", "of at least one entry, 0", cu_q)
    index_tensor(operator, "cu_k", cu_k, (cu_q.shape[0],), q.device)
    if not (isinstance(scale, (int, float)) and math.isfinite(scale)):
        fail(operator, "scale", "a finite number", scale)
    if out is not None:
        tensor(operator, "out", out, (tokens, heads, v.shape[2]), (q.dtype,), q.device, "q")
    if q.device.type == "cpu":
        _bounds(operator, "cu_q", cu_q, tokens)
        _bounds(operator, "cu_k", cu_k, k.shape[0])


def _bounds(operator: str, argument: str, cu: torch.Tensor, end: int) -> None:
    at = cu.tolist()
    if at[0] != 0 or at[-1] != end or any(a > b for a, b in itertools.pairwise(at)):
        fail(operator, argument, f"not falling, from 0 to {end}", at if len(at) < 20 else cu)
