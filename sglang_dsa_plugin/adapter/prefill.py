"""Prefill batches as SGLang hands them in: their plan, and their keys and values where they run on expanded ones.

What a batch costs and which way it goes is decided in backend/dense_fallback.py and backend/masked_prefill.py.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.environ import envs
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph.context import is_in_breakable_cuda_graph
from sglang.srt.runtime_context import get_flags, get_parallel

from sglang_dsa_plugin import settings
from sglang_dsa_plugin.adapter.pool import DsaPool
from sglang_dsa_plugin.adapter.report import NoMetrics, PrefillMetrics
from sglang_dsa_plugin.adapter.whole_prefill import WholePrefills
from sglang_dsa_plugin.backend import dense_fallback, metadata
from sglang_dsa_plugin.backend.masked_prefill import MaskedPrefill
from sglang_dsa_plugin.cache.layouts import LATENT_DIM, ROPE_DIM
from sglang_dsa_plugin.config import DsaConfig
from sglang_dsa_plugin.ops import mha_keys

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

logger = logging.getLogger(__name__)

# The graphs without breaks that are planned by rows.
_WHOLE = {one.path: one for one in (dense_fallback.WHOLE_GRAPH, dense_fallback.WHOLE_SCORED)}


class PrefillPlanner:
    """Plans and counts prefill batches. why_not_dense: why this server never runs one on expanded keys, or None. whole:
    its prefill graphs without breaks, if it has them.
    """

    def __init__(
        self,
        req_to_token: torch.Tensor,
        masked: MaskedPrefill,
        why_not_dense: str | None,
        metrics: PrefillMetrics | NoMetrics,
        whole: WholePrefills | None = None,
    ) -> None:
        self.req_to_token = req_to_token
        self.masked = masked
        self.why_not_dense = why_not_dense
        self.metrics = metrics
        self.whole = whole

    def describe(self) -> str:
        """How prefill runs, in words, for the start-up line."""
        if self.why_not_dense is not None:
            return f"prefill sparse at every length: {self.why_not_dense}"
        return f"prefill dense up to the threshold, past it {self.masked.describe()}"

    def decide(self, forward_batch: ForwardBatch) -> dense_fallback.Decision:
        """How a batch attends outside of a CUDA graph."""
        extend = [int(e) for e in forward_batch.extend_seq_lens_cpu]
        # Expanded keys follow the requests, so padding has no place among them.
        padded = "the batch is padded" if forward_batch.positions.shape[0] != sum(extend) else None
        return dense_fallback.decide(
            prefix=[int(p) for p in forward_batch.extend_prefix_lens_cpu],
            extend=extend,
            threshold=envs.SGLANG_DSA_PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD.get(),
            capacity=min(
                forward_batch.get_max_chunk_capacity(),
                dense_fallback.EXPANDED_BYTES // self.masked.bytes_per_key(),
            ),
            masked=self.masked,
            allowed=padded or self.why_not_dense,
        )

    def whole_graph(self, forward_batch: ForwardBatch) -> tuple[dense_fallback.Path, int] | tuple[None, None]:
        """Path and rows of the graph without breaks that a batch may be a replay of, if there is one."""
        if self.whole is None:
            return None, None
        prefix = [int(p) for p in forward_batch.extend_prefix_lens_cpu]
        extend = [int(e) for e in forward_batch.extend_seq_lens_cpu]
        return self.whole.choose(
            tokens=sum(extend),
            longest=max((p + e for p, e in zip(prefix, extend)), default=0),
            cached=sum(prefix),
            requests=len(extend),
            threshold=envs.SGLANG_DSA_PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD.get(),
        )

    def plan(self, forward_batch: ForwardBatch) -> metadata.StepMetadata:
        """The step of a batch. In a prefill CUDA graph, and where SGLang pads a batch for its collectives, the rows are
        the real ones: SGLang cuts what attention gets to them.
        """
        prefix = [int(p) for p in forward_batch.extend_prefix_lens_cpu]
        extend = [int(e) for e in forward_batch.extend_seq_lens_cpu]
        rows, new_tokens = forward_batch.positions.shape[0], sum(extend)
        longest = max((p + e for p, e in zip(prefix, extend)), default=0)
        recording = get_flags().dp.capturing_prefill_graph
        if self.whole is not None:
            self.whole.forget()
        if is_in_breakable_cuda_graph():
            path, size = (None, None) if recording else self.whole_graph(forward_batch)
            if self.whole is not None and size is not None and path == "whole_dense":
                self.metrics.count(dense_fallback.WHOLE_DENSE, new_tokens)
                return self.whole.fill_requests(
                    forward_batch.extend_seq_lens, forward_batch.out_cache_loc[:new_tokens], size
                )
            rows, decision = new_tokens, dense_fallback.IN_GRAPH
            if size is not None:
                rows, decision = size, _WHOLE[path]
        else:
            decision = self.decide(forward_batch)
            real = forward_batch.global_num_token_non_padded_cpu
            rows = real if real is not None and 0 < real < rows else rows
        step = metadata.extend_step(
            self.req_to_token,
            forward_batch.req_pool_indices,
            forward_batch.extend_prefix_lens,
            forward_batch.extend_seq_lens,
            rows,
            longest,
            decision,
            new_tokens=new_tokens,
            cached_tokens=sum(prefix),
        )
        if not recording:  # else SGLang's own batches of nothing, one or more a graph
            self.metrics.count(decision, new_tokens if decision.path in _WHOLE else rows)
        logger.debug("prefill of %d rows: %s (%s)", rows, decision.path, decision.reason)
        if self.whole is None or decision.path not in _WHOLE:
            return step
        return self.whole.fill_rows(step, forward_batch.out_cache_loc[:new_tokens])


def masked_prefill(config: DsaConfig, heads: int, dtype: torch.dtype, device: torch.device) -> MaskedPrefill:
    """What judges the masked path, and why it is ruled out for this server if it is. heads: of one rank."""
    asked = settings.masked_prefill()
    why = None
    if device.type != "cpu":
        why = "masked prefill is for CPUs"
    elif asked == "off":
        why = "SGLANG_DSA_PLUGIN_MASKED_PREFILL=off"
    elif get_parallel().pp_size > 1 and any(map(config.layer_reuses_picks, range(config.num_layers))):
        # A stage that starts with such a layer gets picks from the one before, but only on the sparse path; all stages
        # must decide alike.
        why = "layers that reuse picks are spread over pipeline stages"
    return MaskedPrefill(
        heads=heads,
        nope=config.qk_nope_head_dim,
        value=config.v_head_dim,
        topk=config.index_topk,
        itemsize=dtype.itemsize,
        ruled_out=why,
        always=asked == "on",
    )


def write_location(step: metadata.StepMetadata, forward_batch: ForwardBatch) -> KVWriteLoc:
    """Where the batch's new rows go: held slots in a graph of a whole prefill."""
    location = KVWriteLoc.for_batch(forward_batch)
    return location if step.store_slots is None else KVWriteLoc(step.store_slots, physical=location.physical)


