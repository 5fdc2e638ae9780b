"""Index-key pages in torch: token-wise views of the pages, then indexed reads and writes."""

from __future__ import annotations

import torch

from sglang_dsa_plugin.cache.layouts import FP8, INDEX_DIM, PAGE_SIZE
from sglang_dsa_plugin.kernels.torch_impl import slot_io

_KEY_BYTES = PAGE_SIZE * INDEX_DIM


def store(pages: torch.Tensor, slots: torch.Tensor, k: torch.Tensor, scale: torch.Tensor | None = None) -> None:
    """`ops.key_pages.store`."""
    views = token_views(pages)
    values = (k,) if scale is None else (k.view(torch.uint8), scale)
    slot_io.scatter(slots, pages.shape[0] * PAGE_SIZE, _page_and_offset, tuple(zip(views, values)))


def load(pages: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`ops.key_pages.load`."""
    out = slot_io.gather(slots, pages.shape[0] * PAGE_SIZE, _page_and_offset, token_views(pages))
    return (out[0], None) if len(out) == 1 else (out[0].view(FP8), out[1])


def move(pages: torch.Tensor, src: torch.Tensor, dst: torch.Tensor) -> None:
    """`ops.key_pages.move`: the gather makes a copy, so overlap does no harm."""
    count = pages.shape[0] * PAGE_SIZE
    src, dst = slot_io.kept_pairs(src, dst, count)
    views = token_views(pages)
    values = slot_io.gather(src, count, _page_and_offset, views)
    slot_io.scatter(dst, count, _page_and_offset, tuple(zip(views, values)))


def token_views(pages: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Views indexed by [page, offset]: u8 keys [P, 64, 128] and f32 scales [P, 64]; or the pages themselves."""
    if pages.dtype != torch.uint8:
        return (pages,)
    keys = pages[:, :_KEY_BYTES].view(pages.shape[0], PAGE_SIZE, INDEX_DIM)
    return keys, pages[:, _KEY_BYTES:].view(torch.float32)


def _page_and_offset(slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return slots >> (PAGE_SIZE.bit_length() - 1), slots & (PAGE_SIZE - 1)
