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

import itertools
import math

import torch

from sglang_dsa_plugin import support
from sglang_dsa_plugin.ops import _check

_OP = "dense_mha"
_FLOATS = (torch.bfloat16, torch.float32, torch.float16)


def dense_mha(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    scale: float,
    out: torch.Tensor | None = None,
    impl: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [T, H, Dqk], k [S, H, Dqk], v [S, H, Dv] of one dtype -> (out [T, H, Dv] in that dtype, lse f32 [T, H]).

    cu_q, cu_k: [B + 1] int32 or int64, from 0 to T and from 0 to S, not falling; checked on a CPU, trusted on a GPU.
    out: where to write, instead of a new tensor.
    Raises ValueError for arguments that do not fit each other, or an `impl` that cannot run here.
    """
    _check.tensor(_OP, "q", q, (None, None, None), _FLOATS)
    tokens, heads, width = q.shape
    _check.tensor(_OP, "k", k, (None, heads, width), (q.dtype,), q.device, "q")
    _check.tensor(_OP, "v", v, (k.shape[0], heads, None), (q.dtype,), q.device, "q")
    _check.index_tensor(_OP, "cu_q", cu_q, (None,), q.device)
    if not cu_q.shape[0]:
        _check.fail(_OP, "cu_q", "of at least one entry, 0", cu_q)
    _check.index_tensor(_OP, "cu_k", cu_k, (cu_q.shape[0],), q.device)
    if not (isinstance(scale, (int, float)) and math.isfinite(scale)):
        _check.fail(_OP, "scale", "a finite number", scale)
    if out is not None:
        _check.tensor(_OP, "out", out, (tokens, heads, v.shape[2]), (q.dtype,), q.device, "q")
    if q.device.type == "cpu":
        _check_bounds("cu_q", cu_q, tokens)
        _check_bounds("cu_k", cu_k, k.shape[0])
    run = support.resolve(_OP, device=q.device, impl=impl, heads=heads, dtype=q.dtype)
    return run(q, k, v, cu_q, cu_k, scale, out)


def _check_bounds(argument: str, cu: torch.Tensor, end: int) -> None:
    at = cu.tolist()
    if at[0] != 0 or at[-1] != end or any(a > b for a, b in itertools.pairwise(at)):
        _check.fail(_OP, argument, f"not falling, from 0 to {end}", at if len(at) < 20 else cu)


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
