"""Sparse MLA on a CPU for many rows: neighbouring queries share the union of their picks.

Copying 2048 latents for every query moves 5 MB a row and leaves products with as many rows as there are heads. Queries
next to each other in a prefill pick mostly the same keys, so a tile of T queries takes the union of its picks, U rows,
once: scores are one product [T * H, 576] x [576, U], a mask [T, U] says who picked what, and the output is one product
[T * H, U] x [U, 512]. The work grows from sum(picks) to T * U, so each tile is united only where that is cheaper, and
split or gathered where it is not (decode batches, borders between requests).

The mask is additive, the logarithm of how often the query picked the row: -inf for never, 0 for once. A NaN or inf in a
row that only a neighbour picked would leak through it (0 * NaN is NaN), so a tile whose output is not finite is done
again row by row.
"""

from __future__ import annotations

import math

import torch

from sglang_dsa_plugin.cache.layouts import LATENT_DIM, ROW_DIM
from sglang_dsa_plugin.kernels.torch_impl import sparse_mla_gather, workspace
from sglang_dsa_plugin.kernels.torch_impl.attention import softmax_and_lse
from sglang_dsa_plugin.kernels.torch_impl.sparse_mla_gather import Source

# Rows of the large products: enough for a matrix product at full speed, few enough that scores stay in cache.
_PRODUCT_ROWS = 512
_MAX_TILE = 64
_MIN_TILE = 4
# Scores of a tile (and as many weights), and the latents of its union, in f32 values.
_MAX_SCORES = _MAX_LATENTS = 8 << 20

# A range of the cache is read in place when at most this much larger than the union.
_SPAN_SLACK = 1.02

