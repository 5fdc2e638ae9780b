"""The whole-model oracle is Hugging Face; here it is held against one layer in float64 written from the formulas."""

import json

import pytest
import torch

from sglang_dsa_plugin.tools.make_model import make_model
from tests.oracle import hf, layer

S, K = 150, 24
CASES = [
    ("deepseek_v32", "default", "half"),
    ("deepseek_v32", "yarn", "half"),
    ("glm_moe_dsa", "default", "interleaved"),
    ("glm_moe_dsa", "yarn", "interleaved"),
]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SGLANG_DSA_ORACLE_CACHE", str(tmp_path / "oracle"))


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    made = {}

    def get(arch, rope="default"):
        if (arch, rope) not in made:
            out = tmp_path_factory.mktemp("oracle") / "model"
            sizes = {"layers": 2, "hidden": 128, "heads": 4, "q_lora_rank": 96, "index_topk": K, "index_heads": 16}
            made[arch, rope] = make_model(out, arch, **sizes, rope=rope, dtype="float32").path
        return made[arch, rope]

    return get


def reference_layer(path, index_rope, model, number=0):
    config = json.loads((path / "config.json").read_text())
    return layer.Layer(dict(model.model.layers[number].self_attn.named_parameters()), config, index_rope)


@torch.no_grad()
def run_layer(model, x, number=0):
    """Hugging Face's attention on x [S, hidden]: output [S, hidden] and the positions each row attends to."""
    module = model.model.layers[number].self_attn
    rows = len(x)
    mask = torch.full((rows, rows), torch.finfo(x.dtype).min, dtype=x.dtype).triu(1)[None, None]
    rotary = model.model.rotary_emb(x[None], torch.arange(rows)[None])
    out, weights = module(x[None], position_embeddings=rotary, attention_mask=mask)[:2]
    return out[0], weights[0]


