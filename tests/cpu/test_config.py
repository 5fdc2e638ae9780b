import copy
import inspect
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest

from sglang_dsa_plugin.config import NOT_SERVED, SERVED, DsaConfig, is_dsa_config
from sglang_dsa_plugin.config_keys import UnsupportedModel

V32 = {
    "architectures": ["DeepseekV32ForCausalLM"],
    "hidden_size": 7168,
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "num_hidden_layers": 61,
    "num_nextn_predict_layers": 1,
    "max_position_embeddings": 163840,
    "rms_norm_eps": 1e-6,
    "index_topk": 2048,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
    },
}
GLM5 = {
    **{k: v for k, v in V32.items() if not k.startswith("rope")},
    "architectures": ["GlmMoeDsaForCausalLM"],
    "hidden_size": 6144,
    "num_attention_heads": 64,
    "q_lora_rank": 2048,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "num_hidden_layers": 78,
    "max_position_embeddings": 202752,
    "rms_norm_eps": 1e-5,
    "index_n_heads": 32,
    "indexer_rope_interleave": True,
    "rope_interleave": True,
    "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
}
GLM52 = {
    **GLM5,
    "rope_parameters": {"rope_theta": 8000000, "rope_type": "default"},
    "index_topk_freq": 4,
    "index_topk_pattern": None,
    "index_skip_topk_offset": 3,
    "index_share_for_mtp_iteration": True,
}
LONGCAT = {
    **V32,
    "architectures": ["LongcatFlashForCausalLM"],
    "num_attention_heads": 32,
    "num_hidden_layers": None,
    "num_layers": 14,
    "index_n_heads": 16,
    "index_k_norm_type": "rms",
    "index_init_tokens": 16,
    "index_local_tokens": 1024,
    "cli_factor": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000000.0,
    "rope_scaling": None,
}
YARN = V32["rope_scaling"]
GLM52_FULL = (0, 1, *range(2, 75, 4))


def read(base, **changes):
    return DsaConfig.from_hf({**base, **changes})


def refusal(base, **changes):
    with pytest.raises(UnsupportedModel) as error:
        read(base, **changes)
    return str(error.value)


def test_v32():
    c = read(V32)
    assert (c.num_layers, c.num_heads, c.hidden_size, c.q_lora_rank, c.v_head_dim) == (61, 128, 7168, 1536, 128)
    assert (c.index_topk, c.index_n_heads) == (2048, 64)
    assert (c.index_rope_layout, c.rope_layout, c.rope_theta) == ("half", "interleaved", 10000.0)
    assert (c.yarn.factor, c.yarn.original_max_position, c.yarn.mscale_all_dim) == (40.0, 4096, 1.0)
    assert c.indexing_layers() == tuple(range(61)) and c.key_norm == "layer"
    assert not c.draft_shares_picks and not c.is_nextn
    hash(c)


def test_glm5_interleaves_the_indexer():
    c = read(GLM5)
    assert (c.index_rope_layout, c.rope_layout, c.rope_theta, c.yarn) == ("interleaved", "interleaved", 1e6, None)
    assert (c.qk_nope_head_dim, c.v_head_dim, c.index_n_heads) == (192, 256, 32)
    assert c.indexing_layers() == tuple(range(78))


def test_glm52_nested_theta_and_21_full_layers():
    c = read(GLM52)
    assert c.rope_theta == 8e6
    assert c.indexing_layers() == GLM52_FULL
    assert len(GLM52_FULL) == 21
    assert c.draft_shares_picks
    types = ["full" if i in GLM52_FULL else "shared" for i in range(78)]
    assert read(GLM52, indexer_types=types).indexing_layers() == GLM52_FULL
    assert read(GLM52, indexer_types=[*types, "full"]).indexing_layers() == GLM52_FULL


def test_longcat():
    c = read(LONGCAT)
    assert (c.num_layers, c.index_n_heads, c.key_norm) == (28, 16, "rms")
    assert (c.index_init_tokens, c.index_local_tokens) == (16, 1024)
    assert c.indexing_layers() == tuple(range(0, 28, 2))


