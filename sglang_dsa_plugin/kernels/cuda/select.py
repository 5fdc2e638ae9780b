"""Exact top-k in CUDA C++, SM 9.0 and later: a cluster of blocks a row (select.cu), or one block of many rows each
(select_many.cu).

What they do not take (tensors that end within a group of four scores, rows whose part of the page table does not fit a
block, far beyond a million columns) goes to the Triton kernels, which give the same picks.
"""

from __future__ import annotations

import ctypes

import torch

from sglang_dsa_plugin import settings
from sglang_dsa_plugin.kernels.triton import index_tables
from sglang_dsa_plugin.kernels.triton import select as triton_select
from sglang_dsa_plugin.support_row import unusable

from . import program, tables

SOURCE, NAME = "select.cu", "select_rows"
MANY_SOURCE, MANY_NAME = "select_many.cu", "select_many_rows"
POSITIONS, SLOTS, BOTH = 0, 1, 2  # WRITE of both

# Source, name, macros and dynamic shared memory of a kernel.
Form = tuple[str, str, program.Defines, int]


def preferred(device: torch.device, rows: int, width: int, k: int, page_size: int = 1) -> bool:
    """Whether the kernel is the faster one for such a selection here, and can run. page_size: of slots, if any."""
    if settings.forced_impl() == "triton":
        return False
    gpu = index_tables.gpu_of(device)
    return tables.prefers_select(gpu, rows, width, k, page_size) and unusable("cuda.core") is None


def fastest_rows(
    scores: torch.Tensor,
    lengths: torch.Tensor,
    k: int,
    starts: torch.Tensor | None,
    init_tokens: int,
    local_tokens: int,
    *,
    slots: tuple[torch.Tensor, torch.Tensor, int] | None = None,
    **more: torch.Tensor | None,
) -> torch.Tensor:
    """`select_rows` of here or of kernels/triton/select.py, whichever is the faster: the picks are the same."""
    rows, width = scores.shape
    here = preferred(scores.device, rows, width, k, max(1, width) if slots is None else slots[2])
    run = select_rows if here else triton_select.select_rows
    return run(scores, lengths, k, starts, init_tokens, local_tokens, slots=slots, **more)


def select_rows(
    scores: torch.Tensor,
    lengths: torch.Tensor,
    k: int,
    starts: torch.Tensor | None,
    init_tokens: int,
    local_tokens: int,
    *,
    slots: tuple[torch.Tensor, torch.Tensor, int] | None = None,
    offsets: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    slots_out: torch.Tensor | None = None,
    tickets: torch.Tensor | None = None,
    shape: tables.SelectShape | tables.ManyShape | None = None,
) -> torch.Tensor:
    """`select_rows` of kernels/triton/select.py, to which tickets go where it is taken. Reads nothing on the host.
    shape: for tests.
    """
    rows, width = scores.shape
    page_size = max(1, width) if slots is None else slots[2]
    if shape is None and rows:
        # A row may begin anywhere in a group of four where rows or windows are not aligned.
        aligned = starts is None and scores.stride(0) % 4 == 0 and scores.data_ptr() % 16 == 0
        columns = width if aligned else width + 3
        shape = tables.launch_shape(index_tables.gpu_of(scores.device), rows, columns, k, page_size)
    if shape is None or not shape.serves(width, page_size) or not _reads_whole_groups(scores):
        return triton_select.select_rows(
            scores,
            lengths,
            k,
            starts,
            init_tokens,
            local_tokens,
            slots=slots,
            offsets=offsets,
            out=out,
            slots_out=slots_out,
            tickets=tickets,
        )
    if out is None:
        out = torch.empty((rows, k), dtype=torch.int32, device=scores.device)
    init = min(init_tokens, k)
    local = min(local_tokens, k - init)
    table, requests = (None, None) if slots is None else slots[:2]
    wide = sum(
        1 << bit
        for bit, tensor in enumerate((lengths, starts, table, requests, offsets))
        if tensor is not None and tensor.dtype == torch.int64
    )
    write = POSITIONS if slots is None else SLOTS if slots_out is None else BOTH
    source, name, macros, shared = form(shape, write, 1 if slots is None else page_size)
    kernel = program.kernel(source, name, scores.device, macros, shared_bytes=shared)
    number, wide_number = ctypes.c_int, ctypes.c_longlong
    kernel.launch(
        rows,
        shape.threads,
        (
            scores.data_ptr(),
            wide_number(scores.stride(0)),
            lengths.data_ptr(),
            _address(starts),
            out.data_ptr(),
            _address(slots_out),
            _address(table),
            wide_number(0 if table is None else table.stride(0)),
            _address(requests),
            _address(offsets),
            number(width),
            number(k),
            number(init),
            number(local),
            number(wide),
        ),
        cluster=shape.cluster,
        pdl=True,
    )
    return out


def form(shape: tables.SelectShape | tables.ManyShape, write: int, page_size: int) -> Form:
    """The kernel of a launch: source, name, macros and dynamic shared memory."""
    both: dict[str, int | str] = {
        "THREADS": shape.threads,
        "BLOCKS": shape.blocks,
        "VECTORS": shape.vectors,
        "PAGE": page_size,
        "WRITE": write,
    }
    if isinstance(shape, tables.SelectShape):
        few = {
            "CLUSTER": shape.cluster,
            "BATCH": shape.batch,
            "HELD": int(shape.held),
            "LISTED": shape.listed,
            "PAGES": shape.pages,
            "SHARED": shape.shared_bytes,
        }
        return SOURCE, NAME, both | few, shape.shared_bytes
    macros = {
        "BATCH": shape.batch,
        "STRATA": shape.strata,
        "LISTED": shape.listed,
        "CHUNKS": shape.chunks,
        "ONCE": int(shape.once),
        "SHARED": shape.shared_bytes,
    }
    return MANY_SOURCE, MANY_NAME, both | macros, shape.shared_bytes


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _reads_whole_groups(scores: torch.Tensor) -> bool:
    """Whether scores can be read in aligned groups of four to the end of the last row."""
    rows, width = scores.shape
    storage = scores.untyped_storage()
    end = scores.data_ptr() + 4 * ((rows - 1) * scores.stride(0) + width)
    return -(-end // 16) * 16 <= storage.data_ptr() + storage.nbytes() and storage.data_ptr() % 16 == 0
