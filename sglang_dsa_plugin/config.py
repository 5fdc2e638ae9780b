"""DsaConfig: everything DSA reads from a model's config, checked once, refused by key.

The readings below are SGLang's (0.5.23: srt/configs/model_config.py, srt/models/deepseek_v2.py, the indexer's
constructor), so that this package and the model class around it never disagree. Where SGLang would quietly take a
default that changes the model's arithmetic, the config is refused instead:

| key | read as | refused |
| --- | --- | --- |
| index_topk | picks a row, 1 to 8192 | missing, not a positive integer, more than MAX_TOPK |
| index_n_heads, index_head_dim | indexer heads; 128 | missing; another head dim |
| kv_lora_rank, qk_rope_head_dim | 512; 64 | anything else: no cache layout holds it |
| indexer_rope_interleave | rope of the indexer; absent: half-split | absent in a GLM config (see below) |
| rope_interleave | rope of MLA; absent: interleaved | |
| rope_parameters, or rope_theta + rope_scaling | see config_rope.py | no theta; other scalings; contradictions |
| index_k_norm_type | key norm, "layer" (absent) or "rms"; epsilon 1e-6 of its own | another word |
| index_init_tokens, index_local_tokens | tokens always picked, 0 when absent | more than index_topk together |
| the reuse schedule | see reuse.py | unknown words, wrong length, layer 0 reusing, contradictions |

GLM and the indexer's rope: the GLM-5 family is trained with interleaved rope in the indexer, and its reference
implementation does not even read the key. SGLang falls back to half-split where the key is absent, which gives fluent
text that decays with length (https://github.com/huggingface/transformers/issues/46842). The plugin cannot change what
the key's absence means to the rest of SGLang, so such a config is refused with the override that repairs it.

Imports neither torch nor sglang.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sglang_dsa_plugin import config_keys as keys
from sglang_dsa_plugin.config_keys import UnsupportedModel
from sglang_dsa_plugin.config_rope import YarnScaling, read_rope
from sglang_dsa_plugin.reuse import ReuseSchedule, read_schedule

LATENT_RANK = 512
ROPE_DIM = 64
INDEX_HEAD_DIM = 128
# A step holds picks and slots of index_topk columns a row, however short its context is, and no budget counts them:
# 512 MiB in a chunk of 8192 rows here, 4 times what the published models take.
MAX_TOPK = 8192
# Of the indexer's key norm, whatever the model's rms_norm_eps.
KEY_NORM_EPS = 1e-6

SERVED = (
    "DeepseekV32ForCausalLM",
    "DeepseekV3ForCausalLM",
    "GlmMoeDsaForCausalLM",
    "LongcatFlashForCausalLM",
    "DeepseekV3ForCausalLMNextN",
    "GlmMoeDsaForCausalLMNextN",
    "LongcatFlashForCausalLMNextN",
)
NOT_SERVED = {
    "MistralLarge3ForCausalLM": "its indexer has not been tried here",
    "PixtralForConditionalGeneration": "its text model's indexer has not been tried here",
    "Glm5NextForConditionalGeneration": "it picks pooled keys (index_kpool) and mixes in linear attention",
    "Glm5NextForConditionalGenerationNextN": "it picks pooled keys (index_kpool)",
    "Dots3NoteForCausalLM": "it mixes sliding-window layers of other head sizes into the same cache",
    "Dots3NoteForCausalLMNextN": "it mixes sliding-window layers of other head sizes into the same cache",
    "HYV4ForCausalLM": "it needs learnable attention sinks",
    "HYV4ForCausalLMNextN": "it needs learnable attention sinks",
}


@dataclass(frozen=True)
class DsaConfig:
    """What DSA needs to know of a model. Sizes count values, not bytes; layers count attention layers.

    num_layers: attention layers with a cache of their own (LongCat: two per decoder layer; NextN: the draft's own).
    rope_layout, index_rope_layout: "half" or "interleaved", for MLA and for the indexer.
    yarn: None for plain rope.
    key_norm: "layer" or "rms".
    draft_shares_picks: later draft steps of speculative decoding reuse the picks of the first.
    """

    architecture: str
    hidden_size: int
    num_heads: int
    q_lora_rank: int
    qk_nope_head_dim: int
    v_head_dim: int
    num_layers: int
    max_position_embeddings: int
    index_topk: int
    index_n_heads: int
    index_rope_layout: str
    rope_layout: str
    rope_theta: float
    yarn: YarnScaling | None
    key_norm: str
    index_init_tokens: int
    index_local_tokens: int
    schedule: ReuseSchedule
    draft_shares_picks: bool

    @classmethod
    def from_hf(cls, config: Any) -> DsaConfig:
        """Read a Hugging Face config: a PretrainedConfig, any object with its attributes, or config.json as a dict.

        A wrapper's nested `text_config` is followed when the outer config has no `index_topk`.
        Raises UnsupportedModel naming the key, the value and the remedy.
        """
        return _read(config)

    @property
    def is_nextn(self) -> bool:
        """Whether this is the draft of multi-token prediction."""
        return self.architecture.endswith("NextN")

    def layer_reuses_picks(self, layer_id: int) -> bool:
        """Whether layer `layer_id` has no picks of its own. A NextN layer always has an indexer."""
        if layer_id < 0:
            raise ValueError(f"DsaConfig: layer_id must be at least 0, got {layer_id}")
        return not self.is_nextn and self.schedule.reuses(layer_id)

    def indexing_layers(self) -> tuple[int, ...]:
        """The layers that run an indexer and hold index keys, ascending."""
        return tuple(i for i in range(self.num_layers) if not self.layer_reuses_picks(i))


def is_dsa_config(config: Any) -> bool:
    """Whether SGLang would treat this model as DSA (served here or refused by name); never raises."""
    text = _text_config(config)
    named = {_architecture(config), _architecture(text)}
    return keys.get(text, "index_topk") is not None and bool(named & {*SERVED, *NOT_SERVED})


def _read(outer: Any) -> DsaConfig:
    config = _text_config(outer)
    architecture = _served_architecture(outer, config)
    if keys.get(config, "index_topk") is None:
        raise UnsupportedModel(
            f"{architecture}: the config has no index_topk, so the model has no sparse attention; "
            "serve it with another attention backend"
        )
    index_topk = keys.positive(config, "index_topk")
    if index_topk > MAX_TOPK:
        raise UnsupportedModel(
            f"index_topk={index_topk} is more than {MAX_TOPK}: each row of a step would hold as many picks, however "
            f"short its context is; start with --json-model-override-args '{{\"index_topk\": {MAX_TOPK}}}', which "
            f"gives the same answers on contexts of up to {MAX_TOPK} tokens"
        )
    keys.fixed(config, "index_head_dim", INDEX_HEAD_DIM, "an index page stores keys of 128 values")
    keys.fixed(config, "kv_lora_rank", LATENT_RANK, "a latent row stores 512 values")
    keys.fixed(config, "qk_rope_head_dim", ROPE_DIM, "a latent row stores 64 rope values")
    kpool = keys.count(config, "index_kpool", 1)
    if kpool != 1:
        raise UnsupportedModel(f"index_kpool={kpool}: picking pooled keys is not served yet; only index_kpool=1 is")
    init, local = keys.count(config, "index_init_tokens", 0), keys.count(config, "index_local_tokens", 0)
    if init + local > index_topk:
        raise UnsupportedModel(
            f"index_init_tokens={init} and index_local_tokens={local} exceed index_topk={index_topk}; "
            "lower them or raise index_topk"
        )
    if keys.get(config, "learnable_sink"):
        raise UnsupportedModel(
            f"learnable_sink=True: {architecture} builds no attention sinks; remove the key if the weights have none"
        )
    theta, yarn = read_rope(config)
    nextn = keys.count(config, "num_nextn_predict_layers", 0)
    layers = _num_layers(config, architecture, nextn)
    return DsaConfig(
        architecture=architecture,
        hidden_size=keys.positive(config, "hidden_size"),
        num_heads=keys.positive(config, "num_attention_heads"),
        q_lora_rank=keys.positive(config, "q_lora_rank"),
        qk_nope_head_dim=keys.positive(config, "qk_nope_head_dim"),
        v_head_dim=keys.positive(config, "v_head_dim"),
        num_layers=layers,
        max_position_embeddings=keys.positive(config, "max_position_embeddings"),
        index_topk=index_topk,
        index_n_heads=keys.positive(config, "index_n_heads"),
        index_rope_layout=_index_rope_layout(config, architecture),
        rope_layout="interleaved" if keys.flag(config, "rope_interleave", True) else "half",
        rope_theta=theta,
        yarn=yarn,
        key_norm=_key_norm(config),
        index_init_tokens=init,
        index_local_tokens=local,
        schedule=read_schedule(config, layers, nextn, architecture),
        draft_shares_picks=keys.flag(config, "index_share_for_mtp_iteration", False),
    )


def _architecture(config: Any) -> str | None:
    names = keys.get(config, "architectures")
    return names[0] if names else None


def _text_config(config: Any) -> Any:
    text = keys.get(config, "text_config")
    return text if text is not None and keys.get(config, "index_topk") is None else config


def _served_architecture(outer: Any, config: Any) -> str:
    named = [name for name in (_architecture(config), _architecture(outer)) if name is not None]
    for name in named:
        if name in NOT_SERVED:
            raise UnsupportedModel(
                f"architectures=[{name!r}] is not served: {NOT_SERVED[name]}; SGLANG_DSA_PLUGIN=off leaves it to "
                "SGLang, which needs a GPU"
            )
    for name in named:
        if name in SERVED:
            return name
    raise UnsupportedModel(
        f"architectures={named[:1] or None} is not a DSA model this plugin serves; it serves {', '.join(SERVED)}"
    )


def _index_rope_layout(config: Any, architecture: str) -> str:
    if architecture.startswith("GlmMoeDsa") and keys.get(config, "indexer_rope_interleave") is None:
        raise UnsupportedModel(
            f"indexer_rope_interleave is missing from a {architecture} config: SGLang would read it as half-split, "
            'while GLM is trained with interleaved rope in the indexer; add "indexer_rope_interleave": true to '
            "config.json or start with --json-model-override-args '{\"indexer_rope_interleave\": true}'"
        )
    return "interleaved" if keys.flag(config, "indexer_rope_interleave", False) else "half"


def _key_norm(config: Any) -> str:
    value = keys.get(config, "index_k_norm_type") or "layer"
    if value not in ("layer", "rms"):
        raise UnsupportedModel(f"index_k_norm_type={value!r} is unknown; it must be 'layer' or 'rms'")
    return value


def _num_layers(config: Any, architecture: str, nextn: int) -> int:
    if architecture.endswith("NextN"):
        return max(nextn, 1)
    key = "num_layers" if keys.get(config, "num_hidden_layers") is None else "num_hidden_layers"
    return keys.positive(config, key) * (2 if architecture.startswith("LongcatFlash") else 1)
