"""The lightning indexer, token by token: from projections to index keys, index queries and a gate.

    key[s]    = rotate?(rope(norm(wk x[s])))                        one 128-vector per token
    query[t]  = rotate?(rope(wq_b q_latent[t]))                      H 128-vectors, q_latent after its own norm
    gate[t,h] = (weights_proj x[t])[h] * H^-1/2 * 128^-1/2            times the query's fp8 scale where there is one
    score     = sum_h gate[t,h] * relu(query[t,h] . key[s])           ops.index_scores

rope turns the first 64 values in the layout of the config (half-split in DeepSeek-V3.2, interleaved in GLM-5;
DeepSeek-V3.2-Exp inference code before 2025-11 had it wrong, sglang#13495). norm is LayerNorm (RMSNorm for some
models) in float32 with an epsilon of its own, 1e-6. The gate stays float32: rounding it to bf16 makes ties
(sglang#13459). Rotation is on both sides or on neither.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang_dsa_plugin.cache.layouts import FP8, INDEX_DIM, ROPE_DIM
from sglang_dsa_plugin.ops import hadamard, quant, rope


@dataclass(frozen=True)
class IndexQuery:
    """What scoring needs of R rows: q [R,H,128] in the keys' dtype and gate f32 [R,H] with every scale folded in."""

    q: torch.Tensor
    gate: torch.Tensor


@dataclass(frozen=True)
class IndexKey:
    """Keys of R tokens as they are cached: k [R,128], scale f32 [R] (None unless fp8)."""

    k: torch.Tensor
    scale: torch.Tensor | None


@dataclass(frozen=True)
class TokenIndexer:
    """The arithmetic between the projections and the index cache.

    heads: index heads H.  rope_layout: "half" or "interleaved".  cos_sin: f32 [max positions, 64].  key_dtype: fp8
    e4m3 or the model's dtype; fp8 keys and queries are rotated and quantised, others are neither.
    """

    heads: int
    rope_layout: str
    cos_sin: torch.Tensor
    key_dtype: torch.dtype

    @property
    def quantised(self) -> bool:
        return self.key_dtype == FP8

    def keys(self, projected: torch.Tensor, norm: torch.nn.Module, positions: torch.Tensor) -> IndexKey:
        """Index keys from wk's output [R,128]: norm in float32, rope, rotation and quantisation for fp8."""
        key = norm(projected.float())
        key = self._turn(key, positions)
        if self.quantised:
            return IndexKey(*quant.quantize_keys(key))
        return IndexKey(key.to(self.key_dtype), None)

    def queries(self, projected: torch.Tensor, weights: torch.Tensor, positions: torch.Tensor) -> IndexQuery:
        """Index queries from wq_b's output [R, H*128] and the head weights f32 [R,H]."""
        rows = projected.shape[0]
        query = self._turn(projected.view(rows, self.heads, INDEX_DIM).float(), positions)
        gate = weights.float() * (self.heads**-0.5 * INDEX_DIM**-0.5)
        if not self.quantised:
            return IndexQuery(query.to(self.key_dtype), gate)
        values, scale = quant.quantize_keys(query.view(rows * self.heads, INDEX_DIM))
        return IndexQuery(values.view(rows, self.heads, INDEX_DIM), gate * scale.view(rows, self.heads))

    def _turn(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Rope on the first 64 values, then the rotation where keys are fp8; x [R,...,128] float32."""
        turned = rope.apply(x[..., :ROPE_DIM], positions, self.cos_sin, self.rope_layout)
        x = torch.cat([turned, x[..., ROPE_DIM:]], dim=-1)
        return hadamard.rotate(x) if self.quantised else x
