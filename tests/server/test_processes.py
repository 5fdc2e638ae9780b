"""Which processes have the plugin, and what SGLang's own sparse attention does meanwhile: nothing.

The probe on the servers' PYTHONPATH shows the line that the plugin writes where it registers, with the process's id,
and makes SGLang's own classes raise. All float32 servers of these tests run under it.
"""

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from tests.server.harness import ModelSpec, ServerSpec, environment_with, random_prompt
from tests.server.oracle import BOUND
from tests.server.specs import PLAIN, PROBE, exact

pytestmark = pytest.mark.server
LLAMA = ModelSpec.of("llama")
PLATFORM = str(Path(PROBE).parent / "plain_cpu")
LLAMA_ARGS = (LLAMA, ("--dtype", "float32"))
WITH = ServerSpec("llama-on", *LLAMA_ARGS, (("PYTHONPATH", PROBE),), dsa_flag=False)
# With the plugin off SGLang knows no platform for this machine; plain_cpu brings one that has nothing to do with ours.
OFF_ENV = (("SGLANG_DSA_PLUGIN", "off"), ("PYTHONPATH", f"{PROBE}:{PLATFORM}"))
WITHOUT = ServerSpec("llama-off", *LLAMA_ARGS, OFF_ENV, dsa_flag=False)


def processes(server):
    """Title -> process ids of the launcher and of everything it started that runs SGLang."""
    found = {"launcher": [server.process.pid]}
    for child in server.children():
        title = " ".join(child.cmdline())
        if title.startswith("sglang::"):
            found.setdefault(re.match(r"sglang::(\w+?)(?=_|\b|$)", title)[1], []).append(child.pid)
    return found


def said(server, state):
    return Counter(
        int(pid) for pid in re.findall(rf"probe: sglang-dsa-plugin is {state} in process (\d+)", server.log())
    )


@pytest.mark.parametrize("server", [PLAIN, exact("yarn", "tp2"), exact("glm", "pp2")], indirect=True)
def test_active_in_every_process(server):
    family = processes(server)
    ranks = 1 if server.spec == PLAIN else 2
    assert {title: len(pids) for title, pids in family.items()} == {"launcher": 1, "scheduler": ranks, "detokenizer": 1}
    assert said(server, "active") == {pid: 1 for pids in family.values() for pid in pids}
    assert not said(server, "off")


@pytest.mark.parametrize("server", [PLAIN], indirect=True)
def test_no_built_in_forward_runs(server):
    """Dense and sparse prefill and decode, while every built-in method and function would raise."""
    (scheduler,) = processes(server)["scheduler"]
    guarded = re.findall(rf"probe: guarded (\d+) of [\w.]+\.(\w+) in process {scheduler}\b", server.log())
    assert {"dsa_backend", "dsa_indexer"} <= {module for _, module in guarded}
    assert all(int(count) > 0 for count, _ in guarded)
    for length in (20, 100):
        assert len(server.generate([random_prompt(length, seed=50)], new=4)[0].output) == 4


def test_the_probe_raises():
    """Or the test above could not fail: with the plugin off the guarded methods are the ones SGLang would call."""
    code = (
        "from sglang.srt.layers.attention.dsa_backend import DeepseekSparseAttnBackend as Backend\n"
        "from sglang.srt.layers.attention.dsa.dsa_indexer import Indexer\n"
        "for call in (Backend.forward_extend, Backend.forward_decode, Backend.init_forward_metadata, "
        "Indexer.forward_cuda):\n"
        "    try:\n"
        "        call(None)\n"
        "    except AssertionError as error:\n"
        "        print(error)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        env=environment_with((("PYTHONPATH", PROBE), ("SGLANG_DSA_PLUGIN", "off"))),
        capture_output=True,
        text=True,
    )
    assert result.stdout.count("was called") == 4, result.stderr


@pytest.mark.parametrize("server", [WITHOUT, WITH], indirect=True)
def test_a_model_without_dsa_is_left_alone(server):
    """With the plugin off no process has it; with it on such a model is served as well, on its ordinary backend."""
    state, other = ("off", "active") if server.spec == WITHOUT else ("active", "off")
    family = processes(server)
    assert set(family) == {"launcher", "scheduler", "detokenizer"}
    assert said(server, state) == {pid: 1 for pids in family.values() for pid in pids}
    assert not said(server, other)
    assert "sglang-dsa-plugin plan" not in server.log()
    (answer,) = server.generate([random_prompt(150, seed=51)], new=8)
    model = LlamaForCausalLM.from_pretrained(LLAMA.path(), dtype=torch.float32).eval()
    with torch.no_grad():
        expected = model(torch.tensor([answer.tokens[:-1]])).logits[0].double().log_softmax(-1)
    assert float((answer.rows - expected).abs().max()) <= BOUND
