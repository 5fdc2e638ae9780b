"""The prompts of the warm-up, with decode's graphs, make every kernel compile that random prompts meet later.

The launch code runs on tensors without memory, as on an H200, and instead of a kernel a recorder notes what Triton
compiles by: the kernel, its constants, the kinds of its tensors, whether their addresses are multiples of 16 bytes, and
which of its numbers are 1 or a multiple of 16.
"""

import functools
import itertools
import math
import random
import sys
import types

import pytest
import torch

pytest.importorskip("sglang")

from sglang_dsa_plugin import plan, support, tuned
from sglang_dsa_plugin.adapter import preload
from sglang_dsa_plugin.adapter.hooks import warmup
from sglang_dsa_plugin.cache.layouts import FP8, INDEX_PAGE_BYTES, LATENT_LAYOUTS
from sglang_dsa_plugin.kernel_flags import KernelFlags
from sglang_dsa_plugin.kernels.cuda import prepare, program, tensor_maps
from sglang_dsa_plugin.kernels.cuda import sparse_mla as sparse_mla_cuda
from sglang_dsa_plugin.kernels.triton import (
    index_front,
    index_scores,
    index_select,
    index_tables,
    latent_rows,
    mha_keys,
    query_rows,
    select,
    sparse_mla,
    sparse_mla_hopper,
    sparse_mla_hopper_fp8,
    sparse_mla_hopper_wide,
    sparse_mla_hopper_wide_fp8,
    step_rows,
)
from sglang_dsa_plugin.kernels.vendor import deep_gemm_load
from sglang_dsa_plugin.kernels.vendor import index_select as vendor_select
from sglang_dsa_plugin.ops import latent_rows as latent_rows_op
from sglang_dsa_plugin.support_row import MANY_ROWS, ROW_STEPS, SOME_ROWS

H200 = index_tables.Gpu("cuda", 90, 132, 227)
KERNELS = [
    (index_front, "keys_kernel"),
    (index_front, "queries_kernel"),
    (index_front, "front_kernel"),
    (latent_rows, "store_kernel"),
    (latent_rows, "load_kernel"),
    (mha_keys, "join_kernel"),
    (index_scores, "rows_kernel"),
    (index_scores, "keys_kernel"),
    (index_scores, "row_kernel"),
    (step_rows, "_rows_kernel"),
    (step_rows, "_clear_kernel"),
    (select, "rows_kernel"),
    (select, "split_kernel"),
    (select, "slots_kernel"),
    (query_rows, "join_kernel"),
    (sparse_mla, "gather_kernel"),
    (sparse_mla, "merge_kernel"),
    (sparse_mla_hopper, "gather_bf16"),
    (sparse_mla_hopper_fp8, "gather_fp8"),
    (sparse_mla_hopper_wide, "gather_bf16_wide"),
    (sparse_mla_hopper_wide_fp8, "gather_fp8_wide"),
]
BUDGET, SLOTS = 512 << 20, 4096 * 64
GRAPHS = [1, 2, 4, 8, *range(12, 257, 4)]


class Recorder:
    """Stands in for a kernel; `seen` collects what would be compiled."""

    def __init__(self, kernel, seen):
        self.kernel, self.seen = kernel, seen

    def __getitem__(self, _grid):
        return self.launch

    def launch(self, *arguments, **named):
        named = dict(zip(self.kernel.arg_names, arguments)) | named
        self.seen.add((self.kernel.fn.__name__, *sorted((name, self.kind(name, v)) for name, v in named.items())))

    def kind(self, name, value):
        if isinstance(value, torch.Tensor):
            aligned = value.storage_offset() * value.element_size() % 16 == 0
            return str(value.dtype) if aligned else f"{value.dtype} off a bound of 16 bytes"
        parameter = next((p for p in self.kernel.params if p.name == name), None)
        if parameter is None or parameter.is_constexpr:
            return repr(value)
        if parameter.do_not_specialize or not isinstance(value, int):
            return type(value).__name__
        return "1" if value == 1 else "16" if value % 16 == 0 else "int"


class Loaded:
    """Stands in for a kernel in CUDA C++ on an H200."""

    def launch(self, *_arguments, **_named):
        pass

    def clusters_at_once(self, _block, cluster):
        return {2: 66, 3: 39, 4: 30, 5: 22, 6: 17, 7: 15, 8: 15}[cluster]


