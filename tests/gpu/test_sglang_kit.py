"""SGLang's own test kit against this package (sglang_kit.py), in a process of its own: the plugin changes SGLang."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


def outcomes(device, where):
    """Every case's outcome, by name."""
    out = where / "kit.json"
    command = [sys.executable, "-m", "tests.gpu.sglang_kit", "--device", device, "--json", str(out)]
    # Threads that spin while they wait would take a CPU's cores from tests beside this one.
    environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert out.exists(), result.stderr[-3000:]
    return {outcome["case"]: outcome for outcome in json.loads(out.read_text())}


def check(device, where, record_testsuite_property):
    """No case fails, most pass, and whatever does not apply says why."""
    found = outcomes(device, where)
    states = [outcome["state"] for outcome in found.values()]
    record_testsuite_property(f"kit on {device}", {state: states.count(state) for state in set(states)})
    assert not [outcome for outcome in found.values() if outcome["state"] == "failed"]
    assert states.count("passed") > 90
    assert all(outcome["reason"] for outcome in found.values() if outcome["state"] != "passed")


@pytest.mark.gpu
def test_no_case_fails(tmp_path, record_testsuite_property):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    check("cuda", tmp_path, record_testsuite_property)
