"""What one forward step needs to know about its rows, built by a fixed number of tensor operations whatever the batch.

R rows (query tokens) of B requests. `lengths[r]` is how many cached tokens row r may see (its position + 1),
`page_table[b, i]` is the page that holds tokens 64 i .. 64 i + 63 of request b, `row_to_request[r]` names the request.
Rows past the batch's real tokens are padding: length 0, request 0, so that they pick nothing and their output is zero.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from sglang_dsa_plugin.backend.dense_fallback import Decision
from sglang_dsa_plugin.cache.layouts import PAGE_SIZE
from sglang_dsa_plugin.ops import index_select, select


@dataclass
class StepMetadata:
    """Rows of one step (module docstring). `decision` is the one that planner and executor read; max_length is a bound
    of `lengths` that the host knows. picks: on the masked path what the last indexer picked, [R,k] positions; layers
    that reuse picks find them here. captured: it is made in a CUDA graph. store_slots: where the rows' own tokens go,
    in a graph of a whole prefill (held_step.py); else the batch says it.
    """

    lengths: torch.Tensor
    row_to_request: torch.Tensor
    page_table: torch.Tensor
    decision: Decision
    max_length: int
    cu_queries: torch.Tensor | None = None
    cu_keys: torch.Tensor | None = None
    key_slots: torch.Tensor | None = None
    picks: torch.Tensor | None = None
    captured: bool = False
    store_slots: torch.Tensor | None = None
    _all: torch.Tensor | None = field(default=None, repr=False)
    _picks: torch.Tensor | None = field(default=None, repr=False)
    _slots: torch.Tensor | None = field(default=None, repr=False)
    _counts: torch.Tensor | None = field(default=None, repr=False)
    _planned: tuple[index_select.Plan | None] | None = field(default=None, repr=False)

    @property
    def rows(self) -> int:
        return self.lengths.shape[0]

    def every_token(self, k: int) -> torch.Tensor | None:
        """Picks [R,k] of all tokens that each row sees, when the host knows that no row sees more than k; else None.

        What selection would return, scores or not. One tensor for all layers, so that it is translated once.
        """
        if self.max_length > k:
            return None
        if self._all is None:
            positions = torch.arange(k, dtype=torch.int32, device=self.lengths.device)
            self._all = torch.where(positions < self.lengths.unsqueeze(1), positions, -1)
        return self._all

    def pick_counts(self, k: int) -> torch.Tensor:
        """How many of a row's k picks are positions, int32 [R]: they come first. k is the same in all layers."""
        if self._counts is None:
            self._counts = self.lengths.clamp(max=k)
        return self._counts

    def index_plan(self, pages: torch.Tensor, topk: int, heads: int, impl: str | None) -> index_select.Plan | None:
        """What picks need of these rows besides queries and keys (`ops.index_select.plan`), made by the first layer
        that asks. pages: index pages of any layer; the rest is the same for all.
        """
        if self._planned is None:
            rows = self.lengths, self.page_table, self.row_to_request
            self._planned = (index_select.plan(pages, *rows, topk, heads, eager=not self.captured, impl=impl),)
        return self._planned[0]

    def slots_of(self, picks: torch.Tensor, impl: str | None = None) -> torch.Tensor:
        """Token slots [R,k] of picked positions [R,k]; -1 stays.

        Layers that reuse picks hand in the very same memory, so the last translation is kept. Its picks are held, so
        that nothing else can lie where they do; the memory of a prefill graph nobody holds, so `picks_moved` says what
        lies there now.
        Where the selection wrote slots as well (`keep_slots`), nothing is left to translate.
        On a CPU, columns that the host knows to be -1 in every row are left out.
        """
        if not _same_memory(self._picks, picks):
            used = picks
            if picks is self._all and picks.device.type == "cpu":
                used = picks[:, : self.max_length]
            self._slots = select.positions_to_slots(
                used, self.page_table, self.row_to_request, page_size=PAGE_SIZE, impl=impl
            )
            self._picks = picks
        return self._slots

    def picks_moved(self, picks: torch.Tensor, to: torch.Tensor) -> None:
        """For `slots_of`: picks [R,k] were copied to `to`. A translation of theirs that is kept is one of `to`; another
        is forgotten, since an earlier layer's picks may have lain there.
        """
        self._picks = to if _same_memory(self._picks, picks) else None

    def keep_slots(self, picks: torch.Tensor, slots: torch.Tensor) -> None:
        """For `slots_of`: slots [R,k] of these very picks [R,k], where selection has written both."""
        self._picks, self._slots = picks, slots


