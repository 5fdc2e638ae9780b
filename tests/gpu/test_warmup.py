"""After the warm-up at start no request meets a kernel of this package that was not loaded yet.

SGLang can name every Triton kernel that is loaded once it serves; the warm-up's own come before its log line. Kernels
of SGLang itself, whose shapes follow other rules, are reported and not judged.
"""

import re

import pytest

from tests.gpu import sanitize
from tests.server import load
from tests.server.conftest import server, slot  # noqa: F401
from tests.server.harness import ModelSpec, ServerSpec

LONGEST = 6000
WATCH = (("SGLANG_TRITON_LOAD_WARNING_THRESHOLD_GB", "100000"), ("SGLANG_TRITON_SLOW_COMPILE_THRESHOLD_SECS", "0.01"))
DONE = "sglang-dsa-plugin warmed up prefill with"


def spec(heads: int, kv: str, index_topk: int) -> ServerSpec:
    model = ModelSpec.of(dtype="bfloat16", heads=heads, index_topk=index_topk, layers=3, max_position=LONGEST + 1024)
    args = ("--kv-cache-dtype", kv, "--max-total-tokens", "100000", "--enable-metrics")
    return ServerSpec(f"warm-{heads}-{kv}-k{index_topk}", model, args, WATCH)


SPECS = [spec(16, "bf16", 256), spec(16, "fp8_e4m3", 2048)]
pytestmark = [pytest.mark.gpu, pytest.mark.parametrize("server", SPECS, indirect=True)]


def loaded(log: str) -> list[str]:
    """Names of the kernels that were compiled or loaded after the warm-up."""
    return re.findall(r"Triton kernel '(\w+)'", log.partition(DONE)[2])


def test_fifty_requests_load_no_kernel(server, record_testsuite_property):  # noqa: F811
    log = server.log()
    assert DONE in log, log[-3000:]
    seconds = re.search(re.escape(DONE) + r" .* in ([\d.]+) s", log).group(1)
    before = len(loaded(log))
    mixed = load.requests(50, LONGEST, seed=7, leaving=0)
    load.check(server, mixed, load.run(server, mixed, 8))
    late = loaded(server.log())[before:]
    ours = set(late) & set(sanitize.kernel_names())
    record_testsuite_property(server.spec.name, f"{seconds} s of warm-up; loaded later: {sorted(set(late))}")
    assert not ours, sorted(ours)
