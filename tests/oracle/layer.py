"""One DSA attention layer in float64, written from the formulas alone, to check the oracle with.

    q_latent = rms(x Wqa)                 latent, k_rope = split(x Wkva);  latent = rms(latent)
    index q  = rope_first64(q_latent Wqb) index k = rope_first64(layer_norm(x Wk))
    score[t, s] = sum_h (x Ww)[t, h] * H^-1/2 * 128^-1/2 * relu(index q[t, h] . index k[s])
    picks[t] = the k best s <= t
    out[t] = Wo . concat_h(softmax_{s in picks}(scale * ((q_nope Wk_h) . latent[s] + q_rope . k_rope[s])) latent[s] Wv)

Nothing here resembles the code it checks: rope is a product of complex numbers, attention stays in the latent space
(Hugging Face expands keys and values), and each row gathers its picks (Hugging Face masks).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

ROPE = 64
F64 = torch.float64


@dataclass(frozen=True)
class Layer:
    """Weights of one attention layer by their checkpoint names, and what its config says."""

    weights: dict[str, torch.Tensor]
    config: dict[str, Any]
    index_rope: str

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.weights[name].to(F64)


def rope_table(config: dict[str, Any], positions: torch.Tensor) -> torch.Tensor:
    """e^(i * position * frequency) times YaRN's table scale: complex [S, 32]."""
    rope = config["rope_parameters"]
    pair = torch.arange(ROPE // 2, dtype=F64)
    frequency = rope["rope_theta"] ** (-pair / (ROPE // 2))
    scale = 1.0
    if rope["rope_type"] == "yarn":
        length, factor, log_base = (
            rope["original_max_position_embeddings"],
            rope["factor"],
            math.log(rope["rope_theta"]),
        )
        # The pair that turns `turns` times over the original length.
        slow, fast = (
            (ROPE // 2) * math.log(length / (2 * math.pi * turns)) / log_base
            for turns in (rope["beta_slow"], rope["beta_fast"])
        )
        low, high = max(math.floor(fast), 0), min(math.ceil(slow), ROPE - 1)
        stretched = ((pair - low) / (high - low)).clamp(0, 1)
        frequency = frequency * (1 - stretched) + frequency / factor * stretched
        scale = _mscale(factor, rope["mscale"]) / _mscale(factor, rope["mscale_all_dim"])
    return torch.polar(
        torch.full_like(frequency, scale).expand(len(positions), -1), positions.to(F64)[:, None] * frequency
    )


def _mscale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0


def rotate(x: torch.Tensor, table: torch.Tensor, layout: str) -> torch.Tensor:
    """Rope on x [S, ..., 64], row s by table[s]: pairs (i, i + 32) when "half", (2i, 2i + 1) when "interleaved"."""
    pairs = x.unflatten(-1, (2, ROPE // 2)).transpose(-1, -2) if layout == "half" else x.unflatten(-1, (ROPE // 2, 2))
    turned = torch.view_as_complex(pairs.contiguous()) * table.view(len(x), *[1] * (x.dim() - 2), ROPE // 2)
    pairs = torch.view_as_real(turned)
    return (pairs.transpose(-1, -2) if layout == "half" else pairs).flatten(-2)


def rms(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def q_latent(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    return rms(x @ layer["q_a_proj.weight"].T, layer["q_a_layernorm.weight"])


def index_scores(layer: Layer, x: torch.Tensor, hadamard: torch.Tensor | None = None) -> torch.Tensor:
    """Scores f64 [S, S] of layer input x [S, hidden], -inf where s > t; `hadamard` [128, 128] rotates q and k."""
    heads, rows = layer.config["index_n_heads"], len(x)
    table = rope_table(layer.config, torch.arange(rows))
    q = (q_latent(layer, x) @ layer["indexer.wq_b.weight"].T).view(rows, heads, 128)
    k = x @ layer["indexer.wk.weight"].T
    k = k - k.mean(-1, keepdim=True)
    k = k / (k.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    k = k * layer["indexer.k_norm.weight"] + layer["indexer.k_norm.bias"]
    q, k = (torch.cat([rotate(v[..., :ROPE], table, layer.index_rope), v[..., ROPE:]], -1) for v in (q, k))
    if hadamard is not None:
        q, k = q @ hadamard, k @ hadamard
    gate = x @ layer["indexer.weights_proj.weight"].T * (heads * 128) ** -0.5
    scores = torch.stack([gate[t] @ (q[t] @ k.T).relu() for t in range(rows)])
    return scores.masked_fill(torch.ones(rows, rows, dtype=torch.bool).triu(1), -torch.inf)


def attention(layer: Layer, x: torch.Tensor, picks: list[torch.Tensor]) -> torch.Tensor:
    """Output f64 [S, hidden] of layer input x [S, hidden], where row t attends to the positions picks[t]."""
    c, rows = layer.config, len(x)
    heads, nope, v_dim, rank = c["num_attention_heads"], c["qk_nope_head_dim"], c["v_head_dim"], c["kv_lora_rank"]
    table = rope_table(c, torch.arange(rows))
    q = (q_latent(layer, x) @ layer["q_b_proj.weight"].T).view(rows, heads, nope + ROPE)
    latent, k_rope = (x @ layer["kv_a_proj_with_mqa.weight"].T).split([rank, ROPE], -1)
    latent, k_rope = rms(latent, layer["kv_a_layernorm.weight"]), rotate(k_rope, table, "interleaved")
    w_k, w_v = layer["kv_b_proj.weight"].view(heads, nope + v_dim, rank).split([nope, v_dim], 1)
    q_latents = torch.einsum("thd,hdr->thr", q[..., :nope], w_k)
    q_rope = rotate(q[..., nope:], table, "interleaved")
    scale = (nope + ROPE) ** -0.5
    if c["rope_parameters"]["rope_type"] == "yarn":
        scale *= _mscale(c["rope_parameters"]["factor"], c["rope_parameters"]["mscale_all_dim"]) ** 2
    out = []
    for t, picked in enumerate(picks):
        weight = ((q_latents[t] @ latent[picked].T + q_rope[t] @ k_rope[picked].T) * scale).softmax(-1)
        out.append(torch.einsum("hr,hdr->hd", weight @ latent[picked], w_v).flatten())
    return torch.stack(out) @ layer["o_proj.weight"].T


def best(scores: torch.Tensor, k: int) -> list[torch.Tensor]:
    """The positions of each row's k best scores among s <= t, ascending; ties go to the earlier position."""
    order = scores.argsort(dim=-1, descending=True, stable=True)
    return [order[t, : min(k, t + 1)].sort().values for t in range(len(scores))]
