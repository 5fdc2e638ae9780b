"""Sparse MLA with every query on its own copy of its picks: two batched products a tile of queries.

Memory: the gathered latents and the scores of a tile are bounded; the tile is one query at least.
"""

from __future__ import annotations

import math

import torch

from sglang_dsa_plugin.cache.layouts import LATENT_DIM, ROW_DIM
from sglang_dsa_plugin.kernels.torch_impl import quant, workspace
from sglang_dsa_plugin.kernels.torch_impl.attention import scaled_scores, softmax_and_lse, tile_values

# Latents and scores of a tile: about a core's share of the last-level cache.
_VALUES_PER_THREAD = 2 << 20


class Source:
    """The latent cache, read as f32 rows; what it returns is valid until it is asked again."""

    def __init__(self, kv_rows: torch.Tensor, layout: str, kv_scale: float) -> None:
        self.layout, self.kv_scale, self.dtype = layout, kv_scale, kv_rows.dtype
        # Indexed reads do not exist for e4m3 everywhere; bytes move the same.
        self.rows = kv_rows.view(torch.uint8) if layout == "fp8_576" else kv_rows

    def pick(self, slots: torch.Tensor) -> torch.Tensor:
        """Rows at `slots` [n], all in range: f32 [n, 576]."""
        rows = workspace.take("rows", (slots.shape[0], self.rows.shape[1]), self.rows.dtype, self.rows.device)
        return self._decode(torch.index_select(self.rows, 0, slots, out=rows))

    def span(self, start: int, end: int) -> torch.Tensor:
        """Rows start .. end: f32 [end - start, 576], which may be a view of the cache."""
        return self._decode(self.rows[start:end])

    def _decode(self, rows: torch.Tensor) -> torch.Tensor:
        if self.layout == "fp32_2304":
            return rows
        out = workspace.take("latents", (rows.shape[0], ROW_DIM), torch.float32, rows.device)
        return quant.dequantize_latent(rows.view(self.dtype), self.layout, self.kv_scale, out)


def run(
    q: torch.Tensor,
    source: Source,
    slots: torch.Tensor,
    ok: torch.Tensor | None,
    scale: float,
    sink: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    """Write out [R, H, 512] and lse [R, H] for q [R, H, 576] and slots [R, K].

    ok: bool [R, K], which picks count; None when all do (then none is looked at twice).
    """
    budget = tile_values(q.device, _VALUES_PER_THREAD)
    step = max(1, budget // (slots.shape[1] * (ROW_DIM + 2 * q.shape[1])))
    if step >= q.shape[0]:
        _tile(q, source, slots, ok, scale, sink, out, lse)
        return
    for at in range(0, q.shape[0], step):
        part = slice(at, at + step)
        _tile(q[part], source, slots[part], None if ok is None else ok[part], scale, sink, out[part], lse[part])


def _tile(
    q: torch.Tensor,
    source: Source,
    slots: torch.Tensor,
    ok: torch.Tensor | None,
    scale: float,
    sink: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    rows, picks = slots.shape
    if ok is not None:
        # An invalid pick becomes a second copy of a valid one, not slot 0, which may hold NaN: 0 * NaN is NaN.
        first = ok.to(torch.uint8).argmax(dim=1, keepdim=True)
        some = ok.gather(1, first)
        stand_in = slots.gather(1, first).masked_fill_(~some, 0)
        slots = torch.where(ok, slots, stand_in)
    latents = source.pick(slots.reshape(-1)).view(rows, picks, ROW_DIM)
    scores = scaled_scores(q.float(), latents.transpose(1, 2), scale)
    if ok is not None:
        scores.masked_fill_(~ok.unsqueeze(1), -math.inf)
    weights, total = softmax_and_lse(scores)
    values = torch.bmm(weights, latents[:, :, :LATENT_DIM])
    if sink is not None:
        values *= torch.sigmoid(total - sink).unsqueeze(2)
    if ok is not None:
        values.masked_fill_(~some.unsqueeze(2), 0)
        total.masked_fill_(~some, -math.inf)
    out.copy_(values)
    lse.copy_(total)
