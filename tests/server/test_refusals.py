"""A server that this package cannot serve rightly does not start: a non-zero exit and a message that says what to do.

Flags are tried on the real launcher, forked from one process that has already imported it (launch_cases.py). A broken
installation is tried from the start, each in a process of its own with a sitecustomize.py that breaks it.
"""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.server.harness import ModelSpec, environment_with

pytestmark = pytest.mark.server
LLAMA = ModelSpec.of("llama")
V32 = ModelSpec.of("deepseek_v32", dtype="bfloat16")
DSA = ("--attention-backend", "dsa")
STEPS = ("--speculative-num-steps", "1", "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "2")
CASES = {
    "a model without index_topk": (LLAMA, DSA, "LlamaForCausalLM has no index_topk"),
    "a model without index_topk, by half": (
        LLAMA,
        ("--decode-attention-backend", "dsa"),
        "--decode-attention-backend dsa: LlamaForCausalLM has no index_topk",
    ),
    "index_kpool": (V32, (*DSA, "--json-model-override-args", '{"index_kpool": 4}'), "index_kpool"),
    "fp8_e5m2": (V32, (*DSA, "--kv-cache-dtype", "fp8_e5m2"), "--kv-cache-dtype fp8_e5m2 is not served"),
    "page size": (V32, (*DSA, "--page-size", "32"), "--page-size 32 cannot be served"),
    "page size 1": (V32, (*DSA, "--page-size", "1"), "--page-size 1 cannot be served"),
    "float16": (V32, (*DSA, "--dtype", "float16"), "--dtype float16 is not served"),
    "speculative": (
        V32,
        (*DSA, "--speculative-algorithm", "EAGLE", *STEPS),
        "--speculative-algorithm EAGLE is not served yet",
    ),
    "speculative without numbers": (
        V32,
        (*DSA, "--speculative-algorithm", "NEXTN"),
        "--speculative-algorithm NEXTN is not served yet",
    ),
    "another backend": (V32, ("--attention-backend", "triton"), "--attention-backend triton does not run the sparse"),
    "another backend by half": (
        V32,
        (*DSA, "--prefill-attention-backend", "flashinfer"),
        "--prefill-attention-backend flashinfer does not run the sparse",
    ),
    "adapters on a CPU": (V32, (*DSA, "--enable-lora"), "--enable-lora is not served for DSA models on a CPU"),
    "prefill kernel": (
        V32,
        (*DSA, "--dsa-prefill-backend", "flashmla_sparse"),
        "--dsa-prefill-backend flashmla_sparse names a GPU kernel",
    ),
    "decode kernel": (V32, (*DSA, "--dsa-decode-backend", "fa3"), "--dsa-decode-backend fa3 names a GPU kernel"),
    "hierarchical cache": (V32, (*DSA, "--enable-hierarchical-cache"), "--enable-hierarchical-cache is not served yet"),
    "a Triton kernel on a CPU": (
        V32,
        (*DSA,),
        "leave SGLANG_DSA_PLUGIN_IMPL=triton out",
        {"SGLANG_DSA_PLUGIN_IMPL": "triton"},
    ),
    "no such implementation": (
        V32,
        (*DSA,),
        "no operator has an implementation of that name",
        {"SGLANG_DSA_PLUGIN_IMPL": "fast"},
    ),
    # What only the process with the model can tell: SGLang would show its traceback.
    "quantising while loading": (V32, (*DSA, "--quantization", "fp8"), "--quantization fp8: the checkpoint is not"),
    "bad switch": (
        V32,
        DSA,
        "SGLANG_DSA_PLUGIN_WARMUP='yes' is not allowed; use one of auto, on, off",
        {"SGLANG_DSA_PLUGIN_WARMUP": "yes"},
    ),
    "mistyped switch": (
        V32,
        DSA,
        "SGLANG_DSA_PLUGIN_SCOREMB is no variable of sglang-dsa-plugin; use SGLANG_DSA_PLUGIN_SCORES_MB",
        {"SGLANG_DSA_PLUGIN_SCOREMB": "5"},
    ),
    "few tokens": (V32, (*DSA, "--max-total-tokens", "64"), "--max-total-tokens 64 is less than any request needs"),
    "a context past the end of scaled rope": (
        ModelSpec.of("deepseek_v32", rope="yarn", dtype="bfloat16"),
        (*DSA, "--context-length", "8193"),
        "--context-length 8193: the scaled rope of this model ends at position 8192",
        {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"},
    ),
    "more picks than any context has": (
        V32,
        (*DSA, "--json-model-override-args", '{"index_topk": 100000}'),
        "index_topk=100000 is more than 8192",
    ),
    "half-split rope in GLM": (
        ModelSpec.of("glm_moe_dsa", dtype="bfloat16"),
        (*DSA, "--json-model-override-args", '{"indexer_rope_interleave": null}'),
        "indexer_rope_interleave",
    ),
}


@pytest.fixture(scope="module")
def launch(tmp_path_factory):
    """launch(model, args, env={}) -> (exit code, output)."""
    output = tmp_path_factory.mktemp("refusals") / "output.txt"
    script = Path(__file__).with_name("launch_cases.py")
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, script], **pipes, stderr=subprocess.DEVNULL) as launcher:

        def ask(model, args, env=None):
            case = {"args": ["--model-path", str(model.path()), *args], "env": env or {}, "output": str(output)}
            launcher.stdin.write(json.dumps(case) + "\n")
            launcher.stdin.flush()
            return launcher.stdout.readline().strip(), output.read_text()

        yield ask
        launcher.stdin.close()


