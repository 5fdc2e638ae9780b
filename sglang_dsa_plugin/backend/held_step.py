"""A step whose tensors stay where they are: what a CUDA graph of a whole prefill reads, filled anew for every batch.

Such a graph has no Python between its kernels, so nothing in it may follow the batch but what lies in this memory. It
serves batches in which no row sees more than k tokens: all of them are picked, nothing is scored, and rows, picks and
slots are the same in every layer (`HeldRows`). Where besides nothing is cached, it may attend on expanded keys and
values, of which only the borders between the requests follow the batch (`HeldRequests`). A few rows may be longer than
k: they are scored as those of a decode step, of which a graph is told lengths and pages (`HeldScored`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang_dsa_plugin.backend.dense_fallback import WHOLE_DENSE, WHOLE_GRAPH, WHOLE_SCORED
from sglang_dsa_plugin.backend.metadata import StepMetadata
from sglang_dsa_plugin.cache.layouts import PAGE_SIZE


@dataclass(frozen=True)
class HeldRows:
    """Memory for R rows: lengths int32 [R], picks and their slots int32 [R,k], store_slots int64 [R] where the rows'
    own tokens go.
    """

    lengths: torch.Tensor
    picks: torch.Tensor
    slots: torch.Tensor
    store_slots: torch.Tensor

    @classmethod
    def make(cls, rows: int, k: int, device: torch.device) -> HeldRows:
        """Rows that are all padding."""
        return cls(
            lengths=torch.zeros(rows, dtype=torch.int32, device=device),
            picks=torch.full((rows, k), -1, dtype=torch.int32, device=device),
            slots=torch.full((rows, k), -1, dtype=torch.int32, device=device),
            store_slots=torch.zeros(rows, dtype=torch.int64, device=device),
        )

    def step(self, rows: int) -> StepMetadata:
        """The first `rows` rows as a step."""
        lengths, picks, slots = self.lengths[:rows], self.picks[:rows], self.slots[:rows]
        nowhere = torch.zeros(1, 1, dtype=torch.int32, device=lengths.device)
        return StepMetadata(
            lengths=lengths,
            row_to_request=nowhere.expand(1, rows).squeeze(0),
            page_table=nowhere,
            decision=WHOLE_GRAPH,
            max_length=picks.shape[1],
            captured=True,
            store_slots=self.store_slots[:rows],
            _all=picks,
            _picks=picks,
            _slots=slots,
            _counts=lengths,
        )

    def fill(self, step: StepMetadata, store_slots: torch.Tensor, impl_slots: str | None = None) -> None:
        """Take over a step, its padding included, of which no row is longer than k; store_slots [real rows].

        Padding is stored in slot 0, which belongs to no request. Raises ValueError for a longer row.
        """
        rows = step.rows
        picks = step.every_token(self.picks.shape[1])
        if picks is None:
            raise ValueError(f"a whole prefill graph takes rows of at most {self.picks.shape[1]} tokens")
        slots = step.slots_of(picks, impl_slots)
        self.lengths[:rows].copy_(step.lengths)
        self.picks[:rows].copy_(picks)
        self.slots[:rows, : slots.shape[1]].copy_(slots)
        self.slots[:rows, slots.shape[1] :].fill_(-1)
        _keep_slots(self.store_slots[:rows], store_slots)


@dataclass(frozen=True)
class HeldRequests:
    """Memory for R rows of up to B requests without cached tokens: borders int32 [B+2], the first row of each request
    and of the padding, and the end; store_slots int64 [R] as in `HeldRows`.
    """

    borders: torch.Tensor
    store_slots: torch.Tensor

    @classmethod
    def make(cls, rows: int, requests: int, device: torch.device) -> HeldRequests:
        """Rows that are all padding, as far as they go."""
        return cls(
            borders=torch.zeros(requests + 2, dtype=torch.int32, device=device),
            store_slots=torch.zeros(rows, dtype=torch.int64, device=device),
        )

    def step(self, rows: int) -> StepMetadata:
        """The first `rows` rows as a step."""
        nothing = torch.zeros(1, 1, dtype=torch.int32, device=self.borders.device)
        each = nothing.expand(1, rows).squeeze(0)
        return StepMetadata(
            lengths=each,
            row_to_request=each,
            page_table=nothing,
            decision=WHOLE_DENSE,
            max_length=rows,
            cu_queries=self.borders,
            cu_keys=self.borders,
            captured=True,
            store_slots=self.store_slots[:rows],
        )

    def fill(self, new_tokens: torch.Tensor, store_slots: torch.Tensor, rows: int) -> None:
        """Take over a batch of new_tokens [requests] tokens at store_slots [their sum], of a graph of `rows` rows.

        Padding is a request of its own, so that its rows are numbers, too; its tokens go to slot 0. Raises ValueError
        for more requests or rows than there is memory for.
        """
        requests, most = new_tokens.shape[0], self.borders.shape[0] - 2
        if requests > most or not store_slots.shape[0] <= rows <= self.store_slots.shape[0]:
            raise ValueError(
                f"a whole dense prefill graph takes up to {most} requests and {self.store_slots.shape[0]} rows"
            )
        self.borders[1 : requests + 1].copy_(torch.cumsum(new_tokens, 0))
        self.borders[requests + 1 :].fill_(rows)
        _keep_slots(self.store_slots[:rows], store_slots)


@dataclass(frozen=True)
class HeldScored:
    """Memory for R rows of any length up to P pages: lengths int32 [R], page_table int32 [R,P] with the pages of each
    row's request, store_slots int64 [R] as in `HeldRows`.
    """

    lengths: torch.Tensor
    page_table: torch.Tensor
    store_slots: torch.Tensor

    @classmethod
    def make(cls, rows: int, pages: int, device: torch.device) -> HeldScored:
        """Rows that are all padding."""
        return cls(
            lengths=torch.zeros(rows, dtype=torch.int32, device=device),
            page_table=torch.zeros(rows, pages, dtype=torch.int32, device=device),
            store_slots=torch.zeros(rows, dtype=torch.int64, device=device),
        )

    def step(self, rows: int) -> StepMetadata:
        """The first `rows` rows as a step, of a request each. For one run of the model: it keeps what layers make."""
        return StepMetadata(
            lengths=self.lengths[:rows],
            row_to_request=torch.arange(rows, dtype=torch.int32, device=self.lengths.device),
            page_table=self.page_table[:rows],
            decision=WHOLE_SCORED,
            max_length=self.page_table.shape[1] * PAGE_SIZE,
            captured=True,
            store_slots=self.store_slots[:rows],
        )

    def fill(self, step: StepMetadata, store_slots: torch.Tensor) -> None:
        """Take over a step, its padding included; store_slots [real rows]. Padding is as in `HeldRows.fill`.

        Raises ValueError for more rows or pages than there is memory for.
        """
        rows, pages = step.rows, step.page_table.shape[1]
        if rows > self.page_table.shape[0] or pages > self.page_table.shape[1]:
            most = " rows of ".join(map(str, self.page_table.shape))
            raise ValueError(f"a whole prefill graph that picks takes up to {most} pages, got {rows} of {pages}")
        self.lengths[:rows].copy_(step.lengths)
        self.page_table[:rows, :pages].copy_(step.page_table[step.row_to_request.long()])
        _keep_slots(self.store_slots[:rows], store_slots)


def _keep_slots(held: torch.Tensor, slots: torch.Tensor) -> None:
    """slots [real rows] into held [rows]; padding goes to slot 0."""
    held[: slots.shape[0]].copy_(slots)
    held[slots.shape[0] :].zero_()
