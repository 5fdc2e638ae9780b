"""Sparse MLA of a few rows on one thread: rows are decoded where they lie, scores never leave the cache.

Blocks of picks with a running maximum a head, as in FlashAttention (arXiv:2205.14135): a block's latents are decoded
once, scored by all heads and summed by all heads. All in f32.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from sglang_dsa_plugin.cache.layouts import LATENT_DIM, QUANT_BLOCK, ROPE_DIM, ROW_DIM
from sglang_dsa_plugin.kernels.numba.memory import E4M3, flat_bytes, jit, widen_bf16

_KINDS = {"bf16_1152": 0, "fp32_2304": 1, "fp8_656": 2, "fp8_576": 3}
_BLOCK = 32  # picks at once: 72 KiB of latents
_SCALES_AT = LATENT_DIM
_ROPE_AT = LATENT_DIM + 4 * (LATENT_DIM // QUANT_BLOCK)

_LOG2_E = np.float32(1 / math.log(2))
# exp(x) = 2^n * exp(r) with r = x - n ln 2, ln 2 in two parts so that n times the first is exact (Cody and Waite).
_LN2_HIGH = np.float32(0.693359375)
_LN2_LOW = np.float32(-2.12194440e-4)
_LEAST = np.float32(-87.0)  # below it the weight counts as 0


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
    q_rope: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`ops.sparse_mla.sparse_mla`."""
    rows, heads, _ = q.shape
    if out is None:
        out = torch.empty(rows, heads, LATENT_DIM, dtype=q.dtype)
    lse = torch.empty(rows, heads, dtype=torch.float32)
    if not rows or not heads or not kv_rows.shape[0]:
        return out.zero_(), lse.fill_(-math.inf)
    even = heads + heads % 2  # heads are computed in pairs
    q32 = torch.empty(rows, even, ROW_DIM)
    q32[:, heads:] = 0
    q32[:, :heads, : q.shape[2]] = q.detach()
    if q_rope is not None:
        q32[:, :heads, LATENT_DIM:] = q_rope.detach()
    sums = torch.empty(rows, even, LATENT_DIM)
    flat, step = flat_bytes(kv_rows)
    many = np.full(rows, slots.shape[1]) if lengths is None else lengths.long().numpy()
    sinks = np.zeros(0, np.float32) if sink is None else sink.detach().numpy()
    _attend(
        q32.numpy(),
        flat,
        step,
        kv_rows.shape[0],
        # One type of index, one compiled form: another may be vectorised, and so rounded, in another way.
        slots.long().contiguous().numpy(),
        many,
        scale,
        _KINDS[layout],
        kv_scale,
        E4M3,
        sinks,
        sums.numpy(),
        lse.numpy(),
    )
    return out.copy_(sums[:, :heads]), lse


@jit
def _attend(
    q: Any,
    rows: Any,
    step: int,
    count: int,
    slots: Any,
    lengths: Any,
    scale: float,
    kind: int,
    kv_scale: float,
    e4m3: Any,
    sinks: Any,
    out: Any,
    lse: Any,
) -> None:
    """Every row of q f32 [R, H, 576] into out f32 [R, H, 512] and lse f32 [R, H]; rows: bytes, `step` apart."""
    heads = q.shape[1]
    latents = np.empty((_BLOCK, ROW_DIM), np.float32)
    weights = np.empty((heads, _BLOCK), np.float32)
    largest = np.empty(heads, np.float32)
    total = np.empty(heads, np.float32)
    picked = np.empty(slots.shape[1], np.int64)
    for r in range(q.shape[0]):
        picks = 0
        for i in range(min(slots.shape[1], lengths[r])):
            if 0 <= slots[r, i] < count:
                picked[picks] = slots[r, i]
                picks += 1
        out[r, :, :] = 0
        largest[:] = -np.inf
        total[:] = 0
        for start in range(0, picks, _BLOCK):
            size = min(_BLOCK, picks - start)
            for i in range(size):
                at = picked[start + i] * step
                _decode(rows, at, kind, kv_scale, e4m3, latents[i])
            # Places past the last pick: latents of zeros with weights of zero.
            for i in range(size, _BLOCK):
                latents[i, :] = 0
            _score(q[r], latents, size, np.float32(scale), weights)
            _weigh(weights, size, largest, total, out[r])
            _gather(weights, latents, size, out[r])
        for h in range(lse.shape[1]):
            if picks == 0:
                lse[r, h] = -np.inf
                continue
            lse[r, h] = largest[h] + np.log(total[h])
            divisor = total[h]
            if sinks.shape[0]:
                divisor += np.exp(sinks[h] - largest[h])
            inverse = np.float32(1) / np.float32(divisor)
            for d in range(LATENT_DIM):
                out[r, h, d] *= inverse


