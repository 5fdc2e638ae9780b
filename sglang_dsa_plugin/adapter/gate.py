"""The indexer's gate before scaling: float32 even from bf16 weights and beside an adapter.

Rounding it to bf16 makes ties between tokens (https://github.com/sgl-project/sglang/issues/13459). A LoRA adapter on
`weights_proj` would do that to every row of the batch, also to those of requests without one, since SGLang adds what it
contributes to the layer's own output in the model's dtype. So that part is asked for alone and added here.
"""

from __future__ import annotations

import torch


def head_weights(projection: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """f32 [R,H] of hidden states x [R,hidden]; projection: `weights_proj`, or SGLang's wrapper of it for adapters."""
    weight = projection.weight
    if x.is_cuda and x.dtype == weight.dtype == torch.bfloat16:
        gate = torch.mm(x, weight.t(), out_dtype=torch.float32)
    else:
        gate = torch.nn.functional.linear(x.float(), weight.float())
    return gate + _adapters(projection, x).float() if getattr(projection, "lora_active", False) else gate


def _adapters(projection: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """What the adapters of the batch add, [R,H] in x's dtype; 0 in rows without one."""
    return projection.lora_backend.forward_with_base(
        projection,
        x,
        lambda: x.new_zeros(x.shape[0], projection.output_size),
        projection.lora_a,
        projection.lora_b,
        projection._output_offset,
        projection.lora_offsets,
    )
