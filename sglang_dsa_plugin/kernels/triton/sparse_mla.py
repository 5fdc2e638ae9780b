"""Sparse MLA in Triton: picks a plan for the shape, allocates what the splits need, launches.

No host synchronisation and no state between calls, so a call can be captured in a CUDA graph as it is.
"""

from __future__ import annotations

import math

import torch
import triton

from sglang_dsa_plugin.cache.layouts import LATENT_DIM
from sglang_dsa_plugin.kernels.triton import index_tables, pdl
from sglang_dsa_plugin.kernels.triton import sparse_mla_tiles as tiles
from sglang_dsa_plugin.kernels.triton.e4m3 import has_cvt
from sglang_dsa_plugin.kernels.triton.layouts import RowViews, row_views
from sglang_dsa_plugin.kernels.triton.sparse_mla_gather import gather_kernel
from sglang_dsa_plugin.kernels.triton.sparse_mla_merge import merge_kernel

_LOG2E = 1 / math.log(2)
# bf16 numbers that together hold a query of this type.
_Q_PARTS = {torch.bfloat16: 1, torch.float16: 2, torch.float32: 3}


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
    plan: tiles.Plan | None = None,
    q_rope: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`ops.sparse_mla.sparse_mla`. plan: instead of the table's choice, for measurements."""
    rows, heads, _ = q.shape
    if q_rope is None:
        q_rope = q[..., LATENT_DIM:]
    if out is None:
        out = torch.empty(rows, heads, LATENT_DIM, dtype=q.dtype, device=q.device)
    lse = torch.empty(rows, heads, dtype=torch.float32, device=q.device)
    count, picks = kv_rows.shape[0], slots.shape[1]
    if not (rows and heads and picks and count):
        return out.zero_(), lse.fill_(-math.inf)
    views = row_views(kv_rows, layout)
    gpu = index_tables.gpu_of(q.device)
    sm = gpu.sm if gpu.kind == "cuda" else None
    q_parts = _Q_PARTS[q.dtype]
    if plan is None:
        hopper = sm == 90 and q_parts == 1 and views.unit == 16
        plan = tiles.choose(sm, gpu.processors, layout, rows, heads, picks, hopper, q_parts)
    if plan.splits > 1:
        part = torch.empty(rows, plan.splits, heads, LATENT_DIM, dtype=torch.float32, device=q.device)
        part_lse = torch.empty(rows, plan.splits, heads, dtype=torch.float32, device=q.device)
    else:
        part, part_lse = out, lse
    value_scale = kv_scale if layout == "fp8_576" else 1.0
    arguments = dict(
        slots_ptr=slots,
        # An absent tensor is never read; the kernel still wants a pointer.
        lengths_ptr=slots if lengths is None else lengths,
        sink_ptr=lse if sink is None else sink,
        out_ptr=part,
        lse_ptr=part_lse,
        count=count,
        heads=heads,
        picks=picks,
        split_picks=plan.split_picks,
        splits=plan.splits,
        scale_log2=scale * value_scale * _LOG2E,
        value_scale=value_scale,
        q_row_stride=q.stride(0),
        q_head_stride=q.stride(1),
        q_rope_row_stride=q_rope.stride(0),
        q_rope_head_stride=q_rope.stride(1),
        kv_stride=views.stride,
        slots_stride=slots.stride(0),
        out_row_stride=out.stride(0),
        out_head_stride=out.stride(1),
        HAS_LENGTHS=lengths is not None,
        HAS_SINK=sink is not None,
        PARTIAL=plan.splits > 1,
        # With lengths the end of a row is known: it need not be looked for.
        SCAN=_scan(plan.split_picks) if lengths is None else 0,
        BLOCK_H=plan.block_h,
        num_warps=plan.warps,
        **pdl.arguments(gpu),
    )
    grid = (rows * plan.splits * triton.cdiv(heads, plan.block_h),)
    if plan.kernel == "wide":
        _wide(grid, q, q_rope, views, arguments)
    elif plan.kernel == "hopper":
        _hopper(grid, q, q_rope, views, plan, arguments)
    else:
        gather_kernel[grid](
            q,
            q_rope,
            views.nope,
            views.rope,
            views.scales,
            UNIT=views.unit,
            ROPE_COLUMN=views.rope_column,
            SCALES_COLUMN=views.scales_column,
            NOPE_WORDS=views.nope_words,
            ROPE_WORDS=views.rope_words,
            HAS_SCALES=views.has_scales,
            Q_PARTS=q_parts,
            DECODE=_decode(gpu),
            BLOCK_N=plan.block_n,
            num_stages=plan.stages,
            **arguments,
        )
    if plan.splits > 1:
        merge(gpu, part, part_lse, sink, out, lse)
    return out, lse


def _hopper(
    grid: tuple[int],
    q: torch.Tensor,
    q_rope: torch.Tensor,
    views: RowViews,
    plan: tiles.Plan,
    arguments: dict[str, object],
) -> None:
    # Imported late: Gluon is needed on this path only.
    from sglang_dsa_plugin.kernels.triton import sparse_mla_hopper, sparse_mla_hopper_fp8

    if views.nope_words:
        sparse_mla_hopper_fp8.gather_fp8[grid](
            q,
            q_rope,
            views.nope,
            views.scales,
            HAS_SCALES=views.has_scales,
            **arguments,
        )
    else:
        sparse_mla_hopper.gather_bf16[grid](
            q,
            q_rope,
            views.nope,
            STAGES=plan.stages,
            **arguments,
        )


def _wide(
    grid: tuple[int], q: torch.Tensor, q_rope: torch.Tensor, views: RowViews, arguments: dict[str, object]
) -> None:
    # Imported late, as above.
    from sglang_dsa_plugin.kernels.triton import sparse_mla_hopper_wide, sparse_mla_hopper_wide_fp8

    if views.nope_words:
        sparse_mla_hopper_wide_fp8.gather_fp8_wide[grid](
            q, q_rope, views.nope, views.scales, HAS_SCALES=views.has_scales, **arguments
        )
    else:
        sparse_mla_hopper_wide.gather_bf16_wide[grid](q, q_rope, views.nope, **arguments)


def merge(
    gpu: index_tables.Gpu,
    part: torch.Tensor,
    part_lse: torch.Tensor,
    sink: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    """Joins part f32 [R, splits, H, 512] and part_lse f32 [R, splits, H] (base 2) to out [R, H, 512] and lse [R, H]."""
    rows, splits, heads, _ = part.shape
    padded = triton.next_power_of_2(splits)
    # Few, large programs: a program per 128 columns costs more to start than to run.
    columns = max(64, min(LATENT_DIM, 4096 // padded))
    merge_kernel[(rows * heads * (LATENT_DIM // columns),)](
        part,
        part_lse,
        lse if sink is None else sink,
        out,
        lse,
        heads,
        splits,
        out.stride(0),
        out.stride(1),
        HAS_SINK=sink is not None,
        SPLITS=padded,
        COLUMNS=columns,
        num_warps=4,
        **pdl.arguments(gpu),
    )


def _scan(split_picks: int) -> int:
    """Picks that a program looks through for the last valid one; few values, so that few kernels are compiled."""
    return 0 if split_picks > 4096 else max(512, triton.next_power_of_2(split_picks))


def _decode(gpu: index_tables.Gpu) -> str:
    """How e4m3 is decoded."""
    return "ops" if gpu.kind != "cuda" else "cvt" if has_cvt(gpu) else "bits"
