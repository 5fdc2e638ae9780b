"""Prefill graphs without breaks: when they are recorded, planned for and replayed. SGLang's graphs are stand-ins."""

from types import SimpleNamespace

import pytest

pytest.importorskip("sglang")

import torch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.model_executor.runner.prefill_cuda_graph_runner import PrefillCudaGraphRunner
from sglang.srt.model_executor.runner.shape_key import ShapeKey
from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph import enable_breakable_cuda_graph
from sglang.srt.plugins.hook_registry import HookRegistry

from sglang_dsa_plugin.adapter import prefill
from sglang_dsa_plugin.adapter.backend import DsaBackend
from sglang_dsa_plugin.adapter.hooks import whole_prefill as hooks
from sglang_dsa_plugin.adapter.whole_prefill import REQUESTS, WholePrefills
from sglang_dsa_plugin.backend import dense_fallback
from sglang_dsa_plugin.backend.masked_prefill import MaskedPrefill

K = 64


@pytest.fixture
def whole():
    return WholePrefills(K, torch.device("cpu"), dense_tokens=8192)


@pytest.fixture
def planner(monkeypatch, whole):
    dp = SimpleNamespace(capturing_prefill_graph=False)
    monkeypatch.setattr(prefill, "get_flags", lambda: SimpleNamespace(dp=dp))
    monkeypatch.setenv("SGLANG_DSA_PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD", str(K))
    counted = []
    metrics = SimpleNamespace(count=lambda decision, rows: counted.append((decision.path, rows)))
    table = torch.arange(64, 320, dtype=torch.int32).view(1, 256)
    made = prefill.PrefillPlanner(table, MaskedPrefill(8, 128, 128, K, 2), None, metrics, whole)
    made.flags, made.counted = dp, counted
    return made


def batch(prefix, *extend):
    new = sum(extend)
    return SimpleNamespace(
        extend_prefix_lens_cpu=[prefix] * len(extend),
        extend_seq_lens_cpu=list(extend),
        extend_prefix_lens=torch.tensor([prefix] * len(extend)),
        extend_seq_lens=torch.tensor(extend),
        req_pool_indices=torch.zeros(len(extend), dtype=torch.int64),
        positions=torch.arange(prefix, prefix + new),
        out_cache_loc=torch.arange(64 + prefix, 64 + prefix + new),
        global_num_token_non_padded_cpu=None,
        get_max_chunk_capacity=lambda: 1 << 20,
    )


def plan_in_graph(planner, prefix, *extend):
    with enable_breakable_cuda_graph():
        return planner.plan(batch(prefix, *extend))


def recorded(whole, *sizes, dense=(), scored=()):
    whole.sizes["whole_scored"] += scored
    whole.sizes["whole"] += sizes
    whole.sizes["whole_dense"] += dense


def test_a_short_batch_is_planned_on_the_rows_of_the_next_larger_graph(planner, whole):
    recorded(whole, 32, 16, 8)
    step = plan_in_graph(planner, 50, 9)
    assert step.rows == 16 and step.decision == dense_fallback.WHOLE_GRAPH
    assert step.lengths.tolist() == [*range(51, 60), *[0] * 7]
    assert step.store_slots.tolist() == [*range(114, 123), *[0] * 7]
    assert planner.counted == [("whole", 9)]
    assert (whole.take(), whole.take()) == (("whole", 16), None)


def test_new_short_requests_are_planned_dense(planner, whole):
    recorded(whole, 32, 16, 8, dense=(128, 32, 16, 8))
    step = plan_in_graph(planner, 0, 9, 3)
    assert step.rows == 16 and step.decision == dense_fallback.WHOLE_DENSE and step.decision.expanded
    assert step.cu_queries.tolist() == step.cu_keys.tolist() == [0, 9, 12, *[16] * (REQUESTS - 1)]
    assert step.store_slots.tolist() == [*range(64, 76), *[0] * 4] and step.key_slots is None
    assert planner.counted == [("whole_dense", 12)]
    assert (whole.take(), whole.take()) == (("whole_dense", 16), None)


