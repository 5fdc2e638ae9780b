"""Argument checks shared by the operators.

Every message names the operator, the argument, what was expected and what came.
"""

from __future__ import annotations

import torch


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


INDEX_DTYPES = (torch.int32, torch.int64)


def index_tensor(
    operator: str, argument: str, value: object, shape: tuple[int | None, ...], device: torch.device | None = None
) -> torch.Tensor:
    """Check an int32/int64 index tensor."""
    return tensor(operator, argument, value, shape, INDEX_DTYPES, device)


def one_of(operator: str, argument: str, value: object, allowed: tuple[object, ...]) -> None:
    """Check membership in a short list."""
    if value not in allowed:
        fail(operator, argument, "one of " + ", ".join(map(str, allowed)), value)
