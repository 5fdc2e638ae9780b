"""Queries in one piece for kernels that take no others: latent and roped part joined, heads of zeros behind them.

torch would do that in two passes, and in a slow one where the latent part comes out of a product by heads, so that its
rows are not next to each other.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_dsa_plugin.cache.layouts import LATENT_DIM, ROPE_DIM, ROW_DIM
from sglang_dsa_plugin.kernels.triton import index_tables, pdl
from sglang_dsa_plugin.kernels.triton.pdl import let_next_start, wait_for_earlier

_HEADS = 16


@triton.jit
def join_kernel(
    latent,
    latent_row,
    latent_head,
    rope,
    rope_row,
    rope_head,
    out,
    heads,
    tiles,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    HEADS: tl.constexpr,
    PDL: tl.constexpr,
):
    """HEADS heads of a row: latent [R, H, LATENT] and rope [R, H, ROPE] to out [R, tiles * HEADS, LATENT + ROPE]; heads
    from `heads` on are 0.
    """
    program = tl.program_id(0)
    row = (program // tiles).to(tl.int64)
    head = (program % tiles) * HEADS + tl.arange(0, HEADS)[:, None]
    real = head < heads
    column = tl.arange(0, LATENT)[None, :]
    more = tl.arange(0, ROPE)[None, :]
    wait_for_earlier(PDL)
    let_next_start(PDL)
    first = tl.load(latent + row * latent_row + head.to(tl.int64) * latent_head + column, mask=real, other=0.0)
    second = tl.load(rope + row * rope_row + head.to(tl.int64) * rope_head + more, mask=real, other=0.0)
    target = out + (row * tiles * HEADS + head) * (LATENT + ROPE)
    tl.store(target + column, first)
    tl.store(target + LATENT + more, second)


def whole_queries(q: torch.Tensor, q_rope: torch.Tensor | None, heads: int) -> torch.Tensor:
    """[R, heads, 576] contiguous of q [R, H, 576], or of q [R, H, 512] with q_rope [R, H, 64]; heads from H on are 0.

    heads: at least H, a multiple of 16. q itself where nothing is to do.
    """
    rows, have, _ = q.shape
    if q_rope is None and have == heads and q.is_contiguous():
        return q
    rope = q[..., LATENT_DIM:] if q_rope is None else q_rope
    out = torch.empty(rows, heads, ROW_DIM, dtype=q.dtype, device=q.device)
    tiles = heads // _HEADS
    join_kernel[(rows * tiles,)](
        q,
        q.stride(0),
        q.stride(1),
        rope,
        rope.stride(0),
        rope.stride(1),
        out,
        have,
        tiles,
        LATENT=LATENT_DIM,
        ROPE=ROPE_DIM,
        HEADS=_HEADS,
        num_warps=4,
        **pdl.arguments(index_tables.gpu_of(q.device)),
    )
    return out
