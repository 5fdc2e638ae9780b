"""`ops.index_select` with scores or selection of another package, the other half ours.

Rows are worked off in groups whose scores, with what the selection needs, fit the budget. What else is alive:

- prefill with scores by DeepGEMM (`gathered`, `ragged`): its kernel for many rows reads keys that lie in one piece, so
  the keys of the batch's requests are gathered from their pages first, 132 bytes a token of the page table, once a call
  and for all of its rows: 53 MB for eight requests of 50,000 tokens. They count towards the budget. No length is read
  on the host, so every request takes the room of the longest. Where they would take more than half of the budget, or
  what is left does not hold the scores of a few rows, scores are Triton's and nothing is gathered. Columns of scores
  count from the first key of a row's own request, so they are as wide as the longest request, not as all together. For
  a single request, and for windows of keys that lie in one piece already, columns are keys, which DeepGEMM is faster
  at, and selection is told where a window begins. Rows of a request should lie together: the kernel reads all keys
  between those of its neighbours in a group of 128 / heads rows.
- `paged`: a copy of the page table's row for each row; scores only count. Rows up to k are scored as if they had one
  key; it does not split one row, and refuses a budget below the scores of a single row. What it needs of a step
  (deep_gemm_plan.py) is the same for all layers: `plan` makes it once, and without it every call does.
"""

from __future__ import annotations

import torch

from sglang_dsa_plugin.cache.layouts import FP8, INDEX_DIM, PAGE_SIZE
from sglang_dsa_plugin.kernels.torch_impl.select import add_offsets, identity
from sglang_dsa_plugin.support_row import MANY_ROWS

from . import deep_gemm, deep_gemm_plan, topk
from .deep_gemm_plan import Plan

_COPIES = 4  # of the scores of a group that are alive while another package selects from them
_KEY_BYTES = INDEX_DIM + 4
_ALIGNED_ROWS = 16


def ragged(
    q: torch.Tensor,
    k: torch.Tensor,
    k_scale: torch.Tensor,
    gate: torch.Tensor,
    start: torch.Tensor | None,
    end: torch.Tensor,
    k_picks: int,
    init_tokens: int,
    local_tokens: int,
    budget_bytes: int,
    offsets: torch.Tensor | None = None,
) -> torch.Tensor:
    """`ops.index_select.ragged` for e4m3 q and k, scores by DeepGEMM: positions int32 [R, k_picks], plus `offsets`. A
    budget too small for the scores of one row is served by Triton.
    """
    width = k.shape[0]
    lengths = (end if start is None else end - start).clamp(min=0, max=width).to(torch.int32)
    if width <= k_picks:
        picks = identity(lengths, k_picks)
        return picks if offsets is None else add_offsets(picks, offsets)
    group = _group(q, width, k_picks, deep_gemm.key_row_bytes(width), budget_bytes)
    if not group:
        from sglang_dsa_plugin.kernels.triton import index_select

        start = torch.zeros_like(end) if start is None else start
        return index_select.ragged(
            q, k, k_scale, gate, start, end, k_picks, init_tokens, local_tokens, budget_bytes, offsets
        )
    forced = (init_tokens, local_tokens)
    return _by_windows(q, k, k_scale, gate, start, lengths, None, k_picks, forced, group, offsets=offsets)


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
    slots_out: torch.Tensor | None = None,
    *,
    plan: Plan | None = None,
    scores: str,
    selection: str,
) -> torch.Tensor:
    """Picks int32 [R, k]: positions, or slots; or positions, and slots to `slots_out`. plan: of `plan` here. scores:
    deep_gemm or triton. selection: triton, or a name of topk.py.

    Raises ValueError where `budget_bytes` does not hold the scores of one row.
    """
    from sglang_dsa_plugin.kernels.cuda import select as cuda_select
    from sglang_dsa_plugin.kernels.triton import select

    rows, width = q.shape[0], page_table.shape[1] * PAGE_SIZE
    if width <= k or not rows or not len(pages):
        picks = identity(lengths, k)
        if slots_out is not None:
            select.positions_to_slots(picks, page_table, row_to_request, PAGE_SIZE, out=slots_out)
        return select.positions_to_slots(picks, page_table, row_to_request, PAGE_SIZE) if slots else picks
    forced = (init_tokens, local_tokens)
    if (scores, selection) == ("deep_gemm", "triton") and rows >= MANY_ROWS * page_table.shape[0]:
        return _gathered(q, pages, gate, lengths, page_table, row_to_request, k, forced, budget_bytes, slots, slots_out)
    step, a_row = _rows_of_a_group(rows, width, budget_bytes, scores, selection)
    if not step:
        raise ValueError(
            f"index_select.paged: budget_bytes must be at least {a_row} for rows of {width} keys with scores by "
            f"{scores} and selection by {selection}, got {budget_bytes}; set SGLANG_DSA_PLUGIN_SCORES_MB to "
            f"{-(-a_row // 2**20)} or more"
        )
    if scores == "deep_gemm":
        step = min(step, deep_gemm_plan.rows_a_call(q.device))
        if plan is None or plan.group > step:
            plan = deep_gemm_plan.make(lengths, page_table, row_to_request, len(pages), width, k, step)
        step = plan.group
    picks = torch.empty((rows, k), dtype=torch.int32, device=q.device)
    for number, top in enumerate(range(0, rows, step)):
        part = slice(top, top + step)
        sizes, owners = lengths[part], row_to_request[part]
        beside = None if slots_out is None else slots_out[part]
        if scores == "deep_gemm":
            found = deep_gemm.paged_scores(q[part], pages, gate[part], plan, number)
        else:
            found = _by_triton(q[part], pages, gate[part], sizes, page_table, owners, width)
        if selection == "triton":
            where = (page_table, owners, PAGE_SIZE) if slots or beside is not None else None
            cuda_select.fastest_rows(found, sizes, k, None, *forced, slots=where, out=picks[part], slots_out=beside)
        else:
            chosen = topk.topk(found, sizes, k, None, *forced, by=selection)
            if beside is not None:
                select.positions_to_slots(chosen, page_table, owners, PAGE_SIZE, out=beside)
            picks[part] = select.positions_to_slots(chosen, page_table, owners, PAGE_SIZE) if slots else chosen
        del found  # or it would still be there while the next group's are made
    return picks


