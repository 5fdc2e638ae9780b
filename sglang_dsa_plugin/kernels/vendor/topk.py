"""Top-k of other packages as `ops.select.topk`: sgl-kernel, FlashInfer and torch. Taken by name only.

None of them promises the operator's total order: which of several equal scores at the edge is picked is their own
choice (sgl-project/sglang#31115), so picks may differ between runs, batches and ranks. FlashInfer is asked to prefer
low positions; whether it then equals the operator everywhere has not been shown. As far as it goes, the result is the
operator's: distinct positions in the window, ascending, -1 after them, min(length, k) of them, and rows not longer
than k keep every position. What is prepared for all three, in a copy of the scores:
- columns outside a row's window are -inf, and -inf or NaN inside it the lowest number, so nothing outside can be taken
  while something inside is left; a NaN then ranks with the lowest numbers instead of after -inf;
- forced positions (init and local tokens) are +inf.
Limits: sgl-kernel takes k = 2048 only; FlashInfer takes k up to 2048 where a CUDA graph may record it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch.nn.functional import pad

from sglang_dsa_plugin.kernels.torch_impl.select import as_asked

_LOWEST = torch.finfo(torch.float32).min
_LOW_POSITIONS = 1  # FlashInfer's number for a tie that goes to the smaller index


def topk(
    scores: torch.Tensor,
    lengths: torch.Tensor,
    k: int,
    starts: torch.Tensor | None,
    init_tokens: int,
    local_tokens: int,
    *,
    by: str,
) -> torch.Tensor:
    """Positions int32 [R, k], picked by `by`: sgl_kernel, flashinfer or torch_topk."""
    rows, width = scores.shape
    columns = torch.arange(width, dtype=torch.int32, device=scores.device)
    starts = torch.zeros_like(lengths) if starts is None else starts
    starts = starts.to(torch.int32).unsqueeze(1)
    lengths = torch.minimum(lengths.to(torch.int32).unsqueeze(1), width - starts)
    whole = torch.arange(k, dtype=torch.int32, device=scores.device)
    whole = torch.where(whole < lengths, whole, -1)
    if not rows or width <= k:
        return whole
    place = columns - starts
    inside = (place >= 0) & (place < lengths)
    init = min(init_tokens, k)
    local = min(local_tokens, k - init)
    # Adding zero makes -0.0 equal to 0.0 in its bits, too.
    prepared = torch.nan_to_num(scores, nan=_LOWEST, posinf=math.inf, neginf=_LOWEST) + 0.0
    if init or local:
        prepared = prepared.masked_fill((place < init) | (place >= lengths - local), math.inf)
    prepared = prepared.masked_fill(~inside, -math.inf)
    found = _PACKAGES[by](prepared, k).to(torch.int32) - starts
    # Junk is sorted behind every position.
    last = torch.iinfo(torch.int32).max
    found = torch.where((found >= 0) & (found < lengths), found, last).sort(dim=1).values
    return torch.where(lengths <= k, whole, torch.where(found == last, -1, found))


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
    by: str,
) -> torch.Tensor:
    """`topk`, then slots by (page_table, row_to_request, page_size) or offsets, if given: int32 [R, k]."""
    return as_asked(topk(scores, lengths, k, starts, init_tokens, local_tokens, by=by), slots, offsets)


def _by_torch(scores: torch.Tensor, k: int) -> torch.Tensor:
    return torch.topk(scores, k, dim=1, sorted=False).indices


def _by_flashinfer(scores: torch.Tensor, k: int) -> torch.Tensor:
    import flashinfer

    _, picks = flashinfer.top_k(
        scores, k, sorted=False, deterministic=True, tie_break=_LOW_POSITIONS, dsa_graph_safe=True
    )
    return picks


def _by_sgl_kernel(scores: torch.Tensor, k: int) -> torch.Tensor:
    from sgl_kernel import fast_topk_v2

    rows, width = scores.shape
    # The window is in the scores already: the whole row is its to choose from. Rows begin on 16 bytes.
    scores = pad(scores, (0, -width % 4), value=-math.inf)
    return fast_topk_v2(scores, torch.full((rows,), width, dtype=torch.int32, device=scores.device), k)


_PACKAGES: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "sgl_kernel": _by_sgl_kernel,
    "flashinfer": _by_flashinfer,
    "torch_topk": _by_torch,
}
