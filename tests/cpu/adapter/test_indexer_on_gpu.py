"""What the indexer asks of the operators on a GPU, with stand-ins for tensors there: no GPU needed. And in a breakable
prefill graph, whose breaks run at once where nothing is recorded.
"""

import functools
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("sglang")

from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph import enable_breakable_cuda_graph

from sglang_dsa_plugin.adapter import backend, indexer
from sglang_dsa_plugin.backend import dense_fallback, metadata
from sglang_dsa_plugin.backend.dense_fallback import SPARSE_DECODE
from sglang_dsa_plugin.indexer.token import IndexQuery

K = 64


@pytest.fixture
def layer(monkeypatch):
    """(a function that runs the indexer of layer 4 on a GPU, what it asked for by operator, the step)."""
    table = torch.arange(512, dtype=torch.int32).flip(0).view(2, 4, 64).flip(2).reshape(2, 256)
    step = metadata.decode_step(table, torch.tensor([1, 0]), torch.tensor([200, 40]), 200, SPARSE_DECODE)
    pages = SimpleNamespace(is_cuda=True, device=torch.device("cpu"))
    pool = SimpleNamespace(index_pages=SimpleNamespace(buffer=[None, pages]), start_layer=3)
    asked = {}

    def plan(*given, eager, impl):
        asked.setdefault("plans", []).append((*given, eager, impl))
        return "plan"

    def paged(*given, slots_out=None, plan, impl, **_):
        asked["paged"] = given
        asked["by"] = plan, impl
        if slots_out is not None:
            slots_out.fill_(9)
        return torch.arange(K, dtype=torch.int32).repeat(2, 1)

    def keys_and_queries(*given):
        asked["front"] = given
        return IndexQuery("q", "gate")

    monkeypatch.setattr(indexer.index_select, "paged", paged)
    monkeypatch.setattr(indexer.index_select, "plan", plan)
    monkeypatch.setattr(indexer, "get_token_to_kv_pool", lambda: pool)
    monkeypatch.setattr(indexer, "get_attn_backend", lambda: SimpleNamespace(get_indexer_metadata=lambda *_: step))
    monkeypatch.setattr(indexer, "get_global_indexer_capturer", lambda: None)
    own = SimpleNamespace(
        wk=lambda x: ("key", None),
        wq_b=lambda x: ("query", None),
        k_norm="norm",
        _head_weights=lambda x: "weights",
        # Nothing else, so that another call of it would fail.
        token=SimpleNamespace(keys_and_queries=keys_and_queries),
        index_topk=K,
        n_heads=32,
        config=SimpleNamespace(index_init_tokens=0, index_local_tokens=0),
        _impl_decode="by decode",
        _impl_prefill="by prefill",
        _same_on_all_ranks=lambda picks: picks,
    )
    for name in ("_select", "_store_and_pick", "_in_graph"):
        setattr(own, name, functools.partial(getattr(indexer.DsaIndexer, name), own))
    batch = SimpleNamespace(out_cache_loc="slots", forward_mode=SimpleNamespace(is_decode=lambda: True))
    run = functools.partial(
        indexer.DsaIndexer.forward,
        own,
        SimpleNamespace(is_cuda=True, shape=(2, 8)),
        "q_lora",
        torch.tensor([199, 39]),
        batch,
        4,
    )
    return run, asked, step


def test_keys_and_queries_are_one_call_and_slots_come_with_the_picks(layer, monkeypatch):
    run, asked, step = layer
    monkeypatch.setattr(indexer, "_picks_of_rank_0", lambda: False)
    picks = run()
    pages, *front = asked["front"]
    assert pages.is_cuda and front[:5] == ["slots", "key", "norm", "query", "weights"]
    assert front[5].tolist() == [199, 39] and front[6] is step.lengths and front[7] == K
    assert asked["paged"][:3] == ("q", pages, "gate")
    assert (step.slots_of(picks) == 9).all()


