"""Index scores in Triton; see ops/index_scores.py for the formula, index_scores_kernels.py for the kernels."""

from __future__ import annotations

import math

import torch

from sglang_dsa_plugin.cache.layouts import FP8, PAGE_SIZE

from . import index_tables, pdl
from .index_scores_kernels import fill_kernel, keys_kernel, rows_kernel
from .index_scores_row import row_kernel

_ROW_ALIGN = 32  # columns: rows of scores begin on 128 bytes, and selection may read whole groups


def ragged(
    q: torch.Tensor,
    k: torch.Tensor,
    k_scale: torch.Tensor | None,
    gate: torch.Tensor,
    start: torch.Tensor,
    end: torch.Tensor,
    width: int | None,
) -> torch.Tensor:
    """`ops.index_scores.ragged`. Without `width` it reads the widest window on the host or, where a CUDA graph is being
    recorded, takes the number of keys.
    """
    if width is None:
        width = k.shape[0] if capturing(q.device) or not len(q) else max(0, int((end - start).max()))
    scores = new_scores(q.shape[0], width, q.device)
    score_ragged(scores, q, k, k_scale, gate, start, end)
    _fill(scores, start, end, False)
    return scores


def paged(
    q: torch.Tensor,
    pages: torch.Tensor,
    gate: torch.Tensor,
    lengths: torch.Tensor,
    page_table: torch.Tensor,
    row_to_request: torch.Tensor,
    width: int | None,
) -> torch.Tensor:
    """`ops.index_scores.paged`. Without `width` it reads the longest window on the host or, where a CUDA graph is being
    recorded, takes the tokens that the page table covers.
    """
    if width is None:
        covered = page_table.shape[1] * PAGE_SIZE
        width = covered if capturing(q.device) or not len(q) else max(0, int(lengths.max()))
    scores = new_scores(q.shape[0], width, q.device)
    score_paged(scores, q, pages, gate, lengths, page_table, row_to_request, fill=True)
    return scores


