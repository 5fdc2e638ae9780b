"""Real servers on a GPU under mixed load: two hundred requests of 10 to 20,000 tokens, sixteen at once."""

import pytest

from sglang_dsa_plugin.backend import dense_fallback
from tests.server import load
from tests.server.conftest import server, slot  # noqa: F401
from tests.server.harness import ModelSpec, ServerSpec, random_prompt
from tests.server.specs import TP2

LONGEST = 20_000
ARGS = ("--enable-metrics", "--max-total-tokens", "400000")


def spec(name: str, arch: str, heads: int, kv: str, index_topk: int, more: tuple[str, ...] = ()) -> ServerSpec:
    model = ModelSpec.of(
        arch, dtype="bfloat16", heads=heads, index_topk=index_topk, layers=3, max_position=LONGEST + 1024
    )
    return ServerSpec(name, model, (*ARGS, *more, "--kv-cache-dtype", kv))


SPECS = [
    spec("v32-16-bf16", "deepseek_v32", 16, "bf16", 256),
    spec("v32-128-fp8", "deepseek_v32", 128, "fp8_e4m3", 2048),
    spec("glm-8-bf16", "glm_moe_dsa", 8, "bf16", 2048),
    spec("glm-64-fp8", "glm_moe_dsa", 64, "fp8_e4m3", 256),
    spec("v32-128-fp8-tp2", "deepseek_v32", 128, "fp8_e4m3", 2048, TP2),
]
pytestmark = [pytest.mark.gpu, pytest.mark.parametrize("server", SPECS, indirect=True)]


def test_two_hundred_requests(server):  # noqa: F811
    assert "decode CUDA graph: captured" in server.log()
    mixed = load.requests(200, LONGEST)
    load.check(server, mixed, load.run(server, mixed, 16))
    paths = server.prefills()
    # Below 2048 tokens in a prefill graph, without breaks where all are short; above outside, unless all are new, too.
    assert paths["graph"] and paths["whole_dense"] and paths["sparse"] and not paths["masked"], paths


def test_short_prompts_together_attend_on_expanded_keys(server):  # noqa: F811
    """More tokens than a sparse prefill graph has, and no prompt past k: in a dense graph, or, behind a cached prefix,
    outside.
    """
    k = dict(server.spec.model.options)["index_topk"]
    # The first may run alone.
    together = 1 + -(-2 * dense_fallback.GRAPH_TOKENS // k)
    for prefix, path in ((0, "whole_dense"), (64, "dense")):
        server.flush()
        start = random_prompt(64, seed=1000)[:prefix]
        if prefix:
            server.generate([start + random_prompt(2)])
        before = server.prefills()
        prompts = [start + random_prompt(k - 8 - prefix, seed=i) for i in range(2 * together)]
        answers = server.generate(prompts, new=2, start=prefix)
        after = server.prefills()
        assert all(answer.meta["cached_tokens"] == prefix for answer in answers)
        assert after[path] > before[path], (path, before, after)
        assert all(answer.rows.isfinite().all() for answer in answers)
