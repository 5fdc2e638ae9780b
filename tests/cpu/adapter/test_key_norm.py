"""The norm of index keys, as the indexer is built."""

import types

import pytest
import torch

pytest.importorskip("sglang")

from sglang_dsa_plugin.adapter import indexer, state
from sglang_dsa_plugin.kernel_flags import KernelFlags
from tests.cpu.test_config import GLM5, LONGCAT, V32


class Projection(torch.nn.Linear):
    """In place of SGLang's, which wants its process groups."""

    def __init__(self, inputs, outputs, bias, params_dtype=None, **_):
        super().__init__(inputs, outputs, bias=bias, dtype=params_dtype)


@pytest.mark.parametrize("model", [V32, GLM5, LONGCAT], ids=["V3.2", "GLM-5", "LongCat"])
def test_its_epsilon_is_not_the_models(monkeypatch, model):
    """DeepSeek's LayerNorm has 1e-6, whatever rms_norm_eps is; so have GLM-5 and LongCat."""
    monkeypatch.setattr(indexer, "ReplicatedLinear", Projection)
    monkeypatch.setattr(state, "kernel_flags", KernelFlags)
    monkeypatch.setattr(state, "set_model_dtype", lambda dtype: None)
    monkeypatch.setattr(state, "index_key_dtype", lambda: torch.float32)
    config = types.SimpleNamespace(**model | {"rms_norm_eps": 1e-3})
    made = indexer.DsaIndexer(
        hidden_size=64,
        index_n_heads=config.index_n_heads,
        index_head_dim=128,
        rope_head_dim=64,
        index_topk=config.index_topk,
        q_lora_rank=32,
        max_position_embeddings=128,
        rope_theta=1e4,
        layer_id=0,
        is_neox_style=not getattr(config, "indexer_rope_interleave", False),
        config=config,
    )
    assert made.k_norm.eps == 1e-6
