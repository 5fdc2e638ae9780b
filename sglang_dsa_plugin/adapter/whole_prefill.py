"""Prefill graphs without a break, for batches in which every request fits in index_topk.

SGLang's prefill graphs stop twice a layer for what follows the batch: index keys and picks, and attention. With short
prompts the GPU waits there for the host. Where all tokens are picked the work is the same for every batch, on what lies
in held memory (backend/held_step.py), and can be recorded with the rest: dense where nothing is cached, sparse on all
tokens else. Where that was asked for, a few rows of any length are scored in a graph, too. SGLang's runner knows of
none of it: hooks/whole_prefill.py records these graphs behind its own of the same size, and replays one in its place
when the batch that was planned last allows it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from sglang.srt.layers.radix_attention import RadixAttention

from sglang_dsa_plugin.backend.dense_fallback import GRAPH_TOKENS, SCORED_TOKENS, Path
from sglang_dsa_plugin.backend.held_step import HeldRequests, HeldRows, HeldScored
from sglang_dsa_plugin.backend.metadata import StepMetadata

# Of a batch on expanded keys. A batch of more is made of shorter prompts than this is for.
REQUESTS = 64
# DeepSeek's attention asks itself whether its product belongs to attention's break.
FUSES = "_can_fuse_bmm_into_attention"


class WholePrefills:
    """Which sizes have such graphs, and what the next replay reads. topk: the longest request. dense_tokens: most rows
    on expanded keys, 0 where there are no dense graphs. pages: of the longest context where graphs score, else 0.
    impl_slots: of positions_to_slots, by name. broken: this model breaks for more than attention and picks (experts
    that go to other ranks), so it has none. seconds, reserved: what recording them took, and bytes.
    """

    def __init__(
        self,
        topk: int,
        device: torch.device,
        dense_tokens: int = 0,
        pages: int = 0,
        impl_slots: str | None = None,
    ) -> None:
        self.topk = topk
        self.device = device
        self.dense_tokens = dense_tokens
        self.pages = pages
        self.impl_slots = impl_slots
        self.sizes: dict[Path, list[int]] = {"whole_dense": [], "whole": [], "whole_scored": []}
        self.broken = False
        self.seconds, self.reserved = 0.0, 0
        self._rows: HeldRows | None = None
        self._requests: HeldRequests | None = None
        self._scored: HeldScored | None = None
        self._next: tuple[Path, int] | None = None

    def paths_for(self, size: int) -> tuple[Path, ...]:
        """What a graph of so many rows may be recorded as."""
        most = {
            "whole_dense": self.dense_tokens,
            "whole": GRAPH_TOKENS,
            "whole_scored": SCORED_TOKENS if self.pages else 0,
        }
        return tuple(path for path in self.sizes if size <= most[path])

    def held(self, path: Path, size: int) -> StepMetadata:
        """The held step of a graph, anew for every run of the model. Memory is made with the first: inside of a
        recording it would be the graph's.
        """
        if path == "whole":
            if self._rows is None:
                self._rows = HeldRows.make(GRAPH_TOKENS, self.topk, self.device)
            return self._rows.step(size)
        if path == "whole_scored":
            if self._scored is None:
                self._scored = HeldScored.make(SCORED_TOKENS, self.pages, self.device)
            return self._scored.step(size)
        if self._requests is None:
            self._requests = HeldRequests.make(self.dense_tokens, REQUESTS, self.device)
        return self._requests.step(size)

    def choose(
        self, tokens: int, longest: int, cached: int, requests: int, threshold: int
    ) -> tuple[Path, int] | tuple[None, None]:
        """Path and rows of the graph for a batch: so many new tokens, those of the longest request (cached ones
        included), cached tokens, requests. threshold: longest request that runs dense. (None, None): there is none.
        """
        fits = {
            "whole_dense": cached == 0 and longest <= threshold and requests <= REQUESTS,
            "whole": longest <= self.topk,
            "whole_scored": True,
        }
        for path, sizes in self.sizes.items():
            size = min((size for size in sizes if size >= tokens), default=None)
            if size is not None and fits[path]:
                return path, size
        return None, None

    def fill_rows(self, step: StepMetadata, store_slots: torch.Tensor) -> StepMetadata:
        """Have the next replay read `step`, of the path and size that were chosen; the held step."""
        path = step.decision.path
        held = self.held(path, step.rows)
        if path == "whole":
            assert self._rows is not None
            self._rows.fill(step, store_slots, self.impl_slots)
        else:
            assert self._scored is not None
            self._scored.fill(step, store_slots)
        self._next = path, step.rows
        return held

    def fill_requests(self, new_tokens: torch.Tensor, store_slots: torch.Tensor, size: int) -> StepMetadata:
        """The same for path "whole_dense": new_tokens [requests], and where all of them go."""
        held = self.held("whole_dense", size)
        assert self._requests is not None
        self._requests.fill(new_tokens, store_slots, size)
        self._next = "whole_dense", size
        return held

    def describe(self) -> str:
        """How many there are and what they cost, in words."""
        dense, sparse, scored = map(len, self.sizes.values())
        return (
            f"prefill graphs without breaks: {dense} dense, {sparse} sparse, {scored} that pick; "
            f"recorded in {self.seconds:.1f} s, {self.reserved / 2**20:.0f} MiB more held by PyTorch"
        )

    def forget(self) -> None:
        """The next replay is an ordinary one."""
        self._next = None

    def take(self) -> tuple[Path, int] | None:
        """Path and rows of the batch that was filled in and not replayed yet, once; None if the last was ordinary."""
        planned, self._next = self._next, None
        return planned

    @contextlib.contextmanager
    def recording(
        self, backend: Any, model: torch.nn.Module, path: Path, size: int, forward: Callable[[], Any]
    ) -> Iterator[Callable[[], Any]]:
        """`forward` on held memory, in which neither picks nor attention break."""

        def on_held_memory() -> Any:
            backend.forward_metadata = self.held(path, size)
            return forward()

        if path == "whole_dense":
            # All rows as one request: of rows that belong to none attention would leave what was in its memory.
            padding = torch.zeros(size, dtype=torch.int64, device=self.device)
            self.fill_requests(torch.tensor([size], device=self.device), padding, size)
            self.forget()
        self.held(path, size)
        before = backend.forward_metadata
        try:
            with unbroken(model):
                yield on_held_memory
        finally:
            backend.forward_metadata = before


@contextlib.contextmanager
def unbroken(model: torch.nn.Module) -> Iterator[None]:
    """Attention layers call the backend where they stand, within a prefill graph, too."""
    with contextlib.ExitStack() as after:
        for module in model.modules():
            if isinstance(module, RadixAttention) and module.use_prefill_attention_wrapper:
                module.use_prefill_attention_wrapper = False
                after.callback(setattr, module, "use_prefill_attention_wrapper", True)
            elif hasattr(module, FUSES):
                # On CUDA the product that absorbs the keys' projection is otherwise part of attention's break.
                vars(module)[FUSES] = _does_not
                after.callback(vars(module).pop, FUSES)
        yield


def _does_not(forward_batch: Any) -> bool:
    return False
