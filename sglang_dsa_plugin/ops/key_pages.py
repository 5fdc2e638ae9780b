"""Index-key pages: store, load and move single tokens.

    slot s lives in page s // 64 at offset s % 64

A page is u8 [8448], 64 x 128 e4m3 keys and then 64 f32 scales, or [64, 128] of the model's dtype without scales. So a
token of an fp8 page is two pieces 8 KiB apart, and nothing may treat a page as 64 rows of 132 bytes.

`store` skips slots of -1, `load` gives zeros for them, `move` skips a pair that has -1 on either side and behaves as if
all sources were read first. Any other slot outside [0, 64 P) is the caller's error: on a CPU it raises ValueError; on a
GPU, where looking would stop the stream, it is treated like -1. Slots written by one call must differ from each other.
"""

from __future__ import annotations

import torch

from sglang_dsa_plugin import support
from sglang_dsa_plugin.cache.layouts import FP8, INDEX_DIM, INDEX_PAGE_BYTES, PAGE_SIZE
from sglang_dsa_plugin.ops import _check

_KEY_BYTES = PAGE_SIZE * INDEX_DIM


def store(
    pages: torch.Tensor,
    slots: torch.Tensor,
    k: torch.Tensor,
    scale: torch.Tensor | None = None,
    impl: str | None = None,
) -> None:
    """Write keys k [R, 128] (and, into fp8 pages, their f32 scale [R]) to `slots` [R] of `pages`, in place.

    pages: u8 [P, 8448] with k e4m3 and a scale, or [P, 64, 128] with k of the same dtype and no scale.
    Raises ValueError for arguments that do not fit each other, or on a CPU for a slot out of range.
    """
    op = "key_pages.store"
    scaled = check_pages(op, pages)
    _check.index_tensor(op, "slots", slots, (None,), pages.device)
    _check.tensor(op, "k", k, (slots.shape[0], INDEX_DIM), (FP8 if scaled else pages.dtype,), pages.device)
    if scaled:
        _check.tensor(op, "scale", scale, (slots.shape[0],), (torch.float32,), pages.device)
    elif scale is not None:
        _check.fail(op, "scale", f"None for pages of {pages.dtype}", scale)
    check_slots(op, "slots", slots, pages.shape[0] * PAGE_SIZE)
    support.resolve("key_pages_store", device=pages.device, impl=impl)(pages, slots, k, scale)


def load(pages: torch.Tensor, slots: torch.Tensor, impl: str | None = None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Keys at `slots` [R]: (e4m3 [R, 128], f32 scale [R]) from fp8 pages, (k [R, 128], None) from the others.

    Raises ValueError for arguments that do not fit each other, or on a CPU for a slot out of range.
    """
    op = "key_pages.load"
    check_pages(op, pages)
    _check.index_tensor(op, "slots", slots, (None,), pages.device)
    check_slots(op, "slots", slots, pages.shape[0] * PAGE_SIZE)
    return support.resolve("key_pages_load", device=pages.device, impl=impl)(pages, slots)


def move(pages: torch.Tensor, src: torch.Tensor, dst: torch.Tensor, impl: str | None = None) -> None:
    """Copy the token at src[i] to dst[i] for every i, in place, scales included; src and dst [R] may overlap.

    Raises ValueError for arguments that do not fit each other, or on a CPU for a slot out of range.
    """
    op = "key_pages.move"
    check_pages(op, pages)
    _check.index_tensor(op, "src", src, (None,), pages.device)
    _check.index_tensor(op, "dst", dst, (src.shape[0],), pages.device)
    check_slots(op, "src", src, pages.shape[0] * PAGE_SIZE)
    check_slots(op, "dst", dst, pages.shape[0] * PAGE_SIZE)
    support.resolve("key_pages_move", device=pages.device, impl=impl)(pages, src, dst)


def check_slots(operator: str, argument: str, slots: torch.Tensor, count: int) -> None:
    """On a CPU, raise unless every slot is -1 or in [0, count); elsewhere the implementation masks such slots."""
    if slots.device.type != "cpu" or not slots.numel():
        return
    low, high = torch.aminmax(slots)
    if low.item() < -1 or high.item() >= count:
        wrong = slots[(slots < -1) | (slots >= count)]
        _check.fail(operator, argument, f"-1 or in [0, {count})", wrong[:8].tolist())


def check_pages(operator: str, pages: torch.Tensor) -> bool:
    """Check pages of either kind; True when they are fp8 with scales."""
    if isinstance(pages, torch.Tensor) and pages.dtype == torch.uint8:
        _check.tensor(operator, "pages", pages, (None, INDEX_PAGE_BYTES))
        if pages.stride(0) % 4 or pages.data_ptr() % 4:
            _check.fail(operator, "pages", "on 4-byte bounds page by page", pages)
        return True
    _check.tensor(operator, "pages", pages, (None, PAGE_SIZE, INDEX_DIM), _check.FLOATS)
    return False


# References: one token at a time, in plain Python over bytes; exact, since nothing is computed.


def reference_store(
    pages: torch.Tensor, slots: torch.Tensor, k: torch.Tensor, scale: torch.Tensor | None = None
) -> None:
    """Reference of `store`."""
    for i, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        page, offset = divmod(slot, PAGE_SIZE)
        if scale is None:
            pages[page, offset] = k[i]
            continue
        pages[page, offset * INDEX_DIM : (offset + 1) * INDEX_DIM] = k[i].clone().view(torch.uint8)
        at = _KEY_BYTES + 4 * offset
        pages[page, at : at + 4] = scale[i : i + 1].clone().view(torch.uint8)


def reference_load(pages: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Reference of `load`."""
    scaled = pages.dtype == torch.uint8
    k = torch.zeros(slots.shape[0], INDEX_DIM, dtype=torch.uint8 if scaled else pages.dtype)
    scale = torch.zeros(slots.shape[0]) if scaled else None
    for i, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        page, offset = divmod(slot, PAGE_SIZE)
        if scale is None:
            k[i] = pages[page, offset]
            continue
        k[i] = pages[page, offset * INDEX_DIM : (offset + 1) * INDEX_DIM]
        at = _KEY_BYTES + 4 * offset
        scale[i] = pages[page, at : at + 4].clone().view(torch.float32)[0]
    return (k.view(FP8), scale) if scaled else (k, None)


def reference_move(pages: torch.Tensor, src: torch.Tensor, dst: torch.Tensor) -> None:
    """Reference of `move`."""
    kept = [(s, d) for s, d in zip(src.tolist(), dst.tolist()) if s >= 0 and d >= 0]
    k, scale = reference_load(pages, torch.tensor([s for s, _ in kept], dtype=torch.int64))
    reference_store(pages, torch.tensor([d for _, d in kept], dtype=torch.int64), k, scale)
