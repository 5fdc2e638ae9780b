"""Prefill up to index_topk runs dense, above it masked or sparse: the same numbers, counted apart, nothing lost."""

import pytest

from tests.server.harness import ServerSpec, random_prompt
from tests.server.oracle import settled, text_of, worst
from tests.server.specs import PLAIN
from tests.server.test_equality import BOUND, K

pytestmark = pytest.mark.server
THRESHOLD = "SGLANG_DSA_PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD"
MASKED = "SGLANG_DSA_PLUGIN_MASKED_PREFILL"
SPARSE = ServerSpec("v32-always-sparse", PLAIN.model, PLAIN.args, (*PLAIN.env, (THRESHOLD, "0"), (MASKED, "off")))
LENGTHS = (1, 2, 31, 63, 64)


def answers_and_paths(server, prompts, new=1, start=0):
    """Answers to one batch, and the prefill batches it took by path."""
    before = server.prefills()
    answers = server.generate(prompts, new=new, start=start)
    after = server.prefills()
    return answers, {path: after[path] - before[path] for path in after if after[path] > before[path]}


@pytest.mark.parametrize("server", [PLAIN], indirect=True)
def test_counter(server):
    server.flush()
    for length, path in ((8, "dense"), (K, "dense"), (K + 1, "masked"), (200, "masked"), (1000, "sparse")):
        assert answers_and_paths(server, [random_prompt(length, seed=20)])[1] == {path: 1}, length
    # Few new rows do not pay for expanding a long prefix.
    longer = random_prompt(210, seed=20)
    server.generate([longer[:200]])
    assert answers_and_paths(server, [longer], start=192)[1] == {"sparse": 1}
    # A batch is dense only when all of it is short.
    assert answers_and_paths(server, [random_prompt(n, seed=21) for n in (8, K + 1)])[1]["masked"] == 1
    assert "sglang_dsa_prefill_rows_total" in server.metrics()


@pytest.mark.parametrize("server", [PLAIN], indirect=True)
def test_dense_prefill_stores_index_keys(server):
    """k - 8 tokens prefilled dense, then 40 decoded: from the ninth on, picks are made among the keys it stored."""

    def ask(seed):
        server.flush()
        answers, paths = answers_and_paths(server, [text_of(server.spec.model, K - 8, seed)], new=40)
        assert paths == {"dense": 1}
        return answers

    assert worst(server, settled(server, ask)) <= BOUND


@pytest.fixture(scope="session")
def dense_rows(slot):
    """Rows of the short prompts by the dense path, asked for once: two servers do not run side by side."""
    kept = []

    def get():
        if not kept:
            for length in LENGTHS:
                (answer,), paths = answers_and_paths(slot.get(PLAIN), [random_prompt(length, seed=22)])
                assert paths == {"dense": 1}
                kept.append(answer.rows)
        return kept

    return get


@pytest.mark.parametrize("server", [PLAIN], indirect=True)
def test_short_prompts_run_dense(server, dense_rows):
    server.flush()
    assert [rows.shape[0] for rows in dense_rows()] == list(LENGTHS)


@pytest.mark.parametrize("server", [SPARSE], indirect=True)
def test_sparse_equals_dense(server, slot, dense_rows):
    """Asked for with SGLang's own threshold; the counter shows that it really ran sparse.

    1e-5 of the value: log-probabilities here reach -20, and in absolute terms Hugging Face differs from itself by 2e-5
    when it reads the same tokens in other chunks. (At a single layer the two paths agree to 1e-5 absolutely:
    tests/cpu/backend/test_core.py.)
    """
    expected = dense_rows()
    server = slot.get(SPARSE)
    for length, rows in zip(LENGTHS, expected):
        (answer,), paths = answers_and_paths(server, [random_prompt(length, seed=22)])
        assert paths == {"sparse": 1}
        assert float(((answer.rows - rows).abs() / rows.abs().clamp(min=1)).max()) <= 1e-5
