"""Small random checkpoints with the real head sizes, for tests and demonstrations.

The attention is the published shape (latent 512, rope 64, nope/v 128/128 for DeepSeek-V3.2 and 192/256 for GLM, index
heads of 128), the rest is small. Weights are scaled by fan-in, so activations keep their size through the layers and
the logits spread; with the usual 0.02 they would be nearly flat and hide errors. Norm weights and biases are random
too, or a kernel that skips one would pass. All values are bfloat16-representable even in a float32 checkpoint (the
router's correction bias included), so a server in either dtype holds the same model.

Hugging Face writes the checkpoint, so both it and SGLang load it. Added for SGLang, which reads them without a default
or with another one: moe_layer_freq, topk_method, scoring_func, ep_size, num_nextn_predict_layers, and for GLM
indexer_rope_interleave. rms_norm_eps is 1e-6 in every model because Hugging Face uses that inside the attention
whatever the config says, and SGLang follows the config.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_dsa_plugin.tools import draft_layer
from sglang_dsa_plugin.tools import tokenizer as tok

if TYPE_CHECKING:
    import torch

ARCHITECTURES = ("deepseek_v32", "glm_moe_dsa")
ROPES = ("default", "yarn")
DTYPES = ("bfloat16", "float32")
QUANTS = (None, "fp8-block")
YARN_ORIGINAL = 1024
# Gains over fan-in scaling. Attention is sharpened so that single keys matter, its output and the logits are widened.
GAINS = {"q_b_proj": 1.5, "o_proj": 2.0, "lm_head": 2.0, "mlp.gate": 2.0}


@dataclass(frozen=True)
class MadeModel:
    """What was written: directory, config as saved, parameters and bytes, and the twin's directory if any."""

    path: Path
    config: dict[str, Any]
    parameters: int
    size_bytes: int
    twin: Path | None = None
    quantized: tuple[str, ...] = field(default=())


def make_model(
    out_dir: str | Path,
    arch: str = "deepseek_v32",
    *,
    layers: int = 3,
    hidden: int = 256,
    heads: int = 16,
    index_heads: int | None = None,
    index_topk: int = 64,
    q_lora_rank: int = 256,
    experts: int = 8,
    experts_per_token: int = 2,
    moe_intermediate: int = 128,
    intermediate: int = 512,
    dense_layers: int = 1,
    vocab: int = 320,
    max_position: int = 8192,
    rope: str = "default",
    rope_theta: float | None = None,
    schedule: str | None = None,
    seed: int = 0,
    dtype: str = "bfloat16",
    quant: str | None = None,
    twin: str | Path | None = None,
    nextn: int = 0,
    echo: float = 0.5,
) -> MadeModel:
    """Write a random checkpoint with tokenizer and generation config to `out_dir` (created; must be empty).

    arch: "deepseek_v32" or "glm_moe_dsa".
    index_heads: 64 for V3.2 and 32 for GLM when None.
    rope: "default" or "yarn" (original length 1024, stretched to max_position).
    rope_theta: 1e4 for V3.2 and 8e6 for GLM when None.
    schedule: GLM only, one letter a layer, F (own indexer) or S (reuses picks); when None, F and S alternate
        from three layers on.
    quant: None, or "fp8-block" for the published DeepSeek format.
    twin: with quant, also write the dequantised model here, in `dtype`, equal to the last bit.
    nextn: 1 adds a draft layer for multi-token prediction and makes the model guessable, see draft_layer.py.
    echo: with nextn, how much the next token follows from the last one alone.

    Raises ValueError naming the option, the value and what is allowed.
    """
    out = Path(out_dir)
    _check(
        arch=arch, rope=rope, dtype=dtype, quant=quant, layers=layers, dense_layers=dense_layers, vocab=vocab,
        experts=experts, experts_per_token=experts_per_token, max_position=max_position, schedule=schedule, twin=twin,
        nextn=nextn, echo=echo,
    )  # fmt: skip
    for directory in (out, *([Path(twin)] if twin else [])):
        if directory.exists() and any(directory.iterdir()):
            raise ValueError(f"make_model: {directory} is not empty; give a new directory")
    theta = rope_theta or (1e4 if arch == "deepseek_v32" else 8e6)
    rope_parameters: dict[str, Any] = {"rope_type": rope, "rope_theta": theta}
    if rope == "yarn":
        rope_parameters |= {
            "factor": max_position / YARN_ORIGINAL,
            "original_max_position_embeddings": YARN_ORIGINAL,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        }
    options: dict[str, Any] = {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "moe_intermediate_size": moe_intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "n_shared_experts": 1,
        "n_routed_experts": experts,
        "num_experts_per_tok": experts_per_token,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": dense_layers,
        "q_lora_rank": q_lora_rank,
        "max_position_embeddings": max_position,
        "rms_norm_eps": 1e-6,
        "index_topk": index_topk,
        "rope_parameters": rope_parameters,
        "bos_token_id": tok.BOS,
        "eos_token_id": tok.EOS,
        "pad_token_id": tok.PAD,
        "moe_layer_freq": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "ep_size": 1,
        "num_nextn_predict_layers": 0,
    }
    model = _build(arch, options, index_heads, schedule, nextn)
    _fill(model, seed)
    draft = draft_layer.lean(model, layers, echo, seed) if nextn else {}
    return _save(model, out, dtype, quant, Path(twin) if twin else None, layers, draft)