@jit
def _decode(rows: Any, at: int, kind: int, kv_scale: float, e4m3: Any, out: Any) -> None:
    """The latent row that begins at byte `at`: f32 [576]."""
    if kind == 0:
        widen_bf16(rows[at : at + 2 * ROW_DIM].view(np.uint16), out.view(np.int32))
    elif kind == 1:
        values = rows[at : at + 4 * ROW_DIM].view(np.float32)
        for i in range(ROW_DIM):
            out[i] = values[i]
    elif kind == 2:
        scales = rows[at + _SCALES_AT : at + _ROPE_AT].view(np.float32)
        for block in range(LATENT_DIM // QUANT_BLOCK):
            for i in range(block * QUANT_BLOCK, (block + 1) * QUANT_BLOCK):
                out[i] = e4m3[rows[at + i]] * scales[block]
        turn = rows[at + _ROPE_AT : at + _ROPE_AT + 2 * ROPE_DIM].view(np.uint16)
        widen_bf16(turn, out[LATENT_DIM:].view(np.int32))
    else:
        for i in range(ROW_DIM):
            out[i] = e4m3[rows[at + i]] * np.float32(kv_scale)


@jit
def _score(q: Any, latents: Any, size: int, scale: Any, scores: Any) -> None:
    """scores[h, i] = scale * q[h] . latents[i], two heads and four picks at once: eight sums from six reads."""
    for h in range(0, q.shape[0], 2):
        p, q2 = q[h], q[h + 1]
        for i in range(0, size, 4):
            a, b, c, d = latents[i], latents[i + 1], latents[i + 2], latents[i + 3]
            pa, pb, pc, pd = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
            qa, qb, qc, qd = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
            for j in range(ROW_DIM):
                pa += p[j] * a[j]
                pb += p[j] * b[j]
                pc += p[j] * c[j]
                pd += p[j] * d[j]
                qa += q2[j] * a[j]
                qb += q2[j] * b[j]
                qc += q2[j] * c[j]
                qd += q2[j] * d[j]
            scores[h, i], scores[h, i + 1], scores[h, i + 2], scores[h, i + 3] = pa, pb, pc, pd
            scores[h + 1, i], scores[h + 1, i + 1], scores[h + 1, i + 2], scores[h + 1, i + 3] = qa, qb, qc, qd
        for i in range(_BLOCK):
            scores[h, i] *= scale
            scores[h + 1, i] *= scale


@jit
def _weigh(weights: Any, size: int, largest: Any, total: Any, out: Any) -> None:
    """Scores [H, block] become exp(score - largest so far), in place; earlier sums are brought to the new largest."""
    whole = np.empty(_BLOCK, np.int32)
    power = whole.view(np.float32)
    for h in range(weights.shape[0]):
        row = weights[h]
        top = largest[h]
        for i in range(size):
            top = max(top, row[i])
        if top == -np.inf:  # every score so far is -inf: weights of 0, and nothing is known of the largest
            for i in range(_BLOCK):
                row[i] = 0
            continue
        if top != largest[h] and total[h] != 0:
            shrink = np.float32(np.exp(largest[h] - top))
            total[h] *= shrink
            for d in range(LATENT_DIM):
                out[h, d] *= shrink
        largest[h] = top
        for i in range(_BLOCK):
            x = row[i] - top
            n = np.rint(x * _LOG2_E)
            rest = (x - n * _LN2_HIGH) - n * _LN2_LOW
            y = np.float32(1.9875691500e-4)
            y = y * rest + np.float32(1.3981999507e-3)
            y = y * rest + np.float32(8.3334519073e-3)
            y = y * rest + np.float32(4.1665795894e-2)
            y = y * rest + np.float32(1.6666665459e-1)
            y = y * rest + np.float32(5.0000001201e-1)
            y = y * rest * rest + rest + np.float32(1)
            dead = x < _LEAST or i >= size
            whole[i] = 0 if dead else (np.int32(n) + 127) << 23
            row[i] = np.float32(0) if dead else y
        for i in range(_BLOCK):
            row[i] *= power[i]
        part = np.float32(0)
        for i in range(_BLOCK):
            part += row[i]
        total[h] += part


@jit
def _gather(weights: Any, latents: Any, size: int, out: Any) -> None:
    """out[h] += sum_i weights[h, i] * latents[i, :512], two heads and four picks at once."""
    for h in range(0, weights.shape[0], 2):
        s, t = out[h], out[h + 1]
        for i in range(0, size, 4):
            a, b, c, d = latents[i], latents[i + 1], latents[i + 2], latents[i + 3]
            sa, sb, sc, sd = weights[h, i], weights[h, i + 1], weights[h, i + 2], weights[h, i + 3]
            ta, tb, tc, td = weights[h + 1, i], weights[h + 1, i + 1], weights[h + 1, i + 2], weights[h + 1, i + 3]
            for j in range(LATENT_DIM):
                s[j] += (sa * a[j] + sb * b[j]) + (sc * c[j] + sd * d[j])
                t[j] += (ta * a[j] + tb * b[j]) + (tc * c[j] + td * d[j])
