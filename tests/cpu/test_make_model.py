import json

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from sglang_dsa_plugin.config import DsaConfig
from sglang_dsa_plugin.tools import fp8_checkpoint
from sglang_dsa_plugin.tools.make_model import ARCHITECTURES, make_model
from sglang_dsa_plugin.tools.tokenizer import byte_tokenizer

SMALL = {"layers": 2, "hidden": 128, "heads": 4, "q_lora_rank": 128, "index_topk": 24, "vocab": 270, "experts": 4}
TINY = {**SMALL, "index_heads": 4, "hidden": 64, "moe_intermediate": 32, "intermediate": 64, "experts": 2}
INDEX_HEADS = {"deepseek_v32": 64, "glm_moe_dsa": 32}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {arch: make_model(root / arch, arch, **SMALL, dtype="float32") for arch in ARCHITECTURES}


def load(directory, **changes):
    from transformers import DeepseekV32ForCausalLM, GlmMoeDsaForCausalLM

    kind = json.loads((directory / "config.json").read_text())["model_type"]
    cls = {"deepseek_v32": DeepseekV32ForCausalLM, "glm_moe_dsa": GlmMoeDsaForCausalLM}[kind]
    return cls.from_pretrained(directory, attn_implementation="eager", dtype=torch.float32, **changes).eval()


@torch.no_grad()
def logprobs(directory, tokens, **changes):
    return load(directory, **changes)(input_ids=tokens).logits[0].log_softmax(-1)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_logits_spread_and_sparsity_matters(models, arch):
    tokens = torch.randint(0, 256, (1, 201), generator=torch.Generator().manual_seed(3))
    sparse = logprobs(models[arch].path, tokens)
    dense = logprobs(models[arch].path, tokens, index_topk=201)
    assert sparse.isfinite().all()
    assert sparse.std(-1).min() > 0.5
    difference = (sparse - dense).abs().amax(-1)
    assert difference[:24].max() < 1e-4
    assert difference[100:].min() > 1e-2


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_config_reads_as_dsa(models, arch):
    config = DsaConfig.from_hf(models[arch].config)
    assert (config.index_topk, config.num_heads, config.index_n_heads) == (24, 4, INDEX_HEADS[arch])
    assert config.index_rope_layout == ("half" if "v32" in arch else "interleaved")
    assert models[arch].config["eos_token_id"] == 257


def test_sglang_reads_the_same_config(models, tmp_path):
    from sglang.srt.utils.hf_transformers import get_config

    yarn = make_model(tmp_path / "yarn", rope="yarn", **TINY)
    for made in (*models.values(), yarn):
        theirs = get_config(str(made.path), trust_remote_code=False)
        assert DsaConfig.from_hf(theirs) == DsaConfig.from_hf(made.config)
        assert theirs.moe_layer_freq == 1 and theirs.scoring_func == "sigmoid"


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_values_survive_bfloat16_and_do_not_depend_on_dtype(arch, tmp_path):
    wide = load_file(make_model(tmp_path / "a", arch, **TINY, dtype="float32").path / "model.safetensors")
    narrow = load_file(make_model(tmp_path / "b", arch, **TINY, dtype="bfloat16").path / "model.safetensors")
    assert set(wide) == set(narrow)
    for name, value in wide.items():
        assert value.dtype == torch.float32
        assert torch.equal(value, narrow[name].float()), name
        assert torch.equal(value, value.bfloat16().float()), name
    other = load_file(make_model(tmp_path / "c", arch, **TINY, seed=1).path / "model.safetensors")
    assert all(not torch.equal(narrow[name], other[name]) for name in narrow)


