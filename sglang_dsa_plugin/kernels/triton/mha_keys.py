"""Keys of every head from their own parts and the part that all share, in Triton: one launch; see ops/mha_keys.py."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import index_tables, pdl
from .pdl import let_next_start, wait_for_earlier

HEADS = 16  # of a program, which is of one token
COLUMNS = 64


@triton.jit
def join_kernel(
    nope,
    rope,
    out,
    nope_token,
    nope_head,
    rope_token,
    HEADS: tl.constexpr,
    TILE: tl.constexpr,
    NOPE: tl.constexpr,
    ROPE: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    """out [S, HEADS, NOPE + ROPE] from nope [S, HEADS, NOPE] and rope [S, ROPE]; strides in elements."""
    wait_for_earlier(PDL)
    let_next_start(PDL)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * TILE + tl.arange(0, TILE)[:, None]
    real = head < HEADS
    to = out + (token * HEADS + head) * (NOPE + ROPE)
    for first in tl.static_range(0, NOPE, COLUMNS):
        column = first + tl.arange(0, COLUMNS)[None, :]
        here = real & (column < NOPE)
        tl.store(to + column, tl.load(nope + token * nope_token + head * nope_head + column, mask=here), mask=here)
    for first in tl.static_range(0, ROPE, COLUMNS):
        column = first + tl.arange(0, COLUMNS)[None, :]
        shared = tl.load(rope + token * rope_token + column, mask=column < ROPE)
        tl.store(to + NOPE + column, shared.broadcast_to(TILE, COLUMNS), mask=real & (column < ROPE))


def join(nope: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
    """`ops.mha_keys.join`."""
    tokens, heads, width = nope.shape
    out = torch.empty(tokens, heads, width + rope.shape[1], dtype=nope.dtype, device=nope.device)
    if not out.numel():
        return out
    tile = min(HEADS, triton.next_power_of_2(heads))
    join_kernel[(tokens, triton.cdiv(heads, tile))](
        nope,
        rope,
        out,
        nope.stride(0),
        nope.stride(1),
        rope.stride(0),
        HEADS=heads,
        TILE=tile,
        NOPE=width,
        ROPE=rope.shape[1],
        COLUMNS=COLUMNS,
        # A thread moves 16 bytes at a time.
        num_warps=max(1, tile * COLUMNS * nope.element_size() // (16 * 32)),
        **pdl.arguments(index_tables.gpu_of(nope.device)),
    )
    return out