# Cost in units of one head against one row in a large product, measured (f32, EPYC 9004, 16 heads): fetching and
# decoding a row, a head in a product of few rows, the floor of such a product, scattering one pick into the mask.
_FETCH, _THIN_HEAD, _THIN_FLOOR, _SCATTER = 6.0, 1.2, 6.0, 0.5


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
    """Write out [R, H, 512] and lse [R, H]; slots [R, K] as wanted, ok None where all are valid."""
    rows, heads, _ = q.shape
    tile = min(_MAX_TILE, max(1, _PRODUCT_ROWS // heads))
    work = _Work(q, source, slots, ok, scale, sink, out, lse)
    for at in range(0, rows, tile):
        work.tile(at, min(at + tile, rows))
    work.flush()


class _Work:
    """One call: the arguments, and the run of rows waiting to be gathered together."""

    def __init__(
        self,
        q: torch.Tensor,
        source: Source,
        slots: torch.Tensor,
        ok: torch.Tensor | None,
        scale: float,
        sink: torch.Tensor | None,
        out: torch.Tensor,
        lse: torch.Tensor,
    ) -> None:
        self.q, self.source, self.slots, self.ok = q, source, slots, ok
        self.scale, self.sink, self.out, self.lse = scale, sink, out, lse
        self.heads = q.shape[1]
        self.waiting: tuple[int, int] | None = None

    def tile(self, at: int, end: int) -> None:
        """Unite rows at .. end, or halve them, or leave them for `flush`."""
        count = end - at
        slots = self.slots[at:end]
        ok = None if self.ok is None else self.ok[at:end]
        if count >= _MIN_TILE or (count > 1 and count == self.q.shape[0]):
            plan = _Union(slots, ok)
            if plan.size and self._worth(count, plan):
                self.flush()
                self._united(at, end, plan)
                return
            if count >= 2 * _MIN_TILE and plan.size:
                middle = at + count // 2
                self.tile(at, middle)
                self.tile(middle, end)
                return
        self.waiting = (self.waiting[0] if self.waiting else at, end)

    def flush(self) -> None:
        """Gather the rows that were left."""
        if self.waiting:
            self._gathered(*self.waiting)
            self.waiting = None

    def _worth(self, count: int, plan: _Union) -> bool:
        if count * self.heads * plan.size > _MAX_SCORES or plan.size * ROW_DIM > _MAX_LATENTS:
            return False
        united = plan.size * (max(count * self.heads, 16) + _FETCH) + _SCATTER * plan.picks
        apart = plan.picks * (max(self.heads * _THIN_HEAD, _THIN_FLOOR) + _FETCH)
        return united < apart

    def _gathered(self, at: int, end: int) -> None:
        ok = None if self.ok is None else self.ok[at:end]
        part = slice(at, end)
        sparse_mla_gather.run(
            self.q[part], self.source, self.slots[part], ok, self.scale, self.sink, self.out[part], self.lse[part]
        )

    def _united(self, at: int, end: int, plan: _Union) -> None:
        count, size = end - at, plan.size
        latents = plan.latents(self.source)
        queries = self.q[at:end].float().reshape(count * self.heads, ROW_DIM)
        scores = workspace.take("scores", (count * self.heads, size), torch.float32, self.q.device)
        scores.view(count, self.heads, size).copy_(plan.mask().unsqueeze(1))
        torch.addmm(scores, queries, latents.t(), alpha=self.scale, out=scores)
        weights, total = softmax_and_lse(scores)
        values = torch.mm(weights, latents[:, :LATENT_DIM])
        if not math.isfinite(values.sum().item()):
            self._gathered(at, end)
            return
        values, total = values.view(count, self.heads, LATENT_DIM), total.view(count, self.heads)
        if self.sink is not None:
            values *= torch.sigmoid(total - self.sink).unsqueeze(2)
        if plan.ok is not None:
            none = ~plan.ok.any(dim=1, keepdim=True)
            values.masked_fill_(none.unsqueeze(2), 0)
            total.masked_fill_(none, -math.inf)
        self.out[at:end].copy_(values)
        self.lse[at:end].copy_(total)


class _Union:
    """The distinct valid slots of a tile.

    picks: how many picks it serves; size: how many rows it reads; span: (start, end) when those are very nearly a range
    of the cache, which is then read in place.
    """

    def __init__(self, slots: torch.Tensor, ok: torch.Tensor | None) -> None:
        self.ok = ok
        self.picks = slots.numel() if ok is None else int(ok.sum())
        self.size = 0
        self.span: tuple[int, int] | None = None
        if not self.picks:
            return
        if ok is not None:
            # Invalid picks stand on a valid slot and add nothing to the mask.
            slots = slots.masked_fill(~ok, -1)
            slots = torch.where(ok, slots, slots.max())
        low, high = (int(x) for x in torch.aminmax(slots))
        self._at = slots.long() - low
        self._marks = torch.zeros(high - low + 1, dtype=torch.bool)
        self._marks[self._at.flatten()] = True
        self._low = low
        self.size = int(self._marks.sum())
        if high - low + 1 <= _SPAN_SLACK * self.size:
            self.size = high - low + 1
            self.span = (low, high + 1)

    def latents(self, source: Source) -> torch.Tensor:
        """f32 [size, 576]."""
        if self.span:
            return source.span(*self.span)
        index = self._marks.nonzero().squeeze(1)
        column = torch.empty(self._marks.shape[0], dtype=torch.int64)
        column[index] = torch.arange(index.shape[0])
        self._at = column[self._at]
        return source.pick(index + self._low)

    def mask(self) -> torch.Tensor:
        """f32 [T, size]: log of how often each query picked each row; call after `latents`, which numbers the rows.

        A query without a pick gets 0 everywhere: a softmax over nothing is NaN.
        """
        counts = torch.zeros(self._at.shape[0], self.size)
        if self.ok is None:
            ones = counts.new_ones(1).expand(self._at.shape)
            return counts.scatter_add_(1, self._at, ones).log_()
        counts.scatter_add_(1, self._at, self.ok.float()).log_()
        return counts.masked_fill_(~self.ok.any(dim=1, keepdim=True), 0)
