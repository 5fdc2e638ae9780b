"""Dense causal attention in torch, in f32 throughout: rounding the weights to bf16 would break the contract's bounds.

A long request runs alone, in tiles of heads and queries whose scores stay in cache; tiles past the diagonal are never
computed. Short requests of about one size run padded side by side, so that a batch of many costs a few launches.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from sglang_dsa_plugin.kernels.torch_impl.attention import scaled_scores, softmax_and_lse, tile_values

_TILE_QUERIES = 128
# Requests up to this size are padded to powers of two and run together.
_SHORT_QUERIES, _SHORT_KEYS = 64, 256


class _Request(NamedTuple):
    """Where one request lies: its queries from q0, its keys from k0; queries <= keys."""

    q0: int
    queries: int
    k0: int
    keys: int


def dense_mha(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    scale: float,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`ops.dense_mha.dense_mha`; on a GPU the host reads the two length vectors, which waits for the stream."""
    tokens, heads, _ = q.shape
    if out is None:
        out = torch.empty(tokens, heads, v.shape[2], dtype=q.dtype, device=q.device)
    lse = torch.empty(tokens, heads, dtype=torch.float32, device=q.device)
    budget = tile_values(q.device)  # of scores
    short: dict[tuple[int, int], list[_Request]] = {}
    for request in _requests(cu_q, cu_k, out, lse):
        if request.queries <= _SHORT_QUERIES and request.keys <= _SHORT_KEYS:
            short.setdefault((_power_of_two(request.queries), _power_of_two(request.keys)), []).append(request)
        else:
            _long(q, k, v, request, scale, budget, out, lse)
    for (rows, columns), requests in short.items():
        step = max(1, budget // (heads * rows * columns))
        for at in range(0, len(requests), step):
            group = requests[at : at + step]
            if len(group) == 1:
                _long(q, k, v, group[0], scale, budget, out, lse)
            else:
                _side_by_side(q, k, v, group, scale, out, lse)
    return out, lse


def _requests(cu_q: torch.Tensor, cu_k: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> list[_Request]:
    """The requests with something to see; queries that see no key are answered here."""
    found = []
    starts_q, starts_k = torch.stack((cu_q.long(), cu_k.long())).tolist()
    for q0, q1, k0, k1 in zip(starts_q, starts_q[1:], starts_k, starts_k[1:]):
        blind = max(0, (q1 - q0) - (k1 - k0))
        if blind:
            out[q0 : q0 + blind] = 0
            lse[q0 : q0 + blind] = -math.inf
        if q0 + blind < q1:
            found.append(_Request(q0 + blind, q1 - q0 - blind, k0, k1 - k0))
    return found


def _long(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    request: _Request,
    scale: float,
    budget: int,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    heads = q.shape[1]
    q0, queries, k0, keys = request
    rows = min(queries, _TILE_QUERIES, max(1, budget // keys))
    together = min(heads, max(1, budget // (rows * keys)))
    diagonal = torch.full((rows, rows), -math.inf, device=q.device).triu_(1)
    for h in range(0, heads, together):
        some = slice(h, h + together)
        # [heads, width, keys] and [heads, keys, width]
        k_t = k[k0 : k0 + keys, some].float().permute(1, 2, 0)
        values = v[k0 : k0 + keys, some].float().transpose(0, 1)
        for at in range(0, queries, rows):
            count = min(rows, queries - at)
            seen = keys - queries + at + count
            part = slice(q0 + at, q0 + at + count)
            scores = scaled_scores(q[part, some].transpose(0, 1).float(), k_t[:, :, :seen], scale)
            scores[:, :, seen - count :].add_(diagonal[:count, :count])
            weights, total = softmax_and_lse(scores)
            out[part, some] = torch.bmm(weights, values[:, :seen]).transpose(0, 1)
            lse[part, some] = total.t()


def _side_by_side(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    group: list[_Request],
    scale: float,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    heads = q.shape[1]
    q0, queries, k0, keys = torch.tensor(group).to(q.device).unbind(1)
    rows = torch.arange(max(r.queries for r in group), device=q.device)
    columns = torch.arange(max(r.keys for r in group), device=q.device)
    # A padded place repeats the request's last token, so nothing foreign is read, and the mask hides it.
    row = torch.minimum(rows, (queries - 1).unsqueeze(1))
    column = torch.minimum(columns, (keys - 1).unsqueeze(1))
    hidden = columns > ((keys - queries).unsqueeze(1) + row).unsqueeze(2)
    token_q, token_k = q0.unsqueeze(1) + row, k0.unsqueeze(1) + column

    def by_head(x: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
        return x[token].transpose(1, 2).float().flatten(0, 1)

    scores = scaled_scores(by_head(q, token_q), by_head(k, token_k).transpose(1, 2), scale)
    scores = scores.unflatten(0, (len(group), heads)).masked_fill_(hidden.unsqueeze(1), -math.inf)
    weights, total = softmax_and_lse(scores)
    values = torch.bmm(weights.flatten(0, 1), by_head(v, token_k)).unflatten(0, (len(group), heads))
    # The repeats of the last query carry equal values up to rounding: write the true ones only.
    true = (rows < queries.unsqueeze(1)).nonzero(as_tuple=True)
    token = token_q[true]
    out[token] = values.transpose(1, 2)[true].to(out.dtype)
    lse[token] = total.transpose(1, 2)[true]


def _power_of_two(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()