def expanded_qkv(
    pool: DsaPool,
    step: metadata.StepMetadata,
    q: torch.Tensor,
    q_pe: torch.Tensor,
    kv_a: torch.Tensor,
    k_pe: torch.Tensor,
    positions: torch.Tensor,
    layer: Any,
    forward_batch: ForwardBatch,
    impl_keys: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rope, store the new rows, read those that are cached before them, expand keys and values.

    q [T,H,nope+rope] and its rope part q_pe, kv_a [T,512] normed latent, k_pe [T,1,64] before rope. Returns q, and k, v
    over prefix and new tokens in request order. All row layouts go through the pool, so fp8 rows need no path of their
    own; where the pool rounds, the new rows are taken as stored, so that an answer does not depend on what was cached
    before and which path a batch took. impl_keys: implementation of mha_keys by name.
    """
    if layer.rotary_emb is not None:
        q_pe, k_pe = layer.rotary_emb(positions, q_pe, k_pe)
        q[..., layer.qk_nope_head_dim :] = q_pe
    latent, rope = kv_a.reshape(-1, LATENT_DIM), k_pe.reshape(-1, ROPE_DIM)
    pool.set_mla_kv_buffer(layer.attn_mha, write_location(step, forward_batch), latent, rope)
    if step.key_slots is not None or pool.layout.dtype != q.dtype:
        new = forward_batch.out_cache_loc if step.store_slots is None else step.store_slots
        slots = new if step.key_slots is None else step.key_slots
        stored = pool.get_mla_kv_buffer(layer.attn_mha, slots, q.dtype)
        latent, rope = (part.squeeze(1) for part in stored)
    expanded = layer.kv_b_proj(latent.contiguous())[0]
    expanded = expanded.view(-1, layer.num_local_heads, layer.qk_nope_head_dim + layer.v_head_dim)
    k_nope, v = expanded.split([layer.qk_nope_head_dim, layer.v_head_dim], dim=-1)
    return q, mha_keys.join(k_nope, rope, impl=impl_keys), v