@pytest.mark.parametrize(
    ("prefix", "extend", "path", "rows"),
    [
        (0, [64], "graph", 64),
        (0, [33], "whole_dense", 128),
        (0, [64, 64], "whole_dense", 128),
        (0, [64, 65], "graph", 129),
        (56, [9], "graph", 9),
        (56, [8], "whole", 8),
        (0, [32], "whole_dense", 32),
        (0, [1] * REQUESTS, "whole_dense", 128),
        (0, [1] * (REQUESTS + 1), "graph", REQUESTS + 1),
    ],
)
def test_longer_requests_and_larger_batches_take_the_graph_with_breaks(planner, whole, prefix, extend, path, rows):
    recorded(whole, 32, 16, 8, dense=() if extend == [64] else (128, 32, 16, 8))
    step = plan_in_graph(planner, prefix, *extend)
    assert (step.decision.path, step.rows) == (path, rows)
    assert (whole.take() is None) == (step.store_slots is None) == (path == "graph")


@pytest.mark.parametrize(
    ("prefix", "extend", "path", "rows"),
    [
        (100, [9], "whole_scored", 16),
        (0, [65], "graph", 65),
        (0, [17], "whole_dense", 32),
        (40, [8], "whole", 8),
        (60, [3, 2], "whole", 8),
        (63, [3, 2], "whole_scored", 8),
        (100, [17], "graph", 17),
    ],
)
def test_a_few_tokens_behind_any_context_are_scored_in_a_graph_where_that_was_asked_for(
    planner, whole, prefix, extend, path, rows
):
    whole.pages = 4
    recorded(whole, 16, 8, dense=(32,), scored=(16, 8))
    step = plan_in_graph(planner, prefix, *extend)
    assert (step.decision.path, step.rows) == (path, rows) and planner.counted == [(path, sum(extend))]
    assert whole.take() == (None if path == "graph" else (path, rows))


def test_who_wants_no_dense_prefill_has_no_dense_graph(planner, whole, monkeypatch):
    recorded(whole, 16, dense=(16,))
    monkeypatch.setenv("SGLANG_DSA_PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD", "8")
    assert plan_in_graph(planner, 0, 9).decision.path == "whole"
    assert plan_in_graph(planner, 0, 8).decision.path == "whole_dense"


def test_what_sglang_records_with_and_what_runs_outside_of_graphs_is_ordinary(planner, whole):
    recorded(whole, 16, dense=(16,))
    planner.flags.capturing_prefill_graph = True
    assert plan_in_graph(planner, 0, 8).decision.path == "graph" and not planner.counted
    planner.flags.capturing_prefill_graph = False
    # One that was planned and never replayed does not stay behind.
    for prefix, path in ((0, "whole_dense"), (1, "whole")):
        assert plan_in_graph(planner, prefix, 8).decision.path == path
        assert planner.plan(batch(0, 8)).decision.path == "dense"
        assert whole.take() is None


def test_larger_batches_go_into_a_graph_that_holds_them_dense_or_that_there_is_besides(planner, whole):
    def asked(*args):
        alone = SimpleNamespace(**vars(batch(*args)), global_num_tokens_cpu=None)
        return DsaBackend.can_run_prefill_cuda_graph(SimpleNamespace(prefill=planner), alone)

    recorded(whole, dense=(8192, 4096))
    assert asked(0, *[64] * 40) and asked(0, 2048) and asked(0, 100)
    assert not asked(64, *[64] * 40) and not asked(0, 2049) and not asked(0, *[64] * 129)
    whole.dense_tokens = 0  # graphs of that size are there because they were asked for
    whole.sizes["whole_dense"].clear()
    assert asked(0, 2049) and not asked(0, *[64] * 40)


