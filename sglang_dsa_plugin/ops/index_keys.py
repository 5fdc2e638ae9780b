"""Index keys from wk's output to their place in the page, in one operator so that a device can do it in one launch.

    y      = norm(projected[r])              LayerNorm with weight and bias, or RMSNorm with weight; its own eps
    y[:64] = rope(y[:64], positions[r])      ops.rope
    y      = rotate(y)                       ops.hadamard; fp8 pages only
    page   <- quantize_keys(y)               ops.quant; or y in the pages' dtype, without rotation and scale
    at slots[r]                              ops.key_pages

All of it in float32. The norm's epsilon is the indexer's own, 1e-6 in DeepSeek-V3.2, not that of the model's norms.
"""

from __future__ import annotations

import math

import torch

from sglang_dsa_plugin import support
from sglang_dsa_plugin.cache.layouts import INDEX_DIM, PAGE_SIZE, ROPE_DIM
from sglang_dsa_plugin.ops import _check, hadamard, key_pages, quant, rope


def store(
    pages: torch.Tensor,
    slots: torch.Tensor,
    projected: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    layout: str,
    impl: str | None = None,
) -> None:
    """Write the keys of projected [R, 128] (bf16, f16 or f32; rows may be strided) to `slots` [R] of `pages`, in place.

    pages: u8 [P, 8448], or [P, 64, 128] of the keys' dtype.  weight, bias: f32 [128]; without a bias the norm is
    RMSNorm.  eps: not negative.  positions [R], cos_sin f32 [max, 64] and layout as in ops.rope. A slot of -1 writes
    nothing; slots written by one call must differ from each other.

    Raises ValueError for arguments that do not fit each other, or on a CPU for a slot out of range. On a GPU such a
    slot writes nothing, and a position outside the table is an error of the caller.
    """
    check_store("index_keys.store", pages, slots, projected, weight, bias, eps, positions, cos_sin, layout)
    run = support.resolve("index_keys_store", device=pages.device, impl=impl)
    run(pages, slots, projected, weight, bias, eps, positions, cos_sin, layout)


def check_store(
    op: str,
    pages: torch.Tensor,
    slots: torch.Tensor,
    projected: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    layout: str,
) -> None:
    """Raises ValueError in the name of operator `op` where arguments of `store` do not fit each other."""
    key_pages.check_pages(op, pages)
    device = pages.device
    _check.index_tensor(op, "slots", slots, (None,), device)
    _check.tensor(op, "projected", projected, (slots.shape[0], INDEX_DIM), _check.FLOATS, device)
    _check.tensor(op, "weight", weight, (INDEX_DIM,), (torch.float32,), device)
    if bias is not None:
        _check.tensor(op, "bias", bias, (INDEX_DIM,), (torch.float32,), device)
    if not (isinstance(eps, (int, float)) and 0 <= eps < math.inf):
        _check.fail(op, "eps", "a finite number, not negative", eps)
    _check.index_tensor(op, "positions", positions, (slots.shape[0],), device)
    _check.tensor(op, "cos_sin", cos_sin, (None, ROPE_DIM), (torch.float32,), device)
    _check.one_of(op, "layout", layout, rope.LAYOUTS)
    key_pages.check_slots(op, "slots", slots, pages.shape[0] * PAGE_SIZE)


def reference_keys(
    projected: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    layout: str,
    rotated: bool,
) -> torch.Tensor:
    """The keys before they are stored: float64 [R, 128]."""
    x = projected.double()
    if bias is not None:
        x = x - x.mean(dim=1, keepdim=True)
    x = x / (x.pow(2).mean(dim=1, keepdim=True) + eps).sqrt() * weight.double()
    if bias is not None:
        x = x + bias.double()
    x = torch.cat((rope.reference(x[:, :ROPE_DIM], positions, cos_sin, layout), x[:, ROPE_DIM:]), dim=1)
    return hadamard.reference(x) if rotated else x


def reference_store(
    pages: torch.Tensor,
    slots: torch.Tensor,
    projected: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    layout: str,
) -> None:
    """Reference of `store`."""
    fp8 = pages.dtype == torch.uint8
    keys = reference_keys(projected, weight, bias, eps, positions, cos_sin, layout, fp8)
    stored = quant.reference_quantize_keys(keys) if fp8 else (keys.to(pages.dtype), None)
    key_pages.reference_store(pages, slots, *stored)
