"""Dense causal attention and sparse MLA by FlashAttention 3, as sgl-kernel builds it (arXiv:2407.08608).

Dense: its causal mask is aligned to the end of the keys, as the contract's. It wants the longest lengths on the host
for its schedule: the totals stand in, which are never too small.

Sparse: every query row is a sequence of one token whose page table, with pages of one row, is its picks. What that
needs and how it is met:
- the valid picks first and their number: with `prefix` they are, else `slot_prefix` brings them there, whatever order
  -1 comes in. What is past their number is not read: -1 there gives the same bits;
- latents as values and as the keys of a second query part, ropes as keys: views of the same rows. bf16 only;
- queries in two parts, each with strides of its own, every head on a 16-byte bound.
A row without a pick comes back with output 0. Queries are handed over as [R, 1, H, D], so that no cumulative lengths
are needed and lse comes as [R, H, 1]. The sink is added outside, from the lse, since its own takes bf16 only. Heads are
not padded. Whoever asks neither for lse nor for a sink, and promises `prefix`, launches its kernels alone, and in a
CUDA graph one less of these: see `_schedule`.
"""

from __future__ import annotations

import functools
import importlib.metadata
import math

import torch

from sglang_dsa_plugin.cache.layouts import LATENT_DIM, ROPE_DIM
from sglang_dsa_plugin.kernels.cuda.sparse_mla_operands import aligned

from . import attention

# Above it the kernel makes no use of a schedule (it has room for 992 rows).
_SCHEDULED_ROWS = 512
# With fewer picks it does not split a row, and what would bring a schedule back to its beginning is not launched.
_SCHEDULED_PICKS = 1024
# Whether it splits is that build's own rule. With another the schedule is made in every call, as by the kernel itself.
_SCHEDULED_BY = ("sglang-kernel", "0.4.10")


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
    q_rope: torch.Tensor | None = None,
    prefix: bool = False,
    with_lse: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`ops.sparse_mla.sparse_mla` for bf16 q and rows `bf16_1152`, 1 to 128 heads, on SM 9.0."""
    empty = attention.nothing(q, slots, kv_rows, out)
    if empty is not None:
        return empty
    from sgl_kernel.flash_attn import flash_attn_with_kvcache

    picked, counts = attention.picks_in_front(slots, kv_rows.shape[0], lengths, prefix, fill=0)
    pages = kv_rows.view(-1, 1, 1, kv_rows.shape[1])
    rope = q[..., LATENT_DIM:] if q_rope is None else q_rope
    more = {} if (schedule := _schedule(q, picked.shape[1])) is None else {"scheduler_metadata": schedule}
    target = None
    if out is not None and out.is_contiguous() and out.data_ptr() % 16 == 0:
        target = out.unsqueeze(1)
    result, lse, *_ = flash_attn_with_kvcache(
        q=aligned(rope).unsqueeze(1),
        k_cache=pages[..., LATENT_DIM:],
        v_cache=pages[..., :LATENT_DIM],
        qv=aligned(q[..., :LATENT_DIM]).unsqueeze(1),
        page_table=picked,
        cache_seqlens=counts,
        softmax_scale=scale,
        causal=True,
        return_softmax_lse=True,  # it computes it in any case
        out=target,
        **more,
    )
    lse = lse.squeeze(2) if with_lse or sink is not None else None
    return attention.finished(result.squeeze(1), lse, None, sink, out)


_Key = tuple[int, torch.device, int, int, int]
_recorded: dict[_Key, torch.Tensor] = {}
_recording: int | None = None


def _schedule(q: torch.Tensor, picks: int) -> torch.Tensor | None:
    """How the kernel shares rows out over processors, for q [R, H, ...] and so many picks; None: it finds out itself,
    by a launch of its own in every call.

    Of whole rows, it serves any lengths: where these are shorter some parts are empty. It holds a counter, which ends a
    call as it began it, so two calls at once must not share one. Hence it is made once for each recording of a CUDA
    graph and stream, inside, as memory of that graph: a step's layers share it, and replays of another graph do not.
    """
    global _recording
    rows, heads = q.shape[:2]
    if rows > _SCHEDULED_ROWS or picks < _SCHEDULED_PICKS or not torch.cuda.is_current_stream_capturing():
        return None
    if _kernels() != _SCHEDULED_BY:
        return None
    stream = torch.cuda.current_stream(q.device).cuda_stream
    recording = _recording_of(stream)
    if recording is None:
        return None
    if recording != _recording:
        _recorded.clear()
        _recording = recording
    key = (stream, q.device, rows, heads, picks)
    if key not in _recorded:
        from sgl_kernel.flash_attn import get_scheduler_metadata

        _recorded[key] = get_scheduler_metadata(
            batch_size=rows,
            max_seqlen_q=1,
            max_seqlen_k=picks,
            num_heads=heads,
            num_heads_k=1,
            headdim=ROPE_DIM,
            headdim_v=LATENT_DIM,
            cache_seqlens=torch.full((rows,), picks, dtype=torch.int32, device=q.device),
            qkv_dtype=q.dtype,
            page_size=1,
            causal=True,
        )
    return _recorded[key]


@functools.cache
def _kernels() -> tuple[str, str]:
    """The package whose build of FlashAttention 3 is installed, and its version."""
    name, _ = _SCHEDULED_BY
    try:
        return name, importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return name, ""


def _recording_of(stream: int) -> int | None:
    """CUDA's number of the recording that the stream is part of, None where it cannot be told."""
    try:
        from cuda.bindings import driver
    except ImportError:
        return None
    status, state, number, *_ = driver.cuStreamGetCaptureInfo(stream)
    active = driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE
    return int(number) if status == driver.CUresult.CUDA_SUCCESS and state == active else None