@pytest.fixture
def graphs(whole):
    """SGLang's graph backend as far as the hooks know it; `calls` has what was recorded and replayed, and how."""
    layer = RadixAttention(4, 192, 1.0, 1, layer_id=0)
    mixer = Fuses()
    model = torch.nn.Sequential(torch.nn.ModuleDict({"attn": layer, "mixer": mixer}))
    backend = SimpleNamespace(prefill=SimpleNamespace(whole=whole), forward_metadata="planned")
    runner = object.__new__(PrefillCudaGraphRunner)
    runner.model_runner = SimpleNamespace(attn_backend=backend, model=model)
    runner.capture_num_tokens = [8, 16]
    kept = {name: {} for name in ("_graphs", "_outputs", "_capture_inputs")}
    return SimpleNamespace(
        _cuda_graph_runner=runner, calls=[], layer=layer, mixer=mixer, backend=backend, other_breaks=0, **kept
    )


class Fuses(torch.nn.Module):
    """Attention of a DeepSeek model, as far as its question goes."""

    def _can_fuse_bmm_into_attention(self, forward_batch):
        return True


def original(graphs, shape_key, forward_fn, capture_inputs=None, post_warmup_hook=None):
    breaks = graphs.layer.use_prefill_attention_wrapper, graphs.mixer._can_fuse_bmm_into_attention(None)
    graphs.calls.append([shape_key, None, any(breaks)])
    forward_fn()
    graphs.calls[-1][1] = graphs.backend.forward_metadata
    graphs._graphs[shape_key] = SimpleNamespace(_break_fns=[print] * (sum(breaks) + graphs.other_breaks))
    graphs._outputs[shape_key] = graphs._capture_inputs[shape_key] = None


def record(graphs, size, forward=lambda: None):
    hooks.record(original, graphs, ShapeKey(size), forward, capture_inputs=None)


def made_of(*paths):
    return [f"sglang_dsa_{path}" for path in paths]


def variants(graphs):
    return [(key.size, key.attention_variant) for key, *_ in graphs.calls]


def test_each_size_is_recorded_with_breaks_and_then_without_on_held_memory(graphs, whole, caplog):
    caplog.set_level("INFO")
    borders = []

    def seen():
        step = graphs.backend.forward_metadata
        if step != "planned" and step.cu_queries is not None:
            borders.append(step.cu_queries.tolist())

    record(graphs, 16, seen)
    record(graphs, 8, seen)
    (_, planned, broken), (_, dense, dense_broken), (_, sparse, sparse_broken), *_ = graphs.calls
    assert planned == "planned" and broken and not dense_broken and not sparse_broken
    assert dense.rows == sparse.rows == 16
    # Nothing was filled in yet: every row belongs to one request that is stored in slot 0.
    assert borders == [[0, 16, *[16] * REQUESTS], [0, 8, *[8] * REQUESTS]] and whole.take() is None
    assert dense.cu_queries.data_ptr() == whole.held("whole_dense", 8).cu_queries.data_ptr()
    assert sparse.lengths.data_ptr() == whole.held("whole", 8).lengths.data_ptr()
    made = [None, "sglang_dsa_whole_dense", "sglang_dsa_whole"]
    assert variants(graphs) == [(size, variant) for size in (16, 8) for variant in made]
    assert whole.sizes == {"whole_dense": [16, 8], "whole": [16, 8], "whole_scored": []}
    assert graphs.backend.forward_metadata == "planned" and graphs.layer.use_prefill_attention_wrapper
    assert graphs.mixer._can_fuse_bmm_into_attention(None)
    assert [r.getMessage() for r in caplog.records if "2 dense, 2 sparse, 0 that pick; recorded in" in r.getMessage()]


def test_large_sizes_are_recorded_dense_alone_and_only_where_dense_may_be(graphs, whole):
    record(graphs, 8192)
    whole.dense_tokens = 4096
    record(graphs, 6144)
    record(graphs, 2048)
    whole.dense_tokens = 0
    record(graphs, 16)
    assert variants(graphs) == [
        (8192, None),
        (8192, "sglang_dsa_whole_dense"),
        (6144, None),
        (2048, None),
        (2048, "sglang_dsa_whole_dense"),
        (2048, "sglang_dsa_whole"),
        (16, None),
        (16, "sglang_dsa_whole"),
    ]