def plan(
    lengths: torch.Tensor,
    pages: torch.Tensor,
    page_table: torch.Tensor,
    row_to_request: torch.Tensor,
    k: int,
    budget_bytes: int,
    *,
    eager: bool = False,
    scores: str,
    selection: str,
) -> Plan | None:
    """What `paged` needs of a step besides queries and keys, for all of its layers; None where it needs nothing, or
    where `budget_bytes` does not hold the scores of one row. eager: a step outside of graphs.
    """
    rows, width = lengths.shape[0], page_table.shape[1] * PAGE_SIZE
    gathers = (scores, selection) == ("deep_gemm", "triton") and rows >= MANY_ROWS * page_table.shape[0]
    if scores != "deep_gemm" or gathers or width <= k or not rows or not len(pages):
        return None
    step, a_row = _rows_of_a_group(rows, width, budget_bytes, scores, selection)
    if not step:
        deep_gemm_plan.say_too_small(-(-a_row // 2**20))
        return None
    step = min(step, deep_gemm_plan.rows_a_call(lengths.device))
    step = deep_gemm_plan.eager_group(rows, step) if eager else step
    return deep_gemm_plan.make(lengths, page_table, row_to_request, len(pages), width, k, step)


def _rows_of_a_group(rows: int, width: int, budget_bytes: int, scores: str, selection: str) -> tuple[int, int]:
    """(rows whose scores fit the budget, 0 where those of one do not; bytes that those of one take). Where not all fit
    they are a multiple of 4, from 4 on: what belongs to a row is then as aligned in every group as in the first, and
    Triton compiles one kernel for all.
    """
    a_row = deep_gemm.page_row_bytes(width) if scores == "deep_gemm" else 4 * width
    a_row *= 1 if selection == "triton" else _COPIES
    fit = budget_bytes // a_row
    if fit >= rows:
        return max(rows, 1), a_row
    aligned = deep_gemm_plan.ALIGNED_ROWS
    return fit - fit % aligned if fit >= aligned else fit, a_row


def _gathered(
    q: torch.Tensor,
    pages: torch.Tensor,
    gate: torch.Tensor,
    lengths: torch.Tensor,
    page_table: torch.Tensor,
    row_to_request: torch.Tensor,
    k: int,
    forced: tuple[int, int],
    budget_bytes: int,
    slots: bool,
    slots_out: torch.Tensor | None,
) -> torch.Tensor:
    """`paged` for many rows a request, from keys in one piece, or by Triton where these take too much room."""
    requests, covered = page_table.shape
    width = covered * PAGE_SIZE
    key_bytes = requests * width * _KEY_BYTES
    # The keys of a single request are numbered as its positions are.
    row_bytes = deep_gemm.key_row_bytes(width) if requests == 1 else deep_gemm.score_row_bytes(width)
    fits = 2 * key_bytes <= budget_bytes and len(pages) > 0
    group = _group(q, width, k, row_bytes, budget_bytes - key_bytes) if fits else 0
    if not group:
        from sglang_dsa_plugin.kernels.triton import index_select

        return index_select.paged(
            q, pages, gate, lengths, page_table, row_to_request, k, *forced, budget_bytes, slots, slots_out
        )
    start, columns = (None, None) if requests == 1 else (row_to_request * width, width)
    where = (page_table, row_to_request) if slots or slots_out is not None else None
    keys = _keys_of(pages, page_table)
    return _by_windows(q, *keys, gate, start, lengths, columns, k, forced, group, where, slots_out)


def _keys_of(pages: torch.Tensor, page_table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys e4m3 [B * tokens, 128] and their scales f32 [B * tokens] of the tokens that page_table [B, pages] covers,
    request after request. Entries outside the pages, past a request's end, give some page's.
    """
    which = page_table.flatten().clamp(min=0, max=pages.shape[0] - 1)
    words = pages.view(torch.int32)  # bytes would be copied one by one
    keys = words[:, : PAGE_SIZE * INDEX_DIM // 4].index_select(0, which)
    scales = words[:, PAGE_SIZE * INDEX_DIM // 4 :].index_select(0, which)
    return keys.view(torch.uint8).view(-1, INDEX_DIM).view(FP8), scales.view(torch.float32).flatten()


def _by_windows(
    q: torch.Tensor,
    keys: torch.Tensor,
    scales: torch.Tensor,
    gate: torch.Tensor,
    start: torch.Tensor | None,
    lengths: torch.Tensor,
    width: int | None,
    k: int,
    forced: tuple[int, int],
    group: int,
    table: tuple[torch.Tensor, torch.Tensor] | None = None,
    slots_out: torch.Tensor | None = None,
    offsets: torch.Tensor | None = None,
) -> torch.Tensor:
    """Picks int32 [R, k] among the lengths[r] keys from start[r] on (None: from the first), `group` rows at a time.
    width: columns of scores, which count from a row's first key; None where they are the keys. table: (page_table,
    row_to_request), for slots instead of positions, or to `slots_out` beside them.
    """
    from sglang_dsa_plugin.kernels.cuda import select as cuda_select

    picks = torch.empty((q.shape[0], k), dtype=torch.int32, device=q.device)
    # A row that keeps every key is scored as if it had one, which is the least that DeepGEMM takes.
    scored = torch.where(lengths > k, lengths, 1).clamp(max=len(keys) if width is None else width)
    first, last = deep_gemm.windows(torch.zeros_like(lengths) if start is None else start, scored, len(keys))
    starts = first if width is None and start is not None else None
    for top in range(0, q.shape[0], group):
        part = slice(top, top + group)
        found = deep_gemm.ragged_scores(q[part], keys, scales, gate[part], first[part], last[part], width)
        cuda_select.fastest_rows(
            found,
            lengths[part],
            k,
            None if starts is None else starts[part],
            *forced,
            slots=None if table is None else (table[0], table[1][part], PAGE_SIZE),
            offsets=None if offsets is None else offsets[part],
            out=picks[part],
            slots_out=None if slots_out is None else slots_out[part],
        )
        del found  # or it would still be there while the next group's are made
    return picks


def _group(q: torch.Tensor, width: int, k: int, row_bytes: int, bytes_left: int) -> int:
    """Rows whose scores, `row_bytes` a row, and selection fit `bytes_left`, 0 where not even the fewest do: as many as
    occupy all processors a whole number of times, if there are that many, since one row's keys are never shared out.
    """
    from sglang_dsa_plugin.kernels.cuda import select as cuda_select
    from sglang_dsa_plugin.kernels.triton import index_tables

    rows, heads, _ = q.shape
    units = (deep_gemm.rows_at_once(heads), _ALIGNED_ROWS, deep_gemm.ROW_ALIGN)

    def whole(most: int) -> int:
        return next((most - most % unit for unit in units if most >= unit), 0)

    gpu = index_tables.gpu_of(q.device)
    in_cuda = cuda_select.preferred(q.device, rows, width, k, PAGE_SIZE)
    made = -(-rows // deep_gemm.ROW_ALIGN) * deep_gemm.ROW_ALIGN
    return min(rows, index_tables.rows_in_budget(gpu, made, width, k, row_bytes, bytes_left, whole, in_cuda))


def _by_triton(
    q: torch.Tensor,
    pages: torch.Tensor,
    gate: torch.Tensor,
    lengths: torch.Tensor,
    page_table: torch.Tensor,
    row_to_request: torch.Tensor,
    width: int,
) -> torch.Tensor:
    """f32 [R, width] whose columns past a row's length hold anything."""
    from sglang_dsa_plugin.kernels.triton import index_scores

    found = index_scores.new_scores(q.shape[0], width, q.device)
    index_scores.score_paged(found, q, pages, gate, lengths, page_table, row_to_request)
    return found