@pytest.fixture
def seen(monkeypatch):
    """The set that the recorders fill, with the tables of an H200."""
    found = set()
    for module, name in KERNELS:
        monkeypatch.setattr(module, name, Recorder(getattr(module, name), found))
    monkeypatch.setattr(index_tables, "gpu_of", lambda device: H200)

    def kernel(source, name, device, defines=None, *, shared_bytes=0):
        found.add((source, name, *sorted((defines or {}).items())))
        return Loaded()

    monkeypatch.setattr(program, "kernel", kernel)
    monkeypatch.setattr(tensor_maps, "of_rows", lambda _: None)

    def scores(q, kv, weights, ks, ke, clean_logits, max_seqlen_k=0):
        # One kernel for all shapes where a column is a key, another one where it counts from a row's first key.
        found.add(("fp8_mqa_logits", max_seqlen_k > 0))
        columns = max_seqlen_k or len(kv[0]) + 256
        return weights.new_empty(len(q), -(-columns // 256) * 256)[:, : max_seqlen_k or len(kv[0])]

    def paged(q, cache, weights, lengths, table, schedule, longest, clean_logits):
        found.add(("fp8_paged_mqa_logits", q.shape[2]))
        return weights.new_empty(len(q), -(-longest // 256) * 256)[:, :longest]

    def schedule(lengths, page_size, processors):
        found.add(("paged_mqa_logits_metadata", -(-len(lengths) // 32)))
        return lengths.new_empty(processors + 1, 2)

    package = types.SimpleNamespace(fp8_mqa_logits=scores, get_num_sms=lambda: H200.processors)
    package.fp8_paged_mqa_logits = paged
    package.get_paged_mqa_logits_metadata = schedule
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setitem(sys.modules, "deep_gemm", package)
    return found


def step(rows, requests, longest, topk, heads, layout, scores, index_heads=64, decode=False, captured=False):
    """One layer of a step of `rows` rows from `requests` requests, the longest of `longest` tokens. scores: of prefill
    and decode, with DeepGEMM or without. captured: in a graph of decode.
    """

    def empty(*shape, dtype=torch.int32):
        return torch.empty(shape, dtype=dtype, device="meta")

    pages = -(-longest // 64)
    table, owner = empty(requests, pages), empty(rows)
    keys, lengths = empty(SLOTS // 64, INDEX_PAGE_BYTES, dtype=torch.uint8), empty(rows)
    where, norm = empty(rows, dtype=torch.int64), empty(128, dtype=torch.float32)
    key, query = empty(rows, 128, dtype=torch.bfloat16), empty(rows, index_heads * 128, dtype=torch.bfloat16)
    weights, cos_sin = empty(rows, index_heads, dtype=torch.float32), empty(longest, 64, dtype=torch.float32)
    front = (key, norm, norm, 1e-6, query, weights, where, cos_sin, "half", FP8, lengths, topk)
    q, gate = index_front.store_and_prepare(keys, where, *front)
    slots = empty(rows, topk)
    run = index_select.paged
    if scores == "deep_gemm" and (rows >= SOME_ROWS if decode else rows // requests >= MANY_ROWS):
        by = {"scores": "deep_gemm", "selection": "triton"}
        made = None
        if decode:
            made = vendor_select.plan(lengths, keys, table, owner, topk, BUDGET, eager=not captured, **by)
        run = functools.partial(vendor_select.paged, plan=made, **by)
    picks = run(q, keys, gate, lengths, table, owner, topk, 0, 0, BUDGET, slots_out=slots)
    # Picks of rows that keep every token.
    select.positions_to_slots(picks, table, owner, 64)
    spec = LATENT_LAYOUTS[layout]
    queries, rope = (empty(heads, rows, 512, dtype=torch.bfloat16), empty(rows, heads, 192, dtype=torch.bfloat16))
    cache = empty(SLOTS, spec.width, dtype=spec.dtype)
    measured = tuned.read(tuned.path_of("NVIDIA H200"))
    taken = tuned.nearest(measured, "sparse_mla", layout, heads, max(s for s in ROW_STEPS if s <= rows))
    # Kernels of other packages come compiled, but for FlashMLA's queries.
    if taken in ("flash_mla", "flash_mla_kv"):
        query_rows.whole_queries(queries.transpose(0, 1), rope[..., 128:], 64 if heads <= 64 else 128)
    if ours := {"cuda": sparse_mla_cuda, "triton": sparse_mla}.get(taken):
        rest = {"lengths": lengths, "q_rope": rope[..., 128:]}
        ours.sparse_mla(queries.transpose(0, 1), cache, slots, 0.07, layout, **rest)


def steps_of_the_warmup(topk, chunk, context):
    """(rows, requests, longest) of the steps that the warm-up's prompts past topk become."""
    _, (text,), *rest = warmup.prompts(topk, chunk, context - 16, 320)
    for begin in range(0, len(text), chunk):
        yield min(chunk, len(text) - begin), 1, min(begin + chunk, len(text))
    for batch in rest:
        shared = [
            next((i for i, (a, b) in enumerate(zip(prompt, text)) if a != b), len(prompt)) // 64 * 64
            for prompt in batch
        ]
        yield sum(map(len, batch)) - sum(shared), len(batch), max(map(len, batch))


def load_scores(topk, heads, layout, scores, requests=2048):
    """What a server loads of scores at its start, with DeepGEMM installed or without."""
    packages = "all" if scores == "deep_gemm" else "none"
    choices = plan.operator_choices("cuda", layout, 90, torch.bfloat16, heads, packages, index_heads=64, topk=topk)
    pages = torch.empty(9, INDEX_PAGE_BYTES, dtype=torch.uint8, device="meta")
    pool = types.SimpleNamespace(index_pages=types.SimpleNamespace(buffer=[pages]))
    preload.load_scores(choices, types.SimpleNamespace(index_n_heads=64, index_topk=topk), pool, requests)


@pytest.mark.parametrize(
    ("topk", "heads", "layout", "scores", "context", "longest", "graphs"),
    [
        (256, 16, "bf16_1152", "deep_gemm", 7024, 6000, GRAPHS),
        (2048, 8, "fp8_656", "triton", 7024, 6000, []),
        (2048, 16, "bf16_1152", "deep_gemm", 131072, 45_000, [1, 2, 4, 8]),
        (2048, 128, "bf16_1152", "triton", 131072, 45_000, GRAPHS),
        (2048, 64, "fp8_656", "deep_gemm", 131072, 45_000, []),
        (2048, 32, "fp8_656", "deep_gemm", 131072, 45_000, GRAPHS),
        (2048, 24, "fp8_656", "triton", 131072, 45_000, []),
    ],
    ids=lambda value: f"{len(value)} graphs" if isinstance(value, list) else None,
)
def test_no_step_meets_a_kernel_that_is_not_there(
    seen, caplog, topk, heads, layout, scores, context, longest, graphs
):  # fmt: skip
    chunk, rng = 8192, random.Random(0)
    model = (topk, heads, layout, scores)
    prepare.prepare(torch.device("cuda", 0), context + 64, topk, layout)
    loaded = len(seen)
    assert loaded > sparse_mla_cuda.MOST_BLOCKS
    load_scores(topk, heads, layout, scores)
    assert not caplog.records
    for batch in graphs:
        step(batch, batch, context, *model, decode=True, captured=True)
    only_graphs = len(seen)
    for shape in steps_of_the_warmup(topk, chunk, context):
        step(*shape, *model)

    def past_topk():
        return round(topk * (longest / topk) ** rng.random()) + 1

    before = set(seen)
    assert len(before) > only_graphs or not graphs
    for _ in range(1500):
        requests = rng.choice([1, 1, 1, 2, 3, 4, 8])
        rows = min(chunk, max(requests, round(2 ** rng.uniform(0, 13))))
        step(rows, requests, past_topk(), *model)
    for _ in range(500):  # few new tokens, equally many or not, of many requests
        requests, each = round(2 ** rng.uniform(0, 11)), rng.choice([1, 2, 3, 4])
        step(requests * each + rng.choice([0, 0, 1]), requests, past_topk(), *model)
    for _ in range(300):  # decode outside of graphs
        rows = round(2 ** rng.uniform(math.log2(max(graphs, default=1)), 11))
        step(rows, rows, past_topk(), *model, decode=True)
    missing = seen - before
    assert not missing, "\n".join(map(str, missing))


@pytest.mark.parametrize(("heads", "packages", "plans"), [(64, "all", True), (64, "none", False), (32, "all", False)])
@pytest.mark.parametrize("requests", [15, 40, 2048])
def test_scores_are_compiled_at_start(monkeypatch, heads, packages, plans, requests):
    triton, by_deep_gemm = [], []
    monkeypatch.setattr(index_select, "load", lambda *given, selection: triton.append((*given, selection)))
    monkeypatch.setattr(deep_gemm_load, "load", lambda *given, **by: by_deep_gemm.append((given, by)))
    choices = plan.operator_choices(
        "cuda", "bf16_1152", 90, torch.bfloat16, 16, packages, index_heads=heads, topk=2048
    )  # fmt: skip
    pages = torch.zeros(3, INDEX_PAGE_BYTES, dtype=torch.uint8)
    config = types.SimpleNamespace(index_n_heads=heads, index_topk=2048)
    pool = types.SimpleNamespace(index_pages=types.SimpleNamespace(buffer=[pages[:0], pages]))
    preload.load_scores(choices, config, pool, requests)
    # Powers of two: the last is the first that holds all rows of so many requests.
    most = {15: (16, 32, 64), 40: (64, 128, 256), 2048: (1024, 1024, 1024)}[requests]
    for each, last in zip((1, 2, 4), most):
        rows = [given[3] for given in triton if given[4] == each]
        assert rows[-1] == last and rows == [1 << p for p in range(11) if each <= 1 << p <= last]
    assert all(given[5] for given in triton)
    by = {"scores": "deep_gemm", "selection": "triton"}
    # Steps of fewer than 16 rows do not take it.
    assert by_deep_gemm == ([((pages, heads, 2048, requests), by)] if plans and requests >= 16 else [])


@pytest.mark.parametrize(
    ("impl", "flags", "triton", "by_deep_gemm"),
    [
        ("", {"topk": "torch"}, {False}, []),
        ("", {"topk": "flashinfer"}, {False}, []),
        ("sgl_kernel", {}, {False}, []),
        ("", {"topk": "torch", "logits": "deepgemm"}, {False}, [("deep_gemm", "torch_topk")]),
        ("", {"logits": "deepgemm"}, {True}, [("deep_gemm", "triton")]),
        ("deep_gemm", {}, set(), [("deep_gemm", "triton")]),
        ("torch", {}, set(), []),
    ],
)
def test_scores_are_compiled_whoever_selects_from_them(monkeypatch, impl, flags, triton, by_deep_gemm):
    """Also where scores by DeepGEMM were asked for by name and fewer than 16 requests may run."""
    monkeypatch.setenv("SGLANG_DSA_PLUGIN_IMPL", impl)
    selections, packages = [], []
    monkeypatch.setattr(index_select, "load", lambda *_, selection: selections.append(selection))
    monkeypatch.setattr(deep_gemm_load, "load", lambda *_, scores, selection: packages.append((scores, selection)))
    choices = plan.operator_choices(
        "cuda", "bf16_1152", 90, torch.bfloat16, 16, "all", index_heads=64, topk=2048, flags=KernelFlags(**flags)
    )  # fmt: skip
    pages = torch.zeros(3, INDEX_PAGE_BYTES, dtype=torch.uint8)
    pool = types.SimpleNamespace(index_pages=types.SimpleNamespace(buffer=[pages]))
    preload.load_scores(choices, types.SimpleNamespace(index_n_heads=64, index_topk=2048), pool, 8)
    assert set(selections) == triton and packages == by_deep_gemm


def test_scores_that_another_package_selects_from_are_those_that_were_loaded(seen):
    """Up to 1024 rows: past these the kernel is that of long prompts, which the warm-up brings."""
    pages = torch.empty(9, INDEX_PAGE_BYTES, dtype=torch.uint8, device="meta")
    for rows, each in itertools.product(preload.ROWS_OF_REQUESTS, preload.ROWS_EACH):
        if rows >= each:
            index_select.load(pages, 64, 2048, rows, each, selection=False)
    loaded, rng = set(seen), random.Random(0)
    assert {name for name, *_ in loaded} >= {"row_kernel", "keys_kernel"}
    assert {name for name, *_ in loaded} <= {"row_kernel", "keys_kernel", "rows_kernel"}
    for _ in range(300):
        rows = round(2 ** rng.uniform(0, 10))
        table = torch.empty(rows, 700, dtype=torch.int32, device="meta")
        owner = torch.empty(rows, dtype=torch.int32, device="meta")
        q, gate = torch.empty(rows, 64, 128, dtype=FP8, device="meta"), torch.empty(rows, 64, device="meta")
        by = {"scores": "triton", "selection": "torch_topk"}
        vendor_select.paged(q, pages, gate, owner, table, owner, 2048, 0, 0, 1 << 40, **by)
    assert seen == loaded


def test_a_start_goes_on_where_they_do_not_compile(monkeypatch, caplog):
    def refuse(*_, **__):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(index_select, "load", refuse)
    choices = plan.operator_choices("cuda", "bf16_1152", 90, torch.bfloat16, 16, "all", index_heads=64, topk=2048)
    pages = torch.zeros(3, INDEX_PAGE_BYTES, dtype=torch.uint8)
    pool = types.SimpleNamespace(index_pages=types.SimpleNamespace(buffer=[pages]))
    preload.load_scores(choices, types.SimpleNamespace(index_n_heads=64, index_topk=2048), pool, 256)
    assert "no compiler" in caplog.text


@pytest.mark.parametrize(("impl", "columns"), [("", 7024 + 64), ("triton", 0)])
def test_by_the_name_triton_nothing_is_compiled_by_nvrtc(monkeypatch, impl, columns):
    """What the README says of an NVRTC that does not work."""
    monkeypatch.setenv("SGLANG_DSA_PLUGIN_IMPL", impl)
    asked = []
    monkeypatch.setattr(prepare, "prepare", lambda *given: asked.append(given) or 0)
    monkeypatch.setattr(preload, "load_scores", lambda *_: None)
    monkeypatch.setattr(preload, "load_expanded", lambda *_: None)
    choices = plan.operator_choices("cuda", "bf16_1152", 90, torch.bfloat16, 16, "all", index_heads=64, topk=2048)
    pool = types.SimpleNamespace(layout=LATENT_LAYOUTS["bf16_1152"])
    config = types.SimpleNamespace(index_n_heads=64, index_topk=2048)
    preload.load_kernels(choices, config, pool, torch.device("cuda", 0), 7024, 16, 256, torch.bfloat16)
    ((_, wide, k, layout, portable),) = asked
    assert (wide, k, layout is None, portable) == (columns, 2048, impl == "triton", None)


@pytest.mark.parametrize(("sm", "impl", "fewest"), [(90, "cuda_portable", 1), (80, "", 16)])
def test_the_portable_kernel_by_name_is_loaded_for_a_single_row_as_well(monkeypatch, sm, impl, fewest):
    monkeypatch.setenv("SGLANG_DSA_PLUGIN_IMPL", impl)
    asked = []
    monkeypatch.setattr(prepare, "prepare", lambda *given: asked.append(given) or 0)
    monkeypatch.setattr(preload, "load_scores", lambda *_: None)
    monkeypatch.setattr(preload, "load_expanded", lambda *_: None)
    choices = plan.operator_choices("cuda", "bf16_1152", sm, torch.bfloat16, 128, "all", index_heads=64, topk=2048)
    pool = types.SimpleNamespace(layout=LATENT_LAYOUTS["bf16_1152"])
    config = types.SimpleNamespace(index_n_heads=64, index_topk=2048)
    preload.load_kernels(choices, config, pool, torch.device("cuda", 0), 7024, 128, 256, torch.bfloat16)
    ((*_, portable),) = asked
    assert portable == ("bf16_1152", 128, fewest)


def test_what_was_loaded_is_told_with_the_time_it_took(monkeypatch, caplog):
    """Kernels in CUDA C++ are counted, those of index scores are not, and each kind has its own time."""
    clock = iter([100.0, 103.0, 108.0])
    monkeypatch.setattr(preload, "time", types.SimpleNamespace(monotonic=lambda: next(clock)))
    monkeypatch.setattr(prepare, "prepare", lambda *_: 12)
    monkeypatch.setattr(preload, "load_scores", lambda *_: None)
    monkeypatch.setattr(preload, "load_expanded", lambda *_: None)
    choices = plan.operator_choices("cuda", "bf16_1152", 90, torch.bfloat16, 16, "all", index_heads=64, topk=2048)
    pool = types.SimpleNamespace(layout=LATENT_LAYOUTS["bf16_1152"])
    config = types.SimpleNamespace(index_n_heads=64, index_topk=2048)
    with caplog.at_level("INFO"):
        preload.load_kernels(choices, config, pool, torch.device("cuda", 0), 7024, 16, 256, torch.bfloat16)
    assert "12 kernels in CUDA C++ in 3.0 s" in caplog.text and "not counted, in 5.0 s" in caplog.text


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_scores_of_keys_in_the_models_dtype_are_loaded_as_well(seen, dtype):
    index_select.load(torch.empty(9, 64, 128, dtype=dtype, device="meta"), 64, 2048, 64, 2)
    ((_, *launch),) = [one for one in seen if one[0] == "keys_kernel"]
    assert dict(launch)["q"] == dict(launch)["k"] == str(dtype) and dict(launch)["ROWS"] == "64"


@pytest.mark.parametrize("layout", ["bf16_1152", "fp8_656", "fp8_576"])
@pytest.mark.parametrize(("heads", "nope", "value", "q_rank"), [(16, 128, 128, 1536), (8, 192, 256, 2048)])
def test_keys_that_prefill_expands_are_those_that_were_loaded(
    seen, monkeypatch, caplog, layout, heads, nope, value, q_rank
):
    spec, rng = LATENT_LAYOUTS[layout], random.Random(0)
    monkeypatch.setattr(support, "resolve", by_triton)
    rows = torch.empty(SLOTS, spec.width, dtype=spec.dtype, device="meta")
    pool = types.SimpleNamespace(layout=spec, start_layer=3, rows_of=lambda layer: {3: rows}[layer])
    sizes = {"qk_nope_head_dim": nope, "v_head_dim": value, "q_lora_rank": q_rank}
    preload.load_expanded(types.SimpleNamespace(**sizes), pool, heads, torch.bfloat16)
    loaded = set(seen)
    assert {name for name, *_ in loaded} == {"join_kernel", "load_kernel"}
    for _ in range(100):
        tokens = round(2 ** rng.uniform(0, 14))
        # As SGLang's projection and an expansion leave them (forward_mha.py).
        latent_and_rope = torch.empty(tokens, q_rank + 576, dtype=torch.bfloat16, device="meta")[:, q_rank:]
        rope, cached = latent_and_rope[:, 512:], rng.random() < 0.5
        if spec.dtype != torch.bfloat16 or cached:
            slots = torch.empty(tokens, dtype=torch.int32 if cached else torch.int64, device="meta")
            _, rope = latent_rows_op.load_parts(rows, slots, layout, torch.bfloat16)
        expanded = torch.empty(tokens, heads, nope + value, dtype=torch.bfloat16, device="meta")
        mha_keys.join(expanded[..., :nope], rope)
    assert seen == loaded and not caplog.records


def by_triton(operator, **_):
    """What a GPU takes of the rows that follow."""
    return {"mha_keys": mha_keys.join, "latent_rows_load": latent_rows.load}[operator]


def test_a_start_goes_on_where_keys_do_not_compile(monkeypatch, caplog):
    def refuse(*_, **__):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(preload.mha_keys, "join", refuse)
    spec = LATENT_LAYOUTS["fp8_656"]
    pool = types.SimpleNamespace(layout=spec, start_layer=0, rows_of=lambda _: torch.zeros(64, 656, dtype=torch.uint8))
    sizes = {"qk_nope_head_dim": 128, "v_head_dim": 128, "q_lora_rank": 64}
    preload.load_expanded(types.SimpleNamespace(**sizes), pool, 2, torch.bfloat16)
    assert "no compiler" in caplog.text


@pytest.mark.parametrize("layout", ["bf16_1152", "fp8_656"])
def test_what_is_loaded_writes_nothing_to_the_cache(layout):
    spec = LATENT_LAYOUTS[layout]
    rows = torch.full((64, spec.width), 3).to(spec.dtype)
    pool = types.SimpleNamespace(layout=spec, start_layer=0, rows_of=lambda _: rows)
    sizes = {"qk_nope_head_dim": 128, "v_head_dim": 128, "q_lora_rank": 64}
    preload.load_expanded(types.SimpleNamespace(**sizes), pool, 2, torch.bfloat16)
    assert torch.equal(rows, torch.full((64, spec.width), 3).to(spec.dtype))
