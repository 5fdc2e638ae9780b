"""Keys of every head from their own parts and the part that all share, in Triton: one launch; see ops/mha_keys.py."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import index_tables, pdl
from .pdl import let_next_start, wait_for_earlier

HEADS = 128  # of a program, which is of one token; fewer were slower wherever a token has more
_WARPS = 16


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
    FIRST: tl.constexpr,
    REST: tl.constexpr,
    ROPE: tl.constexpr,
    TURN: tl.constexpr,
    PDL: tl.constexpr,
):
    """out [S, HEADS, NOPE + ROPE] from nope [S, HEADS, NOPE] and rope [S, ROPE]; strides in elements.

    FIRST columns of NOPE and the REST, TURN of ROPE: powers of two, the last two perhaps of more than there are.
    """
    wait_for_earlier(PDL)
    let_next_start(PDL)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * TILE + tl.arange(0, TILE)[:, None]
    real = head < HEADS
    first = tl.arange(0, FIRST)[None, :]
    turn = tl.arange(0, TURN)[None, :]
    own = nope + token * nope_token + head * nope_head
    # All is asked for before any is stored: a store may be to where a load reads, as far as the compiler knows.
    x = tl.load(own + first, mask=real)
    if REST > 0:
        rest = FIRST + tl.arange(0, REST)[None, :]
        y = tl.load(own + rest, mask=real & (rest < NOPE))
    shared = tl.load(rope + token * rope_token + turn, mask=turn < ROPE)
    to = out + (token * HEADS + head) * (NOPE + ROPE)
    tl.store(to + first, x, mask=real)
    if REST > 0:
        tl.store(to + rest, y, mask=real & (rest < NOPE))
    tl.store(to + NOPE + turn, shared.broadcast_to(TILE, TURN), mask=real & (turn < ROPE))


def join(nope: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
    """`ops.mha_keys.join`."""
    tokens, heads, width = nope.shape
    out = torch.empty(tokens, heads, width + rope.shape[1], dtype=nope.dtype, device=nope.device)
    if not out.numel():
        return out
    constants = shape(heads, width, rope.shape[1])
    join_kernel[(tokens, triton.cdiv(heads, constants["TILE"]))](
        nope,
        rope,
        out,
        nope.stride(0),
        nope.stride(1),
        rope.stride(0),
        **constants,
        **pdl.arguments(index_tables.gpu_of(nope.device)),
    )
    return out


def shape(heads: int, nope: int, rope: int) -> dict[str, int]:
    """Constants of `join_kernel` for the widths of the two parts."""
    tile = min(HEADS, triton.next_power_of_2(heads))
    first = 1 << (nope.bit_length() - 1)
    return {
        "HEADS": heads,
        "TILE": tile,
        "NOPE": nope,
        "FIRST": first,
        "REST": triton.next_power_of_2(nope - first) if nope > first else 0,
        "ROPE": rope,
        "TURN": triton.next_power_of_2(rope),
        # A thread moves 16 bytes of 128 columns at a time while the warps last.
        "num_warps": max(1, min(_WARPS, tile // 2)),
    }
