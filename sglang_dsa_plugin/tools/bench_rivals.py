"""What SGLang 0.5.23's built-in DSA launches on SM 9.0, called as it calls it, with inputs that already have its form.

Each rival prepares one input set: what the built-in computes once a step (schedules, plans, cumulative lengths) is made
there and not timed; what it does in every layer (padding of heads) is part of the call. Read in SGLang's
`layers/attention/dsa_backend.py`, `dsa/dsa_indexer.py` and `dsa/dsa_topk_backend.py`. Kernel packages are imported when
a rival is prepared, so that a missing one costs its own column only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from sglang_dsa_plugin.cache.layouts import FP8, INDEX_DIM, LATENT_DIM, PAGE_SIZE

Inputs = SimpleNamespace
Call = Callable[[], Any]


class Unavailable(Exception):
    """Why a rival cannot run here, in words for the table."""


@dataclass(frozen=True)
class Rival:
    """name: kernel and package.  make: an input set -> one call; raises whatever keeps it from running."""

    name: str
    make: Callable[[Inputs], Call]

    def prepare(self, inputs: Inputs) -> Call:
        """The call for one input set. Raises Unavailable off SM 9.0 and where a package is missing or does not load."""
        if not torch.cuda.is_available():
            raise Unavailable("no CUDA device")
        sm = torch.cuda.get_device_capability()
        if sm != (9, 0):
            raise Unavailable(f"the built-in launches other kernels on SM {sm[0]}.{sm[1]}; this one is for SM 9.0")
        try:
            return self.make(inputs)
        except (ImportError, OSError) as error:
            raise Unavailable(f"{type(error).__name__}: {str(error).strip().splitlines()[0]}") from error


def _fa3_sparse(inputs: Inputs) -> Call:
    # bf16 decode: every row is a sequence of one token, its picks a page table of pages of one token.
    from sgl_kernel.flash_attn import flash_attn_with_kvcache

    latent, rope = (part.contiguous() for part in inputs.q.split([LATENT_DIM, inputs.q.shape[2] - LATENT_DIM], dim=2))
    rows = inputs.rows.unsqueeze(1)
    cu_q = torch.arange(latent.shape[0] + 1, dtype=torch.int32, device=latent.device)
    cu_k = torch.nn.functional.pad(inputs.counts.cumsum(0), (1, 0)).int()

    def attend(slots: torch.Tensor) -> torch.Tensor:
        return flash_attn_with_kvcache(
            q=rope,
            k_cache=rows[:, :, LATENT_DIM:].view(rows.shape[0], 1, 1, -1),
            v_cache=rows[:, :, :LATENT_DIM].view(rows.shape[0], 1, 1, LATENT_DIM),
            qv=latent,
            page_table=slots,
            cache_seqlens=inputs.counts,
            cu_seqlens_q=cu_q,
            cu_seqlens_k_new=cu_k,
            max_seqlen_q=1,
            softmax_scale=inputs.scale,
            causal=True,
            softcap=0.0,
            return_softmax_lse=False,
            num_splits=0,
        )

    inputs.attend = attend
    return lambda: attend(inputs.slots)


def _flash_mla_kv(inputs: Inputs) -> Call:
    # fp8 rows of 656 bytes, decode and (the default on SM 9.0) prefill: every row a request of one token.
    from flash_mla import flash_mla_with_kvcache, get_mla_decoding_metadata
    from flash_mla.flash_mla_interface import FlashMLASchedMeta

    rows, heads, width = inputs.q.shape
    padded = 64 if heads <= 64 else 128
    schedule, splits = get_mla_decoding_metadata(
        inputs.counts, padded, 1, padded, True, inputs.slots.shape[1], use_legacy=True
    )
    cache = inputs.rows.view(FP8).view(-1, PAGE_SIZE, 1, inputs.rows.shape[1])

    def attend(slots: torch.Tensor, q: torch.Tensor | None = None) -> torch.Tensor:
        query = (inputs.q if q is None else q).view(rows, 1, heads, width)
        if padded != heads:
            wide = query.new_zeros(rows, 1, padded, width)
            wide[:, :, :heads] = query
            query = wide
        out, _ = flash_mla_with_kvcache(
            query,
            cache,
            torch.empty(rows, 0, dtype=torch.int32, device=query.device),
            inputs.counts,
            LATENT_DIM,
            FlashMLASchedMeta(tile_scheduler_metadata=schedule, num_splits=splits),
            softmax_scale=inputs.scale,
            is_fp8_kvcache=True,
            indices=slots.unsqueeze(1),
            use_legacy=True,
            kv_format="V32",
        )
        return out[:, :, :heads]

    inputs.attend = attend
    return lambda: attend(inputs.slots)


def _flash_mla_sparse(inputs: Inputs) -> Call:
    # bf16 prefill.
    from flash_mla import flash_mla_sparse_fwd

    q, rows = inputs.q, inputs.rows.unsqueeze(1)
    heads = q.shape[1]

    def call() -> torch.Tensor:
        query = q
        if heads % 64:
            query = q.new_zeros(q.shape[0], 64, q.shape[2])
            query[:, :heads] = q
        picks = inputs.slots.unsqueeze(1)
        out, _, _ = flash_mla_sparse_fwd(
            query, rows, picks, inputs.scale, LATENT_DIM, None, inputs.counts, use_legacy=True, return_log2_lse=True
        )
        return out[:, :heads]

    return call


def _paged_scores(inputs: Inputs) -> Call:
    import deep_gemm

    pages = inputs.pages.view(-1, PAGE_SIZE, 1, INDEX_DIM + 4)
    lengths = inputs.lengths.view(-1, 1)
    schedule = deep_gemm.get_paged_mqa_logits_metadata(lengths, PAGE_SIZE, deep_gemm.get_num_sms())
    width = inputs.table.shape[1] * PAGE_SIZE

    def score(q: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        scores = deep_gemm.fp8_paged_mqa_logits(
            q.unsqueeze(1), pages, gate, lengths, inputs.table, schedule, width, clean_logits=False
        )
        # A single row comes back with a stride of 1, which the selection that follows refuses.
        return scores.as_strided(scores.shape, (-(-width // 256) * 256, 1)) if scores.shape[0] == 1 else scores

    inputs.score = score
    return lambda: score(inputs.q, inputs.gate)


def _ragged_scores(inputs: Inputs) -> Call:
    import deep_gemm

    def call() -> torch.Tensor:
        keys = (inputs.k, inputs.k_scale)
        return deep_gemm.fp8_mqa_logits(inputs.q, keys, inputs.gate, inputs.start, inputs.end, clean_logits=False)

    return call


def _topk_paged_v2(inputs: Inputs) -> Call:
    # Decode: selection and translation to slots in one launch, routed by a plan of the step's lengths.
    from sglang.kernels.ops.attention.dsv4.topk import plan_topk_v2, topk_transform_paged_v2

    plan = plan_topk_v2(inputs.lengths)

    def pick(scores: torch.Tensor) -> torch.Tensor:
        slots = scores.new_empty((scores.shape[0], inputs.k_picks), dtype=torch.int32)
        topk_transform_paged_v2(scores, inputs.lengths, inputs.table, slots, PAGE_SIZE, plan)
        return slots

    inputs.pick = pick
    return lambda: pick(inputs.scores)


def _topk_prefill(inputs: Inputs) -> Call:
    # Prefill into the paged cache. Its table is one of single tokens, made once a step.
    from sgl_kernel import fast_topk_transform_fused

    rows = inputs.lengths.shape[0]
    table = inputs.table.repeat_interleave(PAGE_SIZE, dim=1) * PAGE_SIZE
    table = table + torch.arange(table.shape[1], device=table.device) % PAGE_SIZE
    table, cu_q = table.int().contiguous(), torch.tensor([0, rows], dtype=torch.int32, device=table.device)
    starts = torch.zeros(rows, dtype=torch.int32, device=table.device)

    def pick(scores: torch.Tensor) -> torch.Tensor:
        return fast_topk_transform_fused(scores, inputs.lengths, table, cu_q, inputs.k_picks, row_starts=starts)

    inputs.pick = pick
    return lambda: pick(inputs.scores)


def _topk_ragged_v2(inputs: Inputs) -> Call:
    # Prefill into gathered rows (--dsa-prefill-backend flashmla_sparse on an fp8 pool).
    from sglang.kernels.ops.attention.dsv4.topk import topk_transform_ragged_v2

    starts = torch.zeros_like(inputs.lengths)

    def call() -> torch.Tensor:
        picks = inputs.scores.new_empty((inputs.scores.shape[0], inputs.k_picks), dtype=torch.int32)
        topk_transform_ragged_v2(
            inputs.scores, inputs.lengths, out_offsets=inputs.offsets, out_indices=picks, row_starts=starts
        )
        return picks

    return call


def _ragged_select(inputs: Inputs) -> Call:
    score = _ragged_scores(inputs)
    _topk_prefill(inputs)
    return lambda: inputs.pick(score())


def _paged_select(inputs: Inputs) -> Call:
    _paged_scores(inputs)
    inputs.scores = None
    _topk_paged_v2(inputs)
    return lambda: inputs.pick(inputs.score(inputs.q, inputs.gate))


def _dense(inputs: Inputs) -> Call:
    from sgl_kernel.flash_attn import flash_attn_varlen_func

    tokens = inputs.q.shape[0]

    def call() -> torch.Tensor:
        return flash_attn_varlen_func(
            q=inputs.q,
            k=inputs.k,
            v=inputs.v,
            cu_seqlens_q=inputs.cu,
            cu_seqlens_k=inputs.cu,
            max_seqlen_q=tokens,
            max_seqlen_k=tokens,
            softmax_scale=inputs.scale,
            causal=True,
        )

    return call


def _step(inputs: Inputs) -> Call:
    # As in a captured decode step with interleaved rope, where the built-in fuses most: keys are stored on a second
    # stream beside the queries. fp8 rows need the query in one piece, FA3 takes it in two.
    from sglang.kernels.ops.attention.dsa.indexer_k import fused_k_indexer_norm_rope_store
    from sglang.kernels.ops.attention.dsa.indexer_q import fused_q_indexer_rope_first_quant

    rows, heads = inputs.weights.shape
    both = torch.cat((inputs.key, inputs.weights.to(inputs.key.dtype)), dim=1)
    key, weights = both.split([INDEX_DIM, heads], dim=1)
    projected = inputs.projected.view(rows, heads, INDEX_DIM)
    gate_scale = INDEX_DIM**-0.5 * heads**-0.5
    paged = inputs.layout != "bf16_1152"
    inputs.scores = inputs.slots = None
    inputs.q = torch.cat((inputs.q_latent, inputs.q_rope), dim=2)
    inputs.slots = inputs.lengths.new_empty(rows, inputs.k_picks)
    (_flash_mla_kv if paged else _fa3_sparse)(inputs)
    _paged_scores(inputs)
    _topk_paged_v2(inputs)
    if paged:
        from sglang.kernels.ops.attention.concat_mla import concat_mla_absorb_q
    beside = torch.cuda.Stream()

    def call() -> torch.Tensor:
        here = torch.cuda.current_stream()
        beside.wait_stream(here)
        q, gate = fused_q_indexer_rope_first_quant(projected, weights, gate_scale, inputs.cos_sin, inputs.positions)
        with torch.cuda.stream(beside):
            fused_k_indexer_norm_rope_store(
                key, inputs.pages, inputs.new_slots, inputs.norm, inputs.bias, 1e-6, inputs.cos_sin, inputs.positions,
                PAGE_SIZE,
            )  # fmt: skip
        here.wait_stream(beside)
        slots = inputs.pick(inputs.score(q, gate.squeeze(2)))
        if paged:
            return inputs.attend(slots, concat_mla_absorb_q(inputs.q_latent, inputs.q_rope))
        return inputs.attend(slots)

    return call


FA3_SPARSE = Rival("FA3 (sgl_kernel)", _fa3_sparse)
FLASH_MLA_KV = Rival("flash_mla_with_kvcache", _flash_mla_kv)
FLASH_MLA_SPARSE = Rival("flash_mla_sparse_fwd", _flash_mla_sparse)
PAGED_SCORES = Rival("DeepGEMM paged logits", _paged_scores)
RAGGED_SCORES = Rival("DeepGEMM logits", _ragged_scores)
TOPK_DECODE = Rival("top-k v2, paged", _topk_paged_v2)
TOPK_PREFILL = Rival("fast_topk_transform_fused", _topk_prefill)
TOPK_RAGGED = Rival("top-k v2, ragged", _topk_ragged_v2)
PAGED_SELECT = Rival("DeepGEMM, top-k v2", _paged_select)
RAGGED_SELECT = Rival("DeepGEMM, fast_topk", _ragged_select)
DENSE = Rival("FA3 (sgl_kernel)", _dense)
STEP = Rival("front, DeepGEMM, top-k v2, attention", _step)
