"""Latent rows: store (quantising), load (dequantising) and move single tokens.

    rows [N, width] of `layout` (`cache.layouts`); slot s is row s

`store` skips slots of -1, `load` gives zeros for them, `move` skips a pair that has -1 on either side and behaves as if
all sources were read first. Any other slot outside [0, N) is the caller's error: on a CPU it raises ValueError; on a
GPU, where looking would stop the stream, it is treated like -1. Slots written by one call must differ from each other.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from sglang_dsa_plugin import support
from sglang_dsa_plugin.cache.layouts import LATENT_DIM, LATENT_LAYOUTS, ROPE_DIM, ROW_DIM
from sglang_dsa_plugin.ops import _check, quant
from sglang_dsa_plugin.ops.key_pages import check_slots


def store(
    rows: torch.Tensor,
    slots: torch.Tensor,
    latent: torch.Tensor,
    rope: torch.Tensor,
    layout: str,
    kv_scale: float = 1.0,
    impl: str | None = None,
) -> None:
    """Quantise latent [R, 512] and rope [R, 64] (bf16, f16 or f32) into rows[slots[R]], in place.

    Raises ValueError for arguments that do not fit each other, or on a CPU for a slot out of range.
    """
    op = "latent_rows.store"
    quant.check_rows(op, "rows", rows, layout)
    quant.check_kv_scale(op, kv_scale)
    _check.index_tensor(op, "slots", slots, (None,), rows.device)
    _check.tensor(op, "latent", latent, (slots.shape[0], LATENT_DIM), _check.FLOATS, rows.device)
    _check.tensor(op, "rope", rope, (slots.shape[0], ROPE_DIM), _check.FLOATS, rows.device)
    check_slots(op, "slots", slots, rows.shape[0])
    run = support.resolve("latent_rows_store", device=rows.device, impl=impl, layout=layout)
    run(rows, slots, latent, rope, layout, kv_scale)


def load(
    rows: torch.Tensor, slots: torch.Tensor, layout: str, kv_scale: float = 1.0, impl: str | None = None
) -> torch.Tensor:
    """rows[slots[R]], dequantised: f32 [R, 576], 512 latent values and then 64 rope values.

    Raises ValueError for arguments that do not fit each other, or on a CPU for a slot out of range.
    """
    run = _loader("latent_rows.load", rows, slots, layout, kv_scale, impl)
    out = torch.empty(slots.shape[0], ROW_DIM, dtype=torch.float32, device=rows.device)
    run(rows, slots, layout, kv_scale, *out.split([LATENT_DIM, ROPE_DIM], dim=1))
    return out


def load_parts(
    rows: torch.Tensor,
    slots: torch.Tensor,
    layout: str,
    dtype: torch.dtype,
    kv_scale: float = 1.0,
    impl: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same in two tensors, latents [R, 512] and ropes [R, 64], made in f32 and rounded once to float dtype `dtype`.

    Raises as `load`.
    """
    op = "latent_rows.load_parts"
    run = _loader(op, rows, slots, layout, kv_scale, impl)
    _check.one_of(op, "dtype", dtype, _check.FLOATS)
    latent, rope = (torch.empty(slots.shape[0], n, dtype=dtype, device=rows.device) for n in (LATENT_DIM, ROPE_DIM))
    run(rows, slots, layout, kv_scale, latent, rope)
    return latent, rope


def _loader(
    op: str, rows: torch.Tensor, slots: torch.Tensor, layout: str, kv_scale: float, impl: str | None
) -> Callable[..., None]:
    quant.check_rows(op, "rows", rows, layout)
    quant.check_kv_scale(op, kv_scale)
    _check.index_tensor(op, "slots", slots, (None,), rows.device)
    check_slots(op, "slots", slots, rows.shape[0])
    return support.resolve("latent_rows_load", device=rows.device, impl=impl, layout=layout)


def move(rows: torch.Tensor, src: torch.Tensor, dst: torch.Tensor, impl: str | None = None) -> None:
    """Copy row src[i] to row dst[i] for every i, in place, bytes unchanged; src and dst [R] may overlap.

    Raises ValueError for arguments that do not fit each other, or on a CPU for a slot out of range.
    """
    op = "latent_rows.move"
    kinds = {(spec.width, spec.dtype) for spec in LATENT_LAYOUTS.values()}
    if not isinstance(rows, torch.Tensor) or rows.dim() != 2 or (rows.shape[1], rows.dtype) not in kinds:
        _check.fail(op, "rows", "[N, width] of one of " + ", ".join(LATENT_LAYOUTS), rows)
    _check.index_tensor(op, "src", src, (None,), rows.device)
    _check.index_tensor(op, "dst", dst, (src.shape[0],), rows.device)
    check_slots(op, "src", src, rows.shape[0])
    check_slots(op, "dst", dst, rows.shape[0])
    support.resolve("latent_rows_move", device=rows.device, impl=impl)(rows, src, dst)


# References, through the fp64 codec of `ops.quant`; rows are written one at a time.


def reference_store(
    rows: torch.Tensor,
    slots: torch.Tensor,
    latent: torch.Tensor,
    rope: torch.Tensor,
    layout: str,
    kv_scale: float = 1.0,
) -> None:
    """Reference of `store`."""
    encoded = quant.reference_quantize_latent(latent, rope, layout, kv_scale)
    for i, slot in enumerate(slots.tolist()):
        if slot >= 0:
            rows[slot] = encoded[i]


def reference_load(rows: torch.Tensor, slots: torch.Tensor, layout: str, kv_scale: float = 1.0) -> torch.Tensor:
    """Reference of `load`: fp64 [R, 576]."""
    out = torch.zeros(slots.shape[0], ROW_DIM, dtype=torch.float64)
    some = slots >= 0
    out[some] = quant.reference_dequantize_latent(rows[slots[some].long()], layout, kv_scale)
    return out


def reference_move(rows: torch.Tensor, src: torch.Tensor, dst: torch.Tensor) -> None:
    """Reference of `move`."""
    before = rows.clone()
    for s, d in zip(src.tolist(), dst.tolist()):
        if s >= 0 and d >= 0:
            rows[d] = before[s]
