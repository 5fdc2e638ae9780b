"""Index queries and gate from wq_b's output and the head weights, in one operator.

    x         = projected[r, h]                       128 values
    x[:64]    = rope(x[:64], positions[r])            ops.rope
    fp8:        q[r, h], scale = quantize_keys(rotate(x))            ops.hadamard, ops.quant
    else:       q[r, h] = x in `dtype`, scale = 1
    gate[r,h] = weights[r, h] * H^-1/2 * 128^-1/2 * scale

All of it in float32; the gate stays float32, since rounding it to bf16 makes ties (sglang#13459). What comes out is
what ops.index_scores takes.
"""

from __future__ import annotations

import torch

from sglang_dsa_plugin import support
from sglang_dsa_plugin.cache.layouts import FP8, INDEX_DIM, ROPE_DIM
from sglang_dsa_plugin.ops import _check, hadamard, quant, rope


def prepare(
    projected: torch.Tensor,
    weights: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    layout: str,
    dtype: torch.dtype,
    impl: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """projected [R, H * 128] and weights [R, H] (each bf16, f16 or f32; rows may be strided) -> q [R, H, 128] of
    `dtype` and gate f32 [R, H].

    positions [R], cos_sin f32 [max, 64] and layout as in ops.rope.  dtype: of the index keys, e4m3 (queries are rotated
    and quantised, their scale goes into the gate) or bf16, f16 or f32 (neither).

    Raises ValueError for arguments that do not fit each other. A position outside the table is an error of the caller.
    """
    op = "index_queries.prepare"
    check_prepare(op, projected, weights, positions, cos_sin, layout)
    _check.one_of(op, "dtype", dtype, (FP8, *_check.FLOATS))
    run = support.resolve("index_queries", device=weights.device, impl=impl)
    return run(projected, weights, positions, cos_sin, layout, dtype)


def check_prepare(
    op: str,
    projected: torch.Tensor,
    weights: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    layout: str,
) -> None:
    """Raises ValueError in the name of operator `op` where arguments of `prepare` do not fit each other."""
    _check.tensor(op, "weights", weights, (None, None), _check.FLOATS)
    rows, heads = weights.shape
    _check.tensor(op, "projected", projected, (rows, heads * INDEX_DIM), _check.FLOATS, weights.device, "weights")
    _check.index_tensor(op, "positions", positions, (rows,), weights.device)
    _check.tensor(op, "cos_sin", cos_sin, (None, ROPE_DIM), (torch.float32,), weights.device)
    _check.one_of(op, "layout", layout, rope.LAYOUTS)


def reference_queries(
    projected: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, layout: str, rotated: bool
) -> torch.Tensor:
    """The queries before they are stored: float64 [R, H, 128]."""
    x = projected.double().unflatten(1, (-1, INDEX_DIM))
    x = torch.cat((rope.reference(x[..., :ROPE_DIM], positions, cos_sin, layout), x[..., ROPE_DIM:]), dim=-1)
    return hadamard.reference(x) if rotated else x


def reference(
    projected: torch.Tensor,
    weights: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    layout: str,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Reference of `prepare`: q of `dtype`, gate float64."""
    x = reference_queries(projected, positions, cos_sin, layout, dtype == FP8)
    gate = weights.double() * weights.shape[1] ** -0.5 * INDEX_DIM**-0.5
    if dtype != FP8:
        return x.to(dtype), gate
    values, scale = quant.reference_quantize_keys(x.flatten(0, 1))
    return values.view(x.shape), gate * scale.double().view(gate.shape)
