"""SGLang's own test kit against this package (sglang_kit.py), in a process of its own: the plugin changes SGLang."""

import json
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
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert out.exists(), result.stderr[-3000:]
    return {outcome["case"]: outcome for outcome in json.loads(out.read_text())}


@pytest.mark.parametrize(
    "device",
    [pytest.param("cpu", marks=pytest.mark.full), pytest.param("cuda", marks=pytest.mark.gpu)],
)
def test_no_case_fails(device, tmp_path, record_testsuite_property):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    found = outcomes(device, tmp_path)
    states = [outcome["state"] for outcome in found.values()]
    record_testsuite_property(f"kit on {device}", {state: states.count(state) for state in set(states)})
    assert not [outcome for outcome in found.values() if outcome["state"] == "failed"]
    assert states.count("passed") > 90
    # Whatever does not apply says why.
    assert all(outcome["reason"] for outcome in found.values() if outcome["state"] != "passed")
