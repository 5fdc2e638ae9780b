"""Sparse MLA in torch: gather the picked rows of a tile of queries, then two batched matrix products in f32."""

from __future__ import annotations

import math

import torch

from sglang_dsa_plugin.cache.layouts import LATENT_DIM, ROW_DIM
from sglang_dsa_plugin.kernels.torch_impl import quant

# Gathered latents alive at once, in f32 values.
_TILE_VALUES = 16 << 20


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
    picks = slots.shape[1]
    if out is None:
        out = torch.empty(rows, heads, LATENT_DIM, dtype=q.dtype, device=q.device)
    lse = torch.empty(rows, heads, dtype=torch.float32, device=q.device)
    if not picks or not kv_rows.shape[0]:
        return out.zero_(), lse.fill_(-math.inf)
    ok = (slots >= 0) & (slots < kv_rows.shape[0])
    if lengths is not None:
        ok &= torch.arange(picks, device=q.device) < lengths.unsqueeze(1)
    step = max(1, _TILE_VALUES // (picks * ROW_DIM))
    for at in range(0, rows, step):
        part = slice(at, at + step)
        _gathered(q[part], kv_rows, slots[part], ok[part], scale, layout, kv_scale, sink, out[part], lse[part])
    return out, lse


def _gathered(
    q: torch.Tensor,
    kv_rows: torch.Tensor,
    slots: torch.Tensor,
    ok: torch.Tensor,
    scale: float,
    layout: str,
    kv_scale: float,
    sink: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    view = kv_rows.view(torch.uint8) if layout == "fp8_576" else kv_rows
    picked = view.index_select(0, slots.masked_fill(~ok, 0).flatten()).view(kv_rows.dtype)
    latents = quant.dequantize_latent(picked, layout, kv_scale).unflatten(0, slots.shape)
    # Slot 0 may hold anything, and 0 * NaN is NaN.
    latents.masked_fill_(~ok.unsqueeze(2), 0)
    scores = torch.bmm(q.float(), latents.transpose(1, 2)).mul_(scale)
    scores.masked_fill_(~ok.unsqueeze(1), -math.inf)
    lse.copy_(torch.logsumexp(scores, dim=2))
    weights = torch.exp(scores - lse.unsqueeze(2)).masked_fill_(~ok.unsqueeze(1), 0)
    values = torch.bmm(weights, latents[:, :, :LATENT_DIM])
    if sink is not None:
        values *= torch.sigmoid(lse - sink).unsqueeze(2)
    out.copy_(values)
