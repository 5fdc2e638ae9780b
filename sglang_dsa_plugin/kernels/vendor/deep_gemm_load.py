"""DeepGEMM's kernels of a decode step outside of CUDA graphs, compiled before any request waits for them.

Those of graphs come while these are recorded. A server without graphs, or with few, has no other step that brings the
scores' kernel or the schedules of up to EAGER_ROWS rows (deep_gemm_plan.py). DeepGEMM keeps what it compiled on disk.
"""

from __future__ import annotations

import torch

from sglang_dsa_plugin.cache.layouts import FP8, INDEX_DIM, PAGE_SIZE

from . import index_select
from .deep_gemm_plan import COMPILED_ROWS, EAGER_ROWS, rows_a_call

_ANY_BUDGET = 1 << 40


def load(pages: torch.Tensor, heads: int, topk: int, requests: int, *, scores: str, selection: str) -> None:
    """Run decode's picks once for each kernel that eager steps of up to `requests` rows take, on rows without keys.
    pages: e4m3 index pages of any layer. scores, selection: of `index_select.paged`.
    """
    device, width = pages.device, topk // PAGE_SIZE + 2
    by = {"scores": scores, "selection": selection}
    most = min(EAGER_ROWS, rows_a_call(device))
    for top in range(COMPILED_ROWS, min(most, requests) + COMPILED_ROWS, COMPILED_ROWS):
        rows = min(top, most)  # no multiple of COMPILED_ROWS, perhaps

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        q, gate = zeros(rows, heads, INDEX_DIM, dtype=torch.uint8).view(FP8), zeros(rows, heads, dtype=torch.float32)
        of_rows = zeros(rows), zeros(rows, width), torch.arange(rows, dtype=torch.int32, device=device)
        plan = index_select.plan(of_rows[0], pages, *of_rows[1:], topk, _ANY_BUDGET, eager=True, **by)
        slots = zeros(rows, topk)
        index_select.paged(q, pages, gate, *of_rows, topk, 0, 0, _ANY_BUDGET, slots_out=slots, plan=plan, **by)
