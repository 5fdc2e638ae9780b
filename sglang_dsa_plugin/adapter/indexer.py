"""The indexer module SGLang's model classes build in place of `Indexer`: parameters under the checkpoint's names,
arithmetic in indexer/token.py, scores and selection in ops.index_select.

It is a plain module, not a subclass of SGLang's: that class's constructor needs DeepGEMM on CUDA and its forward
differs by platform. `wk` and `weights_proj` stay separate everywhere, so a quantised wk and a float gate load by the
ordinary loader.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.environ import envs
from sglang.srt.layers.linear import ReplicatedLinear
from sglang.srt.layers.rotary_embedding import get_rope
from sglang.srt.model_executor.forward_context import get_attn_backend, get_token_to_kv_pool
from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph import (
    eager_on_graph,
    is_in_breakable_cuda_graph,
)
from sglang.srt.model_executor.runner_utils.forward_batch import get_forward_batch
from sglang.srt.runtime_context import get_parallel
from sglang.srt.state_capturer.indexer_topk import get_global_indexer_capturer, maybe_capture_indexer_topk
from sglang.srt.utils import add_prefix

from sglang_dsa_plugin import plan
from sglang_dsa_plugin.adapter import gate, rope_table, state
from sglang_dsa_plugin.config import KEY_NORM_EPS, DsaConfig, UnsupportedModel
from sglang_dsa_plugin.indexer.token import TokenIndexer
from sglang_dsa_plugin.ops import index_select

if TYPE_CHECKING:
    from sglang.srt.layers.quantization.base_config import QuantizationConfig
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

    from sglang_dsa_plugin.backend.metadata import StepMetadata
    from sglang_dsa_plugin.indexer.token import IndexQuery


class DsaIndexer(torch.nn.Module):
    """Keys, queries, gate and picks of one layer; replicated over tensor-parallel ranks.

    Called with keywords by the model; returns int32 [R, index_topk] positions in each row's request, ascending, -1
    after them.
    """

    def __init__(
        self,
        hidden_size: int,
        index_n_heads: int,
        index_head_dim: int,
        rope_head_dim: int,
        index_topk: int,
        q_lora_rank: int,
        max_position_embeddings: int,
        rope_theta: float,
        layer_id: int,
        scale_fmt: str | None = None,
        block_size: int = 128,
        rope_scaling: dict[str, Any] | None = None,
        is_neox_style: bool = True,
        prefix: str = "",
        quant_config: QuantizationConfig | None = None,
        alt_stream: torch.cuda.Stream | None = None,
        config: Any = None,
    ) -> None:
        """The keywords SGLang passes. Raises UnsupportedModel where they and the config disagree."""
        super().__init__()
        self.config = DsaConfig.from_hf(config)
        self.layer_id = layer_id
        self.n_heads = index_n_heads
        self.head_dim = index_head_dim
        self.index_topk = index_topk
        layout = "half" if is_neox_style else "interleaved"
        if layout != self.config.index_rope_layout:
            raise UnsupportedModel(
                f"indexer_rope_interleave: SGLang builds layer {layer_id} with {layout} rope, the config says "
                f"{self.config.index_rope_layout}; set indexer_rope_interleave in config.json"
            )
        dtype = torch.get_default_dtype()
        state.set_model_dtype(dtype)
        self.wq_b = ReplicatedLinear(
            q_lora_rank,
            index_n_heads * index_head_dim,
            bias=False,
            quant_config=quant_config,
            prefix=add_prefix("wq_b", prefix),
        )
        self.wk = ReplicatedLinear(
            hidden_size, index_head_dim, bias=False, quant_config=quant_config, prefix=add_prefix("wk", prefix)
        )
        self.weights_proj = ReplicatedLinear(
            hidden_size,
            index_n_heads,
            bias=False,
            # Checkpoints keep the gate unquantised; a float32 model keeps all of its digits.
            params_dtype=torch.float32 if dtype == torch.float32 else torch.bfloat16,
            prefix=add_prefix("weights_proj", prefix),
        )
        norm = torch.nn.RMSNorm if self.config.key_norm == "rms" else torch.nn.LayerNorm
        self.k_norm = norm(index_head_dim, eps=KEY_NORM_EPS, dtype=torch.float32)
        self.rotary_emb = get_rope(
            rope_head_dim,
            rotary_dim=rope_head_dim,
            max_position=max_position_embeddings,
            base=rope_theta,
            rope_scaling=rope_scaling,
            is_neox_style=is_neox_style,
        )
        forced = state.kernel_flags().forced_index(self.weights_proj.weight.device.type)
        self._impl_decode = plan.implementation_for("index_select_paged", forced)
        self._impl_prefill = plan.implementation_for(plan.INDEX_PREFILL, forced)
        self.token = TokenIndexer(
            index_n_heads,
            layout,
            rope_table.float_table(self.rotary_emb),
            state.index_key_dtype(),
            plan.forced_impl("index_keys_store"),
            plan.forced_impl("index_queries"),
            plan.forced_impl("index_front"),
        )
        # A buffer, so that SGLang keeps it over a pause in which the memory of weights is given away.
        self.register_buffer("rope_rows", self.token.cos_sin, persistent=False)

    def reserve_positions(self, positions: int) -> None:
        """Have rope for so many positions: a context can be longer than the config's. Before any graph is captured."""
        self.rope_rows = rope_table.float_table(self.rotary_emb, positions)
        self.token = dataclasses.replace(self.token, cos_sin=self.rope_rows)

    def forward(
        self,
        x: torch.Tensor,
        q_lora: torch.Tensor,
        positions: torch.Tensor,
        forward_batch: ForwardBatch,
        layer_id: int,
        return_indices: bool = True,
        use_cuda_graph: bool = True,
    ) -> torch.Tensor | None:
        """Store the keys of x [R,hidden] in every case; picks from q_lora [R,q_lora_rank] (normed) unless
        return_indices is False. A step on the masked path gets its picks in any case, in its metadata: SGLang takes it
        for one that needs none.
        """
        step = get_attn_backend().get_indexer_metadata(layer_id, forward_batch)
        whole = step is not None and step.store_slots is not None
        if is_in_breakable_cuda_graph() and not whole and not forward_batch.forward_mode.is_decode():
            return self._in_graph(x, q_lora, positions, layer_id, return_indices)
        if step is None:
            # An idle data-parallel rank has no rows in any cache; its shape still takes part in the collectives that
            # follow.
            picks = x.new_full((x.shape[0], self.index_topk), -1, dtype=torch.int32) if return_indices else None
            return maybe_capture_indexer_topk(layer_id, self._same_on_all_ranks(picks))
        # Rows past those of the step are padding for collectives between ranks: neither stored nor picked for.
        padding = x.shape[0] - step.rows
        slots = step.store_slots if whole else forward_batch.out_cache_loc
        if padding > 0:
            x, q_lora, positions, slots = (part[: step.rows] for part in (x, q_lora, positions, slots))
        masked = step.decision.path == "masked"
        picked = return_indices or masked or get_global_indexer_capturer() is not None
        picks = self._store_and_pick(
            step,
            slots,
            self.wk(x)[0],
            positions,
            layer_id,
            (lambda: (self.wq_b(q_lora)[0], self._head_weights(x))) if picked else None,
            forward_batch.forward_mode.is_decode() or step.decision.path == "whole_scored",
        )
        if picks is None:
            return None
        if padding > 0:
            whole = torch.nn.functional.pad(picks, (0, 0, 0, padding), value=-1)
            step.picks_moved(picks, whole[: step.rows])
            picks = whole
        picks = maybe_capture_indexer_topk(layer_id, self._same_on_all_ranks(picks))
        if masked:
            step.picks = picks
        return picks if return_indices else None

    def _in_graph(
        self, x: torch.Tensor, q_lora: torch.Tensor, positions: torch.Tensor, layer_id: int, return_indices: bool
    ) -> torch.Tensor | None:
        """`forward` in a breakable prefill graph, whose rows are padded: projections and the memory of the picks belong
        to its segments, the rest runs between them at each replay, on the real rows.
        """
        rows = x.shape[0] if return_indices else 0
        picks = x.new_full((rows, self.index_topk), -1, dtype=torch.int32)
        self._between_segments(self.wk(x)[0], self.wq_b(q_lora)[0], self._head_weights(x), positions, layer_id, picks)
        return maybe_capture_indexer_topk(layer_id, picks) if return_indices else None

    @eager_on_graph
    def _between_segments(
        self,
        key: torch.Tensor,
        query: torch.Tensor,
        weights: torch.Tensor,
        positions: torch.Tensor,
        layer_id: int,
        picks: torch.Tensor,
    ) -> None:
        """Keys to the cache and picks [R or 0,k] of the step that is planned now. The tensors are the graph's, as the
        arguments of its recording; everything about the batch is asked for here.
        """
        forward_batch = get_forward_batch()
        step = get_attn_backend().get_indexer_metadata(layer_id, forward_batch)
        rows = step.rows
        found = self._store_and_pick(
            step,
            forward_batch.out_cache_loc[:rows],
            key[:rows],
            positions[:rows],
            layer_id,
            (lambda: (query[:rows], weights[:rows])) if len(picks) else None,
            decode=False,
        )
        if found is not None:
            picks[:rows].copy_(self._same_on_all_ranks(found))
            step.picks_moved(found, picks[:rows])

    def _store_and_pick(
        self,
        step: StepMetadata,
        slots: torch.Tensor,
        key: torch.Tensor,
        positions: torch.Tensor,
        layer_id: int,
        project: Callable[[], tuple[torch.Tensor, torch.Tensor]] | None,
        decode: bool,
    ) -> torch.Tensor | None:
        """Store the projected keys [R,128] at `slots`; picks [R,k] where there is `project`, which gives the projected
        queries [R,H*128] and the gate [R,H] if scores are needed. decode: the step has one row a request.
        """
        pool = get_token_to_kv_pool()
        pages = pool.index_pages.buffer[layer_id - pool.start_layer]
        positions = positions.to(torch.int64)
        keys = (pages, slots, key, self.k_norm)
        if project is None:
            self.token.store_keys(*keys, positions)
            return None
        picks = step.every_token(self.index_topk)
        if picks is not None:
            self.token.store_keys(*keys, positions)
            return picks
        if pages.is_cuda:
            query = self.token.keys_and_queries(*keys, *project(), positions, step.lengths, self.index_topk)
        else:
            self.token.store_keys(*keys, positions)
            query = self.token.queries(*project(), positions)
        return self._select(query, step, pages, decode)

    def _select(self, query: IndexQuery, step: StepMetadata, keys: torch.Tensor, decode: bool) -> torch.Tensor:
        """Picks by score; keys: index pages of the layer; decode: the step has one row a request."""
        impl = self._impl_decode if decode else self._impl_prefill
        plan = step.index_plan(keys, self.index_topk, self.n_heads, impl) if decode and keys.is_cuda else None
        # On a GPU slots cost no launch of their own; they must be those of the picks that attention gets.
        slots = None
        if keys.is_cuda and not _picks_of_rank_0():
            slots = torch.empty((step.rows, self.index_topk), dtype=torch.int32, device=keys.device)
        picks = index_select.paged(
            query.q,
            keys,
            query.gate,
            step.lengths,
            step.page_table,
            step.row_to_request,
            self.index_topk,
            init_tokens=self.config.index_init_tokens,
            local_tokens=self.config.index_local_tokens,
            slots_out=slots,
            plan=plan,
            impl=impl,
        )
        if slots is not None:
            step.keep_slots(picks, slots)
        return picks

    def _head_weights(self, x: torch.Tensor) -> torch.Tensor:
        return gate.head_weights(self.weights_proj, x)

    def _same_on_all_ranks(self, picks: torch.Tensor | None) -> torch.Tensor | None:
        """With SGLANG_DSA_TOPK_BROADCAST every attention-TP rank takes rank 0's picks, as in the built-in."""
        if picks is not None and _picks_of_rank_0():
            get_parallel().attn_tp_group.broadcast(picks, src=0)
        return picks


def _picks_of_rank_0() -> bool:
    """Whether all attention-TP ranks take the picks of one of them."""
    return envs.SGLANG_DSA_TOPK_BROADCAST.get() and get_parallel().attn_tp_group.world_size > 1
