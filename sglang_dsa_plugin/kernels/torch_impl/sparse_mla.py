"""Sparse MLA in torch, in f32 throughout: rounding scores or weights to bf16 would break the bounds of the contract.

Two ways, of equal result up to rounding:

- gathered (`sparse_mla_gather`): the picked rows of each query are copied out. Any device; on a GPU the host reads
  nothing back.
- united (`sparse_mla_union`, CPU): neighbouring queries of a prefill share most picks, so their union is copied once.
"""

from __future__ import annotations

import math

import torch

from sglang_dsa_plugin.cache.layouts import LATENT_DIM
from sglang_dsa_plugin.kernels.torch_impl import sparse_mla_gather, sparse_mla_union


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
    """`ops.sparse_mla.sparse_mla`."""
    rows, heads, _ = q.shape
    if out is None:
        out = torch.empty(rows, heads, LATENT_DIM, dtype=q.dtype, device=q.device)
    lse = torch.empty(rows, heads, dtype=torch.float32, device=q.device)
    on_cpu = q.device.type == "cpu"
    ok = _valid(slots, kv_rows.shape[0], lengths)
    if on_cpu and ok is not None:
        # Drop the columns past the last valid pick of any row: a short context is mostly -1.
        used = ok.any(dim=0).nonzero()
        width = int(used[-1]) + 1 if used.numel() else 0
        slots, ok = slots[:, :width], ok[:, :width]
    if not (rows and slots.shape[1] and kv_rows.shape[0]):
        return out.zero_(), lse.fill_(-math.inf)
    source = sparse_mla_gather.Source(kv_rows, layout, kv_scale)
    run = sparse_mla_union.run if on_cpu and rows > 1 else sparse_mla_gather.run
    run(q, source, slots, ok, scale, sink, out, lse)
    return out, lse


def _valid(slots: torch.Tensor, count: int, lengths: torch.Tensor | None) -> torch.Tensor | None:
    """Which picks count, bool [R, K]; None when the host can tell cheaply that all do."""
    picks = slots.shape[1]
    if slots.device.type == "cpu":
        if not slots.numel():
            return None
        low, high = torch.aminmax(slots)
        short = lengths is not None and int(lengths.min()) < picks
        if not short and int(low) >= 0 and int(high) < count:
            return None
    ok = (slots >= 0) & (slots < count)
    if lengths is not None:
        ok &= torch.arange(picks, device=slots.device) < lengths.unsqueeze(1)
    return ok
