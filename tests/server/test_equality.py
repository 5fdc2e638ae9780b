"""A float32 server against Hugging Face: every position, whole vocabulary, on both sides of index_topk.

The bound is the rounding of float32 over a few layers (Hugging Face differs from itself by about 2e-5 when it sums in
another order). It is sharp: above k the wrong picks move log-probabilities by 0.1 to 10, and `test_bound_can_fail`
shows it.
"""

import pytest
import torch

from tests.oracle.hf import hf_logprobs
from tests.server.harness import random_prompt
from tests.server.specs import FORMS, MODELS, PLAIN, exact

BOUND = 5e-5
K = 64
LENGTHS = (8, 40, 63, 64, 65, 100, 200, 400, 1000)
LONG = 2500
# Prompts are prefixes of one text, so that one run of the oracle answers for all of them.
TEXT = random_prompt(max(LENGTHS), seed=1)

# A pairwise choice for the default run; all combinations under --full.
DEFAULT = [exact("v32", "plain"), exact("yarn", "chunked+retracting"), exact("glm", "pp2"), exact("yarn", "tp2")]
OTHERS = [exact(model, form) for model in MODELS for form in FORMS]
OTHERS = [spec for spec in OTHERS if spec not in DEFAULT]
SERVERS = DEFAULT + [pytest.param(spec, marks=pytest.mark.full) for spec in OTHERS]
WIDE = [pytest.param(exact(model, form, 2048), marks=pytest.mark.full) for model in MODELS for form in FORMS]
pytestmark = pytest.mark.server


def difference(server, answer, text=TEXT, **variant) -> torch.Tensor:
    """Largest absolute difference at each predicted position, [n]. text: what the oracle reads for a prefix of it."""
    seen = answer.tokens[:-1]
    tokens = text if text[: len(seen)] == seen else seen
    expected = hf_logprobs(server.spec.model.path(), tokens, start=answer.first - 1, **variant)[: answer.rows.shape[0]]
    assert expected.shape == answer.rows.shape
    return (answer.rows - expected.double()).abs().amax(-1)


def assert_equal(server, answers, record, text=TEXT):
    worst = max(float(difference(server, answer, text).max()) for answer in answers)
    record("max_difference", worst)
    assert worst <= BOUND


@pytest.mark.parametrize("server", SERVERS, indirect=True)
def test_prompts(server, record_property):
    """Every prompt on its own: one prefill, or chunks of 128 where the server is told so."""
    server.flush()
    answers = [server.generate([TEXT[:length]])[0] for length in LENGTHS]
    assert all(a.first == 1 and a.meta["cached_tokens"] == 0 for a in answers)
    assert_equal(server, answers, record_property)


@pytest.mark.parametrize("server", SERVERS, indirect=True)
def test_prefix_hit(server, record_property):
    """A prompt whose start is cached, in whole pages: the new part reads index keys that an earlier request wrote."""
    answers = []
    for length in (63, 64, 65, 200, 400):
        server.flush()
        server.generate([TEXT[:length]])
        cached = length // 64 * 64
        longer = server.generate([TEXT[: length + 70]], start=cached)[0]
        assert longer.meta["cached_tokens"] == cached
        answers.append(longer)
    whole = server.generate([TEXT[:400]], start=384)[0]
    assert whole.meta["cached_tokens"] == 384
    assert_equal(server, [*answers, whole], record_property)


@pytest.mark.parametrize("server", SERVERS, indirect=True)
def test_among_others(server, record_property):
    """Four requests of different lengths at once, prefilled in one batch and decoded together."""
    server.flush()
    answers = server.generate([random_prompt(length, seed=3) for length in (20, 65, 330, 90)], new=12)
    if dict(server.spec.env).get("SGLANG_TEST_RETRACT"):
        assert sum(a.meta["num_retractions"] for a in answers) > 0
    assert_equal(server, answers, record_property)


@pytest.mark.parametrize("server", SERVERS, indirect=True)
def test_token_by_token(server, record_property):
    """Forty decoded tokens. From k - 8 on they cross k: the keys that a dense prefill stored are then picked from."""
    server.flush()
    answers = [server.generate([random_prompt(n, seed=4)], new=40, start=n - 1)[0] for n in (8, K - 8, K, 200)]
    assert [a.rows.shape[0] for a in answers] == [40] * 4
    assert_equal(server, answers, record_property)


@pytest.mark.parametrize("server", WIDE, indirect=True)
def test_wide(server, record_property):
    """index_topk = 2048: a prompt past it, decoding across it, and a cached prefix as long as it."""
    server.flush()
    prompt = random_prompt(LONG, seed=5)
    answers = server.generate([prompt[:-100]])
    answers += server.generate([prompt], start=2368)
    assert answers[-1].meta["cached_tokens"] == 2368
    answers += server.generate([prompt[:2040], prompt[:90]], new=20)
    assert_equal(server, answers, record_property, prompt)


@pytest.mark.parametrize("server", [PLAIN], indirect=True)
@pytest.mark.parametrize("variant", ["dense", "other_rope"])
def test_bound_can_fail(server, variant):
    """Attending to every token, or roping the indexer in the other layout, is seen above k and only there."""
    text = TEXT[:400]
    for length in (K - 1, K, 100, 400):
        answer = server.generate([text[:length]])[0]
        wrong = difference(server, answer, text, **{variant: True})
        # Row i attends to i + 1 tokens, so rows before k have nothing to choose.
        assert float(wrong[:K].max()) <= BOUND
        assert length <= K or float(wrong[K:].max()) > 1000 * BOUND
