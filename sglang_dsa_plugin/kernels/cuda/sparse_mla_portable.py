"""Sparse MLA in CUDA C++ for many heads on any GPU from SM 8.0 on: what `sparse_mla_portable.cu` is compiled and
launched with.

No host synchronisation and no state between calls, so a call can be captured in a CUDA graph once the kernel is loaded.
"""

from __future__ import annotations

import ctypes
import dataclasses
import math

import torch

from sglang_dsa_plugin.cache.layouts import LATENT_DIM
from sglang_dsa_plugin.kernels.cuda import program
from sglang_dsa_plugin.kernels.cuda.sparse_mla_operands import Operands, rows_on_bounds
from sglang_dsa_plugin.kernels.triton import index_tables
from sglang_dsa_plugin.kernels.triton.sparse_mla import merge
from sglang_dsa_plugin.kernels.triton.sparse_mla import sparse_mla as triton_sparse_mla

# What the source takes for granted, too.
_ROW_BYTES, _PACKED_BYTES, _STEPS, _MARKS = 1168, 656, 36, 8
SOURCE, NAME = "sparse_mla_portable.cu", "sparse_mla_portable"
_LOG2E = 1 / math.log(2)
LAYOUTS = ("bf16_1152", "fp8_656")
# (tile, stages, kept, together) by layout and heads of a block; the first that fits is taken. Forced on an H200,
# 2026-12-01, T 4096, S 32K, k 2048, 128 heads, microseconds: bf16 7343 (163 KB) and 9119 (99 KB), fp8 8152 and 10261;
# 32 heads the day before 3214 and 3735. More is in docs/tried.md.
_FORMS = {
    ("bf16_1152", 64): ((32, 3, 28, 1), (16, 4, 32, 1)),
    ("fp8_656", 64): ((32, 1, 15, 2), (16, 2, 30, 1)),
    ("bf16_1152", 32): ((32, 3, 28, 1), (16, 4, 32, 1)),
    ("fp8_656", 32): ((32, 1, 28, 1), (16, 2, 30, 1)),
}
# Picks of a split, where there are as many: 1 row of 128 heads in bf16 21.6 with 32, 19.3 with 64, 20.7 with 128.
_LEAST_PICKS = 64
# Rows from which a bf16 row is copied in three runs instead of one: prefill, where rows come from the L2 cache, 7343
# instead of 7676. From memory the last run comes late: decode of 16 rows 53.0 instead of 48.5, of 64 142.3 instead of
# 140.7. In between nothing was measured.
_SPREAD_ROWS = 512


