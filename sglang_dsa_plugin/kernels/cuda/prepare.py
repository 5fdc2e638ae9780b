"""Kernels in CUDA C++ compiled and loaded when a server starts, so that no request waits for a compiler.

Which form of a kernel runs follows from the numbers of rows and columns of a step; the forms are few, and known from
the tables. NVRTC compiles several at a time, and what it made lies on disk for the next start.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch

from sglang_dsa_plugin.cache.layouts import PAGE_SIZE
from sglang_dsa_plugin.kernels.triton import index_tables
from sglang_dsa_plugin.support_row import unusable

from . import latent_rows, program, select, sparse_mla, sparse_mla_portable, tables

_AT_A_TIME = 8

Form = select.Form  # of any kernel


def server_forms(
    gpu: index_tables.Gpu, columns: int, k: int, layout: str | None, portable: tuple[str, int, int] | None = None
) -> list[Form]:
    """The forms that steps of a server take on this GPU: selection of k from up to `columns` scores (0: none) with
    positions and slots written, and sparse attention on rows of `layout` (None: none). portable: (layout, heads,
    fewest rows) where the kernel for GPUs without a vendor's is taken. Rows of bf16 are stored at slots of 64 bits.
    """
    shapes = tables.select_shapes(gpu, columns, k, PAGE_SIZE)
    forms: list[Form] = [select.form(shape, select.BOTH, PAGE_SIZE) for shape in shapes]
    if layout in sparse_mla.FORMS:
        form = sparse_mla.FORMS[layout]
        for cluster in range(1, sparse_mla.MOST_BLOCKS + 1):
            for heads, walks in ((8, True), (16, True), (16, False)) if cluster == 1 else ((16, True),):
                macros = form.defines(cluster, lengths=True, sink=False, wide_slots=False, heads=heads, walks=walks)
                one = (form.source, form.name, macros, form.shared_bytes)
                if one not in forms:
                    forms.append(one)
    if layout == "bf16_1152" and gpu.sm is not None and gpu.sm >= 90:
        forms.append((latent_rows.SOURCE, latent_rows.NAME, latent_rows.defines(wide_slots=True), 0))
    if portable is not None:
        rows_layout, heads, fewest = portable
        for plan in sparse_mla_portable.forms(gpu, rows_layout, fewest, heads, k):
            macros = plan.defines(lengths=True, sink=False, wide_slots=False, pdl=bool(gpu.sm and gpu.sm >= 90))
            forms.append((sparse_mla_portable.SOURCE, sparse_mla_portable.NAME, macros, plan.shared_bytes))
    return forms


def prepare(
    device: torch.device, columns: int, k: int, layout: str | None, portable: tuple[str, int, int] | None = None
) -> int:
    """Load those forms on a CUDA device; returns how many, none where there is nothing to compile them with and the
    support table takes other kernels. Raises RuntimeError with the compiler's log.
    """
    if unusable("cuda.core") is not None:
        return 0
    index = device.index if device.index is not None else torch.cuda.current_device()
    where = torch.device("cuda", index)
    forms = server_forms(index_tables.gpu_of(where), columns, k, layout, portable)

    def load(form: Form) -> None:
        source, name, macros, shared = form
        program.kernel(source, name, where, macros, shared_bytes=shared)

    with ThreadPoolExecutor(_AT_A_TIME) as pool:
        for _ in pool.map(load, forms):
            pass
    return len(forms)
