"""The index-key cache of one pool: one buffer of pages per layer, none for layers that reuse another layer's picks.

A page holds 64 tokens (cache/layouts.py). Tokens are moved and copied by slot through ops.key_pages, so keys and scales
always travel together; copying whole rows of the buffer as if they were tokens would mix pages up. The indexer writes
and reads pages through ops.index_keys and ops.index_select.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sglang_dsa_plugin.cache.layouts import PAGE_SIZE, index_page_shape
from sglang_dsa_plugin.ops import key_pages

# Tokens per host copy: bounds the temporary while a long request is moved to the host.
HOST_COPY_TOKENS = 8192


class IndexPages:
    """Index pages of `layers` layers.

    pages: number of pages in each owning layer.  owns: per layer, False for a layer that reuses picks (it gets a
    buffer of 0 pages). key_dtype: fp8 e4m3 (u8 [pages, 8448]) or the model's dtype ([pages, 64, 128]).
    """

    def __init__(self, pages: int, owns: Sequence[bool], key_dtype: torch.dtype, device: torch.device | str) -> None:
        self.key_dtype = key_dtype
        shape, dtype = index_page_shape(key_dtype)
        self.buffer = [torch.zeros((pages if own else 0, *shape), dtype=dtype, device=device) for own in owns]

    def store(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, scales: torch.Tensor | None) -> None:
        """Write keys [R,128] (and scales [R] for fp8) at token slots [R]; slots of -1 are skipped."""
        key_pages.store(self.buffer[layer], slots, keys, scales)

    def load(self, layer: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Keys [R,128] and scales [R] (None unless fp8) at token slots [R]."""
        return key_pages.load(self.buffer[layer], slots)

    def move(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy the tokens at slots `source` to slots `target` in every layer that owns pages."""
        if target.numel() == 0:
            return
        for pages in self.buffer:
            if pages.shape[0]:
                key_pages.move(pages, source.reshape(-1), target.reshape(-1))

    def to_host(self, slots: torch.Tensor) -> list[list[tuple[torch.Tensor, torch.Tensor | None]]]:
        """Keys and scales of `slots`, per layer in chunks of HOST_COPY_TOKENS, on the host."""
        host: list[list[tuple[torch.Tensor, torch.Tensor | None]]] = []
        for layer, pages in enumerate(self.buffer):
            chunks = []
            for part in slots.split(HOST_COPY_TOKENS) if pages.shape[0] else ():
                keys, scales = self.load(layer, part)
                chunks.append((keys.cpu(), None if scales is None else scales.cpu()))
            host.append(chunks)
        return host

    def from_host(self, host: list[list[tuple[torch.Tensor, torch.Tensor | None]]], slots: torch.Tensor) -> None:
        """Write what `to_host` returned at `slots` (as many as were read, possibly other ones)."""
        for layer, chunks in enumerate(host):
            parts = slots.split(HOST_COPY_TOKENS) if chunks else ()
            if len(chunks) != len(parts):
                raise ValueError(
                    f"index pages: host copy of layer {layer} has {len(chunks)} chunks, the slots make {len(parts)}"
                )
            for (keys, scales), part in zip(chunks, parts):
                device = self.buffer[layer].device
                self.store(layer, part, keys.to(device), None if scales is None else scales.to(device))

    def clear(self) -> None:
        """Drop the buffers."""
        self.buffer = []


def pages_for(tokens: int) -> int:
    """Pages that hold `tokens` cached tokens plus the padding page that padded rows write to."""
    return tokens // PAGE_SIZE + 1
