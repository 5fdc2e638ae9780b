"""Sparse MLA by the TensorRT-LLM kernels that FlashInfer loads, on SM 10.0 and 10.3.

Written from FlashInfer's documentation of `trtllm_batch_decode_with_kv_cache_mla` (0.7.2) and **not run**: no such GPU
has been at hand. What it needs and how it is met:
- the valid picks first and their number, -1 after them: `slot_prefix`;
- at least one pick a row: a row without one is given row 0, and its result replaced;
- picks in multiples of 4: padded with -1;
- q in the rows' dtype: for fp8 rows q is rounded to e4m3 with scale 1, saturating, which costs digits of its own;
- rows in pages of 64, and a workspace that was zero once: one per device, of _WORKSPACE_BYTES, kept for good because a
  CUDA graph that was recorded with it replays with it. The softmax of a row and head takes 2 KiB of it, so many rows
  are worked off in groups;
- a base for the lse: natural log is asked for. The sink is added outside.
"""

from __future__ import annotations

import torch

from sglang_dsa_plugin.cache.layouts import FP8, FP8_MAX, LATENT_DIM, ROPE_DIM

from . import attention

_PICKS = 4
_NOPE_DIM = 128  # of the query before absorption; the kernel only checks it
_WORKSPACE_BYTES = 256 << 20
_SCRATCH_BYTES = 128 << 20
_SOFTMAX_BYTES = 2048


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
    """`ops.sparse_mla.sparse_mla` for bf16 q and rows `bf16_1152` or `fp8_576`, 1 to 128 heads."""
    empty = attention.nothing(q, slots, kv_rows, out)
    if empty is not None:
        return empty
    from flashinfer.decode import trtllm_batch_decode_with_kv_cache_mla

    rows, heads, _ = q.shape
    fp8 = kv_rows.dtype == FP8
    picked, counts = attention.picks_in_front(
        slots, kv_rows.shape[0], lengths, False, multiple=_PICKS, never_empty=True
    )
    query = q.clamp(-FP8_MAX, FP8_MAX).to(FP8) if fp8 else q
    row_scale = kv_scale if fp8 else 1.0
    pages = attention.whole_pages(kv_rows).unsqueeze(1)
    result = torch.empty(rows, heads, LATENT_DIM, dtype=torch.bfloat16, device=q.device)
    lse = torch.empty(rows, heads, dtype=torch.float32, device=q.device)
    step = (_WORKSPACE_BYTES - _SCRATCH_BYTES) // (heads * _SOFTMAX_BYTES)
    for first in range(0, rows, step):
        part = slice(first, first + step)
        trtllm_batch_decode_with_kv_cache_mla(
            query=query[part].unsqueeze(1),
            kv_cache=pages,
            workspace_buffer=_workspace(q.device),
            qk_nope_head_dim=_NOPE_DIM,
            kv_lora_rank=LATENT_DIM,
            qk_rope_head_dim=ROPE_DIM,
            block_tables=picked[part].unsqueeze(1),
            seq_lens=counts[part].clamp(min=1),
            max_seq_len=picked.shape[1],
            sparse_mla_top_k=picked.shape[1],
            out=result[part].unsqueeze(1),
            bmm1_scale=scale * row_scale,
            bmm2_scale=row_scale,
            backend="trtllm-gen",
            lse=lse[part],
            return_lse=True,
            return_lse_base="basee",
        )
    return attention.finished(result, lse, counts, sink, out)


_workspaces: dict[torch.device, torch.Tensor] = {}


def _workspace(device: torch.device) -> torch.Tensor:
    if device not in _workspaces:
        _workspaces[device] = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    return _workspaces[device]