def new_scores(rows: int, width: int, device: torch.device) -> torch.Tensor:
    """Uninitialised f32 [rows, width] with aligned rows, as the selection reads them fastest."""
    whole = -(-width // _ROW_ALIGN) * _ROW_ALIGN
    return torch.empty((rows, whole), dtype=torch.float32, device=device)[:, :width]


def score_ragged(
    scores: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    k_scale: torch.Tensor | None,
    gate: torch.Tensor,
    start: torch.Tensor,
    end: torch.Tensor,
    skip: int = 0,
) -> None:
    """Write the scores of rows whose window is longer than `skip`; other columns are left as they are."""
    if not scores.numel() or not k.shape[0]:
        return
    kind, q, k = _operands(q, k)
    scale = gate if k_scale is None else k_scale
    _walk_rows(scores, q, k.contiguous(), scale, gate, start, end, gate, 0, k.shape[0], skip, kind, False)


def score_paged(
    scores: torch.Tensor,
    q: torch.Tensor,
    pages: torch.Tensor,
    gate: torch.Tensor,
    lengths: torch.Tensor,
    page_table: torch.Tensor,
    row_to_request: torch.Tensor,
    skip: int = 0,
    requests: int | None = None,
    tickets: torch.Tensor | None = None,
    fill: bool = False,
) -> None:
    """Write the scores of rows longer than `skip`; other columns are left as they are. Reads nothing on the host.

    requests: how many requests the rows are of, where it is not the whole page table (only speed depends on it).
    tickets: int32 [R] that is to be 0 afterwards (for the selection), which costs nothing while scoring.
    fill: write -inf past each row's keys; only without `skip`.
    """
    if fill and skip:
        raise ValueError(f"score_paged: fill wants every row scored, got skip {skip}")
    if not scores.numel() or not pages.shape[0] or not page_table.shape[1]:
        if tickets is not None:
            tickets.zero_()
        if fill:
            scores.fill_(-math.inf)
        return
    scale = gate
    if pages.dtype == torch.uint8:
        scale = pages.view(torch.float32)
        pages = pages.view(FP8)
    kind, q, k = _operands(q, pages)
    requests = requests or page_table.shape[0]
    gpu = index_tables.gpu_of(q.device)
    tiles = index_tables.stream_tiles(gpu, kind, q.shape[1], q.shape[0], requests)
    if tiles is None:
        if tickets is not None:
            tickets.zero_()
        _walk_rows(scores, q, k, scale, gate, row_to_request, lengths, page_table, k.stride(0), 0, skip, kind, True)
        if fill:
            fill_past(scores, lengths)
        return
    rows, heads, _ = q.shape
    tensors = (
        q,
        k,
        scale,
        gate.contiguous(),
        row_to_request,
        lengths,
        page_table,
        scores,
        # Where nobody wants them they are still written: a kernel that did not would be one more to compile.
        torch.empty(rows, dtype=torch.int32, device=q.device) if tickets is None else tickets,
        k.stride(0),
        page_table.stride(0),
    )
    constants = dict(
        H=heads,
        HP=index_tables.padded_heads(heads),
        BN=tiles.keys,
        KIND=kind,
        STAGES=tiles.stages,
        PERIOD=index_tables.head_period(gpu),
        FILL=fill,
        num_warps=tiles.warps,
        **pdl.arguments(gpu),
    )
    grid, width = (tiles.programs,), scores.shape[1]
    if rows == 1:
        row_kernel[grid](*tensors, k.shape[0], *page_table.shape, width, skip, **constants)
    else:
        group = index_tables.power_of_two(rows)
        keys_kernel[grid](*tensors, scores.stride(0), rows, width, skip, G=tiles.bundle, ROWS=group, **constants)


def _walk_rows(
    scores: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    scale: torch.Tensor,
    gate: torch.Tensor,
    first: torch.Tensor,
    last: torch.Tensor,
    table: torch.Tensor,
    page_stride: int,
    keys: int,
    skip: int,
    kind: str,
    paged: bool,
) -> None:
    rows, heads, _ = q.shape
    width = scores.shape[1]
    gpu = index_tables.gpu_of(q.device)
    tiles = index_tables.walk_tiles(gpu, kind, heads, rows, width)
    key_tiles = -(-width // tiles.keys)
    rows_kernel[(key_tiles * -(-rows // tiles.rows),)](
        q,
        k,
        scale,
        gate.contiguous(),
        first,
        last,
        table,
        scores,
        page_stride,
        table.stride(0),
        scores.stride(0),
        rows,
        keys,
        width,
        skip,
        key_tiles,
        H=heads,
        HP=index_tables.padded_heads(heads),
        G=tiles.bundle,
        BN=tiles.keys,
        ROWS=tiles.rows,
        KIND=kind,
        PAGED=paged,
        STAGES=tiles.stages,
        PERIOD=index_tables.head_period(gpu),
        num_warps=tiles.warps,
    )


def _operands(q: torch.Tensor, k: torch.Tensor) -> tuple[str, torch.Tensor, torch.Tensor]:
    """(KIND, q contiguous, k) as the kernels take them on this device."""
    kind = index_tables.score_kind(index_tables.gpu_of(q.device), q.dtype)
    if kind == "bytes":
        return kind, q.to(torch.float16).contiguous(), k.view(torch.uint8)
    return kind, q.contiguous(), k


def fill_past(scores: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """-inf in the columns at or past a row's length, in place; the others are not touched."""
    _fill(scores, lengths, lengths, True)
    return scores


def _fill(scores: torch.Tensor, first: torch.Tensor, last: torch.Tensor, paged: bool) -> None:
    rows, width = scores.shape
    if scores.numel():
        gpu = index_tables.gpu_of(scores.device)
        grid = (rows, index_tables.fill_programs(gpu, rows, width))
        fill_kernel[grid](
            first, last, scores, scores.stride(0), rows, width, PAGED=paged, num_warps=4, **pdl.arguments(gpu)
        )


def capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is being recorded, so that nothing can be read on the host."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
