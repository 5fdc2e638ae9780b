"""What the adapters of sparse attention share: empty calls, picks in front, whole pages, the operator's rules for rows
without a pick and for a sink.

Each launch that an adapter adds costs one to two microseconds of some forty, and a pass over the output of a prefill a
tenth of a millisecond. So what a caller promises or does not ask for (`prefix`, `with_lse`) is left out, and a decode
step launches the package's own kernels and nothing else.
"""

from __future__ import annotations

import math

import torch
from torch.nn.functional import pad

from sglang_dsa_plugin.cache.layouts import LATENT_DIM, PAGE_SIZE

Result = tuple[torch.Tensor, torch.Tensor]
Finished = tuple[torch.Tensor, torch.Tensor | None]


def nothing(q: torch.Tensor, slots: torch.Tensor, kv_rows: torch.Tensor, out: torch.Tensor | None) -> Result | None:
    """The result where there are no rows, no picks or no cache, else None. q [R, H, 576]."""
    rows, heads, _ = q.shape
    if rows and slots.shape[1] and kv_rows.shape[0]:
        return None
    out = q.new_zeros(rows, heads, LATENT_DIM) if out is None else out.zero_()
    return out, torch.full((rows, heads), -math.inf, dtype=torch.float32, device=q.device)


def picks_in_front(
    slots: torch.Tensor,
    cached: int,
    lengths: torch.Tensor | None,
    prefix: bool,
    fill: int = -1,
    multiple: int = 1,
    never_empty: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`slot_prefix`, or slots [R, K] and lengths [R] as they are, int32 both, where they are promised to have its form.

    Behind a row's picks is -1 then, whatever `fill`: for kernels that read nothing there.
    """
    as_wanted = slots.dtype == torch.int32 and slots.is_contiguous() and slots.shape[1] % multiple == 0
    if prefix and lengths is not None and as_wanted and not never_empty:
        return slots, lengths.to(torch.int32)
    from sglang_dsa_plugin.kernels.triton.slot_prefix import slot_prefix

    return slot_prefix(slots, cached, lengths, fill, multiple, never_empty)


def whole_pages(kv_rows: torch.Tensor) -> torch.Tensor:
    """kv_rows [N, width] as pages [P, 64, width]. A view where N is a multiple of 64, as in a server's pool; other
    caches are copied with rows of zeros behind them, which no slot names.
    """
    kv_rows = pad(kv_rows, (0, 0, 0, -kv_rows.shape[0] % PAGE_SIZE)) if kv_rows.shape[0] % PAGE_SIZE else kv_rows
    return kv_rows.view(-1, PAGE_SIZE, kv_rows.shape[1])


def finished(
    result: torch.Tensor,
    lse: torch.Tensor | None,
    counts: torch.Tensor | None = None,
    sink: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> Finished:
    """result bf16 [R, H, 512] and lse f32 [R, H] natural log, without a sink, as the operator gives them. Without lse,
    which a sink needs, the kernel's rows without a pick are zeros already, and nothing is launched.

    counts [R]: valid picks, for a kernel that was handed a slot where a row has none; None where its lse of such a row
    is infinite. sink f32 [H]: brought in here. out: where to write.
    """
    if lse is not None:
        from sglang_dsa_plugin.kernels.triton.empty_rows import clear_empty_rows

        # In the kernel's own tensors: a pass over the output of a prefill would be felt.
        clear_empty_rows(result, lse, counts, sink)
    if out is None:
        return result.contiguous(), lse
    return out if out.data_ptr() == result.data_ptr() else out.copy_(result), lse
