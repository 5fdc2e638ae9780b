"""Dense causal attention and sparse MLA by FlashAttention 3, as sgl-kernel builds it (arXiv:2407.08608).

Dense: its causal mask is aligned to the end of the keys, as the contract's. It wants the longest lengths on the host
for its schedule: the totals stand in, which are never too small.

Sparse: every query row is a sequence of one token whose page table, with pages of one row, is its picks. What that
needs and how it is met:
- the valid picks first and their number: `slot_prefix` brings them there, whatever order -1 comes in (the selection of
  this package writes it last already);
- page numbers inside the cache in every column: what is past the picks is row 0;
- at least one pick: a row without one is given row 0, and its result replaced;
- latents as values and as the keys of a second query part, ropes as keys: views of the same rows. bf16 only.
The sink is added outside, from the lse. Heads are not padded.
"""

from __future__ import annotations

import math

import torch

from sglang_dsa_plugin.cache.layouts import LATENT_DIM

from . import attention


def dense_mha(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    scale: float,
    out: torch.Tensor | None = None,
    with_lse: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`ops.dense_mha.dense_mha` for bf16 on SM 9.0."""
    tokens, heads, _ = q.shape
    if not tokens or not k.shape[0]:
        out = q.new_zeros(tokens, heads, v.shape[2]) if out is None else out.zero_()
        return out, torch.full((tokens, heads), -math.inf, dtype=torch.float32, device=q.device)
    from sgl_kernel.flash_attn import flash_attn_varlen_func

    found = flash_attn_varlen_func(
        q,
        k,
        v,
        cu_q.to(torch.int32),
        cu_k.to(torch.int32),
        max_seqlen_q=tokens,
        max_seqlen_k=k.shape[0],
        softmax_scale=scale,
        causal=True,
        return_softmax_lse=with_lse,
    )
    result, lse = found[:2] if with_lse else (found, None)
    if lse is not None:
        # A query without keys has an output of zeros and, by version, lse +inf or -inf: a pass over [H, T] settles it.
        lse = torch.nan_to_num(lse, nan=math.nan, posinf=-math.inf, neginf=-math.inf).transpose(0, 1)
    return result if out is None else out.copy_(result), lse


def sparse_mla(
    q: torch.Tensor,
    kv_rows: torch.Tensor,
    slots: torch.Tensor,
    scale: float,
    layout: str,
    kv_scale: float = 1.0,
    sink: torch.Tensor | None = None,
    lengths: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`ops.sparse_mla.sparse_mla` for bf16 q and rows `bf16_1152`, 1 to 128 heads, on SM 9.0."""
    empty = attention.nothing(q, slots, kv_rows, out)
    if empty is not None:
        return empty
    from sgl_kernel.flash_attn import flash_attn_with_kvcache

    from sglang_dsa_plugin.kernels.triton.slot_prefix import slot_prefix

    rows = q.shape[0]
    picked, counts = slot_prefix(slots, kv_rows.shape[0], lengths, fill=0)
    pages = kv_rows.view(-1, 1, 1, kv_rows.shape[1])
    result, lse, *_ = flash_attn_with_kvcache(
        q=q[..., LATENT_DIM:],
        k_cache=pages[..., LATENT_DIM:],
        v_cache=pages[..., :LATENT_DIM],
        qv=q[..., :LATENT_DIM],
        page_table=picked,
        cache_seqlens=counts.clamp(min=1),
        cu_seqlens_q=torch.arange(rows + 1, dtype=torch.int32, device=q.device),
        max_seqlen_q=1,
        softmax_scale=scale,
        causal=True,
        return_softmax_lse=True,
    )
    return attention.finished(result, lse.transpose(0, 1), counts, q.dtype, sink, out)