def inputs(hidden=128, seed=5):
    return torch.randn(S, hidden, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def attended(weights):
    """Positions that any head gave weight to."""
    return [(weights[:, t] > 0).any(0).nonzero().flatten() for t in range(weights.shape[1])]


@pytest.mark.parametrize(("arch", "rope", "index_rope"), CASES)
def test_layer_equals_float64(directory, arch, rope, index_rope):
    path = directory(arch, rope)
    model = hf.load(path, torch.float64)
    ours = reference_layer(path, index_rope, model)
    x = inputs()
    with torch.no_grad():
        scores = layer.index_scores(ours, x)
        picks = layer.best(scores, K)
        expected = layer.attention(ours, x, picks)
    out, weights = run_layer(model, x)
    gap = scores.sort(-1, descending=True).values[K:, K - 1 : K + 1].diff().abs().min()
    assert gap > 1e-5, "a near tie at the k-th pick: choose another seed"
    assert all(torch.equal(a, b) for a, b in zip(attended(weights), picks))
    # Hugging Face takes its softmax and index scores in float32.
    assert (out - expected).abs().max() < 2e-6 * expected.abs().max()


@pytest.mark.parametrize(("arch", "rope", "index_rope"), CASES)
def test_layer_differs_in_the_other_rope(directory, arch, rope, index_rope):
    path = directory(arch, rope)
    model = hf.load(path, torch.float64)
    other = {"half": "interleaved", "interleaved": "half"}[index_rope]
    x = inputs()
    with torch.no_grad():
        wrong = layer.best(layer.index_scores(reference_layer(path, other, model), x), K)
    _, weights = run_layer(model, x)
    same = [torch.equal(a, b) for a, b in zip(attended(weights), wrong)]
    assert all(same[:K])
    assert not any(same[100:])
    # The flipped oracle is that other layout, and the flip is nothing else.
    flipped = attended(run_layer(hf.load(path, torch.float64, other_rope=True), x)[1])
    assert all(torch.equal(a, b) for a, b in zip(flipped, wrong))


@pytest.mark.parametrize("arch", ["deepseek_v32", "glm_moe_dsa"])
def test_rotating_both_sides_changes_no_score(directory, arch):
    path = directory(arch)
    ours = reference_layer(path, "half", hf.load(path, torch.float64))
    hadamard = torch.ones(1, 1, dtype=torch.float64)
    for _ in range(7):
        hadamard = torch.cat([torch.cat([hadamard, hadamard], 1), torch.cat([hadamard, -hadamard], 1)]) / 2**0.5
    x = inputs()
    with torch.no_grad():
        plain, rotated = layer.index_scores(ours, x), layer.index_scores(ours, x, hadamard)
    past = torch.ones(S, S, dtype=torch.bool).tril()
    assert (plain - rotated)[past].abs().max() < 1e-12
    assert plain[past].abs().max() > 0.1


def tokens(count, seed=1):
    return torch.randint(0, 256, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("arch", ["deepseek_v32", "glm_moe_dsa"])
def test_index_keys_survive_steps_of_any_size(directory, arch):
    ids = tokens(130)
    whole = hf.hf_logprobs(directory(arch), ids, chunk=1000)
    for chunk in (4, 37, 128):
        assert (hf.hf_logprobs(directory(arch), ids, chunk=chunk) - whole).abs().max() < 5e-5


@pytest.mark.parametrize("arch", ["deepseek_v32", "glm_moe_dsa"])
def test_variants_agree_up_to_k_and_differ_beyond(directory, arch):
    ids = tokens(200)
    base = hf.hf_logprobs(directory(arch), ids)
    for variant in ({"dense": True}, {"other_rope": True}, {"index_topk": K + 1}):
        difference = (hf.hf_logprobs(directory(arch), ids, **variant) - base).abs().amax(-1)
        assert difference[:K].max() < 5e-5
        assert difference[100:].min() > 1e-2
    dense = hf.hf_logprobs(directory(arch), ids, dense=True)
    assert torch.equal(hf.hf_logprobs(directory(arch), ids, index_topk=200), dense)
    assert torch.equal(hf.hf_logprobs(directory(arch), ids, cache=False), base)


def test_rows_and_cache(directory, monkeypatch):
    path, ids = directory("deepseek_v32"), tokens(40)
    base = hf.hf_logprobs(path, ids)
    assert base.shape == (40, 320) and base.dtype == torch.float32
    assert (base.exp().sum(-1) - 1).abs().max() < 1e-5
    monkeypatch.setattr(hf, "_forward", lambda *_: pytest.fail("not read from disk"))
    assert torch.equal(hf.hf_logprobs(path, ids, positions=[3, 39, 0]), base[[3, 39, 0]])
    assert torch.equal(hf.hf_logprobs(path, ids, start=35), base[35:])
    with pytest.raises(pytest.fail.Exception):
        hf.hf_logprobs(path, [*ids[:-1], ids[-1] ^ 1])
    with pytest.raises(pytest.fail.Exception):
        hf.hf_logprobs(path, ids, index_topk=7)


def test_a_rewritten_model_is_not_served_from_the_cache(tmp_path):
    sizes = {"layers": 1, "hidden": 64, "heads": 2, "index_heads": 2, "dtype": "float32"}
    one, two = (make_model(tmp_path / str(seed), **sizes, seed=seed).path for seed in (0, 1))
    ids = tokens(9)
    first, second = hf.hf_logprobs(one, ids), hf.hf_logprobs(two, ids)
    assert (first - second).abs().max() > 0.1
    (one / "model.safetensors").write_bytes((two / "model.safetensors").read_bytes())
    assert torch.equal(hf.hf_logprobs(one, ids), second)


def test_bad_arguments(tmp_path):
    sizes = {"layers": 1, "hidden": 128, "heads": 2, "index_heads": 2}
    quantised = make_model(tmp_path / "q", **sizes, quant="fp8-block", twin=tmp_path / "t")
    with pytest.raises(ValueError, match="twin"):
        hf.hf_logprobs(quantised.path, [1, 2])
    assert hf.hf_logprobs(tmp_path / "t", [1, 2]).shape == (2, 320)
    with pytest.raises(ValueError, match="empty"):
        hf.hf_logprobs(tmp_path / "t", [])
    with pytest.raises(ValueError, match="not both"):
        hf.hf_logprobs(tmp_path / "t", [1, 2, 3], positions=[0], start=1)
