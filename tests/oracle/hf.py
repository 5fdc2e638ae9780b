"""Log-probabilities of a checkpoint by Hugging Face transformers, the oracle of the whole-model tests.

Eager attention, which computes every score and masks those the indexer did not pick. Hugging Face's indexer works in
float32 without rotation and quantisation, so against a float32 server the two may differ only by rounding. It was
checked against an independent float64 implementation in tests/cpu/test_oracle.py (transformers 5.19.0): half-split rope
in the V3.2 indexer, interleaved in GLM's, index keys kept across steps.

The prompt goes through in chunks over Hugging Face's cache, since whole it would hold S x heads x S scores. Results are
kept on disk by the model's bytes, the tokens and the variant, because a server test asks for the same ones each time.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

CHUNK = 512
ROPE_DIM = 64
_MODELS = {
    "deepseek_v32": transformers.DeepseekV32ForCausalLM,
    "glm_moe_dsa": transformers.GlmMoeDsaForCausalLM,
}


def cache_dir() -> Path:
    """Where results are kept: SGLANG_DSA_ORACLE_CACHE, or .models/oracle at the root of the repository."""
    default = Path(__file__).resolve().parents[2] / ".models" / "oracle"
    return Path(os.environ.get("SGLANG_DSA_ORACLE_CACHE") or default)


def hf_logprobs(
    model_dir: str | Path,
    token_ids: Sequence[int],
    positions: Sequence[int] | None = None,
    dtype: torch.dtype = torch.float32,
    start: int = 0,
    *,
    index_topk: int | None = None,
    dense: bool = False,
    other_rope: bool = False,
    chunk: int = CHUNK,
    cache: bool = True,
) -> torch.Tensor:
    """Log-softmax over the vocabulary after each token: f32 [S, vocab], row i predicts token i + 1.

    positions: return these rows only; start: return the rows from here on (one or the other).
    index_topk: instead of the config's, as a server's --json-model-override-args would.
    dense: every token is picked, as if index_topk were S. other_rope: the other rope layout in the indexer. Both are
        there to prove that a comparison can fail.
    chunk: tokens a forward pass.
    cache: read and write the results on disk.

    Raises ValueError for a quantised checkpoint (compare with its twin) and for an empty prompt.
    """
    tokens = [int(token) for token in token_ids]
    if not tokens:
        raise ValueError("hf_logprobs: token_ids is empty")
    if positions is not None and start:
        raise ValueError("hf_logprobs: give positions or start, not both")
    config = json.loads((Path(model_dir) / "config.json").read_text())
    if config.get("quantization_config"):
        raise ValueError(f"hf_logprobs: {model_dir} is quantised; compare with the dequantised twin")
    k = len(tokens) if dense else index_topk or config["index_topk"]
    variant = f"{dtype} k={k} other_rope={other_rope} chunk={chunk} transformers={transformers.__version__}"
    stored = cache_dir() / f"{_key(model_dir, tokens, variant)}.pt"
    if cache and stored.exists():
        result = torch.load(stored, weights_only=True)
    else:
        result = _forward(load(model_dir, dtype, other_rope), tokens, k, chunk)
        if cache:
            stored.parent.mkdir(parents=True, exist_ok=True)
            partial = stored.with_suffix(f".{os.getpid()}")
            torch.save(result, partial)
            partial.replace(stored)
    return result[start:] if positions is None else result[list(positions)]


def load(model_dir: str | Path, dtype: torch.dtype = torch.float32, other_rope: bool = False) -> Any:
    """The Hugging Face model, eager; kept in memory and shared by callers, who must leave it as it was."""
    return _load(*_stamp(model_dir), dtype, other_rope)


@torch.no_grad()
def _forward(model: Any, tokens: list[int], k: int, chunk: int) -> torch.Tensor:
    found = indexers(model)
    kept = [indexer.index_topk for indexer in found]
    rows, past = [], None
    try:
        for indexer in found:
            indexer.index_topk = k
        for i in range(0, len(tokens), chunk):
            ids = torch.tensor([tokens[i : i + chunk]])
            out = model(input_ids=ids, past_key_values=past, use_cache=True)
            past = out.past_key_values
            rows.append(out.logits[0].float().log_softmax(-1))
    finally:
        for indexer, before in zip(found, kept):
            indexer.index_topk = before
    return torch.cat(rows)


def indexers(model: Any) -> list[Any]:
    """The indexer modules of a model, in layer order."""
    return [module for module in model.modules() if hasattr(module, "index_topk") and hasattr(module, "wq_b")]


def _stamp(model_dir: str | Path) -> tuple[str, tuple[tuple[str, int, int], ...]]:
    """The directory and its files' sizes and times, so that a rewritten model is loaded and hashed anew."""
    files = sorted(p for p in Path(model_dir).resolve().iterdir() if p.suffix in (".json", ".safetensors"))
    stats = tuple((p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in files)
    return str(Path(model_dir).resolve()), stats


def model_hash(model_dir: str | Path) -> str:
    """A hash of the config and weights."""
    return _model_hash(*_stamp(model_dir))


def _key(model_dir: str | Path, tokens: list[int], variant: str) -> str:
    text = json.dumps([model_hash(model_dir), tokens, variant])
    return hashlib.sha256(text.encode()).hexdigest()[:32]


@functools.lru_cache(maxsize=32)
def _model_hash(directory: str, stats: tuple[tuple[str, int, int], ...]) -> str:
    digest = hashlib.sha256()
    for name, _, _ in stats:
        if name.endswith(".safetensors") or name == "config.json":
            with open(Path(directory) / name, "rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


@functools.lru_cache(maxsize=4)
def _load(directory: str, stats: tuple[tuple[str, int, int], ...], dtype: torch.dtype, other_rope: bool) -> Any:
    # By class, not AutoConfig: sglang registers a config of its own under the same model type in this process.
    kind = json.loads((Path(directory) / "config.json").read_text())["model_type"]
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = _MODELS[kind].from_pretrained(directory, dtype=dtype, **eager).eval()
    if other_rope:
        _flip_indexer_rope(model, half=kind == "deepseek_v32")
    return model


def _flip_indexer_rope(model: Any, half: bool) -> None:
    """Make the indexer rope in the other layout by permuting its weights, which leaves everything else as it is.

    Half-split rope turns pairs (i, i + 32), interleaved (2i, 2i + 1). Moving channel 2i to i and 2i + 1 to i + 32 makes
    half-split code turn the interleaved pairs; q and k are permuted alike, so their product only sees the pairing.
    """
    permutation = torch.arange(ROPE_DIM).view(-1, 2).T.reshape(-1)
    if not half:
        permutation = permutation.argsort()
    for module in indexers(model):
        order = torch.cat([permutation, torch.arange(ROPE_DIM, module.head_dim)])
        wq_b = module.wq_b.weight.data
        wq_b.copy_(wq_b.view(module.n_heads, module.head_dim, -1)[:, order].reshape(wq_b.shape))
        for parameter in (module.wk.weight, module.k_norm.weight, module.k_norm.bias):
            parameter.data.copy_(parameter.data[order])
