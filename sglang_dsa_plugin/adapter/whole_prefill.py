"""Prefill graphs without a break, for batches in which every request fits in index_topk.

SGLang's prefill graphs stop twice a layer for what follows the batch: index keys and picks, and attention. With short
prompts the GPU waits there for the host. Where all tokens are picked the work is the same for every batch, on rows that
lie in held memory (backend/held_step.py), and can be recorded with the rest. SGLang's runner knows nothing of it:
hooks/whole_prefill.py records a second graph for each size, and replays it in place of the first when the batch that
was planned last allows it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from sglang.srt.layers.radix_attention import RadixAttention

from sglang_dsa_plugin.backend import dense_fallback
from sglang_dsa_plugin.backend.held_step import HeldRows
from sglang_dsa_plugin.backend.metadata import StepMetadata

# DeepSeek's attention asks itself whether its product belongs to attention's break.
FUSES = "_can_fuse_bmm_into_attention"


class WholePrefills:
    """Which sizes have such a graph, and what the next replay reads. topk: the longest request. impl_slots: of
    positions_to_slots, by name. broken: this model breaks for more than attention and picks (experts that go to other
    ranks), so it has none.
    """

    def __init__(self, topk: int, device: torch.device, impl_slots: str | None = None) -> None:
        self.topk = topk
        self.device = device
        self.impl_slots = impl_slots
        self.sizes: list[int] = []
        self.broken = False
        self._held: HeldRows | None = None
        self._next: int | None = None

    @property
    def held(self) -> HeldRows:
        """The memory, made before the first recording: inside of one it would be the graph's."""
        if self._held is None:
            self._held = HeldRows.make(dense_fallback.GRAPH_TOKENS, self.topk, self.device)
        return self._held

    def size_for(self, tokens: int, longest: int) -> int | None:
        """Rows of the graph for a batch of so many new tokens whose longest request has `longest`, cached ones
        included; None where there is none.
        """
        if longest > self.topk:
            return None
        return min((size for size in self.sizes if size >= tokens), default=None)

    def fill(self, step: StepMetadata, store_slots: torch.Tensor) -> StepMetadata:
        """Have the next replay read `step`, of a size from `size_for`; the held step."""
        self.held.fill(step, store_slots, self.impl_slots)
        self._next = step.rows
        return self.held.step(step.rows)

    def forget(self) -> None:
        """The next replay is an ordinary one."""
        self._next = None

    def take(self) -> int | None:
        """Rows of the batch that was filled in and not replayed yet, once; None where the last one was ordinary."""
        size, self._next = self._next, None
        return size

    @contextlib.contextmanager
    def recording(self, backend: Any, model: torch.nn.Module, size: int) -> Iterator[None]:
        """What runs within runs on held rows, and neither picks nor attention break."""
        before, backend.forward_metadata = backend.forward_metadata, self.held.step(size)
        try:
            with unbroken(model):
                yield
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
