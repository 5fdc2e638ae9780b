"""Multi-head attention on expanded keys and values over the tokens that each row picked: sparse prefill on a CPU.

    request b: queries cu_q[b] .. cu_q[b+1], keys cu_k[b] .. cu_k[b+1] (s of them)
    P(t)      = the set of picks[t, :] in 0 .. s - 1: positions in the request of t; -1 is none, wherever it stands
    lse[t,h]  = log sum_{j in P(t)} exp(scale * q[t,h] . k[j,h])          natural log
    out[t,h,] = sum_{j in P(t)} exp(scale * q[t,h] . k[j,h] - lse[t,h]) * v[j,h,]

Nothing is causal but the picks. A query without a pick: out 0, lse -inf. A key or value that a query did not pick has
no effect on it, NaN included. The result is that of ops.sparse_mla on the rows that k and v were expanded from; a key
costs 192 + 128 products a head instead of 576 + 512, and is expanded once for all queries.
"""

from __future__ import annotations

import math

import torch

from sglang_dsa_plugin import support
from sglang_dsa_plugin.ops import _check

_OP = "masked_mha"


def masked_mha(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    picks: torch.Tensor,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    scale: float,
    out: torch.Tensor | None = None,
    impl: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [T, H, Dqk], k [S, H, Dqk], v [S, H, Dv] of one dtype -> (out [T, H, Dv] in that dtype, lse f32 [T, H]).

    picks: [T, K] int32 or int64; a position twice counts once, and one outside its request is an error of the caller:
    it is skipped, never read. cu_q, cu_k: [B + 1] int32 or int64, from 0 to T and from 0 to S, not falling; checked on
    a CPU, trusted on a GPU. out: where to write, instead of a new tensor.
    Raises ValueError for arguments that do not fit each other, or an `impl` that cannot run here.
    """
    _check.multi_head(_OP, q, k, v, cu_q, cu_k, scale, out)
    _check.index_tensor(_OP, "picks", picks, (q.shape[0], None), q.device)
    run = support.resolve(_OP, device=q.device, impl=impl, heads=q.shape[1], dtype=q.dtype)
    return run(q, k, v, picks, cu_q, cu_k, scale, out)


def reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    picks: torch.Tensor,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """fp64 reference: (out fp64 [T, H, Dv], lse fp64 [T, H]), one query at a time."""
    out = torch.zeros(q.shape[0], q.shape[1], v.shape[2], dtype=torch.float64)
    lse = torch.full(q.shape[:2], -math.inf, dtype=torch.float64)
    starts_q, starts_k = cu_q.tolist(), cu_k.tolist()
    for q0, q1, k0, k1 in zip(starts_q, starts_q[1:], starts_k, starts_k[1:]):
        for t in range(q0, q1):
            picked = [k0 + p for p in sorted(set(picks[t].tolist())) if 0 <= p < k1 - k0]
            if picked:
                scores = scale * torch.einsum("hd,shd->hs", q[t].double(), k[picked].double())
                lse[t] = torch.logsumexp(scores, dim=1)
                out[t] = torch.einsum("hs,shd->hd", torch.softmax(scores, dim=1), v[picked].double())
    return out, lse
