"""The multi-token-prediction layer of a test checkpoint, and a target it can guess.

A draft layer with random weights never guesses right, so speculative decoding would only ever see rejections. Here the
target leans towards the successor of its last token under a fixed permutation of the vocabulary: lm_head row perm[i] is
embedding i, and embeddings grow by `echo` against what the layers add. The draft's projection passes the last token's
embedding on, its attention and MLP add a tenth of their usual share, and so it guesses that successor. In the default
V3.2 model that is the target's own choice for 13, 42 and 97 of 100 random tokens at an `echo` of 0.3, 0.5 and 1.0.

In the checkpoint the draft is one decoder layer behind the last, plus eh_proj, enorm, hnorm and shared_head.norm.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

SHARE = 0.1
_PER_LAYER = ("mlp_layer_types", "layer_types", "indexer_types")


def lean(model: Any, layers: int, echo: float, seed: int) -> dict[str, torch.Tensor]:
    """Make the target lean and the draft follow, in place; return the draft's tensors that have no place in `model`.

    model: the Hugging Face model with `layers` target layers and the draft's decoder layer behind them.
    """
    import torch

    with torch.no_grad():
        embedding, head = model.model.embed_tokens.weight, model.lm_head.weight
        vocab, hidden = embedding.shape
        successor = torch.randperm(vocab, generator=torch.Generator().manual_seed(seed))
        head[successor] = (2 * embedding / math.sqrt(hidden)).bfloat16().float()
        embedding.mul_(echo).copy_(embedding.bfloat16())
        for name, weight in model.model.layers[layers].named_parameters():
            if name.removesuffix(".weight").endswith(("down_proj", "o_proj")):
                weight.mul_(SHARE).copy_(weight.bfloat16())
    prefix = f"model.layers.{layers}"
    # The draft reads [enorm(embedding of the last token), hnorm(hidden state of the target)].
    passed = torch.cat([torch.eye(hidden), torch.zeros(hidden, hidden)], 1)
    return {
        f"{prefix}.eh_proj.weight": passed,
        f"{prefix}.enorm.weight": torch.ones(hidden),
        f"{prefix}.hnorm.weight": torch.ones(hidden),
        f"{prefix}.shared_head.norm.weight": model.model.norm.weight.detach().clone(),
    }


def add(directory: Path, layers: int, tensors: dict[str, torch.Tensor]) -> None:
    """Put the draft's tensors into a saved checkpoint and declare its last layer to be the draft's."""
    from safetensors.torch import load_file, save_file

    file = directory / "model.safetensors"
    held = load_file(file)
    dtype = held["lm_head.weight"].dtype
    held |= {name: tensor.to(dtype) for name, tensor in tensors.items()}
    save_file(held, file, metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    config |= {"num_hidden_layers": layers, "num_nextn_predict_layers": 1}
    config |= {key: config[key][:layers] for key in _PER_LAYER if config.get(key)}
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
