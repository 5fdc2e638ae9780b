"""A pause in which the memory of weights and cache is given away, and a new load of the weights, change no answer."""

import pytest
import torch

from tests.server.conftest import server, slot  # noqa: F401
from tests.server.harness import ModelSpec, ServerSpec, random_prompt

ARGS = ("--enable-memory-saver", "--max-total-tokens", "20000", "--chunked-prefill-size", "2048")
# Around k = 256: dense, in a prefill graph, and in two chunks.
LENGTHS = (60, 257, 1500, 3000)


def spec(arch, heads, kv):
    # Without experts, whose choice a rounding can change.
    model = ModelSpec.of(
        arch, dtype="bfloat16", heads=heads, index_topk=256, layers=3, dense_layers=3, max_position=8192
    )
    return ServerSpec(f"pause-{arch[:3]}-{heads}-{kv}", model, (*ARGS, "--kv-cache-dtype", kv))


SPECS = [spec("deepseek_v32", 16, "bf16"), spec("glm_moe_dsa", 64, "fp8_e4m3")]
pytestmark = [pytest.mark.gpu, pytest.mark.parametrize("server", SPECS, indirect=True)]


def answers(server):  # noqa: F811
    server.flush()
    return [server.generate([random_prompt(n, seed=n)], new=8)[0] for n in LENGTHS]


def difference(a, b):
    """The largest one between log-probabilities at any position of any answer."""
    assert [x.tokens for x in a] == [x.tokens for x in b]
    return max(float((x.rows - y.rows).abs().max()) for x, y in zip(a, b, strict=True))


def post(server, path, body):  # noqa: F811
    reply = server.http.post(path, json=body)
    assert reply.status_code == 200, (path, reply.text[:500])
    return reply


def test_answers_are_the_same_after_a_pause(server, record_testsuite_property):  # noqa: F811
    before = answers(server)
    noise = difference(before, answers(server))
    free = torch.cuda.mem_get_info()[0]
    post(server, "/release_memory_occupation", {})
    # The cache alone is 3 layers of 20,000 tokens with 788 bytes or more.
    assert torch.cuda.mem_get_info()[0] - free > 40 << 20
    post(server, "/resume_memory_occupation", {})
    loaded = post(server, "/update_weights_from_disk", {"model_path": str(server.spec.model.path())})
    assert loaded.json()["success"], loaded.text[:500]
    after = difference(before, answers(server))
    record_testsuite_property(server.spec.name, f"after a pause {after:.3g}, between two of the same {noise:.3g}")
    assert noise < 0.05
    assert after <= 2 * noise  # none, where two of the same are equal