def test_graphs_that_score_are_recorded_for_a_few_rows_and_run_on_a_step_of_their_own_each_time(graphs, whole):
    whole.pages = 3
    steps = []
    record(graphs, 512)
    record(graphs, 256, lambda: steps.append(graphs.backend.forward_metadata))
    assert [v for size, v in variants(graphs) if size == 512] == [None, *made_of("whole_dense", "whole")]
    assert [v for size, v in variants(graphs) if size == 256] == [
        None,
        *made_of("whole_dense", "whole", "whole_scored"),
    ]
    step = steps[-1]
    assert step.rows == 256 and step.page_table.shape == (256, 3) and step is not whole.held("whole_scored", 256)
    assert step.lengths.data_ptr() == whole.held("whole_scored", 8).lengths.data_ptr()


def test_a_model_that_breaks_for_other_parts_has_no_whole_graphs(graphs, whole, caplog):
    graphs.other_breaks = 3
    record(graphs, 16)
    record(graphs, 8)
    assert variants(graphs) == [(16, None), (16, "sglang_dsa_whole_dense"), (8, None)] and not any(whole.sizes.values())
    assert list(graphs._graphs) == list(graphs._outputs) == list(graphs._capture_inputs) == [ShapeKey(16), ShapeKey(8)]
    assert [r.getMessage() for r in caplog.records if "breaks them 3 times" in r.getMessage()]


def test_a_recording_that_fails_leaves_the_model_as_it_was(graphs, whole):
    def fails():
        if len(graphs.calls) == 2:
            raise MemoryError("no memory for the graph")

    with pytest.raises(MemoryError):
        record(graphs, 16, fails)
    assert graphs.backend.forward_metadata == "planned" and graphs.layer.use_prefill_attention_wrapper
    assert graphs.mixer._can_fuse_bmm_into_attention(None)
    assert not any(whole.sizes.values())


def test_other_graphs_are_recorded_once(graphs, whole, monkeypatch):
    monkeypatch.setattr(hooks, "get_global_indexer_capturer", object)
    record(graphs, 16)
    monkeypatch.undo()
    graphs._cuda_graph_runner = SimpleNamespace(model_runner=graphs._cuda_graph_runner.model_runner)  # decode's
    record(graphs, 16)
    assert variants(graphs) == [(16, None)] * 2 and not any(whole.sizes.values())
    # SGLang's own attention backends have none of this.
    graphs.backend.prefill = None
    assert hooks.replay(lambda _, key, batch: key, graphs, ShapeKey(8), None) == ShapeKey(8)


def test_a_replay_follows_the_plan_once(graphs, planner, whole):
    recorded(whole, 16, dense=(16,))
    replayed = lambda: hooks.replay(lambda _, key, batch: key.attention_variant, graphs, ShapeKey(16), None)  # noqa: E731
    assert replayed() is None
    plan_in_graph(planner, 1, 9)
    assert (replayed(), replayed()) == ("sglang_dsa_whole", None)
    plan_in_graph(planner, 0, 9)
    assert (replayed(), replayed()) == ("sglang_dsa_whole_dense", None)
    plan_in_graph(planner, 0, 9)
    with pytest.raises(RuntimeError, match="16 rows and SGLang replays that of 32"):
        hooks.replay(lambda *_: None, graphs, ShapeKey(32), None)


@pytest.mark.parametrize("value", ["on", "off", "long"])
def test_hooks_follow_the_setting(monkeypatch, value):
    queued = []
    monkeypatch.setattr(HookRegistry, "register", lambda target, hook, kind: queued.append(target))
    monkeypatch.setenv("SGLANG_DSA_PLUGIN_WHOLE_PREFILL", value)
    hooks.register()
    assert len(queued) == (0 if value == "off" else 2)
