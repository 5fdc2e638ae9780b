"""`index_keys.store` and `index_queries.prepare` of one step in one call, so that a device can do both in one launch.

    page         <- the keys of `key`                                       ops.index_keys
    q, gate       = the queries and gate of `query` and `weights`           ops.index_queries; q in the keys' dtype

Equal to the two calls bit for bit, but for rows that keep every token: where `lengths` and `topk` are given, q and gate
of a row with lengths[r] <= topk are left undefined, since ops.index_select.paged makes nothing of them.
"""

from __future__ import annotations

import torch

from sglang_dsa_plugin import support
from sglang_dsa_plugin.cache.layouts import FP8
from sglang_dsa_plugin.ops import _check, index_keys, index_queries


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
    lengths: torch.Tensor | None = None,
    topk: int = 0,
    impl: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys of key [R, 128] into `pages` at slots [R], and query [R, H * 128] with weights [R, H] -> q [R, H, 128] of
    e4m3 (pages of bytes) or the pages' dtype, and gate f32 [R, H].

    weight, bias, eps: of the keys' norm.  positions [R], cos_sin f32 [max, 64] and layout serve both.  lengths: int
    [R], how many keys each row sees.
    Raises ValueError as the two operators do, and for lengths or topk that do not fit.
    """
    op = "index_front.store_and_prepare"
    index_keys.check_store(op, pages, slots, key, weight, bias, eps, positions, cos_sin, layout)
    index_queries.check_prepare(op, query, weights, positions, cos_sin, layout)
    if key.device != weights.device or key.shape[0] != weights.shape[0]:
        _check.fail(op, "weights", f"{key.shape[0]} rows on {key.device} like key", weights)
    if lengths is not None:
        _check.index_tensor(op, "lengths", lengths, (slots.shape[0],), pages.device)
    if not isinstance(topk, int) or topk < 0:
        _check.fail(op, "topk", "an int of at least 0", topk)
    run = support.resolve("index_front", device=pages.device, impl=impl)
    return run(
        pages, slots, key, weight, bias, eps, query, weights, positions, cos_sin, layout, dtype_of(pages), lengths, topk
    )


def dtype_of(pages: torch.Tensor) -> torch.dtype:
    """Of the keys in index pages."""
    return FP8 if pages.dtype == torch.uint8 else pages.dtype


def reference(
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
) -> tuple[torch.Tensor, torch.Tensor]:
    """The two references one after the other; pages in place."""
    index_keys.reference_store(pages, slots, key, weight, bias, eps, positions, cos_sin, layout)
    return index_queries.reference(query, weights, positions, cos_sin, layout, dtype_of(pages))
