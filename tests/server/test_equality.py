"""A float32 server against Hugging Face: every position, whole vocabulary, on both sides of index_topk.

The bound is sharp: above k wrong picks move log-probabilities by 0.1 to 10, and `test_bound_can_fail` shows it.
"""

import pytest

from tests.server.harness import GPU
from tests.server.oracle import BOUND, LENGTHS, difference, settled, text_of, worst
from tests.server.specs import FORMS, MODELS, PLAIN, exact

K = 64
# A pairwise choice for the default run; all combinations under --full.
DEFAULT = [exact("v32", "plain"), exact("yarn", "chunked+retracting"), exact("glm", "pp2"), exact("yarn", "tp2")]
DEFAULT += [exact("glm", "masked"), exact("glm", "whole"), exact("v32", "wholelong")]
OTHERS = [spec for model in MODELS for form in FORMS if (spec := exact(model, form)) not in DEFAULT]
SERVERS = DEFAULT + [pytest.param(spec, marks=pytest.mark.full) for spec in OTHERS]
WIDE = [exact(model, form, 2048) for model in MODELS for form in FORMS]
WIDE = WIDE[:1] + [pytest.param(spec, marks=pytest.mark.full) for spec in WIDE[1:]]
# The path of a new prompt that fits in index_topk, in the forms that run prefills as in a graph.
GRAPHS = {"graph": "graph", "whole": "whole_dense", "wholesparse": "whole", "wholelong": "whole_dense"}
pytestmark = pytest.mark.server


@pytest.fixture
def assert_equal(server, record_testsuite_property, request):
    def check(answers, text=None):
        difference = worst(server, answers, text)
        record_testsuite_property(request.node.name, difference)
        assert difference <= BOUND

    return check


@pytest.mark.parametrize("server", SERVERS, indirect=True)
def test_prompts(server, assert_equal):
    """Every prompt on its own: one prefill, or chunks of 128 where the server is told so."""
    text = text_of(server.spec.model)
    server.flush()
    before = server.prefills()
    answers = [server.generate([text[:length]])[0] for length in LENGTHS]
    assert all(a.first == 1 and a.meta["cached_tokens"] == 0 for a in answers)
    # However many ranks there are, a batch is counted once.
    chunk = 128 if "--chunked-prefill-size" in server.spec.args else max(LENGTHS)
    after = server.prefills()
    if (short := GRAPHS.get(server.spec.name.rpartition("-")[2])) is not None:
        counted = dict.fromkeys(after, 0)
        for n in LENGTHS:
            # On a GPU, too, a graph of up to 256 rows may pick; the probe's have room for the next power of two.
            few = "long" in server.spec.name and 1 << n.bit_length() <= 256
            counted[short if n <= K else "whole_scored" if few else "graph"] += 1
        assert {path: after[path] - before[path] for path in after} == counted
        assert_equal(answers)
        return
    assert after["dense"] - before["dense"] == sum(n <= K for n in LENGTHS)
    masked, sparse = (after[path] - before[path] for path in ("masked", "sparse"))
    assert masked + sparse == sum(-(-n // chunk) for n in LENGTHS if n > K)
    if GPU:
        # Masked prefill is for CPUs.
        assert masked == 0
    elif server.spec.name.endswith("-masked"):
        assert sparse == 0
    elif server.spec == exact("glm", "pp2"):
        # The second stage starts with layers that reuse picks, and only absorbed attention sends them there.
        assert masked == 0
    else:
        assert masked and sparse
    assert_equal(answers)


@pytest.mark.parametrize("server", SERVERS, indirect=True)
def test_prefix_hit(server, assert_equal):
    """A prompt whose start is cached, in whole pages: the new part reads index keys that an earlier request wrote."""
    text = text_of(server.spec.model)
    answers = []
    for length in (63, 64, 65, 200, 400):
        server.flush()
        server.generate([text[:length]])
        cached = length // 64 * 64
        longer = server.generate([text[: length + 70]], start=cached)[0]
        assert longer.meta["cached_tokens"] == cached
        answers.append(longer)
    whole = server.generate([text[:400]], start=384)[0]
    assert whole.meta["cached_tokens"] == 384
    assert_equal([*answers, whole])


@pytest.mark.parametrize("server", SERVERS, indirect=True)
def test_among_others(server, assert_equal):
    """Four requests of different lengths at once, prefilled in one batch and decoded together."""

    def ask(seed):
        server.flush()
        return server.generate([text_of(server.spec.model, n, seed) for n in (20, 65, 330, 90)], new=12)

    answers = settled(server, ask)
    if dict(server.spec.env).get("SGLANG_TEST_RETRACT"):
        assert sum(a.meta["num_retractions"] for a in answers) > 0
    assert_equal(answers)


@pytest.mark.parametrize("server", SERVERS, indirect=True)
def test_token_by_token(server, assert_equal):
    """Forty decoded tokens. From k - 8 on they cross k: the keys that a dense prefill stored are then picked from."""
    server.flush()
    answers = []
    for n in (8, K - 8, K, 200):
        answers += settled(server, lambda seed, n=n: server.generate([text_of(server.spec.model, n, seed)], new=40))
        assert answers[-1].rows.shape[0] == n + 40 - 1
    assert_equal(answers)


@pytest.mark.parametrize("server", WIDE, indirect=True)
def test_wide(server, assert_equal):
    """index_topk = 2048: a prompt past it, a cached prefix longer than it, beside a short one, decoding across it; and
    a cached prefix with what follows it in a few prompts at once, all within it.
    """
    text = text_of(server.spec.model, 2500)
    server.flush()
    server.generate([text[:200]])
    before = server.prefills()
    answers = [server.generate([text[:330]], start=192)[0]]
    assert answers[0].meta["cached_tokens"] == 192
    after = server.prefills()
    # Something is cached, which no dense graph has a place for.
    forms = {"whole": "whole", "wholesparse": "whole", "wholelong": "whole", "graph": "graph"}
    short = forms.get(server.spec.name.split("-")[1], "dense")
    assert {path: after[path] - before[path] for path in after} == dict.fromkeys(after, 0) | {
        short: -(-138 // 128) if "chunked" in server.spec.name else 1
    }
    server.flush()
    answers += server.generate([text[:length] for length in (70, 200, 131)])
    server.flush()
    answers += server.generate([text])
    answers += server.generate([text], start=2368)
    assert answers[-1].meta["cached_tokens"] == 2368
    server.flush()
    answers += settled(server, lambda seed: server.generate([text[: 2040 - seed], text[: 90 + seed]], new=20))
    assert_equal(answers, text)


@pytest.mark.parametrize("server", [PLAIN], indirect=True)
@pytest.mark.parametrize("variant", ["dense", "other_rope"])
def test_bound_can_fail(server, variant):
    """Attending to every token, or roping the indexer in the other layout, is seen above k and only there."""
    text = text_of(server.spec.model)[:400]
    for length in (K - 1, K, 100, 400):
        answer = server.generate([text[:length]])[0]
        wrong = difference(server, answer, text, **{variant: True})
        # Row i attends to i + 1 tokens, so rows before k have nothing to choose.
        assert float(wrong[:K].max()) <= BOUND
        assert length <= K or float(wrong[K:].max()) > 1000 * BOUND
