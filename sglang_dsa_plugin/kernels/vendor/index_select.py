"""`ops.index_select.paged` with scores or selection of another package, the other half ours.

Rows are worked off in groups within the budget. Unlike our own it scores short rows, too, and does not split one row:
a budget below the scores of a single row is refused.
"""

from __future__ import annotations

import torch

from sglang_dsa_plugin.cache.layouts import PAGE_SIZE
from sglang_dsa_plugin.kernels.torch_impl.select import identity

from . import deep_gemm, topk

_COPIES = 4  # of the scores of a group that are alive while another package selects from them


def paged(
    q: torch.Tensor,
    pages: torch.Tensor,
    gate: torch.Tensor,
    lengths: torch.Tensor,
    page_table: torch.Tensor,
    row_to_request: torch.Tensor,
    k: int,
    init_tokens: int,
    local_tokens: int,
    budget_bytes: int,
    slots: bool = False,
    *,
    scores: str,
    selection: str,
) -> torch.Tensor:
    """Picks int32 [R, k]: positions, or slots. scores: deep_gemm or triton. selection: triton, or a name of topk.py.

    Raises ValueError where `budget_bytes` does not hold the scores of one row.
    """
    from sglang_dsa_plugin.kernels.triton import select

    rows, width = q.shape[0], page_table.shape[1] * PAGE_SIZE
    if width <= k:
        picks = identity(lengths, k)
        return select.positions_to_slots(picks, page_table, row_to_request, PAGE_SIZE) if slots else picks
    a_row = 4 * width * (1 if selection == "triton" else _COPIES)
    if budget_bytes < a_row:
        raise ValueError(
            f"index_select.paged: budget_bytes must be at least {a_row} for rows of {width} keys with scores by "
            f"{scores} and selection by {selection}, got {budget_bytes}; set SGLANG_DSA_PLUGIN_SCORES_MB to "
            f"{-(-a_row // 2**20)} or more"
        )
    picks = torch.empty((rows, k), dtype=torch.int32, device=q.device)
    step = budget_bytes // a_row
    for top in range(0, rows, step):
        part = slice(top, top + step)
        sizes, owners = lengths[part], row_to_request[part]
        found = _scores(scores, q[part], pages, gate[part], sizes, page_table, owners, width)
        forced = (None, init_tokens, local_tokens)
        if selection == "triton":
            where = (page_table, owners, PAGE_SIZE) if slots else None
            select.select_rows(found, sizes, k, *forced, slots=where, out=picks[part])
        else:
            chosen = topk.topk(found, sizes, k, *forced, by=selection)
            picks[part] = select.positions_to_slots(chosen, page_table, owners, PAGE_SIZE) if slots else chosen
    return picks


def _scores(
    by: str,
    q: torch.Tensor,
    pages: torch.Tensor,
    gate: torch.Tensor,
    lengths: torch.Tensor,
    page_table: torch.Tensor,
    row_to_request: torch.Tensor,
    width: int,
) -> torch.Tensor:
    """f32 [R, width] whose columns past a row's length hold anything."""
    if by == "deep_gemm":
        return deep_gemm.paged_scores(q, pages, gate, lengths, page_table, row_to_request, width)
    from sglang_dsa_plugin.kernels.triton import index_scores

    found = index_scores.new_scores(q.shape[0], width, q.device)
    index_scores.score_paged(found, q, pages, gate, lengths, page_table, row_to_request)
    return found