@pytest.mark.parametrize(
    ("changes", "full"),
    [
        ({}, "FFFFFFFFF"),
        ({"index_topk_freq": None, "index_topk_pattern": None, "indexer_types": None}, "FFFFFFFFF"),
        ({"index_topk_freq": 1, "index_skip_topk_offset": 3}, "FFFFFFFFF"),
        ({"index_topk_freq": 4}, "FFSSSFSSS"),
        ({"index_topk_freq": 4, "index_skip_topk_offset": 3}, "FFFSSSFSS"),
        ({"index_topk_freq": 3, "index_skip_topk_offset": 1}, "FSSFSSFSS"),
        ({"index_topk_pattern": "FSFSSFFSS"}, "FSFSSFFSS"),
        ({"index_topk_pattern": "FSFSSFFSSF"}, "FSFSSFFSS"),
        ({"index_topk_pattern": "FSSSSSSSS", "index_topk_freq": 1}, "FSSSSSSSS"),
        ({"cli_factor": 3}, "FSSFSSFSS"),
        ({"indexer_types": ["full", "shared", "full"] * 3}, "FSFFSFFSF"),
    ],
)
def test_schedule_equals_sglang(changes, full):
    from sglang.srt.configs.model_config import dsa_layer_skips_topk

    config = {**V32, "num_hidden_layers": 9, **changes}
    ours = DsaConfig.from_hf(config)
    assert "".join("FS"[ours.layer_reuses_picks(i)] for i in range(9)) == full
    theirs = SimpleNamespace(**config)
    # Past the end too: SGLang asks for layer n when it builds layer n - 1.
    for i in range(12):
        assert ours.layer_reuses_picks(i) == dsa_layer_skips_topk(theirs, i)


def test_architectures_are_exactly_sglangs():
    from sglang.srt.configs.model_config import is_deepseek_dsa

    assert set(re.findall(r'"(\w+)"', inspect.getsource(is_deepseek_dsa))) - {"index_topk"} == {*SERVED, *NOT_SERVED}
    for name in (*SERVED, *NOT_SERVED):
        config = {"architectures": [name], "index_topk": 64}
        assert is_deepseek_dsa(config), name
        assert is_dsa_config(config)
    for config in ({"architectures": ["DeepseekV3ForCausalLM"]}, {"architectures": ["LlamaForCausalLM"]}, {}):
        assert not is_dsa_config(config)
        assert not is_deepseek_dsa(config)


@pytest.mark.parametrize("name", NOT_SERVED)
def test_not_served_architecture_is_named(name):
    assert name in refusal(V32, architectures=[name])


def test_other_architecture_is_refused():
    assert "LlamaForCausalLM" in refusal(V32, architectures=["LlamaForCausalLM"])
    assert "None" in refusal(V32, architectures=None)


def test_draft_always_has_its_own_indexer():
    c = read(GLM52, architectures=["GlmMoeDsaForCausalLMNextN"])
    assert (c.is_nextn, c.num_layers, c.indexing_layers()) == (True, 1, (0,))
    c = read(LONGCAT, architectures=["LongcatFlashForCausalLMNextN"], num_hidden_layers=1)
    assert (c.num_layers, c.indexing_layers()) == (1, (0,))


def test_wrapper_and_object_forms():
    inner = {**V32, "architectures": None}
    assert read({"architectures": ["DeepseekV32ForCausalLM"], "text_config": inner}).index_topk == 2048
    wrapped = SimpleNamespace(architectures=["SomeVisionWrapper"], text_config=SimpleNamespace(**V32))
    assert DsaConfig.from_hf(wrapped) == DsaConfig.from_hf(V32)
    assert is_dsa_config(wrapped)
    outer = {"architectures": ["PixtralForConditionalGeneration"], "text_config": inner}
    assert "PixtralForConditionalGeneration" in refusal(outer)