@pytest.mark.parametrize("name", CASES)
def test_refused_by_name(launch, name):
    model, args, message, *env = CASES[name]
    code, output = launch(model, args, *env)
    assert code == "1", output[-2000:]
    told = [line for line in output.splitlines() if message in line]
    assert len(told) == 1 and told[0].startswith("sglang-dsa-plugin: error: "), output[-2000:]
    assert output.splitlines()[-1] == told[0]
    assert "Traceback" not in output and "fired up" not in output


@pytest.mark.parametrize("family", ["deepseek_v32", "glm_moe_dsa"])
def test_theta_that_config_json_lost(launch, tmp_path, family):
    """Hugging Face's class fills it in: only the file tells."""
    source = ModelSpec.of(family, dtype="bfloat16").path()
    for file in source.iterdir():
        if file.name != "config.json":
            (tmp_path / file.name).symlink_to(file)
    config = json.loads((source / "config.json").read_text())
    kept = {key: value for key, value in config.items() if key not in ("rope_parameters", "rope_theta")}
    assert len(kept) < len(config)
    (tmp_path / "config.json").write_text(json.dumps(kept))
    code, output = launch(SimpleNamespace(path=lambda: tmp_path), DSA)
    assert code == "1", output[-2000:]
    assert output.splitlines()[-1].startswith("sglang-dsa-plugin: error: rope_theta is missing, both flat and in rope_")


def test_bad_switch(launch):
    code, output = launch(V32, DSA, {"SGLANG_DSA_PLUGIN": "yes"})
    assert code == "1", output[-2000:]
    told = [line for line in output.splitlines() if "SGLANG_DSA_PLUGIN=" in line]
    assert told == ["sglang-dsa-plugin: error: SGLANG_DSA_PLUGIN='yes' is not allowed; use one of on, off"]
    assert "Traceback" not in output and "could not start" not in output


OTHER_VERSION = """
import importlib.metadata as metadata
real = metadata.version
metadata.version = lambda name: "0.7.1" if name == "sglang" else real(name)
"""
BROKEN_IMPORT = """
import sys
class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "sglang_dsa_plugin.adapter.backend":
            raise ImportError("libsomething.so.12: cannot open shared object file")
sys.meta_path.insert(0, Finder)
"""
RENAMED_SYMBOL = """
import importlib.util, sys
class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name != "sglang.srt.mem_cache.memory_pool":
            return None
        sys.meta_path.remove(Finder)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module
        def exec_module(module):
            execute(module)
            module.DSATokenToKVPool.new_index_key_cache = module.DSATokenToKVPool._create_index_key_cache
            del module.DSATokenToKVPool._create_index_key_cache
        spec.loader.exec_module = exec_module
        return spec
sys.meta_path.insert(0, Finder)
"""
BROKEN = {
    "other version": (OTHER_VERSION, "sglang 0.7.1 is outside the supported range"),
    "renamed symbol": (RENAMED_SYMBOL, "DSATokenToKVPool._create_index_key_cache is missing"),
    "broken import": (BROKEN_IMPORT, "libsomething.so.12: cannot open shared object file"),
}
# Without the flag SGLang takes its own sparse attention for such a model, which must not happen quietly either.
ATTEMPTS = [*((name, True) for name in BROKEN), ("other version", False)]


@pytest.fixture(scope="module")
def attempts(tmp_path_factory):
    """Exit code and output of every attempt, two at a time."""

    def start(attempt):
        name, flag = attempt
        directory = tmp_path_factory.mktemp("broken")
        (directory / "sitecustomize.py").write_text(BROKEN[name][0])
        args = ["--model-path", str(V32.path()), "--device", "cpu", *(DSA if flag else ())]
        result = subprocess.run(
            [sys.executable, "-m", "sglang.launch_server", *args],
            env=environment_with((("PYTHONPATH", str(directory)),)),
            capture_output=True,
            text=True,
            timeout=120,
        )
        return result.returncode, result.stdout + result.stderr

    V32.path()
    with ThreadPoolExecutor(2) as pool:
        return dict(zip(ATTEMPTS, pool.map(start, ATTEMPTS)))


@pytest.mark.parametrize("attempt", ATTEMPTS, ids=lambda a: f"{a[0]}-{'flag' if a[1] else 'no flag'}")
def test_a_broken_installation_does_not_serve(attempts, attempt):
    code, output = attempts[attempt]
    assert code != 0
    assert BROKEN[attempt[0]][1] in output
    assert "sglang-dsa-plugin could not start" in output
    assert "sglang-dsa doctor" in output and "SGLANG_DSA_PLUGIN=off" in output
    # It stopped before any process was started or any weight was read.
    assert "Load weight begin" not in output
