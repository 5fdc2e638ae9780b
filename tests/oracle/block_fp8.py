"""What rounding of activations does to a block-fp8 model, and checkpoints in which neighbouring blocks differ in scale.

A block-fp8 layer multiplies e4m3 weights with activations that are rounded to e4m3, too, with one scale for each 128
values of a row (SGLang 0.5.23, `per_token_group_quant_fp8`). Its dequantised twin does not round them. How far the two
may lie apart is computed here from the twin alone, in float32: the same forward with the inputs of those layers
rounded.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.overrides import TorchFunctionMode

from sglang_dsa_plugin.tools.fp8_checkpoint import BLOCK, E4M3_MAX
from tests.oracle import hf

_KEPT = ("embed_tokens", "lm_head", "gate.weight", "weights_proj")


class RoundedActivations(TorchFunctionMode):
    """Inputs of all linear layers but those whose weights are `kept` are rounded to e4m3 in groups of 128.

    layers: how many inputs were rounded.
    """

    def __init__(self, kept: list[torch.Tensor]) -> None:
        super().__init__()
        self.kept = {tensor.untyped_storage().data_ptr() for tensor in kept}
        self.layers = 0

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func is torch.nn.functional.linear and args[1].untyped_storage().data_ptr() not in self.kept:
            groups = args[0].float().unflatten(-1, (-1, BLOCK))
            scale = groups.abs().amax(-1, keepdim=True).clamp_min(1e-10) / E4M3_MAX
            rounded = (groups / scale).to(torch.float8_e4m3fn).float() * scale
            args = (rounded.flatten(-2).to(args[0].dtype), *args[1:])
            self.layers += 1
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def logprobs(twin: Path, tokens: list[int], rounded: bool) -> torch.Tensor:
    """Log-softmax after each token, f32 [S, vocab], with activations as they are or rounded."""
    network = hf.load(twin)
    ids = torch.tensor([tokens])
    if not rounded:
        return network(input_ids=ids).logits[0].log_softmax(-1)
    kept = [weight for name, weight in network.named_parameters() if any(part in name for part in _KEPT)]
    with RoundedActivations(kept) as mode:
        result = network(input_ids=ids).logits[0].log_softmax(-1)
    assert mode.layers >= 8 * network.config.num_hidden_layers, mode.layers
    return result


def scale_by_place(quantised: Path, twin: Path) -> None:
    """Multiply each block of 128 x 128 by 1/2, 1 or 2, no two neighbours alike, in a block-fp8 checkpoint and its twin.

    Random weights all come out with the same scale, and a scale taken from another block would show nothing.
    """
    fp8, exact = (load_file(directory / "model.safetensors") for directory in (quantised, twin))
    for name in [name for name in fp8 if name.endswith("_scale_inv")]:
        rows, columns = (torch.arange(size) for size in fp8[name].shape)
        factor = torch.exp2((rows.unsqueeze(1) + columns) % 3 - 1.0)
        weight = exact[name.removesuffix("_scale_inv")]
        spread = factor.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[: weight.shape[0], : weight.shape[1]]
        fp8[name] = fp8[name] * factor
        weight.mul_(spread)
    for directory, tensors in ((quantised, fp8), (twin, exact)):
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
