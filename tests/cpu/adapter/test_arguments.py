"""Flags of a DSA model: what is not served is refused by the flag's own name, and the rest passes."""

import json
import re
import types

import pytest

pytest.importorskip("sglang")

import torch
from sglang.srt.layers.rotary_embedding.factory import get_rope
from sglang.srt.model_executor.cuda_graph_config import CudaGraphConfig, Phase, with_phase
from sglang.srt.server_args import prepare_server_args

from sglang_dsa_plugin import plan, support
from sglang_dsa_plugin.adapter import selfcheck
from sglang_dsa_plugin.adapter.hooks import arguments, last_check
from sglang_dsa_plugin.adapter.hooks.arguments import BACKEND_FIELDS, NOT_SERVED, refuse_flags
from sglang_dsa_plugin.backend.dense_fallback import DENSE_GRAPH_SIZES, GRAPH_SIZES
from sglang_dsa_plugin.config import UnsupportedModel
from sglang_dsa_plugin.config_rope import YarnScaling
from sglang_dsa_plugin.kernel_flags import KernelFlags

CONFIG = types.SimpleNamespace(architecture="DeepseekV32ForCausalLM")
# A value that asks for the feature, as the command line would give it.
ASKED = {
    "speculative_algorithm": "EAGLE",
    "attn_cp_size": 2,
    "dcp_size": 4,
    "attn_dp_size": 2,
    "disaggregation_mode": "decode",
    "dsa_triton_union": 2,
}


def typed(*flags: str) -> dict:
    """SGLang's arguments for a command line, as they are before resolution."""
    args = prepare_server_args(["--model-path", "none", *flags])
    return {field: getattr(args, field) for field in (*NOT_SERVED, *BACKEND_FIELDS)}


@pytest.fixture(scope="module")
def defaults():
    return typed()


def test_plain_arguments_pass(defaults):
    refuse_flags(defaults, CONFIG)


@pytest.mark.parametrize("field", NOT_SERVED)
def test_each_feature_is_refused_by_its_flag(defaults, field):
    _, flag = NOT_SERVED[field]
    value = ASKED.get(field, True)
    with pytest.raises(plan.Refusal) as refusal:
        refuse_flags({**defaults, field: value}, CONFIG)
    shown = flag if value is True else f"{flag} {value}"
    assert str(refusal.value).startswith(f"{shown} is not served yet for DSA models")
    assert "leave the flag out" in str(refusal.value)


@pytest.mark.parametrize("field", NOT_SERVED)
def test_each_flag_exists_and_is_off_by_default(defaults, field):
    """A renamed field would be refused by nobody; a default outside `off` would refuse everybody."""
    off, flag = NOT_SERVED[field]
    assert defaults[field] in off
    value = ASKED.get(field, True)
    assert typed(*([flag] if value is True else [flag, str(value)]))[field] == value


@pytest.mark.parametrize("field", BACKEND_FIELDS)
@pytest.mark.parametrize("value", ["triton", "flashinfer", "fa3", "torch_native", "flashmla"])
def test_another_attention_backend_is_refused(defaults, field, value):
    flag = "--" + field.replace("_", "-")
    with pytest.raises(plan.Refusal, match=f"{flag} {value} does not run the sparse attention that Deepseek"):
        refuse_flags({**defaults, field: value}, CONFIG)


@pytest.mark.parametrize("field", BACKEND_FIELDS)
@pytest.mark.parametrize("value", ["dsa", "nsa", None])
def test_both_names_of_ours_pass(defaults, field, value):
    refuse_flags({**defaults, field: value}, CONFIG)


def test_a_model_without_dsa_is_left_to_sglang(monkeypatch):
    """The step runs as it is, and nothing is declared."""
    ran = []
    monkeypatch.setattr(arguments, "hf_config_of", lambda args: types.SimpleNamespace(architectures=["Qwen"]))
    monkeypatch.setattr(arguments, "declare_resolution", lambda *_args, **_kwargs: pytest.fail("declared something"))
    args = types.SimpleNamespace(attention_backend=None, prefill_attention_backend=None, decode_attention_backend=None)
    arguments.adjust(args, ran.append)
    assert ran == [args]


