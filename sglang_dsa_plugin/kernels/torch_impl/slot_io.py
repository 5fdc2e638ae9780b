"""Scatter and gather by slot where some slots are "none"; shared by the index pages and the latent rows.

A CPU drops the unwanted rows. A GPU must not look at values (that would stop the stream and break graph capture), so
there an unwanted row becomes a second copy of a wanted one: same slot, same data, so the order of writing is no matter.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

Index = Callable[[torch.Tensor], tuple[torch.Tensor, ...]]


Writes = tuple[tuple[torch.Tensor, torch.Tensor], ...]


def scatter(slots: torch.Tensor, count: int, index: Index, writes: Writes) -> None:
    """For every (view, values [R, ...]): view[index(slot)] = value, for the slots [R] in [0, count)."""
    if not slots.numel() or not count:
        return
    if slots.device.type != "cpu":
        scatter_unseen(slots, count, index, writes)
        return
    if int(slots.min()) < 0:
        kept = (slots >= 0).nonzero().squeeze(1)
        slots = slots[kept]
        writes = tuple((view, values[kept]) for view, values in writes)
    at = index(slots.long())
    for view, values in writes:
        view[at] = values


def scatter_unseen(slots: torch.Tensor, count: int, index: Index, writes: Writes) -> None:
    """`scatter` for at least one slot, without a look at the values."""
    ok = (slots >= 0) & (slots < count)
    row = torch.where(ok, torch.arange(slots.shape[0], device=slots.device), ok.to(torch.uint8).argmax())
    at = index(slots.long()[row].clamp(0, count - 1))
    # Without a single valid slot the row is still invalid here, and what is written is what was there.
    live = ok[row]
    for view, values in writes:
        view[at] = torch.where(live.view(-1, *(1,) * (values.dim() - 1)), values[row], view[at])


def gather(slots: torch.Tensor, count: int, index: Index, views: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """view[index(slot)] for every view, zeros for slots outside [0, count)."""
    if not count:
        at = index(slots.new_zeros(0, dtype=torch.int64))
        return [view.new_zeros(slots.shape[0], *view[at].shape[1:]) for view in views]
    at = index(slots.long().clamp(0, count - 1))
    out = [view[at] for view in views]
    if slots.device.type == "cpu" and (not slots.numel() or int(slots.min()) >= 0):
        return out
    none = (slots < 0) | (slots >= count)
    return [values.masked_fill_(none.view(-1, *(1,) * (values.dim() - 1)), 0) for values in out]


def kept_pairs(src: torch.Tensor, dst: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(src, dst) with dst -1 wherever src is not in [0, count), so that a scatter drops the pair."""
    ok = (src >= 0) & (src < count)
    return src, dst.masked_fill(~ok, -1)
