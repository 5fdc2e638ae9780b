"""Latent rows in torch: the codec of `quant` around indexed reads and writes."""

from __future__ import annotations

import torch

from sglang_dsa_plugin.cache.layouts import FP8, LATENT_DIM
from sglang_dsa_plugin.kernels.torch_impl import quant, slot_io


def store(
    rows: torch.Tensor,
    slots: torch.Tensor,
    latent: torch.Tensor,
    rope: torch.Tensor,
    layout: str,
    kv_scale: float = 1.0,
) -> None:
    """`ops.latent_rows.store`."""
    encoded = quant.quantize_latent(latent, rope, layout, kv_scale)
    slot_io.scatter(slots, rows.shape[0], _row, ((_bytes(rows), _bytes(encoded)),))


def load(
    rows: torch.Tensor, slots: torch.Tensor, layout: str, kv_scale: float, latent: torch.Tensor, rope: torch.Tensor
) -> None:
    """`ops.latent_rows.load_parts` into latent [R, 512] and rope [R, 64]."""
    (picked,) = slot_io.gather(slots, rows.shape[0], _row, (_bytes(rows),))
    values = picked.view(rows.dtype)
    if values.dtype.itemsize == 1:
        values = quant.dequantize_latent(values, layout, kv_scale)
    latent.copy_(values[:, :LATENT_DIM])
    rope.copy_(values[:, LATENT_DIM:])


def move(rows: torch.Tensor, src: torch.Tensor, dst: torch.Tensor) -> None:
    """`ops.latent_rows.move`: the gather makes a copy, so overlap does no harm."""
    src, dst = slot_io.kept_pairs(src, dst, rows.shape[0])
    view = _bytes(rows)
    (picked,) = slot_io.gather(src, rows.shape[0], _row, (view,))
    slot_io.scatter(dst, rows.shape[0], _row, ((view, picked),))


def _bytes(rows: torch.Tensor) -> torch.Tensor:
    # Not every indexed operation exists for e4m3; bytes move the same.
    return rows.view(torch.uint8) if rows.dtype == FP8 else rows


def _row(slots: torch.Tensor) -> tuple[torch.Tensor]:
    return (slots,)