@pytest.mark.parametrize("field", BACKEND_FIELDS)
@pytest.mark.parametrize("name", ["dsa", "nsa"])
def test_dsa_for_a_model_without_it_is_refused(monkeypatch, field, name):
    monkeypatch.setattr(arguments, "hf_config_of", lambda args: types.SimpleNamespace(architectures=["Qwen"]))
    args = types.SimpleNamespace(**dict.fromkeys(BACKEND_FIELDS) | {field: name})
    with pytest.raises(ValueError, match=f"--{field.replace('_', '-')} {name}: Qwen has no index_topk"):
        arguments.adjust(args, lambda args: pytest.fail("the step ran"))


def plan_that_ends(monkeypatch, error):
    """`_plan` of a server whose plan raises that."""

    def plan_serving(**_):
        raise error

    monkeypatch.setattr(plan, "plan_serving", plan_serving)
    monkeypatch.setattr(arguments, "model_config_of", lambda _: types.SimpleNamespace(dtype=torch.bfloat16))
    monkeypatch.setattr(arguments, "resolving_view", lambda _: types.SimpleNamespace(tp_size=1))
    config = types.SimpleNamespace(architecture=CONFIG.architecture, num_heads=8, index_n_heads=4, index_topk=64)
    arguments._plan(types.SimpleNamespace(), {}, KernelFlags(), config, "cpu")


@pytest.mark.parametrize(("impl", "remedy"), [("", "`sglang-dsa doctor` says"), ("cuda", "IMPL=cuda out")])
def test_an_operator_that_nothing_computes_is_a_refusal(monkeypatch, impl, remedy):
    monkeypatch.setenv("SGLANG_DSA_PLUGIN_IMPL", impl)
    with pytest.raises(plan.Refusal, match=f"{CONFIG.architecture} cannot be served here: sparse_mla: no.*{remedy}"):
        plan_that_ends(monkeypatch, support.NotServed("sparse_mla: no implementation can run here"))


@pytest.mark.parametrize("error", [plan.Refusal("--page-size 32 cannot"), ValueError("a fault of this package")])
def test_another_error_of_the_plan_stays_what_it_is(monkeypatch, error):
    with pytest.raises(ValueError) as raised:
        plan_that_ends(monkeypatch, error)
    assert raised.value is error


def test_a_phase_left_unsaid_is_dsa_too(monkeypatch):
    declared = []
    monkeypatch.setattr(arguments, "declare_resolution", lambda args, source, **fields: declared.append(fields))
    monkeypatch.setattr(arguments, "resolving_view", lambda args: args)
    for resolved in ("torch_native", "intel_amx", "fa3", None):
        arguments._both_phases(types.SimpleNamespace(attention_backend=resolved))
        assert declared.pop() == {"attention_backend": "dsa"}
    for resolved in ("dsa", "nsa"):
        arguments._both_phases(types.SimpleNamespace(attention_backend=resolved))
    assert not declared


@pytest.mark.parametrize(
    ("asked", "cuda", "remedy"),
    [("cpu", True, 'CUDA_VISIBLE_DEVICES=""'), ("cuda", False, "leave the flag out"), ("xpu", True, "leave the flag")],
)
def test_the_device_is_that_of_the_arguments_or_refused(monkeypatch, asked, cuda, remedy):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(arguments, "resolving_view", lambda args: args)
    with pytest.raises(plan.Refusal, match=f"--device {asked} is not served for DSA models here: .*{remedy}"):
        arguments.serving_device(types.SimpleNamespace(device=asked))
    here = "cuda" if cuda else "cpu"
    assert arguments.serving_device(types.SimpleNamespace(device=f"{here}:1")) == here


