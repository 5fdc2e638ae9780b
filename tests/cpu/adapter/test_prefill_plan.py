"""Which rows a prefill's plan has, and which prefills are counted: no server, SGLang's batch is a stand-in."""

from types import SimpleNamespace

import pytest

pytest.importorskip("sglang")

import torch
from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph import enable_breakable_cuda_graph

from sglang_dsa_plugin.adapter import prefill
from sglang_dsa_plugin.backend import dense_fallback
from sglang_dsa_plugin.backend.masked_prefill import MaskedPrefill


@pytest.fixture
def planner(monkeypatch):
    """A planner; `flags` says whether its server records a graph, `counted` is what its metrics were told."""
    dp = SimpleNamespace(capturing_prefill_graph=False)
    monkeypatch.setattr(prefill, "get_flags", lambda: SimpleNamespace(dp=dp))
    table = torch.arange(256, dtype=torch.int32).view(1, 256)
    counted = []
    metrics = SimpleNamespace(count=lambda decision, rows: counted.append((decision.path, rows)))
    made = prefill.PrefillPlanner(table, MaskedPrefill(128, 128, 128, 2048, 2), None, metrics)
    made.flags, made.counted = dp, counted
    return made


def batch(rows, real=None):
    """Five new tokens after three cached ones, in `rows` rows."""
    return SimpleNamespace(
        extend_prefix_lens_cpu=[3],
        extend_seq_lens_cpu=[5],
        extend_prefix_lens=torch.tensor([3]),
        extend_seq_lens=torch.tensor([5]),
        req_pool_indices=torch.tensor([0]),
        positions=torch.zeros(rows, dtype=torch.int64),
        global_num_token_non_padded_cpu=real,
        get_max_chunk_capacity=lambda: 1 << 20,
    )


@pytest.mark.parametrize(("rows", "real", "path"), [(5, None, "dense"), (5, 5, "dense"), (6, 5, "sparse")])
def test_padding_for_collectives_is_left_out(planner, rows, real, path):
    """SGLang cuts what attention gets to the real rows, so the plan has no others."""
    step = planner.plan(batch(rows, real))
    assert (step.rows, step.decision.path) == (5, path)
    assert step.lengths.tolist() == [4, 5, 6, 7, 8]
    assert planner.counted == [(path, 5)]


def test_a_prefill_graph_has_the_real_rows_and_its_recording_is_not_counted(planner):
    with enable_breakable_cuda_graph():
        planner.flags.capturing_prefill_graph = True
        planner.plan(batch(5))
        assert not planner.counted
        planner.flags.capturing_prefill_graph = False
        step = planner.plan(batch(8))
    assert (step.rows, step.decision.path) == (5, "graph") and not step.decision.expanded
    assert planner.counted == [("graph", 5)]


@pytest.mark.parametrize(("requests", "path"), [(18, "dense"), (19, "sparse"), (64, "sparse")])
def test_expanded_keys_stay_below_their_bytes(planner, requests, path):
    """Requests of 64 new tokens behind a prefix of 1984 that they share: 115,840 bytes a key with 128 heads."""
    many = SimpleNamespace(
        extend_prefix_lens_cpu=[1984] * requests,
        extend_seq_lens_cpu=[64] * requests,
        positions=torch.zeros(64 * requests),
        get_max_chunk_capacity=lambda: 1 << 17,
    )
    assert planner.decide(many).path == path
    assert (planner.masked.bytes_per_key() * 2048 * requests <= dense_fallback.EXPANDED_BYTES) == (path == "dense")
