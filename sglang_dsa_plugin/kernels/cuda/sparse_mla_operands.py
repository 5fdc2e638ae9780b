"""What both launchers of sparse MLA in CUDA C++ (sparse_mla.py, sparse_mla_portable.py) make of a call's tensors;
queries on 16-byte bounds are FA3's, too.
"""

from __future__ import annotations

import dataclasses
import math

import torch

from sglang_dsa_plugin.cache.layouts import LATENT_DIM


def rows_on_bounds(kv_rows: torch.Tensor) -> bool:
    """Whether rows may be copied 16 bytes at a time, as a server's cache allows. The Triton kernel takes any rows."""
    return kv_rows.data_ptr() % 16 == 0 and kv_rows.stride(0) * kv_rows.element_size() % 16 == 0


@dataclasses.dataclass
class Operands:
    """nope [R,H,512] and rope [R,H,64]: queries, every head on a 16-byte bound. slots [R,K] int32 or int64, contiguous
    in a row. lengths int32 [R] or None. result [R,H,512] and lse f32 [R,H]: what the call returns.
    """

    nope: torch.Tensor
    rope: torch.Tensor
    slots: torch.Tensor
    lengths: torch.Tensor | None
    result: torch.Tensor
    lse: torch.Tensor

    @classmethod
    def of(
        cls,
        q: torch.Tensor,
        slots: torch.Tensor,
        lengths: torch.Tensor | None,
        out: torch.Tensor | None,
        q_rope: torch.Tensor | None,
    ) -> Operands:
        """Those of a call of `ops.sparse_mla.sparse_mla`."""
        rows, heads, _ = q.shape
        return cls(
            aligned(q[..., :LATENT_DIM]),
            aligned(q[..., LATENT_DIM:] if q_rope is None else q_rope),
            plain_slots(slots),
            narrow_lengths(lengths, slots.shape[1]),
            torch.empty(rows, heads, LATENT_DIM, dtype=q.dtype, device=q.device) if out is None else out,
            torch.empty(rows, heads, dtype=torch.float32, device=q.device),
        )

    def without_picks(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What is returned where no row has anything to read."""
        return self.result.zero_(), self.lse.fill_(-math.inf)

    def written(self) -> torch.Tensor:
        """Where the kernel writes: the result, or a tensor that is copied to it afterwards."""
        fits = writable(self.result)
        return self.result if fits else torch.empty_like(self.result, memory_format=torch.contiguous_format)


def aligned(q: torch.Tensor) -> torch.Tensor:
    """q [R, H, D] of 16 bits, or a copy of it: every head on a 16-byte bound."""
    whole = q.stride(2) == 1 and q.stride(0) % 8 == 0 and q.stride(1) % 8 == 0 and q.data_ptr() % 16 == 0
    return q if whole else q.clone(memory_format=torch.contiguous_format)


def writable(out: torch.Tensor) -> bool:
    """Whether the kernel's stores of 8 bytes fit."""
    return out.stride(2) == 1 and out.stride(0) % 4 == 0 and out.stride(1) % 4 == 0 and out.data_ptr() % 8 == 0


def plain_slots(slots: torch.Tensor) -> torch.Tensor:
    """slots [R, K], or a copy of them: int32 or int64, and contiguous in the last dimension."""
    if slots.dtype not in (torch.int32, torch.int64):
        slots = slots.to(torch.int32)
    return slots if slots.stride(1) == 1 else slots.contiguous()


def narrow_lengths(lengths: torch.Tensor | None, picks: int) -> torch.Tensor | None:
    """lengths [R] in int32: cut before they are narrowed; the kernels themselves cut what is int32."""
    if lengths is None:
        return None
    narrow = lengths if lengths.dtype == torch.int32 else lengths.clamp(0, picks).to(torch.int32)
    return narrow.contiguous()
