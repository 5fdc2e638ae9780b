"""Dense causal multi-head attention over a batch of requests of any lengths; used while a context fits the top-k.

    request b: queries cu_q[b] .. cu_q[b+1] (n of them), keys cu_k[b] .. cu_k[b+1] (s of them)
    query i sees keys 0 .. s - n + i of its request (causal, aligned to the end: a cached prefix makes s > n)
    lse[t,h]  = log sum_j exp(scale * q[t,h] . k[j,h])         natural log
    out[t,h,] = sum_j exp(scale * q[t,h] . k[j,h] - lse[t,h]) * v[j,h,]

The head sizes of (q, k) and of v are free: 192 and 128 in DeepSeek-V3.2, 256 and 256 in GLM-5. Where a request has
fewer keys than queries, its first queries see none: out 0, lse -inf. Requests never touch each other; within one, a
key or value that is not a number may also reach queries before it.
"""

from __future__ import annotations

import math

import torch

from sglang_dsa_plugin import support
from sglang_dsa_plugin.ops import _check

_OP = "dense_mha"


def dense_mha(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    scale: float,
    out: torch.Tensor | None = None,
    impl: str | None = None,
    with_lse: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """q [T, H, Dqk], k [S, H, Dqk], v [S, H, Dv] of one dtype -> (out [T, H, Dv] in that dtype, lse f32 [T, H]).

    cu_q, cu_k: [B + 1] int32 or int64, from 0 to T and from 0 to S, not falling; checked on a CPU, trusted on a GPU.
    out: where to write, instead of a new tensor. with_lse: False gives None instead of lse, which may save a pass.
    Raises ValueError for arguments that do not fit each other, or an `impl` that cannot run here.
    """
    _check.multi_head(_OP, q, k, v, cu_q, cu_k, scale, out)
    chosen = support.choose(_OP, device=q.device, impl=impl, heads=q.shape[1], dtype=q.dtype).implementation
    more = {"with_lse": with_lse} if "with_lse" in chosen.takes else {}
    found, lse = chosen.load()(q, k, v, cu_q, cu_k, scale, out, **more)
    return found, lse if with_lse else None


def reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_q: torch.Tensor, cu_k: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """fp64 reference: (out fp64 [T, H, Dv], lse fp64 [T, H]), one request at a time."""
    out = torch.zeros(q.shape[0], q.shape[1], v.shape[2], dtype=torch.float64)
    lse = torch.full(q.shape[:2], -math.inf, dtype=torch.float64)
    starts_q, starts_k = cu_q.tolist(), cu_k.tolist()
    for q0, q1, k0, k1 in zip(starts_q, starts_q[1:], starts_k, starts_k[1:]):
        last_seen = (k1 - k0) - (q1 - q0) + torch.arange(q1 - q0)
        seeing = last_seen >= 0
        if not seeing.any():
            continue
        rows = torch.arange(q0, q1)[seeing]
        scores = scale * torch.einsum("thd,shd->ths", q[rows].double(), k[k0:k1].double())
        future = torch.arange(k1 - k0) > last_seen[seeing][:, None]
        scores = scores.masked_fill(future[:, None, :], -math.inf)
        lse[rows] = torch.logsumexp(scores, dim=2)
        out[rows] = torch.einsum("ths,shd->thd", torch.softmax(scores, dim=2), v[k0:k1].double())
    return out, lse
