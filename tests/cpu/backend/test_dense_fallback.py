"""Which way prefill attends, and that the reason says why not another."""

import pytest

from sglang_dsa_plugin.backend import masked_prefill
from sglang_dsa_plugin.backend.dense_fallback import Decision, decide
from sglang_dsa_plugin.backend.masked_prefill import MaskedPrefill

SIZES = {"heads": 16, "nope": 128, "value": 128, "topk": 64, "itemsize": 2}
MASKED = MaskedPrefill(**SIZES)
RULED_OUT = MaskedPrefill(**SIZES, ruled_out="not on this server", always=True)
PLAIN = {"prefix": [0], "extend": [64], "threshold": 64, "capacity": 128, "masked": RULED_OUT}


def test_dense_up_to_the_threshold():
    assert decide(**PLAIN) == Decision("dense", "longest request 64 <= threshold 64")
    assert decide(**PLAIN | {"masked": MASKED}).path == "dense"
    assert decide(**{**PLAIN, "prefix": [60, 0], "extend": [4, 64]}).path == "dense"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"extend": [65]}, "65 > threshold 64"),
        ({"prefix": [0, 60], "extend": [1, 5]}, "65 > threshold 64"),
        ({"threshold": 0}, "64 > threshold 0"),
        ({"prefix": [0, 1, 64], "extend": [60, 4, 0]}, "129 keys > chunk capacity 128"),
        ({"allowed": "ruled out here"}, "ruled out here"),
    ],
)
def test_sparse_with_the_reason(change, reason):
    decision = decide(**{**PLAIN, **change})
    assert decision.path == "sparse" and not decision.expanded
    assert reason in decision.reason


def test_masked_past_the_threshold_where_it_is_cheaper():
    decision = decide(**PLAIN | {"extend": [200], "masked": MASKED})
    assert decision.path == "masked" and decision.expanded
    assert "200 > threshold 64; masked costs 0." in decision.reason


@pytest.mark.parametrize(
    ("prefix", "extend", "path"),
    [
        # New tokens alone cost as much to project either way, and less to attend to.
        ([0], [65], "masked"),
        ([128], [200], "masked"),
        # Few rows do not pay for the projection of a long prefix, a mixed batch of decoding rows least of all.
        ([448], [1], "sparse"),
        ([500, 700, 900], [1, 1, 1], "sparse"),
        ([500, 700, 900, 0], [1, 1, 1, 8], "sparse"),
        ([60, 0], [1, 300], "masked"),
        # Absorbed attention stops growing with the context, masked does not.
        ([0], [100_000], "sparse"),
        ([50_000], [2048], "sparse"),
    ],
)
def test_masked_by_cost(monkeypatch, prefix, extend, path):
    monkeypatch.setattr(masked_prefill, "MAX_BYTES", 1 << 40)
    assert decide(**PLAIN | {"prefix": prefix, "extend": extend, "masked": MASKED}).path == path


def test_masked_asked_for_whatever_it_costs():
    always = MaskedPrefill(**SIZES, always=True)
    assert decide(**PLAIN | {"prefix": [448], "extend": [1], "masked": always}).path == "masked"
    assert decide(**PLAIN | {"masked": always}).path == "dense"


def test_masked_ruled_out_says_why():
    decision = decide(**PLAIN | {"extend": [200]})
    assert decision == Decision("sparse", "longest request 200 > threshold 64; not on this server")
    assert RULED_OUT.describe() == "sparse (not on this server)"


def test_masked_within_its_bytes():
    # Of 16 heads in bf16: 128 + 128 values as projected, 192 of the key; a cached row.
    assert MASKED.bytes_per_key() == 2 * (16 * (256 + 192) + 576)
    fits = masked_prefill.MAX_BYTES // MASKED.bytes_per_key()
    always = MaskedPrefill(**SIZES, always=True)
    assert always.judge([0], [fits])[0]
    assert always.judge([fits], [1]) == (False, "1024 MiB of expanded keys and values > 1024 MiB")
