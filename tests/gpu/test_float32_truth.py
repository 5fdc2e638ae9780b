"""Float32 servers on a GPU against Hugging Face: every position, whole vocabulary, 5e-5, on both sides of k.

First with every operator of this package in torch, then with what the support table chooses. The equality tests of
tests/server run there too (pytest tests/server/test_equality.py) and take longer.
"""

import dataclasses

import pytest

from tests.server.conftest import server, slot  # noqa: F401
from tests.server.oracle import BOUND, settled, text_of, worst
from tests.server.specs import exact

K = 64
LENGTHS = (1, K - 1, K, K + 1, 2 * K + 7, 300)
# Each start compiles nothing that these prompts need.
QUICK = (("SGLANG_DSA_PLUGIN_WARMUP", "off"),)


def spec(model, form, impl=None):
    made = exact(model, form)
    env = made.env + QUICK + ((("SGLANG_DSA_PLUGIN_IMPL", impl),) if impl else ())
    return dataclasses.replace(made, name=f"{made.name}-{impl or 'chosen'}", env=env)


SPECS = [
    spec("v32", "plain", "torch"),
    spec("v32", "chunked", "torch"),
    spec("yarn", "chunked", "torch"),
    spec("glm", "plain", "torch"),
    spec("v32", "chunked"),
    spec("glm", "plain"),
]
pytestmark = [pytest.mark.gpu, pytest.mark.parametrize("server", SPECS, indirect=True)]


def test_prompts(server, record_testsuite_property):  # noqa: F811
    """Each on its own; from 129 tokens on in chunks where the server is told so."""
    text = text_of(server.spec.model)
    server.flush()
    difference = worst(server, [server.generate([text[:length]])[0] for length in LENGTHS])
    record_testsuite_property(f"{server.spec.name} prompts", difference)
    assert difference <= BOUND


def test_cached_prefix_and_decode(server, record_testsuite_property):  # noqa: F811
    """A prompt whose first 192 tokens are cached, then decoding across k, alone and among others."""
    text = text_of(server.spec.model)
    server.flush()
    server.generate([text[:200]])
    longer = server.generate([text[:270]], start=192)[0]
    assert longer.meta["cached_tokens"] == 192
    server.flush()
    answers = settled(server, lambda seed: server.generate([text_of(server.spec.model, K - 8, seed)], new=20))
    lengths = (20, K + 1, 200, 90)
    answers += settled(
        server, lambda seed: server.generate([text_of(server.spec.model, n, seed) for n in lengths], new=8)
    )
    difference = worst(server, [longer, *answers])
    record_testsuite_property(f"{server.spec.name} cached and decoded", difference)
    assert difference <= BOUND
