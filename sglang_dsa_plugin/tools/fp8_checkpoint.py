"""Block quantisation of a saved checkpoint, in the format DeepSeek publishes.

A quantised weight W [N, K] becomes `weight` e4m3 [N, K] and `weight_scale_inv` f32 [ceil(N / 128), ceil(K / 128)] with
W ~= weight * weight_scale_inv of its 128 x 128 block. Scales are powers of two, rounded up, so the dequantised value
has e4m3's three mantissa bits and bfloat16 holds it exactly: the twin is the same model to the last bit.

Quantised are the linear layers of attention, MLPs, experts and the indexer's wq_b and wk; not the embeddings, the head,
the norms, the router and the indexer's weights_proj, as in the published DeepSeek-V3.2.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

BLOCK = 128
E4M3_MAX = 448.0
QUANTIZATION_CONFIG = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "weight_block_size": [BLOCK, BLOCK],
    "activation_scheme": "dynamic",
}
QUANTIZED = re.compile(
    r"\.(q_a_proj|q_b_proj|kv_a_proj_with_mqa|kv_b_proj|o_proj|wq_b|wk|gate_proj|up_proj|down_proj)\.weight$"
)


def quantize_blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise W [N, K]: e4m3 [N, K] and power-of-two scales f32 [ceil(N / 128), ceil(K / 128)]."""
    import torch

    n, k = weight.shape
    rows, columns = -(-n // BLOCK), -(-k // BLOCK)
    padded = torch.zeros(rows * BLOCK, columns * BLOCK)
    padded[:n, :k] = weight.float()
    blocks = padded.view(rows, BLOCK, columns, BLOCK)
    largest = blocks.abs().amax(dim=(1, 3)).clamp(min=1e-30)
    scale = torch.exp2(torch.ceil(torch.log2(largest / E4M3_MAX)))
    quantized = (blocks / scale[:, None, :, None]).view_as(padded)[:n, :k].to(torch.float8_e4m3fn)
    return quantized.contiguous(), scale


def dequantize_blocks(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The f32 [N, K] that an e4m3 weight and its block scales stand for."""
    n, k = weight.shape
    spread = scale.repeat_interleave(BLOCK, 0)[:n].repeat_interleave(BLOCK, 1)[:, :k]
    return weight.float() * spread


def quantize(directory: Path, twin: Path | None) -> tuple[str, ...]:
    """Quantise the checkpoint in `directory` in place and put the dequantised weights into `twin`'s.

    Both hold the same single-file checkpoint. Returns the names of the quantised weights, sorted.
    """
    from safetensors.torch import load_file, save_file

    file = directory / "model.safetensors"
    tensors = load_file(file)
    names = tuple(sorted(name for name in tensors if QUANTIZED.search(name)))
    exact = dict(tensors)
    for name in names:
        weight, scale = quantize_blocks(tensors[name])
        exact[name] = dequantize_blocks(weight, scale).to(tensors[name].dtype)
        tensors[name], tensors[f"{name}_scale_inv"] = weight, scale
    save_file(tensors, file, metadata={"format": "pt"})
    if twin is not None:
        save_file(exact, twin / "model.safetensors", metadata={"format": "pt"})
    config = read_config(directory) | {"quantization_config": QUANTIZATION_CONFIG}
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return names


def read_config(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "config.json").read_text())
