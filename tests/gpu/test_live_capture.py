"""Every layer of a running server on a GPU: attention, scores and picks against fp64 on the same inputs.

Calls are copied to the host as they happen, so decode runs outside a CUDA graph here. That a graph's replay equals the
eager call is held by tests/gpu/test_sparse_mla_triton.py and test_index_triton.py. Prefills of up to 2048 tokens are
captured between the segments of their graph, one server has no such graphs. In those without segments nothing can be
copied (test_prefill_graph.py compares them), so there are none here.
"""

import os
import tempfile
from pathlib import Path

import pytest

from tests.server import capture
from tests.server.conftest import server, slot  # noqa: F401
from tests.server.harness import ModelSpec, ServerSpec

CAPTURED = Path(tempfile.gettempdir()) / f"dsa-capture-{os.getpid()}"
LAYERS, LONGEST = 3, 6000
EAGER = "--disable-cuda-graph"


def spec(arch: str, heads: int, kv: str, index_topk: int, graphs: str = "--disable-decode-cuda-graph") -> ServerSpec:
    name = f"{arch.split('_')[0]}-{heads}-{kv}-k{index_topk}"
    model = ModelSpec.of(
        arch, dtype="bfloat16", heads=heads, index_topk=index_topk, layers=LAYERS, max_position=LONGEST + 1024
    )
    args = ("--kv-cache-dtype", kv, "--max-total-tokens", "40000", "--chunked-prefill-size", "4096")
    args += (graphs, "--enable-metrics")
    name += "-eager" * (graphs == EAGER)
    env = (*capture.environment(CAPTURED / name), ("SGLANG_DSA_PLUGIN_WHOLE_PREFILL", "off"))
    return ServerSpec(f"capture-{name}", model, args, env)


SPECS = [
    spec("deepseek_v32", 16, "bf16", 2048),
    spec("deepseek_v32", 16, "bf16", 2048, EAGER),
    spec("deepseek_v32", 16, "fp8_e4m3", 2048),
    spec("deepseek_v32", 128, "bf16", 2048),
    spec("deepseek_v32", 128, "fp8_e4m3", 256),
    spec("glm_moe_dsa", 8, "bf16", 256),
    spec("glm_moe_dsa", 64, "fp8_e4m3", 2048),
]
pytestmark = [pytest.mark.gpu, pytest.mark.parametrize("server", SPECS, indirect=True)]


def test_every_layer_against_fp64(server, record_testsuite_property):  # noqa: F811
    where, k = capture.directory_of(server), dict(server.spec.model.options)["index_topk"]
    server.flush()
    with capture.capturing(where):
        capture.drive(server, k, longest=LONGEST)
    report = capture.judge(where)
    record_testsuite_property(server.spec.name, report.text())
    (where / "report.txt").write_text(report.text() + "\n")
    for mode in ("prefill", "decode"):
        assert set(report.calls["sparse_mla", mode]) == set(range(LAYERS)), report.text()
        # Layers that reuse picks have no indexer.
        assert report.calls["paged", mode], report.text()
    assert report.recall >= 0.99, report.text()
    paths = server.prefills()
    assert (paths["dense"] if server.spec.name.endswith("-eager") else paths["graph"]) and paths["sparse"], paths
