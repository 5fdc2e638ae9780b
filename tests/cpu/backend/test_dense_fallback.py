"""When prefill runs dense, and that the reason says why not."""

import pytest

from sglang_dsa_plugin.backend.dense_fallback import Decision, PathCounter, decide

PLAIN = {"plain_prefill": True, "max_length": 64, "total_keys": 64, "threshold": 64, "capacity": 128}


def test_dense_up_to_the_threshold():
    assert decide(**PLAIN).dense


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"max_length": 65, "total_keys": 65}, "65 > threshold 64"),
        ({"threshold": 0}, "64 > threshold 0"),
        ({"total_keys": 129}, "129 keys > chunk capacity 128"),
        ({"plain_prefill": False}, "not a plain prefill"),
        ({"allowed": "ruled out here"}, "ruled out here"),
    ],
)
def test_sparse_with_the_reason(change, reason):
    decision = decide(**{**PLAIN, **change})
    assert not decision.dense
    assert reason in decision.reason


def test_counter_counts_batches_and_rows_by_path():
    counter = PathCounter()
    counter.count(Decision(True, ""), 5)
    counter.count(Decision(False, ""), 7)
    counter.count(Decision(True, ""), 1)
    assert counter.batches == {"dense": 2, "sparse": 1}
    assert counter.rows == {"dense": 6, "sparse": 7}