def test_sglang_and_hf_config_classes_read_the_same():
    from transformers import DeepseekV32Config, GlmMoeDsaConfig

    ignore = ("architectures", "num_nextn_predict_layers")
    for cls, base in ((DeepseekV32Config, V32), (GlmMoeDsaConfig, GLM5), (GlmMoeDsaConfig, GLM52)):
        # A copy: the class puts theta into the mapping of the scaling.
        hf = cls(**copy.deepcopy({k: v for k, v in base.items() if k not in ignore}))
        hf.architectures, hf.num_nextn_predict_layers = base["architectures"], 1
        ours, plain = DsaConfig.from_hf(hf), DsaConfig.from_hf(base)
        assert ours.indexing_layers() == plain.indexing_layers()
        for field in ("rope_theta", "yarn", "index_rope_layout", "rope_layout", "key_norm", "num_layers", "index_topk"):
            assert getattr(ours, field) == getattr(plain, field), field


def test_glm_without_rope_key_is_refused_with_the_override():
    base = {k: v for k, v in GLM5.items() if k != "indexer_rope_interleave"}
    message = refusal(base)
    assert "indexer_rope_interleave" in message and '{"indexer_rope_interleave": true}' in message
    assert read(base, indexer_rope_interleave=False).index_rope_layout == "half"
    assert read(V32, indexer_rope_interleave=True).index_rope_layout == "interleaved"
    assert read(V32, rope_interleave=False).rope_layout == "half"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"index_topk": None}, ["no index_topk", "another attention backend"]),
        ({"index_topk": 0}, ["index_topk=0", "positive integer"]),
        ({"index_topk": -1}, ["index_topk=-1"]),
        ({"index_topk": True}, ["index_topk=True"]),
        ({"index_topk": "2048"}, ["index_topk='2048'"]),
        (
            {"index_topk": 8193},
            ["index_topk=8193 is more than 8192", "--json-model-override-args '{\"index_topk\": 8192}'"],
        ),
        ({"index_topk": 100_000}, ["index_topk=100000 is more than 8192", "contexts of up to 8192 tokens"]),
        ({"index_kpool": 4}, ["index_kpool=4", "not served yet"]),
        ({"index_head_dim": 64}, ["index_head_dim=64", "128"]),
        ({"index_head_dim": None}, ["index_head_dim is missing"]),
        ({"kv_lora_rank": 256}, ["kv_lora_rank=256", "512"]),
        ({"qk_rope_head_dim": 32}, ["qk_rope_head_dim=32", "64"]),
        ({"index_n_heads": None}, ["index_n_heads is missing"]),
        ({"q_lora_rank": None}, ["q_lora_rank is missing"]),
        ({"index_k_norm_type": "batch"}, ["index_k_norm_type='batch'", "'layer' or 'rms'"]),
        ({"index_init_tokens": 1500, "index_local_tokens": 600}, ["index_init_tokens=1500", "index_topk=2048"]),
        ({"index_init_tokens": -1}, ["index_init_tokens=-1"]),
        ({"rope_theta": None, "rope_scaling": None}, ["rope_theta is missing"]),
        ({"rope_theta": None, "rope_parameters": {"rope_type": "default"}, "rope_scaling": None}, ["rope_theta"]),
        ({"rope_parameters": {**YARN, "rope_theta": 8e6}}, ["10000", "8000000.0"]),
        ({"rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}}, ["rope_scaling", "contradicts"]),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, ["'linear'", "yarn"]),
        ({"rope_scaling": {"factor": 2}}, ["None"]),
        ({"rope_scaling": {"type": "yarn"}}, ["no factor"]),
        ({"rope_scaling": {"type": "yarn", "factor": 2, "attn_factor": 2}}, ["attn_factor=2"]),
        ({"max_position_embeddings": None}, ["max_position_embeddings is missing"]),
        ({"indexer_rope_interleave": "yes"}, ["indexer_rope_interleave='yes'"]),
        ({"learnable_sink": True}, ["learnable_sink", "sinks"]),
        ({"indexer_types": ["full"] * 60}, ["indexer_types has 60 entries", "61"]),
        ({"indexer_types": ["full"] * 63}, ["indexer_types has 63 entries", "61"]),
        ({"indexer_types": ["full", "reuse"] + ["full"] * 59}, ["indexer_types", "'reuse'"]),
        ({"indexer_types": ["shared"] + ["full"] * 60}, ["indexer_types", "layer 0"]),
        ({"index_topk_pattern": "S" + "F" * 60}, ["index_topk_pattern", "layer 0"]),
        ({"index_topk_pattern": "X" + "F" * 60}, ["index_topk_pattern", "'X'"]),
        ({"index_topk_pattern": "F" * 60}, ["index_topk_pattern has 60 entries"]),
        ({"indexer_types": ["full"] * 61, "index_topk_pattern": "FS" + "F" * 59}, ["contradict", "index_topk_pattern"]),
        ({"indexer_types": ["full"] * 61, "index_topk_freq": 4}, ["contradict", "index_topk_freq", "null"]),
        ({"index_topk_freq": 0}, ["index_topk_freq=0"]),
        ({"index_topk_freq": 4, "index_skip_topk_offset": 0}, ["index_skip_topk_offset=0"]),
        ({"cli_factor": 0}, ["cli_factor=0"]),
    ],
)
def test_refusals_name_key_value_and_remedy(changes, words):
    message = refusal(V32, **changes)
    for word in words:
        assert word in message


