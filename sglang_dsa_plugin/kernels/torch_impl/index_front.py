"""Index keys and index queries in torch: the operators they are made of, one after the other."""

from __future__ import annotations

import torch
from torch.nn import functional

from sglang_dsa_plugin.cache.layouts import FP8, INDEX_DIM, ROPE_DIM
from sglang_dsa_plugin.kernels.torch_impl import hadamard, key_pages, quant, rope

_CPU_TILE = 4096  # queries times heads at once: rope, rotation and quantisation pass over what is still in the cache


def store_keys(
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
    """`ops.index_keys.store`."""
    x = projected.float()
    if bias is None:
        x = functional.rms_norm(x, (INDEX_DIM,), weight, eps)
    else:
        x = functional.layer_norm(x, (INDEX_DIM,), weight, bias, eps)
    x = _turn(x, positions, cos_sin, layout)
    if pages.dtype == torch.uint8:
        key_pages.store(pages, slots, *quant.quantize_keys(hadamard.rotate(x)))
    else:
        key_pages.store(pages, slots, x.to(pages.dtype))


def prepare_queries(
    projected: torch.Tensor,
    weights: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    layout: str,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`ops.index_queries.prepare`."""
    rows, heads = weights.shape
    tile = max(1, _CPU_TILE // max(1, heads))
    if projected.device.type == "cpu" and rows > tile:
        q = torch.empty(rows, heads, INDEX_DIM, dtype=dtype)
        gate = torch.empty(rows, heads)
        for top in range(0, rows, tile):
            part = slice(top, top + tile)
            q[part], gate[part] = prepare_queries(
                projected[part], weights[part], positions[part], cos_sin, layout, dtype
            )
        return q, gate
    x = _turn(projected.reshape(rows, heads, INDEX_DIM).float(), positions, cos_sin, layout)
    gate = weights.float() * (heads**-0.5 * INDEX_DIM**-0.5)
    if dtype != FP8:
        return x.to(dtype), gate
    values, scale = quant.quantize_keys(hadamard.rotate(x).view(rows * heads, INDEX_DIM))
    return values.view(x.shape), gate * scale.view(rows, heads)


def store_and_prepare(
    pages: torch.Tensor,
    slots: torch.Tensor,
    key: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    query: torch.Tensor,
    weights: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    layout: str,
    dtype: torch.dtype,
    lengths: torch.Tensor | None,
    topk: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`ops.index_front.store_and_prepare`: queries of rows that keep every token are made like the others."""
    store_keys(pages, slots, key, weight, bias, eps, positions, cos_sin, layout)
    return prepare_queries(query, weights, positions, cos_sin, layout, dtype)


def _turn(x: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, layout: str) -> torch.Tensor:
    """Rope on the first 64 values of x [R, ..., 128]."""
    return torch.cat([rope.apply(x[..., :ROPE_DIM], positions, cos_sin, layout), x[..., ROPE_DIM:]], dim=-1)