def test_picks_of_another_rank_are_translated_here(layer, monkeypatch):
    run, _, step = layer
    monkeypatch.setattr(indexer, "_picks_of_rank_0", lambda: True)
    picks = run()
    assert torch.equal(step.slots_of(picks)[:, 0] // 64, step.page_table[:, 0])


PADDED, REAL = 6, 4


@pytest.fixture
def in_graph(monkeypatch):
    """(a real indexer's `forward` on PADDED rows, the step of REAL rows, what the operators were given)."""
    table = torch.arange(512, dtype=torch.int32).view(2, 256)
    step = metadata.extend_step(
        table, torch.tensor([0, 1]), torch.tensor([150, 70]), torch.tensor([3, 1]), REAL, 153, dense_fallback.IN_GRAPH
    )
    pages = torch.zeros(8, 8448, dtype=torch.uint8)
    given = {}

    def paged(q, _pages, gate, lengths, *_, **__):
        given["paged"] = (q, gate, lengths)
        return (lengths.unsqueeze(1) - 1 - torch.arange(K)).flip(1).to(torch.int32)

    def store_keys(where, slots, key, _norm, positions):
        given["store"] = (slots, key, positions)
        assert where is pages

    own = indexer.DsaIndexer.__new__(indexer.DsaIndexer)
    torch.nn.Module.__init__(own)
    own.index_topk, own.n_heads = K, 2
    own.wk, own.wq_b = (lambda x: (x + 1, None)), (lambda x: (x + 2, None))
    own._head_weights = lambda x: x[:, :2].float()
    own.k_norm = torch.nn.Identity()
    own.config = SimpleNamespace(index_init_tokens=0, index_local_tokens=0)
    own._impl_decode = own._impl_prefill = None
    own.token = SimpleNamespace(
        store_keys=store_keys, queries=lambda query, weights, positions: IndexQuery(query, weights)
    )
    batch = SimpleNamespace(out_cache_loc=torch.arange(100, 100 + PADDED))
    pool = SimpleNamespace(index_pages=SimpleNamespace(buffer=[None, pages]), start_layer=3)
    monkeypatch.setattr(indexer.index_select, "paged", paged)
    monkeypatch.setattr(indexer, "get_token_to_kv_pool", lambda: pool)
    monkeypatch.setattr(indexer, "get_attn_backend", lambda: SimpleNamespace(get_indexer_metadata=lambda *_: step))
    monkeypatch.setattr(indexer, "get_forward_batch", lambda: batch)
    monkeypatch.setattr(indexer, "maybe_capture_indexer_topk", lambda _layer, picks: picks)
    monkeypatch.setattr(indexer, "_picks_of_rank_0", lambda: False)
    x, positions = torch.arange(PADDED * 4.0).view(PADDED, 4), torch.tensor([150, 151, 152, 70, 0, 0])
    prefill = SimpleNamespace(forward_mode=SimpleNamespace(is_decode=lambda: False))
    with enable_breakable_cuda_graph():
        yield functools.partial(own.forward, x, 10 * x, positions, prefill, 4), step, given


def test_a_prefill_graph_picks_for_its_real_rows(in_graph):
    run, step, given = in_graph
    picks = run()
    slots, key, positions = given["store"]
    assert slots.tolist() == [100, 101, 102, 103] and positions.tolist() == [150, 151, 152, 70]
    assert torch.equal(key, torch.arange(PADDED * 4.0).view(PADDED, 4)[:REAL] + 1)
    query, gate, lengths = given["paged"]
    assert torch.equal(query, 10 * torch.arange(PADDED * 4.0).view(PADDED, 4)[:REAL] + 2) and len(gate) == REAL
    assert lengths.tolist() == [151, 152, 153, 71]
    assert picks.shape == (PADDED, K) and (picks[REAL:] == -1).all()
    assert picks[:REAL, -1].tolist() == [150, 151, 152, 70]
    # Attention is handed a view of the real rows: row 3 is of request 1, whose tokens lie from 256 on.
    assert step.slots_of(picks[:REAL])[3].tolist() == list(range(256 + 71 - K, 256 + 71))


def test_a_prefill_graph_of_short_rows_keeps_every_token(in_graph):
    run, step, given = in_graph
    step.lengths, step.max_length = torch.tensor([1, 2, 64, 40], dtype=torch.int32), 64
    picks = run()
    assert "paged" not in given and len(given["store"][0]) == REAL
    assert [(row >= 0).sum().item() for row in picks] == [1, 2, 64, 40, 0, 0]
    assert picks[2].tolist() == list(range(64))


def test_a_prefill_graph_without_picks_stores_the_keys(in_graph):
    run, _, given = in_graph
    assert run(return_indices=False) is None
    assert len(given["store"][0]) == REAL and "paged" not in given


@pytest.mark.parametrize("captured", [False, True])
def test_layers_of_a_decode_step_share_a_plan(layer, monkeypatch, captured):
    run, asked, step = layer
    step.captured = captured
    monkeypatch.setattr(indexer, "_picks_of_rank_0", lambda: False)
    for _ in range(2):
        run()
        assert asked["by"] == ("plan", "by decode")
    ((pages, *rows, k, heads, eager, impl),) = asked["plans"]
    assert pages.is_cuda and all(a is b for a, b in zip(rows, (step.lengths, step.page_table, step.row_to_request)))
    assert (k, heads, eager, impl) == (K, 32, not captured, "by decode")


def test_a_decode_step_is_a_graphs_where_it_is_planned_in_one():
    table = torch.arange(512).view(2, 256)
    own = SimpleNamespace(req_to_token=table, max_context_len=200, threads=None)
    batch = SimpleNamespace(
        forward_mode=SimpleNamespace(is_decode=lambda: True, is_idle=lambda: False),
        req_pool_indices=torch.tensor([1, 0]),
        seq_lens=torch.tensor([70, 3]),
        seq_lens_cpu=torch.tensor([70, 3]),
    )
    backend.DsaBackend.init_forward_metadata_in_graph(own, batch)
    assert own.forward_metadata.captured and own.forward_metadata.page_table.shape == (2, 4)
    backend.DsaBackend.init_forward_metadata(own, batch)
    assert not own.forward_metadata.captured and own.forward_metadata.page_table.shape == (2, 2)


def test_a_prefill_makes_no_plan(layer, monkeypatch):
    run, asked, _ = layer
    monkeypatch.setattr(indexer, "_picks_of_rank_0", lambda: False)
    run.args[4].forward_mode.is_decode = lambda: False
    run()
    assert asked["by"] == (None, "by prefill") and "plans" not in asked


def test_rows_that_ranks_were_padded_with_get_no_picks(in_graph, monkeypatch):
    """Outside of a graph: SGLang pads a batch for collectives and cuts what attention gets to the real rows."""
    run, step, given = in_graph
    monkeypatch.setattr(indexer, "is_in_breakable_cuda_graph", lambda: False)
    batch = indexer.get_forward_batch()
    batch.forward_mode = SimpleNamespace(is_decode=lambda: False)
    monkeypatch.setattr(indexer, "get_global_indexer_capturer", lambda: None)
    picks = functools.partial(run.func, *run.args[:3], batch, 4)()
    assert len(given["store"][0]) == len(given["paged"][0]) == REAL
    assert picks.shape == (PADDED, K) and (picks[REAL:] == -1).all()
    assert step.slots_of(picks[:REAL])[3].tolist() == list(range(256 + 71 - K, 256 + 71))
