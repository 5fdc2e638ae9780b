"""Every layer of a running server, above and below k: attention, scores and picks against fp64 on the same inputs.

Absorbed prefill is asked for here; the masked form of a CPU is held against it by the equality tests.
"""

import os
import tempfile
from pathlib import Path

import pytest

from tests.server import capture
from tests.server.harness import ModelSpec, ServerSpec

CAPTURED = Path(tempfile.gettempdir()) / f"dsa-capture-{os.getpid()}"
MODEL = ModelSpec.of(dtype="bfloat16", dense_layers=3)
LAYERS = 3
K = 64
FP8 = ("--kv-cache-dtype", "fp8_e4m3")


def spec(name, args, *env):
    env = (*capture.environment(CAPTURED / name), ("SGLANG_DSA_PLUGIN_MASKED_PREFILL", "off"), *env)
    return ServerSpec(f"capture-{name}", MODEL, ("--chunked-prefill-size", "128", *args), env)


# A server each; what the judge finds wrong is held without one in tests/cpu/test_live_capture.py.
SERVERS = [
    spec("fp8_656", FP8),
    spec("bf16", (), ("SGLANG_DSA_PLUGIN_INDEX_KEYS", "model")),
    spec("fp8_576", FP8, ("SGLANG_DSA_PLUGIN_LATENT_LAYOUT", "fp8_576")),
]
pytestmark = [pytest.mark.server, pytest.mark.full, pytest.mark.parametrize("server", SERVERS, indirect=True)]


def test_every_layer_against_fp64(server, record_testsuite_property):
    where = capture.directory_of(server)
    server.flush()
    with capture.capturing(where):
        capture.drive(server, K, longest=3 * K + 5)
    report = capture.judge(where)
    record_testsuite_property(server.spec.name, report.text())
    everywhere = set(range(LAYERS))
    for call in (("dense_mha", "prefill"), *((op, m) for op in ("sparse_mla", "paged") for m in ("prefill", "decode"))):
        assert set(report.calls[call]) == everywhere, (call, report.text())
    assert report.recall >= 0.999, report.text()
