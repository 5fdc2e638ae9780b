"""Sparse multi-head latent attention (MLA) over picked rows, in absorbed form (DeepSeek-V3.2 report, section 2).

    s[r,h,i]  = scale * sum_{d<576} q[r,h,d] * row[slots[r,i], d]
    lse[r,h]  = log sum_i exp(s[r,h,i])                                  natural log, without the sink
    out[r,h,] = sum_i exp(s[r,h,i] - lse[r,h]) * row[slots[r,i], :512]  / (1 + exp(sink[h] - lse[r,h]))

i runs over the valid picks: slots[r,i] in [0, N), and i < lengths[r] when `lengths` is given. All heads of a row share
its picks. A slot named twice counts twice. A row without a valid pick gives out 0 and lse -inf, with or without a sink.
The result of a row depends on its neighbours in the batch by rounding only.
"""

from __future__ import annotations

import math

import torch

from sglang_dsa_plugin import support
from sglang_dsa_plugin.cache.layouts import LATENT_DIM, ROPE_DIM, ROW_DIM
from sglang_dsa_plugin.ops import _check, quant

_OP = "sparse_mla"


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
    impl: str | None = None,
    q_rope: torch.Tensor | None = None,
    prefix: bool = False,
    with_lse: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """q [R, H, 576] (bf16, f16 or f32) against kv_rows[slots] -> (out [R, H, 512] in q's dtype, lse f32 [R, H]).

    kv_rows: [N, width] of `layout`; slots: [R, K] int32 or int64, -1 anywhere is skipped, and a slot outside [0, N) is
    masked and never read. sink: f32 [H], adds exp(sink) to the denominator of out. lengths: [R], a promise that only
    the first lengths[r] slots count. out: where to write, instead of a new tensor. q_rope: [R, H, 64] in q's dtype, the
    last 64 values of the queries where they lie apart; q is [R, H, 512] then. Both may be strided. prefix: a promise,
    made with lengths, that the first lengths[r] slots of every row, 0 to K of them, are cached rows and all others -1,
    as selection writes them; nothing checks it, and kernels of other packages then take the slots as they are.
    with_lse: False gives None instead of lse, which may save a launch.
    Raises ValueError for arguments that do not fit each other, or an `impl` that cannot run here.
    """
    _check.tensor(_OP, "q", q, (None, None, ROW_DIM if q_rope is None else LATENT_DIM), _check.FLOATS)
    rows, heads, _ = q.shape
    if q_rope is not None:
        _check.tensor(_OP, "q_rope", q_rope, (rows, heads, ROPE_DIM), (q.dtype,), q.device, "q")
    quant.check_rows(_OP, "kv_rows", kv_rows, layout)
    quant.check_kv_scale(_OP, kv_scale)
    if kv_rows.device != q.device:
        _check.fail(_OP, "kv_rows", f"on {q.device} like q", kv_rows)
    _check.index_tensor(_OP, "slots", slots, (rows, None), q.device)
    if not (isinstance(scale, (int, float)) and math.isfinite(scale)):
        _check.fail(_OP, "scale", "a finite number", scale)
    if sink is not None:
        _check.tensor(_OP, "sink", sink, (heads,), (torch.float32,), q.device, "q")
    if lengths is not None:
        _check.index_tensor(_OP, "lengths", lengths, (rows,), q.device)
    elif prefix:
        _check.fail(_OP, "prefix", "promised together with lengths", prefix)
    if out is not None:
        _check.tensor(_OP, "out", out, (rows, heads, LATENT_DIM), (q.dtype,), q.device, "q")
    features = {"layout": layout, "heads": heads, "k": slots.shape[1], "dtype": q.dtype, "rows": rows}
    chosen = support.choose(_OP, device=q.device, impl=impl, **features).implementation
    run = chosen.load()
    more = {"q_rope": q_rope, "prefix": prefix, "with_lse": with_lse}
    if q_rope is not None and "q_rope" not in chosen.takes:
        q = torch.cat((q, q_rope), dim=-1)
    more = {name: value for name, value in more.items() if name in chosen.takes}
    found, lse = run(q, kv_rows, slots, scale, layout, kv_scale, sink, lengths, out, **more)
    return found, lse if with_lse else None


def reference(
    q: torch.Tensor,
    kv_rows: torch.Tensor,
    slots: torch.Tensor,
    scale: float,
    layout: str,
    kv_scale: float = 1.0,
    sink: torch.Tensor | None = None,
    lengths: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """fp64 reference: (out fp64 [R, H, 512], lse fp64 [R, H])."""
    count, heads = q.shape[0], q.shape[1]
    out = torch.zeros(count, heads, LATENT_DIM, dtype=torch.float64)
    lse = torch.full((count, heads), -math.inf, dtype=torch.float64)
    valid = (slots >= 0) & (slots < kv_rows.shape[0])
    if lengths is not None:
        valid &= torch.arange(slots.shape[1]) < lengths[:, None]
    cached = torch.unique(slots[valid].long())
    all_latents = quant.reference_dequantize_latent(kv_rows[cached], layout, kv_scale)
    for r in range(count):
        latents = all_latents[torch.searchsorted(cached, slots[r, valid[r]].long())]
        if not len(latents):
            continue
        scores = scale * (q[r].double() @ latents.T)
        lse[r] = torch.logsumexp(scores, dim=1)
        out[r] = torch.softmax(scores, dim=1) @ latents[:, :LATENT_DIM]
        if sink is not None:
            out[r] /= (1 + torch.exp(sink.double() - lse[r]))[:, None]
    return out, lse
