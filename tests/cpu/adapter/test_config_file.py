"""config.json as it was written: what SGLang's config classes fill in, drop or read otherwise is refused by key."""

import json
import types

import pytest

pytest.importorskip("sglang")

from sglang.srt.utils.hf_transformers_utils import get_config

from sglang_dsa_plugin.adapter import config_file
from sglang_dsa_plugin.config import DsaConfig
from sglang_dsa_plugin.config_keys import UnsupportedModel
from tests.cpu.test_config import GLM5, GLM52, GLM52_FULL, LONGCAT, V32

PUBLISHED = {
    "v32": {**V32, "model_type": "deepseek_v32"},
    "glm5": {**GLM5, "model_type": "glm_moe_dsa"},
    "glm52": {**{k: v for k, v in GLM52.items() if v is not None}, "model_type": "glm_moe_dsa"},
    "longcat": {
        **{k: v for k, v in LONGCAT.items() if v is not None and k != "num_nextn_predict_layers"},
        "model_type": "longcat_flash",
    },
}
NEEDED = (
    *("index_n_heads", "index_head_dim", "q_lora_rank", "kv_lora_rank", "qk_rope_head_dim"),
    *("qk_nope_head_dim", "v_head_dim", "max_position_embeddings", "num_attention_heads", "hidden_size"),
)


@pytest.fixture
def served(tmp_path):
    """served(config, overrides={}) -> DsaConfig of a server with that config.json, or an UnsupportedModel."""

    def read(config, overrides=None):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        text = json.dumps(overrides or {})
        args = types.SimpleNamespace(
            model_path=str(folder), revision=None, decrypted_config_file=None, json_model_override_args=text
        )
        made = get_config(str(folder), trust_remote_code=False, model_override_args=json.loads(text))
        return config_file.read_checked(args, made)

    return read


@pytest.fixture(autouse=True)
def plain_arguments(monkeypatch):
    monkeypatch.setattr(config_file, "resolving_view", lambda args: args)


def without(config, *names):
    return {key: value for key, value in config.items() if key not in names}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_are_read_as_they_are_written(served, name):
    config = served(PUBLISHED[name])
    plain = DsaConfig.from_hf(PUBLISHED[name])
    assert config.indexing_layers() == plain.indexing_layers()
    for field in ("rope_theta", "yarn", "index_topk", "num_layers", "max_position_embeddings"):
        assert getattr(config, field) == getattr(plain, field), field
    if name == "glm52":
        assert config.indexing_layers() == GLM52_FULL


# Without index_topk SGLang serves V3.2 and LongCat as models without DSA: such a config does not come here.
LOST = [(name, key) for name in ("v32", "glm5", "longcat") for key in NEEDED] + [("glm5", "index_topk")]


@pytest.mark.parametrize(("name", "key"), LOST)
def test_a_key_that_was_lost_is_refused_by_name(served, name, key):
    with pytest.raises(UnsupportedModel, match=rf"{key} is missing from .*config.json"):
        served(without(PUBLISHED[name], key))


@pytest.mark.parametrize("name", PUBLISHED)
def test_theta_is_never_a_default(served, name):
    with pytest.raises(UnsupportedModel, match="rope_theta is missing"):
        served(without(PUBLISHED[name], "rope_theta", "rope_parameters"))
    nested = {**without(PUBLISHED[name], "rope_theta", "rope_scaling"), "rope_parameters": {"rope_type": "default"}}
    with pytest.raises(UnsupportedModel, match="rope_theta is missing"):
        served(nested)


def test_a_flat_theta_beside_another_nested_one_is_refused(served):
    for name in ("glm5", "glm52"):
        with pytest.raises(UnsupportedModel, match=r"rope_theta=10000.0 contradicts rope_parameters"):
            served({**PUBLISHED[name], "rope_theta": 10000})
        theta = PUBLISHED[name]["rope_parameters"]["rope_theta"]
        assert served({**PUBLISHED[name], "rope_theta": theta}).rope_theta == theta


def test_what_the_config_class_drops_is_refused(served):
    nested = {**without(PUBLISHED["longcat"], "rope_theta"), "rope_parameters": GLM5["rope_parameters"]}
    with pytest.raises(UnsupportedModel, match=r"rope_theta: config.json says 1000000.0, .* makes 10000000.0 of it"):
        served(nested)


def test_an_override_gives_what_the_file_lacks(served):
    for key, value in (("max_position_embeddings", 4096), ("index_n_heads", 32), ("q_lora_rank", 1536)):
        assert getattr(served(without(PUBLISHED["v32"], key), {key: value}), key) == value
    lost = without(PUBLISHED["glm5"], "rope_parameters")
    theta = {"rope_theta": 8e6, "rope_type": "default"}
    assert served(lost, {"rope_parameters": theta}).rope_theta == 8e6
    # Of the two forms one is named and both are meant.
    assert served(PUBLISHED["glm5"], {"rope_scaling": {"rope_theta": 8e6}}).rope_theta == 8e6
    scaled = served(PUBLISHED["glm5"], {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}})
    assert (scaled.rope_theta, scaled.yarn.factor) == (1e6, 4.0)
    with pytest.raises(UnsupportedModel, match=r"rope_scaling: config.json says Yarn.* makes None of it"):
        served(PUBLISHED["glm5"], {"rope_scaling": {"type": "yarn", "factor": 4.0}})
    assert served(PUBLISHED["v32"], {"rope_scaling": {"factor": 20}}).yarn.factor == 20


def test_a_scaling_that_is_plain_rope_for_longcat(served):
    """The remedy that arguments.py names."""
    scaling = {"rope_type": "yarn", "factor": 1.0, "original_max_position_embeddings": 163840}
    config = served(PUBLISHED["longcat"], {"rope_scaling": scaling})
    assert (config.rope_theta, config.yarn.factor) == (5e6, 1.0)


def test_nothing_is_asked_of_a_network(monkeypatch, caplog):
    asked = []

    def get_config_dict(path, **options):
        asked.append((path, options))
        raise OSError("not there")

    monkeypatch.setattr(config_file.PretrainedConfig, "get_config_dict", get_config_dict)
    args = types.SimpleNamespace(
        model_path="somebody/model", revision="v1", decrypted_config_file=None, json_model_override_args="{}"
    )
    config = types.SimpleNamespace(**PUBLISHED["glm5"])
    assert config_file.read_checked(args, config) == DsaConfig.from_hf(PUBLISHED["glm5"])
    assert asked == [("somebody/model", {"revision": "v1", "local_files_only": True})]
    assert "somebody/model was not found again, so what it lacks is not checked" in caplog.text
