"""The lightning indexer, token by token: from projections to index keys, index queries and a gate.

    key[s]    = rotate?(rope(norm(wk x[s])))                        one 128-vector per token
    query[t]  = rotate?(rope(wq_b q_latent[t]))                      H 128-vectors, q_latent after its own norm
    gate[t,h] = (weights_proj x[t])[h] * H^-1/2 * 128^-1/2            times the query's fp8 scale where there is one
    score     = sum_h gate[t,h] * relu(query[t,h] . key[s])           ops.index_scores

rope turns the first 64 values in the layout of the config (half-split in DeepSeek-V3.2, interleaved in GLM-5;
DeepSeek-V3.2-Exp inference code before 2025-11 had it wrong, sglang#13495). norm is LayerNorm (RMSNorm for some
models) in float32 with an epsilon of its own, 1e-6. The gate stays float32: rounding it to bf16 makes ties
(sglang#13459). Rotation leaves dot products alone and spreads outliers before fp8 rounding, so without fp8 it would be
work for nothing; on one side only it would pick the wrong tokens, so both sides ask the keys' dtype.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang_dsa_plugin.ops import index_front, index_keys, index_queries


@dataclass(frozen=True)
class IndexQuery:
    """What scoring needs of R rows: q [R,H,128] in the keys' dtype and gate f32 [R,H] with every scale folded in. Of a
    row that keeps every token they may be undefined (`TokenIndexer.keys_and_queries`).
    """

    q: torch.Tensor
    gate: torch.Tensor


@dataclass(frozen=True)
class TokenIndexer:
    """The arithmetic between the projections and the index cache.

    heads: index heads H.  rope_layout: "half" or "interleaved".  cos_sin: f32 [max positions, 64].  key_dtype: fp8
    e4m3 or the model's dtype; fp8 keys and queries are rotated and quantised, others are neither.  impl, impl_queries,
    impl_front: implementations of index_keys_store, index_queries and index_front by name, None to let the support
    table choose.
    """

    heads: int
    rope_layout: str
    cos_sin: torch.Tensor
    key_dtype: torch.dtype
    impl: str | None = None
    impl_queries: str | None = None
    impl_front: str | None = None

    def store_keys(
        self,
        pages: torch.Tensor,
        slots: torch.Tensor,
        projected: torch.Tensor,
        norm: torch.nn.Module,
        positions: torch.Tensor,
    ) -> None:
        """Keys from wk's output [R,128] into the layer's index pages at slots [R].

        norm: a LayerNorm with bias or an RMSNorm, its parameters in float32.
        """
        bias = getattr(norm, "bias", None)
        index_keys.store(
            pages,
            slots,
            projected,
            norm.weight,
            bias,
            norm.eps,
            positions,
            self.cos_sin,
            self.rope_layout,
            impl=self.impl,
        )

    def queries(self, projected: torch.Tensor, weights: torch.Tensor, positions: torch.Tensor) -> IndexQuery:
        """Index queries from wq_b's output [R, H*128] and the head weights f32 [R,H]."""
        return IndexQuery(
            *index_queries.prepare(
                projected, weights, positions, self.cos_sin, self.rope_layout, self.key_dtype, impl=self.impl_queries
            )
        )

    def keys_and_queries(
        self,
        pages: torch.Tensor,
        slots: torch.Tensor,
        key: torch.Tensor,
        norm: torch.nn.Module,
        query: torch.Tensor,
        weights: torch.Tensor,
        positions: torch.Tensor,
        lengths: torch.Tensor,
        topk: int,
    ) -> IndexQuery:
        """`store_keys` of key [R,128] and `queries` of query [R,H*128] and weights f32 [R,H] in one; a row with
        lengths[r] of at most topk need not get queries.
        """
        bias = getattr(norm, "bias", None)
        return IndexQuery(
            *index_front.store_and_prepare(
                pages,
                slots,
                key,
                norm.weight,
                bias,
                norm.eps,
                query,
                weights,
                positions,
                self.cos_sin,
                self.rope_layout,
                lengths,
                topk,
                impl=self.impl_front,
            )
        )