@pytest.mark.parametrize("flags", [("--enable-lora",), ("--lora-paths", "a=somewhere")])
def test_adapters_are_refused_on_a_cpu(flags):
    user = vars_of(prepare_server_args(["--model-path", "none", *flags]))
    with pytest.raises(plan.Refusal, match=f"{flags[0]} is not served for DSA models on a CPU: .*leave the flag out"):
        arguments.refuse_on_cpu(user, CONFIG)
    arguments.refuse_on_cpu(vars_of(prepare_server_args(["--model-path", "none"])), CONFIG)


def vars_of(server_args):
    return {field: getattr(server_args, field) for field in ("enable_lora", "lora_paths")}


def test_longcat_is_refused_on_a_cpu_and_with_plain_rope():
    longcat = types.SimpleNamespace(
        architecture="LongcatFlashForCausalLM", yarn=None, rope_theta=5e6, max_position_embeddings=8192
    )
    with pytest.raises(plan.Refusal, match=r"LongcatFlashForCausalLM.* is not served on a CPU.*needs a GPU"):
        arguments.refuse_on_cpu({}, longcat)
    with pytest.raises(UnsupportedModel, match="without rope_scaling: SGLang cannot build it") as refusal:
        arguments.refuse_plain_rope_of_longcat(longcat)
    scaling = json.loads(re.search(r"--json-model-override-args '(.*)'$", str(refusal.value)).group(1))["rope_scaling"]
    longcat.yarn = scaling
    arguments.refuse_plain_rope_of_longcat(longcat)
    arguments.refuse_plain_rope_of_longcat(types.SimpleNamespace(architecture="GlmMoeDsaForCausalLM", yarn=None))
    # The remedy is plain rope to the bit, by the class that SGLang takes for YaRN.
    shape = {"head_size": 64, "rotary_dim": 64, "max_position": 8192, "base": 5e6, "is_neox_style": False}
    plain = get_rope(**shape)
    scaled = get_rope(**shape, rope_scaling={**scaling, "rope_type": "deepseek_yarn"})
    assert type(scaled) is not type(plain)
    assert torch.equal(scaled.cos_sin_cache, plain.cos_sin_cache)


@pytest.mark.parametrize(("factor", "context"), [(4, 512), (1.3, 167), (None, 1 << 20)])
def test_a_context_past_the_end_of_scaled_rope_is_refused(factor, context):
    """At start, and exactly from where the table that SGLang builds ends; plain rope goes on."""
    yarn = factor and YarnScaling(factor, 128)
    config = types.SimpleNamespace(yarn=yarn)
    arguments.refuse_past_the_end(config, context)
    if yarn is None:
        return
    scaling = {"rope_type": "deepseek_yarn", "factor": factor, "original_max_position_embeddings": 128}
    made = get_rope(64, rotary_dim=64, max_position=9999, base=1e4, rope_scaling=scaling, is_neox_style=True)
    assert len(made.cos_sin_cache) == yarn.positions == context
    with pytest.raises(plan.Refusal, match=f"--context-length {context + 1}: .* to {context} or less"):
        arguments.refuse_past_the_end(config, context + 1)


LAST_CHECK = [
    # prefill, decode, whether the model is DSA, words of the refusal
    ("dsa", "dsa", True, None),
    ("nsa", "dsa", True, None),
    ("dsa", "fa3", True, "attention of decode would run on fa3"),
    ("torch_native", "dsa", True, "attention of prefill would run on torch_native"),
    ("fa3", "fa3", True, "attention of prefill would run on fa3"),
    ("fa3", "fa3", False, None),
]


@pytest.mark.parametrize(("prefill", "decode", "dsa", "refused"), LAST_CHECK)
def test_both_phases_are_ours_or_neither(monkeypatch, prefill, decode, dsa, refused):
    names = ["DeepseekV32ForCausalLM"] if dsa else ["LlamaForCausalLM"]
    config = types.SimpleNamespace(architectures=names, index_topk=64 if dsa else None)
    checked = []
    monkeypatch.setattr(arguments, "hf_config_of", lambda args: config)
    monkeypatch.setattr(last_check, "resolving_view", lambda args: args)
    monkeypatch.setattr(selfcheck, "require_classes", lambda: checked.append(True))
    args = types.SimpleNamespace(
        attention_backend=None, prefill_attention_backend=prefill, decode_attention_backend=decode
    )
    if refused:
        with pytest.raises(plan.Refusal, match=refused):
            last_check.check(args, lambda args: None)
    else:
        last_check.check(args, lambda args: None)
    assert checked == ([True] if dsa and not refused else [])


