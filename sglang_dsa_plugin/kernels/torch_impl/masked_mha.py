"""Attention over each row's picks on expanded keys and values, in torch, in f32 throughout (as dense_mha, and why).

Requests run one after another, in tiles of heads and queries whose scores stay in cache; a tile reads the keys up to
its last pick. What a query did not pick is masked by adding -inf to its score. A NaN or inf in a key or value that only
a neighbour picked would leak through that (0 * NaN is NaN), so a tile whose output is not finite is done again row by
row.
"""

from __future__ import annotations

import math

import torch

from sglang_dsa_plugin.kernels.torch_impl import workspace
from sglang_dsa_plugin.kernels.torch_impl.attention import scaled_scores, softmax_and_lse, tile_values

# Wider than a dense tile: there is little to skip past the diagonal, and larger products run faster (measured: 256
# queries take 8 % less time than 128).
_TILE_QUERIES = 256
# The mask is made for as many queries as fit this, in f32 values, and shared by all heads.
_MASK_VALUES = 8 << 20


def masked_mha(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    picks: torch.Tensor,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    scale: float,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`ops.masked_mha.masked_mha`; the host reads the two length vectors and each tile's last pick."""
    tokens, heads, _ = q.shape
    if out is None:
        out = torch.empty(tokens, heads, v.shape[2], dtype=q.dtype, device=q.device)
    lse = torch.empty(tokens, heads, dtype=torch.float32, device=q.device)
    starts_q, starts_k = torch.stack((cu_q.long(), cu_k.long())).tolist()
    for q0, q1, k0, k1 in zip(starts_q, starts_q[1:], starts_k, starts_k[1:]):
        keys, values = k[k0:k1], v[k0:k1]
        block = max(1, _MASK_VALUES // (k1 - k0 + 1))
        for at in range(q0, q1, block):
            part = slice(at, min(at + block, q1))
            _block(q[part], keys, values, picks[part], scale, out[part], lse[part])
    return out, lse


def _block(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    picks: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    """Queries q [n, H, Dqk] of one request with keys k [s, H, Dqk]."""
    queries, heads, _ = q.shape
    budget = tile_values(q.device)  # of scores
    picked = _Picked(picks, k.shape[0])
    rows = min(queries, _TILE_QUERIES, max(1, budget // max(1, k.shape[0])))
    ends = [picked.end(at, at + rows) for at in range(0, queries, rows)]
    longest = max(ends)
    if not longest:
        out.zero_()
        lse.fill_(-math.inf)
        return
    together = min(heads, max(1, budget // (rows * longest)))
    for h in range(0, heads, together):
        some = slice(h, h + together)
        # [heads, width, keys] and [heads, keys, width]
        k_t = k[:longest, some].float().permute(1, 2, 0)
        values = v[:longest, some].float().transpose(0, 1)
        for at, seen in zip(range(0, queries, rows), ends):
            part = slice(at, at + rows)
            if seen:
                scores = scaled_scores(q[part, some].transpose(0, 1).float(), k_t[:, :, :seen], scale)
                scores.add_(picked.mask[part, :seen])
                weights, total = softmax_and_lse(scores)
                result = torch.bmm(weights, values[:, :seen])
                if not math.isfinite(result.sum().item()):
                    _row_by_row(q[part, some], k_t, values, picked, at, scale, out[part, some], lse[part, some])
                    continue
                out[part, some] = result.transpose(0, 1)
                lse[part, some] = total.t()
    if picked.none is not None:
        out.masked_fill_(picked.none.view(-1, 1, 1), 0)
        lse.masked_fill_(picked.none.view(-1, 1), -math.inf)


class _Picked:
    """What the queries of a block picked.

    mask: f32 [n, at least s], 0 where a query picked the key, else -inf; all 0 for a query without picks, since a
    softmax over nothing is NaN. none: bool [n], the queries without picks, or None where all have some.
    """

    def __init__(self, picks: torch.Tensor, keys: int) -> None:
        self.none: torch.Tensor | None = None
        index = picks.long()
        device = picks.device
        # One column more than keys takes what is not a pick.
        self.mask = workspace.take("mask", (picks.shape[0], keys + 1), torch.float32, device).fill_(-math.inf)
        if not picks.numel():
            self._last = [-1] * picks.shape[0]
            self.none = torch.ones(picks.shape[0], dtype=torch.bool, device=device)
            return
        low, high = (int(x) for x in torch.aminmax(picks))
        if low < 0 or high >= keys:
            ok = (index >= 0) & (index < keys)
            self._last = index.masked_fill(~ok, -1).amax(dim=1).tolist()
            self.none = ~ok.any(dim=1)
            index = index.masked_fill(~ok, keys)
        else:
            self._last = index.amax(dim=1).tolist()
        self.mask.scatter_(1, index, 0.0)
        if self.none is not None:
            self.mask.masked_fill_(self.none.unsqueeze(1), 0)

    def end(self, first: int, last: int) -> int:
        """Keys up to the last pick of queries first .. last."""
        return max(self._last[first:last]) + 1

    def positions(self, query: int) -> torch.Tensor:
        """Picked positions of one query, ascending; none for a query without picks."""
        if self._last[query] < 0:
            return torch.empty(0, dtype=torch.long, device=self.mask.device)
        return (self.mask[query, : self._last[query] + 1] == 0).nonzero().squeeze(1)


def _row_by_row(
    q: torch.Tensor,
    k_t: torch.Tensor,
    v: torch.Tensor,
    picked: _Picked,
    first: int,
    scale: float,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    """A tile again, q [n, g, Dqk] from query `first` of the block on: each query reads nothing but its own picks."""
    for r in range(q.shape[0]):
        at = picked.positions(first + r)
        scores = scaled_scores(q[r].float().unsqueeze(1), k_t[:, :, at], scale)
        weights, total = softmax_and_lse(scores) if len(at) else (scores, lse[r].unsqueeze(1))
        out[r] = torch.bmm(weights, v[:, at]).squeeze(1)
        lse[r] = total.squeeze(1)