def test_glm_shared_layers_have_no_indexer_weights(tmp_path):
    made = make_model(tmp_path / "m", "glm_moe_dsa", **{**TINY, "layers": 3})
    assert made.config["indexer_types"] == ["full", "shared", "full"]
    names = load_file(made.path / "model.safetensors")
    held = {int(n.split(".")[2]) for n in names if ".indexer." in n}
    assert held == {0, 2} == set(DsaConfig.from_hf(made.config).indexing_layers())
    made = make_model(tmp_path / "n", "glm_moe_dsa", **{**TINY, "layers": 4}, schedule="FFSS")
    assert DsaConfig.from_hf(made.config).indexing_layers() == (0, 1)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_fp8_checkpoint_equals_its_twin(tmp_path, dtype):
    sizes = {**TINY, "hidden": 192, "layers": 2, "moe_intermediate": 96}
    made = make_model(tmp_path / "q", "glm_moe_dsa", **sizes, dtype=dtype, quant="fp8-block", twin=tmp_path / "t")
    original = load_file(make_model(tmp_path / "o", "glm_moe_dsa", **sizes, dtype=dtype).path / "model.safetensors")
    packed, twin = load_file(made.path / "model.safetensors"), load_file(tmp_path / "t" / "model.safetensors")
    assert set(twin) == set(original)
    assert set(packed) == set(original) | {f"{name}_scale_inv" for name in made.quantized}
    for name in original:
        if name not in made.quantized:
            assert torch.equal(packed[name], original[name]) and torch.equal(twin[name], original[name])
            continue
        weight, scale = packed[name], packed[f"{name}_scale_inv"]
        assert (weight.dtype, scale.dtype, twin[name].dtype) == (
            torch.float8_e4m3fn,
            torch.float32,
            original[name].dtype,
        )
        rows, columns = weight.shape
        assert scale.shape == (-(-rows // 128), -(-columns // 128))
        assert torch.equal(scale.log2(), scale.log2().round())
        for i in (0, rows - 1):
            for j in (0, columns - 1):
                assert twin[name][i, j].double() == weight[i, j].double() * scale[i // 128, j // 128].double()
        error = (twin[name].float() - original[name].float()).abs()
        assert error.max() <= original[name].float().abs().max() / 16
        assert error.max() > 0
    assert made.config["quantization_config"]["weight_block_size"] == [128, 128]
    assert "quantization_config" not in json.loads((tmp_path / "t" / "config.json").read_text())
    load(tmp_path / "t")


def test_fp8_quantises_what_deepseek_does(tmp_path):
    made = make_model(tmp_path / "q", **TINY, quant="fp8-block")
    kinds = {name.removesuffix(".weight").split(".")[-1] for name in made.quantized}
    attention = {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "wq_b", "wk"}
    assert kinds == attention | {"gate_proj", "up_proj", "down_proj"}
    left = {n for n in load_file(made.path / "model.safetensors") if not n.endswith("_inv")} - set(made.quantized)
    wide = {
        name for name in left if name.endswith("proj.weight") or "embed" in name or "head" in name or "gate" in name
    }
    assert {name.split("layers.")[-1].split(".", 1)[-1] for name in wide} == {
        "self_attn.indexer.weights_proj.weight",
        "mlp.gate.weight",
        "mlp.gate.e_score_correction_bias",
        "weight",
        "embed_tokens.weight",
    }


@pytest.mark.parametrize(("arch", "echo"), [("deepseek_v32", 0.1), ("deepseek_v32", 2.0), ("glm_moe_dsa", 2.0)])
def test_draft_layer_guesses_as_often_as_asked(tmp_path, arch, echo):
    made = make_model(tmp_path / "m", arch, **TINY, dtype="float32", nextn=1, echo=echo)
    config, weights = DsaConfig.from_hf(made.config), load_file(made.path / "model.safetensors")
    assert (config.num_layers, made.config["num_nextn_predict_layers"]) == (2, 1)
    assert len(made.config["mlp_layer_types"]) == len(made.config["layer_types"]) == 2
    assert made.parameters == sum(w.numel() for name, w in weights.items() if "correction_bias" not in name)
    draft = {name.removeprefix("model.layers.2.") for name in weights if name.startswith("model.layers.2.")}
    assert draft > {"eh_proj.weight", "enorm.weight", "hnorm.weight", "shared_head.norm.weight"}
    assert {"self_attn.indexer.wq_b.weight", "mlp.experts.1.up_proj.weight", "input_layernorm.weight"} < draft
    tokens = torch.randint(0, 256, (1, 80), generator=torch.Generator().manual_seed(3))
    chosen = logprobs(made.path, tokens).argmax(-1)
    # The draft without its attention and MLP, which add little.
    h = weights["model.embed_tokens.weight"][tokens[0]]
    h = (weights["model.layers.2.eh_proj.weight"] @ torch.cat([h, torch.zeros_like(h)], 1).T).T
    h = h / h.square().mean(-1, keepdim=True).sqrt() * weights["model.layers.2.shared_head.norm.weight"]
    agreed = ((h @ weights["lm_head.weight"].T).argmax(-1) == chosen).float().mean()
    assert agreed > 0.9 if echo > 1 else agreed < 0.3


def test_fp8_leaves_the_drafts_projection(tmp_path):
    made = make_model(tmp_path / "q", "glm_moe_dsa", **TINY, nextn=1, quant="fp8-block", twin=tmp_path / "t")
    assert "model.layers.2.self_attn.indexer.wk.weight" in made.quantized
    assert not any("eh_proj" in name for name in made.quantized)
    assert set(load_file(tmp_path / "t" / "model.safetensors")) > {"model.layers.2.eh_proj.weight"}
    assert made.config["num_nextn_predict_layers"] == 1


@pytest.mark.parametrize(("n", "k"), [(1, 1), (128, 128), (129, 255), (300, 64)])
def test_block_round_trip(n, k):
    weight = torch.randn(n, k, generator=torch.Generator().manual_seed(n)) * torch.logspace(-6, 2, n)[:, None]
    quantized, scale = fp8_checkpoint.quantize_blocks(weight)
    back = fp8_checkpoint.dequantize_blocks(quantized, scale)
    assert torch.equal(back, back.bfloat16().float())
    spread = scale.repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]
    assert ((back - weight).abs() <= weight.abs() / 16 + spread * 2**-10).all()
    assert quantized.float().abs().max() <= 448 and quantized.float().abs().max() > 224
    zeros, unit = fp8_checkpoint.quantize_blocks(torch.zeros(n, k))
    assert fp8_checkpoint.dequantize_blocks(zeros, unit).abs().max() == 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"arch": "llama"}, ["arch", "deepseek_v32", "'llama'"]),
        ({"rope": "linear"}, ["rope", "yarn", "'linear'"]),
        ({"rope": "yarn", "max_position": 1024}, ["max_position", "1024"]),
        ({"dtype": "float16"}, ["dtype", "'float16'"]),
        ({"quant": "int4"}, ["quant", "fp8-block"]),
        ({"vocab": 261}, ["vocab", "262", "261"]),
        ({"dense_layers": 3}, ["dense_layers", "3"]),
        ({"experts_per_token": 5}, ["experts_per_token", "5"]),
        ({"schedule": "FS"}, ["schedule", "'FS'"]),
        ({"arch": "glm_moe_dsa", "schedule": "SF"}, ["schedule", "starting with F"]),
        ({"arch": "glm_moe_dsa", "schedule": "FSF"}, ["schedule", "2 letters"]),
        ({"twin": "t"}, ["twin", "quant"]),
        ({"nextn": 2}, ["nextn", "0 or 1"]),
        ({"nextn": 1, "layers": 1}, ["layers", "at least 2"]),
        ({"nextn": 1, "echo": 0.0}, ["echo", "positive"]),
    ],
)
def test_bad_options_are_named(tmp_path, changes, words):
    with pytest.raises(ValueError) as error:
        make_model(tmp_path / "m", **{**SMALL, **changes})
    assert all(word in str(error.value) for word in words), str(error.value)
    assert not (tmp_path / "m").exists()