def _same_memory(one: torch.Tensor | None, other: torch.Tensor) -> bool:
    """Whether both are the same rows of the same memory. SGLang hands on views of picks that a CUDA graph left."""
    if one is None or one is other:
        return one is other
    return one.data_ptr() == other.data_ptr() and one.shape == other.shape and one.stride() == other.stride()


def page_table(req_to_token: torch.Tensor, requests: torch.Tensor, max_length: int) -> torch.Tensor:
    """Pages [B, ceil(max_length / 64)] int32 of the requests' rows in `req_to_token` [requests, context] (token slots).

    Slots of one page are consecutive and start at a multiple of 64, so every 64th slot names its page.
    """
    pages = max(1, -(-max_length // PAGE_SIZE))
    return (req_to_token[requests.long(), : pages * PAGE_SIZE : PAGE_SIZE] // PAGE_SIZE).to(torch.int32)


def decode_step(
    req_to_token: torch.Tensor,
    requests: torch.Tensor,
    lengths: torch.Tensor,
    max_length: int,
    decision: Decision,
    captured: bool = False,
) -> StepMetadata:
    """One row per request: the token just appended sees all `lengths[b]` tokens of its request."""
    return StepMetadata(
        lengths=lengths.to(torch.int32),
        row_to_request=torch.arange(lengths.shape[0], dtype=torch.int32, device=lengths.device),
        page_table=page_table(req_to_token, requests, max_length),
        decision=decision,
        max_length=max_length,
        captured=captured,
    )


def extend_step(
    req_to_token: torch.Tensor,
    requests: torch.Tensor,
    prefix_lens: torch.Tensor,
    extend_lens: torch.Tensor,
    rows: int,
    max_length: int,
    decision: Decision,
    new_tokens: int | None = None,
    cached_tokens: int | None = None,
) -> StepMetadata:
    """`extend_lens[b]` new tokens after `prefix_lens[b]` cached ones per request (prefill, chunk, mixed batch).

    rows: rows of the step, at least sum(extend_lens); the rest is padding. For expanded keys also the cumulative
    lengths and, where something is cached before, the slots of all tokens, prefix and new, in request order.
    new_tokens, cached_tokens: the sums of extend_lens and prefix_lens where the host knows them; without them a GPU is
    waited for.
    """
    device = extend_lens.device
    batch = extend_lens.shape[0]
    extend = extend_lens.long()
    starts = torch.cumsum(extend, 0) - extend
    request = torch.repeat_interleave(torch.arange(batch, device=device), extend, output_size=new_tokens)
    real = request.shape[0]
    if real > rows:
        raise ValueError(f"extend_step: rows must be at least the {real} new tokens of the batch, got {rows}")
    lengths = prefix_lens.long()[request] + (torch.arange(real, device=device) - starts[request]) + 1
    if rows > real:
        lengths = torch.nn.functional.pad(lengths, (0, rows - real))
        request = torch.nn.functional.pad(request, (0, rows - real))
    step = StepMetadata(
        lengths=lengths.to(torch.int32),
        row_to_request=request.to(torch.int32),
        page_table=page_table(req_to_token, requests, max_length),
        decision=decision,
        max_length=max_length,
    )
    if decision.expanded:
        step.cu_queries = _cumulative(extend)
        step.cu_keys = _cumulative(extend + prefix_lens.long())
        cached = int(prefix_lens.sum()) if cached_tokens is None else cached_tokens
        if cached:
            step.key_slots = _key_slots(req_to_token, requests, extend + prefix_lens.long(), real + cached)
    return step


def _cumulative(lengths: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(torch.cumsum(lengths, 0), (1, 0)).to(torch.int32)


def _key_slots(req_to_token: torch.Tensor, requests: torch.Tensor, keys: torch.Tensor, total: int) -> torch.Tensor:
    """Slots of all tokens of the batch, `keys[b]` of request b, request after request; total: the sum of keys."""
    owner = torch.repeat_interleave(torch.arange(keys.shape[0], device=keys.device), keys, output_size=total)
    offset = torch.arange(total, device=keys.device) - (torch.cumsum(keys, 0) - keys)[owner]
    return req_to_token[requests.long()[owner], offset]
