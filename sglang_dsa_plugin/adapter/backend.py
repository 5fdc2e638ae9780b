"""The attention backend SGLang sees, in place of its `DeepseekSparseAttnBackend`.

It keeps what the rest of SGLang reads from that class: `use_mha`, the two pools, `forward_metadata`,
`max_context_len`. No built-in DSA class is in its MRO. Decode is planned in backend/metadata.py, prefill in
adapter/prefill.py; attention runs in backend/core.py.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.runtime_context import get_exec, get_parallel

from sglang_dsa_plugin import plan, settings
from sglang_dsa_plugin.adapter import prefill, preload, report, state
from sglang_dsa_plugin.adapter.cpu_threads import StepThreads
from sglang_dsa_plugin.adapter.indexer import DsaIndexer
from sglang_dsa_plugin.adapter.pool import DsaPool
from sglang_dsa_plugin.adapter.prefill import write_location
from sglang_dsa_plugin.adapter.whole_prefill import WholePrefills
from sglang_dsa_plugin.backend import core, dense_fallback, metadata
from sglang_dsa_plugin.cache.layouts import LATENT_DIM, PAGE_SIZE, ROPE_DIM
from sglang_dsa_plugin.config import DsaConfig

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
    from sglang.srt.model_executor.model_runner import ModelRunner

logger = logging.getLogger(__name__)


class DsaBackend(AttentionBackend):
    """Sparse attention over the indexer's picks; prefill on expanded keys and values where that is cheaper."""

    # None keeps rope in the model for every row layout: with e4m3 here and a backend named trtllm SGLang leaves it to
    # the backend.
    kv_cache_dtype = None
    needs_cpu_seq_lens = True

    def __init__(
        self,
        model_runner: ModelRunner,
        skip_prefill: bool = False,
        speculative_step_id: int = 0,
        topk: int = 0,
        speculative_num_steps: int = 0,
        seed_dsa_topk_from_draft_extend: bool = False,
    ) -> None:
        """The signature of the class it replaces; the speculative arguments are refused before this by the argument
        check.
        """
        super().__init__()
        pool = model_runner.token_to_kv_pool
        if not isinstance(pool, DsaPool):
            raise plan.Refusal(
                f"the KV pool is {type(pool).__name__}, not this package's DsaPool: another platform plugin or "
                "feature built it. "
                "Unset SGLANG_PLATFORM, or set SGLANG_DSA_PLUGIN=off to use SGLang's built-in DSA"
            )
        self.config = DsaConfig.from_hf(model_runner.model_config.hf_config)
        self.device = model_runner.device
        self.model_dtype = model_runner.dtype
        self.heads = max(1, self.config.num_heads // get_parallel().attn_tp_size)
        self.token_to_kv_pool = pool
        self.req_to_token_pool = model_runner.req_to_token_pool
        self.req_to_token = model_runner.req_to_token_pool.req_to_token
        self.max_context_len = model_runner.model_config.context_len
        for module in model_runner.model.modules():
            if isinstance(module, DsaIndexer):
                module.reserve_positions(self.max_context_len)
        self.forward_metadata: metadata.StepMetadata | None = None
        flags = state.kernel_flags()
        forced = flags.forced(pool.layout.name, str(self.device))
        self.choices = plan.operator_choices(
            str(self.device),
            pool.layout.name,
            dtype=self.model_dtype,
            heads=self.heads,
            index_heads=self.config.index_n_heads,
            topk=self.config.index_topk,
            flags=flags,
        )
        self.core = core.AttentionCore(
            pool.layout,
            impl_sparse=plan.implementation_for("sparse_mla", forced),
            impl_prefill=plan.implementation_for("sparse_mla_prefill", forced),
            impl_slots=plan.forced_impl("positions_to_slots"),
            impl_dense=plan.forced_impl("dense_mha"),
            impl_masked=plan.forced_impl("masked_mha"),
            whole_picks=plan.picks_are_whole(self.choices),
        )
        self._impl_keys = plan.forced_impl("mha_keys")
        self.threads = StepThreads(model_runner.model) if torch.device(self.device).type == "cpu" else None
        first_rank = get_parallel().tp_rank == 0
        masked = prefill.masked_prefill(self.config, self.heads, self.model_dtype, torch.device(self.device))
        self.prefill = prefill.PrefillPlanner(
            self.req_to_token,
            masked,
            plan.why_not_dense(str(self.device), self.choices),
            report.prefill_metrics(counting_rank=first_rank and get_parallel().pp_rank == 0),
            self._whole_prefills(masked.bytes_per_key()),
        )
        if torch.device(self.device).type == "cuda":
            context, requests = self.max_context_len, model_runner.req_to_token_pool.size
            preload.load_kernels(
                self.choices,
                self.config,
                pool,
                torch.device(self.device),
                context,
                self.heads,
                requests,
                self.model_dtype,
            )
        if first_rank and not model_runner.is_draft_worker:
            logger.info(report.serving_line(self, pool))

    def _whole_prefills(self, bytes_per_key: int) -> WholePrefills | None:
        """Graphs of prefills without breaks, where the setting allows them; those on expanded keys where a graph may
        hold the dense operator.
        """
        if not settings.whole_prefill():
            return None
        dense = plan.dense_graphs(str(self.device), self.choices)
        dense_tokens = dense_fallback.EXPANDED_BYTES // bytes_per_key if dense else 0
        context = min(self.max_context_len, self.req_to_token.shape[1])
        pages = -(-context // PAGE_SIZE) if settings.scored_prefill() else 0
        device = torch.device(self.device)
        return WholePrefills(self.config.index_topk, device, dense_tokens, pages, self.core.impl_slots)

    def describe_prefill(self) -> str:
        """How prefill runs, and on how many of a CPU's threads decode does, in words, for the start-up line."""
        threads = "" if self.threads is None else f"; {self.threads.describe()}"
        graphs = get_exec().graph.cuda_graph_config
        captured = "" if graphs is None or graphs.prefill.backend != "breakable" else "; small batches in CUDA graphs"
        if self.prefill.whole is not None and captured:
            captured += ", without breaks where every request fits in index_topk"
            captured += f" or there are up to {dense_fallback.SCORED_TOKENS} tokens" if self.prefill.whole.pages else ""
        return self.prefill.describe() + captured + threads

    # Planning

    @property
    def use_mha(self) -> bool:
        """Whether the current batch runs on expanded keys and values: read by SGLang's forward-method dispatch
        (attention_backend_handler.py).
        """
        return self.forward_metadata is not None and self.forward_metadata.decision.expanded

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        mode = forward_batch.forward_mode
        if self.threads is not None:
            self.threads.set(forward_batch.batch_size if mode.is_decode() else None)
        if mode.is_idle():
            self.forward_metadata = None
        elif mode.is_decode():
            self.forward_metadata = metadata.decode_step(
                self.req_to_token,
                forward_batch.req_pool_indices,
                forward_batch.seq_lens,
                int(forward_batch.seq_lens_cpu.max()),
                dense_fallback.SPARSE_DECODE,
            )
        elif _plain_prefill(mode):
            self.forward_metadata = self.prefill.plan(forward_batch)
        else:
            raise NotImplementedError(
                f"forward mode {mode.name} is not served yet: remove the --speculative-* flags (or the dLLM / PD "
                "flags), or set "
                "SGLANG_DSA_PLUGIN=off to use SGLang's built-in DSA on a GPU"
            )

    def can_run_prefill_cuda_graph(self, forward_batch: ForwardBatch) -> bool:
        """Whether SGLang may replay a prefill graph that fits: it asks once per batch. Small batches leave the GPU idle
        between launches whichever way they attend; a larger one goes where it is dense in the graph, too, or, where no
        such graphs are recorded, would be sparse anyway.
        """
        if forward_batch.global_num_tokens_cpu is not None:
            return True  # ranks whose collectives belong together have voted already, and must not part here
        if forward_batch.positions.shape[0] <= dense_fallback.GRAPH_TOKENS:
            return True
        if self.prefill.whole_graph(forward_batch) != (None, None):
            return True
        if self.prefill.whole is not None and self.prefill.whole.dense_tokens:
            return False  # larger graphs are there for what is dense in them
        return not self.prefill.decide(forward_batch).expanded

    def get_indexer_metadata(self, layer_id: int, forward_batch: ForwardBatch) -> metadata.StepMetadata | None:
        """The step's metadata for this package's indexer; None on an idle rank."""
        return self.forward_metadata

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Nothing to set up: a captured step makes its metadata inside the graph, in the graph's own memory."""

    def init_forward_metadata_out_graph(self, forward_batch: ForwardBatch, in_capture: bool = False) -> None:
        """Forget the last eager step before a capture: its tensors must not end up in a graph."""
        if in_capture:
            self.forward_metadata = None

    def init_forward_metadata_in_graph(self, forward_batch: ForwardBatch) -> None:
        """Decode metadata as part of the captured graph, from the runner's static buffers.

        The host knows no lengths at replay, so the page table is as wide as the longest context and short rows are
        found on the device.
        """
        if not forward_batch.forward_mode.is_decode():
            raise NotImplementedError(f"no CUDA graph is captured for forward mode {forward_batch.forward_mode.name}")
        self.forward_metadata = metadata.decode_step(
            self.req_to_token,
            forward_batch.req_pool_indices,
            forward_batch.seq_lens,
            min(self.max_context_len, self.req_to_token.shape[1]),
            dense_fallback.SPARSE_DECODE,
            captured=True,
        )

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Padded rows of a captured graph read one token of the padding page."""
        return 1

    # Dense and masked path: SGLang's MHA forward asks the backend to prepare q, k and v

    def prepare_prefill_qkv(
        self,
        *,
        q: torch.Tensor,
        q_pe: torch.Tensor,
        kv_a: torch.Tensor,
        k_pe: torch.Tensor,
        positions: torch.Tensor,
        layer: Any,
        forward_batch: ForwardBatch,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """`prefill.expanded_qkv` for the step that was planned last."""
        pool, step = self.token_to_kv_pool, self.forward_metadata
        return prefill.expanded_qkv(pool, step, q, q_pe, kv_a, k_pe, positions, layer, forward_batch, self._impl_keys)

    # Attention

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Prefill rows: on expanded keys when the step was planned so, else sparse. Returns [T, H*Dv] or [T, H*512]."""
        if "q_rope" not in kwargs:
            return self.core.expanded(
                q.view(-1, layer.tp_q_head_num, layer.head_dim),
                k.view(-1, layer.tp_k_head_num, layer.head_dim),
                v.view(-1, layer.tp_v_head_num, layer.v_head_dim),
                self.forward_metadata,
                layer.scaling,
            )
        return self._sparse(q, k, layer, forward_batch, save_kv_cache, prefill=True, **kwargs)

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        """One row per request, always sparse. Returns [B, H*512]."""
        return self._sparse(q, k, layer, forward_batch, save_kv_cache, prefill=False, **kwargs)

    def _sparse(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool,
        *,
        prefill: bool,
        q_rope: torch.Tensor,
        k_rope: torch.Tensor,
        topk_indices: torch.Tensor | None = None,
        attn_sink: torch.Tensor | None = None,
        **_unused: Any,
    ) -> torch.Tensor:
        if topk_indices is None:
            raise RuntimeError(
                f"layer {layer.layer_id} got no picks: it reuses those of an earlier layer and none were carried to it "
                "(two-batch overlap drops them; pipeline stages must send them)"
            )
        if save_kv_cache:
            location = write_location(self.forward_metadata, forward_batch)
            self.token_to_kv_pool.set_mla_kv_buffer(layer, location, k, k_rope)
        return self.core.sparse(
            q.view(-1, layer.tp_q_head_num, LATENT_DIM),
            q_rope.view(-1, layer.tp_q_head_num, ROPE_DIM),
            self.token_to_kv_pool.rows_of(layer.layer_id),
            topk_indices,
            self.forward_metadata,
            layer.scaling,
            sink=attn_sink,
            prefill=prefill,
        )


def _plain_prefill(mode: ForwardMode) -> bool:
    return mode.is_extend_without_speculative() and not (mode.is_dllm_extend() or mode.is_prebuilt())