def test_the_most_picks_that_are_served_are_read():
    assert read(V32, index_topk=8192).index_topk == 8192


NOT_NUMBERS = ("x", "40", None, True, float("nan"), float("inf"), -1, [40])
ABOVE_ZERO = ("factor", "beta_fast", "beta_slow", "original_max_position_embeddings", "extrapolation_factor")


@pytest.mark.parametrize("form", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("key", [*ABOVE_ZERO, "attn_factor", "mscale", "mscale_all_dim"])
def test_rope_factors_are_numbers(form, key):
    other = {"rope_scaling": None, "rope_parameters": None}
    for value in (*NOT_NUMBERS, *([0] if key in ABOVE_ZERO else [])):
        message = refusal(V32, **(other | {form: {**YARN, key: value}}))
        assert key in message and form in message
        assert repr(value) in message or (key, value) == ("factor", None)
    without = {name: value for name, value in YARN.items() if name != key}
    if key != "factor":
        assert read(V32, **(other | {form: without})).yarn.factor == 40


@pytest.mark.parametrize("value", [*(v for v in NOT_NUMBERS if v is not None), 0])
def test_theta_is_a_positive_number(value):
    assert f"rope_theta={value!r}" in refusal(V32, rope_theta=value)
    nested = refusal(GLM5, rope_parameters={"rope_type": "default", "rope_theta": value})
    assert f"rope_parameters['rope_theta']={value!r}" in nested


@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("value", [[1], "yarn", 4, True])
def test_rope_forms_are_objects(key, value):
    assert f"{key}={value!r} must be an object" in refusal(V32, **{key: value})


@pytest.mark.parametrize("kinds", [("yarn", "default"), ("default", "yarn"), ("yarn", "linear")])
def test_two_words_for_the_type_of_rope_must_agree(kinds):
    message = refusal(V32, rope_scaling={**YARN, "type": kinds[0], "rope_type": kinds[1]})
    assert f"['type']={kinds[0]!r} contradicts" in message and f"['rope_type']={kinds[1]!r}" in message
    assert read(V32, rope_scaling={**YARN, "rope_type": "deepseek_yarn"}) == read(V32)


def test_two_forms_of_yarn_must_agree():
    same = {**YARN, "rope_theta": 10000, "rope_type": "yarn"}
    assert read(V32, rope_parameters=same) == read(V32)
    for key in ("factor", "mscale", "beta_slow", "original_max_position_embeddings"):
        assert "contradicts rope_parameters" in refusal(V32, rope_parameters={**same, key: 3})


@pytest.mark.parametrize("key", ["index_head_dim", "kv_lora_rank", "qk_rope_head_dim"])
def test_fixed_sizes_are_integers(key):
    for value in (float(V32[key]), str(V32[key])):
        assert f"{key}={value!r} must be a positive integer" in refusal(V32, **{key: value})


def test_any_positive_topk_is_served():
    for k in (1, 7, 64, 2051):
        assert read(V32, index_topk=k).index_topk == k


def test_frequency_override_on_v32():
    assert read(V32, index_topk_freq=4).indexing_layers() == (0, *range(1, 61, 4))


def test_imports_neither_torch_nor_sglang():
    code = "import sys, sglang_dsa_plugin.config; print([m for m in ('torch', 'sglang') if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
