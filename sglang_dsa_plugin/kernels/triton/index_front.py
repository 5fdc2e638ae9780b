"""Launches from projections to index keys in their page and to index queries with a gate: one each, or one for both
where rows are few; see ops/index_keys.py, ops/index_queries.py and ops/index_front.py for what is computed, and
index_front_parts.py for how.
"""

from __future__ import annotations

import torch
import triton

from sglang_dsa_plugin.cache.layouts import FP8, INDEX_DIM, PAGE_SIZE, ROPE_DIM

from . import index_tables, pdl
from .e4m3 import has_cvt
from .index_front_kernels import front_kernel
from .index_front_keys import keys_kernel
from .index_front_queries import queries_kernel

TILE = 16  # vectors, the least the matrix unit takes; more would change its instruction, and with it the last bit
WARPS = 4
MANY_WARPS = 2  # where programs take several tiles in turn; it changes no result, since warps share columns, not sums
_PROGRAMS_PER_PROCESSOR = 4


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
    rows, count = projected.shape[0], pages.shape[0] * PAGE_SIZE
    if not rows or not count:
        return
    fp8 = pages.dtype == torch.uint8
    scales = pages.view(torch.float32) if fp8 else pages
    keys_kernel[(triton.cdiv(rows, TILE),)](
        projected,
        weight,
        weight if bias is None else bias,
        positions,
        cos_sin,
        slots,
        pages,
        scales,
        projected.stride(0),
        cos_sin.stride(0),
        pages.stride(0),
        INDEX_DIM if fp8 else pages.stride(1),
        scales.stride(0),
        rows,
        count,
        cos_sin.shape[0],
        float(eps),
        LAYER=bias is not None,
        PAGE=PAGE_SIZE,
        num_warps=WARPS,
        **_common(projected.device, layout, fp8),
    )


def prepare_queries(
    projected: torch.Tensor,
    weights: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    layout: str,
    dtype: torch.dtype,
    lengths: torch.Tensor | None = None,
    skip: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`ops.index_queries.prepare`; where lengths [R] are given, rows not longer than skip may be left out."""
    rows, heads = weights.shape
    q, gate = _new_queries(weights, dtype)
    vectors = rows * heads
    if not vectors:
        return q, gate
    fp8 = dtype == FP8
    tiles, programs = triton.cdiv(vectors, TILE), _programs(projected.device)
    queries_kernel[(min(tiles, programs),)](
        projected,
        weights,
        positions,
        cos_sin,
        q.view(torch.uint8) if fp8 else q,
        gate,
        # Absent lengths are never read; the kernel still wants a pointer.
        positions if lengths is None else lengths,
        projected.stride(0),
        cos_sin.stride(0),
        weights.stride(0),
        vectors,
        cos_sin.shape[0],
        heads**-0.5 * INDEX_DIM**-0.5,
        skip,
        HEADS=heads,
        SKIP=lengths is not None,
        num_warps=WARPS if tiles <= programs else MANY_WARPS,
        **_common(projected.device, layout, fp8),
    )
    return q, gate


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
    """`ops.index_front.store_and_prepare`: one launch where each program has one tile, else one for keys and one for
    queries.
    """
    rows, heads = weights.shape
    vectors, count = rows * heads, pages.shape[0] * PAGE_SIZE
    tiles = triton.cdiv(vectors, TILE)
    if not vectors or not count or tiles > _programs(pages.device):
        store_keys(pages, slots, key, weight, bias, eps, positions, cos_sin, layout)
        return prepare_queries(query, weights, positions, cos_sin, layout, dtype, lengths, topk)
    q, gate = _new_queries(weights, dtype)
    fp8 = dtype == FP8
    scales = pages.view(torch.float32) if fp8 else pages
    front_kernel[(triton.cdiv(rows, TILE) + tiles,)](
        key,
        weight,
        weight if bias is None else bias,
        slots,
        pages,
        scales,
        query,
        weights,
        q.view(torch.uint8) if fp8 else q,
        gate,
        positions,
        cos_sin,
        positions if lengths is None else lengths,
        key.stride(0),
        pages.stride(0),
        INDEX_DIM if fp8 else pages.stride(1),
        scales.stride(0),
        query.stride(0),
        weights.stride(0),
        cos_sin.stride(0),
        rows,
        count,
        vectors,
        cos_sin.shape[0],
        float(eps),
        heads**-0.5 * INDEX_DIM**-0.5,
        topk,
        LAYER=bias is not None,
        HEADS=heads,
        SKIP=lengths is not None,
        PAGE=PAGE_SIZE,
        num_warps=WARPS,
        **_common(pages.device, layout, fp8),
    )
    return q, gate


def _new_queries(weights: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Uninitialised (q, gate) for weights [R, H]."""
    q = torch.empty((*weights.shape, INDEX_DIM), dtype=dtype, device=weights.device)
    return q, torch.empty(weights.shape, dtype=torch.float32, device=weights.device)


def _programs(device: torch.device) -> int:
    """Programs of queries at a time."""
    return _PROGRAMS_PER_PROCESSOR * index_tables.gpu_of(device).processors


def _common(device: torch.device, layout: str, fp8: bool) -> dict[str, object]:
    """Compile-time arguments and launch options of all kernels here."""
    gpu = index_tables.gpu_of(device)
    return {
        "HALF": layout == "half",
        "FP8_KEYS": fp8,
        "CVT": has_cvt(gpu),
        "TILE": TILE,
        "DIM": INDEX_DIM,
        "ROPE": ROPE_DIM,
        "NORM": INDEX_DIM**-0.5,
        "enable_fp_fusion": False,
        **pdl.arguments(gpu),
    }