def _check(*, schedule: str | None, twin: str | Path | None, **options: Any) -> None:
    def bad(name: str, expected: str) -> None:
        raise ValueError(f"make_model: {name} must be {expected}, got {options.get(name)!r}")

    for name, allowed in (("arch", ARCHITECTURES), ("rope", ROPES), ("dtype", DTYPES), ("quant", QUANTS)):
        if options[name] not in allowed:
            bad(name, "one of " + ", ".join(map(str, allowed)))
    if not 0 <= options["dense_layers"] <= options["layers"] or options["layers"] < 1:
        bad("dense_layers", f"between 0 and layers ({options['layers']}, at least 1)")
    if not 0 < options["experts_per_token"] <= options["experts"]:
        bad("experts_per_token", f"between 1 and experts ({options['experts']})")
    if options["vocab"] < tok.MIN_VOCAB:
        bad("vocab", f"at least {tok.MIN_VOCAB} (256 bytes and the specials)")
    if options["rope"] == "yarn" and options["max_position"] <= YARN_ORIGINAL:
        bad("max_position", f"more than {YARN_ORIGINAL} with rope='yarn'")
    if options["nextn"] not in (0, 1):
        bad("nextn", "0 or 1, SGLang's limit")
    if options["nextn"] and options["layers"] == 1:
        bad("layers", "at least 2 with nextn, because SGLang takes a single layer for the draft itself")
    if not options["echo"] > 0:
        bad("echo", "positive")
    if schedule is not None:
        options["schedule"] = schedule
        if options["arch"] != "glm_moe_dsa":
            bad("schedule", "None for deepseek_v32, where Hugging Face gives every layer an indexer")
        if len(schedule) != options["layers"] or set(schedule) - {"F", "S"} or not schedule.startswith("F"):
            bad("schedule", f"{options['layers']} letters F or S, starting with F")
    if twin is not None and options["quant"] is None:
        options["twin"] = twin
        bad("twin", "left out unless quant is 'fp8-block'")


def _build(arch: str, options: dict[str, Any], index_heads: int | None, schedule: str | None, nextn: int) -> Any:
    """The Hugging Face model of `arch`, in float32, with its own initial weights; a draft layer is one more layer."""
    import transformers

    layers = options["num_hidden_layers"]
    options["num_hidden_layers"] += nextn
    if arch == "deepseek_v32":
        options |= {"index_n_heads": index_heads or 64}
        config = transformers.DeepseekV32Config(**options)
        model = transformers.DeepseekV32ForCausalLM(config)
    else:
        letters = (schedule or ("FS" * layers if layers >= 3 else "F" * layers))[:layers] + "F" * nextn
        options |= {
            "index_n_heads": index_heads or 32,
            "indexer_rope_interleave": True,
            "indexer_types": [{"F": "full", "S": "shared"}[letter] for letter in letters],
        }
        config = transformers.GlmMoeDsaConfig(**options)
        model = transformers.GlmMoeDsaForCausalLM(config)
    return model.eval().float()


def _fill(model: Any, seed: int) -> None:
    """Overwrite every parameter and the router bias; a tensor's values depend on the seed and its name only."""
    import torch

    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if "inv_freq" in name:
                continue
            generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
            noise = torch.randn(tensor.shape, generator=generator)
            tensor.copy_(_scaled(name, noise).bfloat16())


def _scaled(name: str, noise: torch.Tensor) -> torch.Tensor:
    if name.endswith("embed_tokens.weight"):
        return noise
    if name.endswith("e_score_correction_bias"):
        return 0.1 * noise
    if "norm" in name:
        return 0.25 * noise if name.endswith("bias") else (0.25 * noise).exp()
    gain = next((value for part, value in GAINS.items() if f"{part}.weight" in name), 1.0)
    return gain * noise / math.sqrt(noise.shape[-1])


def _save(
    model: Any, out: Path, dtype: str, quant: str | None, twin: Path | None, layers: int, draft: dict[str, torch.Tensor]
) -> MadeModel:
    import torch

    from sglang_dsa_plugin.tools import fp8_checkpoint

    parameters = sum(p.numel() for p in (*model.parameters(), *draft.values()))
    bias = {name: b.clone() for name, b in model.named_buffers() if name.endswith("e_score_correction_bias")}
    model.to(getattr(torch, dtype))
    for name, value in bias.items():
        model.get_buffer(name).data = value
    model.config.dtype = dtype
    quantized: tuple[str, ...] = ()
    for directory in (out, twin):
        if directory is not None:
            model.save_pretrained(directory)
            tok.byte_tokenizer(model.config.vocab_size, model.config.max_position_embeddings).save_pretrained(directory)
            if draft:
                draft_layer.add(directory, layers, draft)
    if quant == "fp8-block":
        quantized = fp8_checkpoint.quantize(out, twin)
    size = sum(f.stat().st_size for f in out.glob("*.safetensors"))
    return MadeModel(out, fp8_checkpoint.read_config(out), parameters, size, twin, quantized)
