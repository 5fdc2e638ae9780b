"""What the adapters of sparse attention share: empty calls, whole pages, and the operator's rules for a result.

Rows without a valid pick have output 0 and lse -inf, whatever a kernel gave for the slot it was handed in their place,
and the sink is added here, because packages differ in whether their lse holds it.
"""

from __future__ import annotations

import math

import torch
from torch.nn.functional import pad

from sglang_dsa_plugin.cache.layouts import LATENT_DIM, PAGE_SIZE

Result = tuple[torch.Tensor, torch.Tensor]


def nothing(q: torch.Tensor, slots: torch.Tensor, kv_rows: torch.Tensor, out: torch.Tensor | None) -> Result | None:
    """The result where there are no rows, no picks or no cache, else None. q [R, H, 576]."""
    rows, heads, _ = q.shape
    if rows and slots.shape[1] and kv_rows.shape[0]:
        return None
    out = q.new_zeros(rows, heads, LATENT_DIM) if out is None else out.zero_()
    return out, torch.full((rows, heads), -math.inf, dtype=torch.float32, device=q.device)


def padded_heads(q: torch.Tensor, heads: int) -> torch.Tensor:
    """q [R, H, 576] with heads of zeros up to `heads`; contiguous."""
    return (q if q.shape[1] == heads else pad(q, (0, 0, 0, heads - q.shape[1]))).contiguous()


def whole_pages(kv_rows: torch.Tensor) -> torch.Tensor:
    """kv_rows [N, width] as pages [P, 64, width]. A view where N is a multiple of 64, as in a server's pool; other
    caches are copied with rows of zeros behind them, which no slot names.
    """
    kv_rows = pad(kv_rows, (0, 0, 0, -kv_rows.shape[0] % PAGE_SIZE)) if kv_rows.shape[0] % PAGE_SIZE else kv_rows
    return kv_rows.view(-1, PAGE_SIZE, kv_rows.shape[1])


def finished(
    result: torch.Tensor,
    lse: torch.Tensor,
    counts: torch.Tensor,
    dtype: torch.dtype,
    sink: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> Result:
    """result [R, H, 512] without a sink and lse [R, H] natural log, as the operator gives them.

    counts [R]: valid picks. dtype: of q. sink f32 [H]: brought in here. out: where to write.
    """
    lse = lse.float()
    if sink is not None:
        none = (counts == 0).unsqueeze(1)
        lse = torch.where(none, -math.inf, lse)
        # 1 / (1 + exp(sink - lse)); a row without picks is 0 in any case.
        result = result.float() * torch.sigmoid(lse - sink).unsqueeze(2)
        result = result.masked_fill(none.unsqueeze(2), 0)
    else:
        from sglang_dsa_plugin.kernels.triton.empty_rows import clear_empty_rows

        # In the kernel's own tensors: a pass over the output of a prefill would be felt.
        clear_empty_rows(result, lse, counts)
    return result.to(dtype).contiguous() if out is None else out.copy_(result), lse
