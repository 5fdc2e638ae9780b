"""Argument resolution on a machine that claims one H200 (resolve_on_cuda.py), with the plugin and without it."""

import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sglang_dsa_plugin.backend import dense_fallback
from sglang_dsa_plugin.tools.make_model import make_model
from tests.server.harness import make_llama

SCRIPT = Path(__file__).with_name("resolve_on_cuda.py")
# Drawn anew in every process.
RANDOM = {"random_seed"}


def resolve(switch, cases):
    """What each case (a model and arguments) resolves to with SGLANG_DSA_PLUGIN at `switch`, by the case's name."""
    result = subprocess.run(
        [sys.executable, SCRIPT, json.dumps([["--model-path", str(model), *args] for model, *args in cases.values()])],
        env={**os.environ, "SGLANG_DSA_PLUGIN": switch},
        capture_output=True,
        text=True,
    )
    lines = [line for line in result.stdout.splitlines() if line.startswith("RESOLVED ")]
    assert len(lines) == len(cases), result.stderr[-3000:]
    return {name: json.loads(line.removeprefix("RESOLVED ")) for name, line in zip(cases, lines)}


@pytest.fixture(scope="module")
def resolved(tmp_path_factory):
    """What each case resolved to; the processes with the plugin and the one without it start side by side."""
    directory = tmp_path_factory.mktemp("models")
    llama, dsa = directory / "llama", directory / "dsa"
    make_llama(llama, "bfloat16")
    make_model(dsa, layers=1, hidden=64, heads=2, q_lora_rank=32, index_heads=4, experts=2)
    off = {"llama off": (llama,)}
    on = {
        "llama on": (llama,),
        "dsa on": (dsa,),
        "dsa by prefill": (dsa, "--prefill-attention-backend", "dsa"),
        "dsa by decode": (dsa, "--decode-attention-backend", "nsa"),
        "dsa float32": (dsa, "--dtype", "float32"),
        "dsa few tokens": (dsa, "--max-total-tokens", "1024"),
        "dsa asked for": (dsa, "--cuda-graph-max-bs-prefill", "4096"),
        "dsa no prefill graphs": (dsa, "--cuda-graph-backend-prefill", "disabled"),
        "dsa pp2": (dsa, "--pp-size", "2", "--cuda-graph-backend-prefill", "breakable"),
        "dsa kernels": (
            dsa,
            *("--dsa-prefill-backend", "flashmla_sparse", "--dsa-decode-backend", "fa3"),
            *("--dsa-topk-backend", "torch", "--dsa-paged-mqa-logits-backend", "deepgemm"),
        ),
        "dsa float32, bf16 rows": (dsa, "--dtype", "float32", "--kv-cache-dtype", "bf16"),
    }
    with ThreadPoolExecutor(2) as pool:
        without, with_plugin = pool.map(resolve, ("off", "on"), (off, on))
    return without | with_plugin


def test_a_model_without_dsa_resolves_as_without_the_plugin(resolved):
    off, on = resolved["llama off"], resolved["llama on"]
    assert (off["platform"], on["platform"]) == ("CudaSRTPlatform", "DsaCudaPlatform")
    assert len(off["args"]) > 300
    assert off["args"].keys() == on["args"].keys()
    different = {name for name in off["args"] if off["args"][name] != on["args"][name]}
    assert different <= RANDOM
    # The claim was believed: these are what SGLang chooses on Hopper.
    assert off["args"]["device"] == "'cuda'"
    assert off["args"]["attention_backend"] == "'fa3'"


def test_a_model_with_dsa_gets_the_plan(resolved):
    args = resolved["dsa on"]["args"]
    assert args["device"] == "'cuda'"
    assert args["attention_backend"] == "'dsa'"
    assert args["page_size"] == "64"
    assert args["kv_cache_dtype"] == "'bfloat16'"
    assert args["dsa_prefill_backend"] == args["dsa_decode_backend"] == "'sglang_dsa_plugin'"
    assert args["warmups"] == "'sglang_dsa_plugin'"


@pytest.mark.parametrize("case", ["dsa on", "dsa by prefill", "dsa by decode"])
def test_a_phase_that_is_asked_for_brings_the_other(resolved, case):
    args = resolved[case]["args"]
    assert args["attention_backend"] == "'dsa'"
    assert {args["prefill_attention_backend"], args["decode_attention_backend"]} <= {"None", "'dsa'", "'nsa'"}


def test_kernel_flags_reach_the_workers_behind_our_name(resolved):
    """SGLang publishes these; `KernelFlags.published` reads them back."""
    args = resolved["dsa kernels"]["args"]
    assert args["dsa_prefill_backend"] == "'sglang_dsa_plugin:flashmla_sparse'"
    assert args["dsa_decode_backend"] == "'sglang_dsa_plugin:fa3'"
    assert args["dsa_topk_backend"] == "'torch'" and args["dsa_paged_mqa_logits_backend"] == "'deepgemm'"
    assert args["kv_cache_dtype"] == "'bfloat16'" and phases(resolved["dsa kernels"])["decode"].lower() != "disabled"


def phases(resolved):
    """Backend of each CUDA graph phase by name."""
    return dict(re.findall(r"(decode|prefill)=PhaseConfig\(backend='(\w+)'", resolved["args"]["cuda_graph_config"]))


def largest(resolved):
    """The most tokens of a captured prefill."""
    return int(re.search(r"prefill=PhaseConfig\(.*?max_bs=(\d+)", resolved["args"]["cuda_graph_config"]).group(1))


def test_steps_are_captured_with_the_kernels_and_not_in_torch(resolved):
    kernels, plain = phases(resolved["dsa on"]), phases(resolved["dsa float32"])
    assert (kernels["prefill"], plain["prefill"]) == ("breakable", "disabled")
    assert kernels["decode"].lower() != "disabled" and plain["decode"].lower() == "disabled"


def test_prefills_are_captured_up_to_the_tokens_that_pay_or_those_asked_for(resolved):
    assert largest(resolved["dsa on"]) == dense_fallback.DENSE_GRAPH_SIZES[-1]
    assert largest(resolved["dsa few tokens"]) == 1024
    sizes = re.search(r"prefill=PhaseConfig\(.*?bs=\[([\d, ]+)\]", resolved["dsa on"]["args"]["cuda_graph_config"])
    found = tuple(map(int, sizes.group(1).split(",")))
    assert found == dense_fallback.GRAPH_SIZES + dense_fallback.DENSE_GRAPH_SIZES
    assert largest(resolved["dsa asked for"]) == 4096
    assert phases(resolved["dsa no prefill graphs"])["prefill"] == "disabled"
    assert phases(resolved["dsa pp2"])["prefill"] == "disabled"


def test_a_float32_model_gets_operators_that_take_it(resolved):
    for case in ("dsa float32", "dsa float32, bf16 rows"):
        assert resolved[case]["environment"] == {"SGLANG_FORCE_FUSED_OP_BACKEND": "torch"}
    assert resolved["dsa on"]["environment"] == {}
