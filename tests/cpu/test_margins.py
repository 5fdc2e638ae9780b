import json

import pytest
import torch

from sglang_dsa_plugin.tools.make_model import make_model
from tests.oracle import hf, layer, margins

S, K = 90, 20
SIZES = {"hidden": 64, "heads": 2, "index_heads": 4, "q_lora_rank": 64, "index_topk": K, "dtype": "float32"}


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("m") / "dense", layers=1, **SIZES).path


@pytest.fixture(scope="module")
def experts(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("m") / "moe", "glm_moe_dsa", layers=3, **SIZES).path


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SGLANG_DSA_ORACLE_CACHE", str(tmp_path))


def tokens(count, seed=1):
    return torch.randint(0, 256, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("k", [1, K, 33])
def test_pick_margins_equal_float64(dense, k):
    model, ids = hf.load(dense), tokens(S)
    weights = dict(model.model.layers[0].self_attn.named_parameters())
    ours = layer.Layer(weights, json.loads((dense / "config.json").read_text()), "half")
    with torch.no_grad():
        embedded = model.model.embed_tokens.weight[ids].double()
        x = layer.rms(embedded, model.model.layers[0].input_layernorm.weight.double())
        scores = layer.index_scores(ours, x)
    best = scores.sort(-1, descending=True).values
    largest = scores.tril().abs().amax(-1)
    got = margins.margins(dense, ids, index_topk=k)
    assert (got["picks"][:k] == torch.inf).all()
    assert (got["picks"] - (best[:, k - 1] - best[:, k]) / largest)[k:].abs().max() < 5e-6
    assert (got["experts"] == torch.inf).all()
    assert hf.indexers(model)[0].index_topk == K


def test_expert_margins_are_of_the_chosen(experts):
    model, ids = hf.load(experts), tokens(S)
    seen = []
    hooks = [
        module.register_forward_hook(lambda m, _, out: seen.append(out[0].sigmoid() + m.e_score_correction_bias))
        for name, module in model.named_modules()
        if name.endswith("mlp.gate")
    ]
    got = margins.margins(experts, ids)["experts"]
    for hook in hooks:
        hook.remove()
    assert len(seen) == 2
    expected = torch.stack([(s.sort(-1).values[:, -2] - s.sort(-1).values[:, -3]) / s.abs().amax(-1) for s in seen])
    assert (got - expected.amin(0)).abs().max() < 1e-6


def test_steady_prompt_keeps_the_floor(experts):
    floor = 1e-4
    assert min(v.min() for v in margins.margins(experts, tokens(S, seed=4)).values()) < floor
    prompt = margins.steady_prompt(experts, S, seed=4, floor=floor)
    assert len(prompt) == S and min(prompt) >= 0 and max(prompt) < 256
    assert min(v.min() for v in margins.margins(experts, prompt).values()) >= floor
    assert margins.steady_prompt(experts, S, seed=4, floor=floor) == prompt
    assert margins.steady_prompt(experts, S, seed=5, floor=floor) != prompt


def test_steady_prompt_gives_up(experts, monkeypatch):
    monkeypatch.setattr(margins, "margins", lambda *_: {k: torch.zeros(S) for k in ("picks", "experts")})
    with pytest.raises(RuntimeError, match="no prompt of 90 tokens"):
        margins.steady_prompt(experts, S)