def test_a_full_directory_is_not_overwritten(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(ValueError, match="not empty"):
        make_model(tmp_path, **SMALL)


@pytest.mark.parametrize(
    "text", ["", "plain", "  two  spaces\n\t", "héllo 🚨 中文 \x00\x7f", "Ġ Ċ <262> <|x|>", "𝔘" * 300]
)
def test_tokenizer_round_trips(text):
    tokenizer = byte_tokenizer(300, 128)
    ids = tokenizer(text)["input_ids"]
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text


def test_saved_tokenizer_and_chat(models):
    from transformers import AutoTokenizer, GenerationConfig

    tokenizer = AutoTokenizer.from_pretrained(models["deepseek_v32"].path)
    assert (len(tokenizer), tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (
        270,
        256,
        257,
        258,
    )
    assert all(tokenizer.decode([i]) for i in range(262, 270))
    turns = [("system", "Be brief."), ("user", "Hé?"), ("assistant", "Oui."), ("user", "2")]
    ids = tokenizer.apply_chat_template(
        [{"role": r, "content": c} for r, c in turns], add_generation_prompt=True, return_dict=False
    )
    expected = [256]
    for role, content in turns:
        expected += [{"system": 259, "user": 260, "assistant": 261}[role], *content.encode(), 257]
    assert ids == [*expected, 261]
    assert max(ids) < models["deepseek_v32"].config["vocab_size"]
    with pytest.raises(Exception, match="unknown role judge"):
        tokenizer.apply_chat_template([{"role": "judge", "content": "x"}])
    assert GenerationConfig.from_pretrained(models["deepseek_v32"].path).eos_token_id == 257


def test_command_line(tmp_path):
    from sglang_dsa_plugin.cli import app

    options = ["--hidden", "64", "--heads", "4", "--index-heads", "2", "--arch", "glm_moe_dsa", "--quant", "fp8-block"]
    result = CliRunner().invoke(app, ["make-model", str(tmp_path / "m"), "--twin", str(tmp_path / "t"), *options])
    assert result.exit_code == 0, result.output
    assert "FSF" in result.output and "interleaved" in result.output
    assert (tmp_path / "m" / "config.json").exists() and (tmp_path / "t" / "tokenizer.json").exists()
    again = CliRunner().invoke(app, ["make-model", str(tmp_path / "m")])
    assert again.exit_code == 2 and "not empty" in again.output
