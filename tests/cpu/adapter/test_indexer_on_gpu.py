"""What the indexer asks of the operators on a GPU, with stand-ins for tensors there: no GPU needed."""

import functools
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("sglang")

from sglang_dsa_plugin.adapter import indexer
from sglang_dsa_plugin.backend import metadata
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

    def plan(*given, impl):
        asked.setdefault("plans", []).append((*given, impl))
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
    own._select = functools.partial(indexer.DsaIndexer._select, own)
    batch = SimpleNamespace(out_cache_loc="slots", forward_mode=SimpleNamespace(is_decode=lambda: True))
    run = functools.partial(
        indexer.DsaIndexer.forward, own, SimpleNamespace(is_cuda=True), "q_lora", torch.tensor([199, 39]), batch, 4
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


def test_layers_of_a_decode_step_share_a_plan(layer, monkeypatch):
    run, asked, step = layer
    monkeypatch.setattr(indexer, "_picks_of_rank_0", lambda: False)
    for _ in range(2):
        run()
        assert asked["by"] == ("plan", "by decode")
    ((pages, *rows, k, heads, impl),) = asked["plans"]
    assert pages.is_cuda and all(a is b for a, b in zip(rows, (step.lengths, step.page_table, step.row_to_request)))
    assert (k, heads, impl) == (K, 32, "by decode")


def test_a_prefill_makes_no_plan(layer, monkeypatch):
    run, asked, _ = layer
    monkeypatch.setattr(indexer, "_picks_of_rank_0", lambda: False)
    run.args[4].forward_mode.is_decode = lambda: False
    run()
    assert asked["by"] == (None, "by prefill") and "plans" not in asked
