"""Argument resolution on a machine without CUDA: a model with DSA gets this plugin's backend without a flag."""

import subprocess
import sys

import pytest

pytest.importorskip("sglang")

import torch

from sglang_dsa_plugin.tools.make_model import make_model
from tests.server.harness import make_llama

CODE = """
import sys
from sglang.srt.arg_groups.overrides import resolving_view
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import prepare_server_args
load_plugins()
for model in sys.argv[1:]:
    server_args = prepare_server_args(["--model-path", model])
    server_args.resolve_once()
    print("BACKEND", resolving_view(server_args).attention_backend)
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="resolves to what a GPU gets; see test_cuda_arguments.py")
def test_the_backend_of_a_model_without_a_flag(tmp_path):
    make_model(tmp_path / "dsa", layers=1, hidden=64, heads=2, q_lora_rank=32, index_heads=4, experts=2)
    make_llama(tmp_path / "llama", "bfloat16")
    result = subprocess.run(
        [sys.executable, "-c", CODE, tmp_path / "dsa", tmp_path / "llama"], capture_output=True, text=True, timeout=300
    )
    backends = [line for line in result.stdout.splitlines() if line.startswith("BACKEND ")]
    assert backends == ["BACKEND dsa", "BACKEND torch_native"], result.stderr[-3000:]
