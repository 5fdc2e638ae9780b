"""DeepGEMM's kernels of a decode step outside of CUDA graphs, compiled before any request waits for them.

Those of graphs come while these are recorded. A server without graphs, or with few, has no other step that brings the
scores' kernel or the schedules of up to EAGER_ROWS rows (deep_gemm_plan.py). DeepGEMM keeps what it compiled on disk.
"""

from __future__ import annotations

import torch

from sglang_dsa_plugin.kernels.triton.index_select import ANY_BUDGET, without_keys

from . import index_select
from .deep_gemm_plan import COMPILED_ROWS, EAGER_ROWS, rows_a_call


def load(pages: torch.Tensor, heads: int, topk: int, requests: int, *, scores: str, selection: str) -> None:
    """Run decode's picks once for each kernel that eager steps of up to `requests` rows take, on rows without keys.
    pages: e4m3 index pages of any layer. scores, selection: of `index_select.paged`.
    """
    by = {"scores": scores, "selection": selection}
    most = min(EAGER_ROWS, rows_a_call(pages.device))
    for top in range(COMPILED_ROWS, min(most, requests) + COMPILED_ROWS, COMPILED_ROWS):
        rows = min(top, most)  # no multiple of COMPILED_ROWS, perhaps
        q, gate, lengths, table, owner = without_keys(pages, heads, topk, rows)
        plan = index_select.plan(lengths, pages, table, owner, topk, ANY_BUDGET, eager=True, **by)
        slots = torch.zeros((rows, topk), dtype=torch.int32, device=pages.device)
        of_rows = lengths, table, owner
        index_select.paged(q, pages, gate, *of_rows, topk, 0, 0, ANY_BUDGET, slots_out=slots, plan=plan, **by)