@pytest.fixture
def captured(monkeypatch):
    """Backend of the prefill graphs on a GPU, of a server that was told `backend`, and the graphs' tokens."""

    def ask(backend, dtype=torch.bfloat16, pp_size=1, most=8192, cuda=True, more=(), a2a="none", dense=False):
        graphs = with_phase(CudaGraphConfig(), Phase.PREFILL, backend=backend, bs=[4, 8192], max_bs=most)
        view = types.SimpleNamespace(cuda_graph_config=graphs, pp_size=pp_size, moe_a2a_backend=a2a)
        monkeypatch.setattr(arguments, "resolving_view", lambda _: view)
        monkeypatch.setattr(arguments, "model_config_of", lambda _: types.SimpleNamespace(dtype=dtype))
        monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
        server = types.SimpleNamespace(_cuda_graph_config_locked={(Phase.PREFILL, name) for name in ("backend", *more)})
        found = arguments._captured_phases(server, types.SimpleNamespace(capturable=True, dense_graphs=dense)).prefill
        return found.backend, found.bs

    return ask


def test_prefill_graphs_are_breakable_or_none(captured):
    assert captured("breakable") == ("breakable", list(GRAPH_SIZES))
    assert captured("disabled")[0] == "disabled"
    # As long as a chunk, whatever that is; -1 is none.
    assert captured("breakable", most=1000)[1] == [n for n in GRAPH_SIZES if n < 1000] + [1000]
    assert captured("breakable", most=-1)[1] == list(GRAPH_SIZES)
    assert captured("breakable", more=["max_bs"])[1] == [*GRAPH_SIZES, 8192]
    assert captured("breakable", more=["bs"])[1] == [4, 8192]
    # Collectives of DeepEP are recorded for multiples of 8 only.
    assert captured("breakable", a2a="deepep")[1] == list(GRAPH_SIZES[1:])
    assert captured("breakable", a2a="deepep", most=1001)[1][-2:] == [768, 1000]


def test_larger_prefill_graphs_are_for_those_that_may_be_dense(captured, monkeypatch):
    every = [*GRAPH_SIZES, *DENSE_GRAPH_SIZES]
    assert captured("breakable", dense=True)[1] == captured("breakable", dense=True, most=16384)[1] == every
    assert captured("breakable", dense=True, most=4096)[1] == [n for n in every if n <= 4096]
    assert captured("breakable", dense=True, most=5000)[1] == [n for n in every if n < 5000] + [5000]
    assert captured("breakable", dense=True, most=1000)[1] == [n for n in GRAPH_SIZES if n < 1000] + [1000]
    assert captured("breakable", dense=True, more=["bs"])[1] == [4, 8192]
    monkeypatch.setenv("SGLANG_DSA_PLUGIN_WHOLE_PREFILL", "off")
    assert captured("breakable", dense=True)[1] == list(GRAPH_SIZES)


@pytest.mark.parametrize("cuda", [True, False])
def test_prefill_graphs_of_another_kind_are_refused(captured, cuda):
    said = r"--cuda-graph-backend-prefill full is not served.*use breakable or disabled"
    with pytest.raises(plan.Refusal, match=said):
        captured("full", cuda=cuda)


@pytest.mark.parametrize(
    ("why", "told"),
    [("float32", {"dtype": torch.float32}), ("--pp-size 2", {"pp_size": 2}), ("no CUDA", {"cuda": False})],
)
def test_prefill_graphs_that_were_asked_for_in_vain_are_said_so(captured, caplog, why, told):
    assert captured("breakable", **told)[0] == "disabled"
    assert "prefill runs outside CUDA graphs" in caplog.text and why in caplog.text