@dataclasses.dataclass(frozen=True)
class Plan:
    """heads: of a block, 32 or 64. stages: tiles in the ring, 3 or more; of packed rows 1 or more. split_picks: picks
    of a split, whole tiles. splits: 1 writes the result at once. fp8: for packed rows. tile: picks of one, 16 or 32.
    kept: steps of 16 columns whose queries a warp of scores keeps in registers. together: warps of scores that share
    columns, 1 or 2. spread: copies of a tile of 32 bf16 rows in three runs among the sums, instead of one.
    """

    heads: int
    stages: int
    split_picks: int
    splits: int
    fp8: bool = False
    tile: int = 32
    kept: int = 28
    together: int = 1
    spread: bool = False

    def defines(self, *, lengths: bool, sink: bool, wide_slots: bool, pdl: bool) -> dict[str, int]:
        """Macros. wide_slots: int64. pdl: the launch may begin before the one ahead is done."""
        return {
            "FP8": int(self.fp8),
            "HEADS": self.heads,
            "TILE": self.tile,
            "STAGES": self.stages,
            "Q_KEPT": self.kept,
            "TOGETHER": self.together,
            "SPREAD": int(self.spread),
            "PARTIAL": int(self.splits > 1),
            "HAS_LENGTHS": int(lengths),
            "HAS_SINK": int(sink and self.splits == 1),
            "SLOTS64": int(wide_slots),
            "PDL": int(pdl),
        }

    @property
    def threads(self) -> int:
        """Of a block: eight warps, and one for 16 heads."""
        return 256 + 2 * self.heads

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block, as `Shared` of the source divides it."""
        tiles = (3 if self.fp8 else self.stages) * self.tile * _ROW_BYTES
        packed = self.tile * (self.stages * _PACKED_BYTES + 4 * 4) + 4 * self.heads + 16 if self.fp8 else 0
        operands = (_STEPS - self.kept * self.together) * self.heads * 32 + 2 * self.heads * (self.tile + 8) * 2
        largest = self.tile if self.together == 2 else 8
        ahead = self.stages if self.fp8 else self.stages - 2
        slots = (2 if ahead == 1 else 4) * self.tile * 8 if self.fp8 or self.spread else 0
        return tiles + packed + operands + slots + self.heads * (5 * 4 + largest * 4) + _MARKS * self.tile + 80


def choose(gpu: index_tables.Gpu, layout: str, rows: int, heads: int, picks: int) -> Plan | None:
    """The plan for a shape, None where the GPU has not enough shared memory. From shapes and the GPU model only, so
    results repeat.
    """
    block, fp8 = 32 if heads <= 32 else 64, layout == "fp8_656"
    for tile, stages, kept, together in _FORMS[layout, block]:
        tiles, programs = -(-picks // tile), rows * -(-heads // block)
        # Splits that fill the GPU once, a block a multiprocessor.
        wanted = min(max(1, gpu.processors // programs), tiles)
        per_split = min(max(-(-tiles // wanted), _LEAST_PICKS // tile), tiles)
        spread = (layout, block, tile) == ("bf16_1152", 64, 32) and rows >= _SPREAD_ROWS
        plan = Plan(block, stages, per_split * tile, -(-tiles // per_split), fp8, tile, kept, together, spread)
        if plan.shared_bytes <= gpu.shared_kib << 10:
            return plan
    return None


def forms(gpu: index_tables.Gpu, layout: str, fewest: int, heads: int, picks: int) -> list[Plan]:
    """A plan of each form that `choose` takes for so many rows and more."""
    found = (choose(gpu, layout, rows, heads, picks) for rows in (fewest, max(fewest, _SPREAD_ROWS - 1), 1 << 20))
    return list(dict.fromkeys(plan for plan in found if plan is not None))


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
    plan: Plan | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`ops.sparse_mla.sparse_mla` for bf16 q and LAYOUTS. plan: instead of `choose`, for measurements.

    Raises ValueError where the GPU has not enough shared memory.
    """
    if not rows_on_bounds(kv_rows):
        return triton_sparse_mla(q, kv_rows, slots, scale, layout, kv_scale, sink, lengths, out, q_rope=q_rope)
    given = Operands.of(q, slots, lengths, out, q_rope)
    (rows, heads, _), picks = q.shape, slots.shape[1]
    if not (rows and heads and picks and kv_rows.shape[0]):
        return given.without_picks()
    nope, rope, slots, lengths = given.nope, given.rope, given.slots, given.lengths
    result, lse, row_stride = given.result, given.lse, kv_rows.stride(0) * kv_rows.element_size()
    gpu = index_tables.gpu_of(q.device)
    if plan is None:
        plan = choose(gpu, layout, rows, heads, picks)
    if plan is None:  # the support table does not send such a call here
        raise ValueError(
            f"sparse_mla: {layout} rows want more shared memory in this kernel than the {gpu.shared_kib} KiB that a "
            "block has on this GPU; take impl='triton'"
        )
    if plan.splits > 1:
        written = torch.empty(rows, plan.splits, heads, LATENT_DIM, dtype=torch.float32, device=q.device)
        written_lse = torch.empty(rows, plan.splits, heads, dtype=torch.float32, device=q.device)
        out_row = out_head = 0  # the kernel knows how parts lie
    else:
        written = given.written()
        written_lse, out_row, out_head = lse, written.stride(0), written.stride(1)
    pdl = bool(gpu.sm and gpu.sm >= 90)
    macros = plan.defines(
        lengths=lengths is not None, sink=sink is not None, wide_slots=slots.dtype == torch.int64, pdl=pdl
    )
    run = program.kernel(SOURCE, NAME, q.device, macros, shared_bytes=plan.shared_bytes)
    run.launch(
        rows * plan.splits * -(-heads // plan.heads),
        plan.threads,
        (
            nope.data_ptr(),
            rope.data_ptr(),
            kv_rows.data_ptr(),
            slots.data_ptr(),
            0 if lengths is None else lengths.data_ptr(),
            0 if sink is None else sink.data_ptr(),
            written.data_ptr(),
            written_lse.data_ptr(),
            ctypes.c_int64(nope.stride(0)),
            ctypes.c_int64(nope.stride(1)),
            ctypes.c_int64(rope.stride(0)),
            ctypes.c_int64(rope.stride(1)),
            ctypes.c_int64(row_stride),
            ctypes.c_int64(slots.stride(0)),
            ctypes.c_int64(out_row),
            ctypes.c_int64(out_head),
            ctypes.c_int32(kv_rows.shape[0]),
            ctypes.c_int32(heads),
            ctypes.c_int32(picks),
            ctypes.c_int32(plan.split_picks),
            ctypes.c_int32(plan.splits),
            ctypes.c_float(scale * _LOG2E),
        ),
        pdl=pdl,
    )
    if plan.splits > 1:
        merge(gpu, written, written_lse, sink, result, lse)
    elif written is not result:
        result.copy_(written)
    return result, lse
