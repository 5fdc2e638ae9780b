"""What a server will use, by flags, model dtype and settings; every refusal by its message."""

import pytest
import torch

from sglang_dsa_plugin import plan, support
from sglang_dsa_plugin.cache.layouts import FP8
from sglang_dsa_plugin.kernel_flags import KernelFlags
from sglang_dsa_plugin.support_row import Where

BF16, FP32 = torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    ("model", "flag", "layout", "declared", "keys"),
    [
        (BF16, "auto", "bf16_1152", "bfloat16", FP8),
        (BF16, "bf16", "bf16_1152", "bfloat16", FP8),
        (BF16, "bfloat16", "bf16_1152", "bfloat16", FP8),
        (BF16, "fp8_e4m3", "fp8_656", "fp8_e4m3", FP8),
        (FP32, "auto", "fp32_2304", "auto", FP32),
        (FP32, "bfloat16", "bf16_1152", "bfloat16", FP32),
        (FP32, "fp8_e4m3", "fp8_656", "fp8_e4m3", FP32),
    ],
)
def test_layout_and_keys_follow_flag_and_model(model, flag, layout, declared, keys):
    serving = plan.plan_serving(model_dtype=model, kv_cache_dtype=flag)
    assert serving.latent.name == layout
    assert serving.kv_cache_dtype == declared
    assert serving.index_key_dtype == keys
    turned = "on queries and keys" if keys == FP8 else "off on both sides"
    assert serving.reasons["rotation"].startswith(turned)
    assert layout in serving.describe() and "sparse_mla: numba" in serving.describe()


@pytest.mark.parametrize(("choice", "keys"), [("fp8", FP8), ("model", FP32), ("auto", FP32)])
def test_index_keys_setting(monkeypatch, choice, keys):
    monkeypatch.setenv("SGLANG_DSA_PLUGIN_INDEX_KEYS", choice)
    assert plan.plan_serving(model_dtype=FP32).index_key_dtype == keys


@pytest.mark.parametrize(("choice", "layout"), [("auto", "fp8_656"), ("fp8_656", "fp8_656"), ("fp8_576", "fp8_576")])
def test_latent_layout_setting(monkeypatch, choice, layout):
    monkeypatch.setenv("SGLANG_DSA_PLUGIN_LATENT_LAYOUT", choice)
    assert plan.plan_serving(model_dtype=BF16, kv_cache_dtype="fp8_e4m3").latent.name == layout
    assert plan.plan_serving(model_dtype=BF16).latent.name == "bf16_1152"


def test_raw_and_packed_rows_cannot_share_a_pool():
    assert plan.latent_layout(FP8, KernelFlags("trtllm", "trtllm")).name == "fp8_576"
    assert plan.latent_layout(FP8, KernelFlags("flashmla_kv", "flashmla_kv")).name == "fp8_656"
    assert plan.latent_layout(BF16, KernelFlags(decode="trtllm")).name == "bf16_1152"
    with pytest.raises(plan.Refusal, match="--dsa-prefill-backend flashmla_kv and --dsa-decode-backend trtllm"):
        plan.latent_layout(FP8, KernelFlags("flashmla_kv", "trtllm"))
    assert plan.latent_layout(FP8, KernelFlags(decode="trtllm")).name == "fp8_576"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model_dtype": torch.float16}, "--dtype float16 .* use --dtype bfloat16"),
        (
            {"model_dtype": torch.float16, "dtype": "auto"},
            r"--dtype auto \(float16 for this checkpoint, by SGLang\) is not served .* use --dtype bfloat16",
        ),
        ({"max_total_tokens": 64}, "--max-total-tokens 64 is less than any request needs: .* give at least 192"),
        ({"max_total_tokens": 191}, "--max-total-tokens 191 is less"),
        ({"max_total_tokens": 0}, "--max-total-tokens 0 is less"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "--kv-cache-dtype fp8_e5m2 .* use one of auto, bf16, bfloat16, fp8_e4m3"),
        ({"kv_cache_dtype": "mxfp8"}, "--kv-cache-dtype mxfp8"),
        ({"page_size": 1}, "--page-size 1 .* set it to 64"),
        ({"page_size": 128}, "--page-size 128"),
        ({"flags": KernelFlags(prefill="flashmla_sparse")}, "--dsa-prefill-backend flashmla_sparse .* leave the flag"),
        ({"flags": KernelFlags(decode="fa3")}, "--dsa-decode-backend fa3 names a GPU kernel, and .* runs on a CPU"),
    ],
)
def test_refusals_name_the_flag_and_the_remedy(arguments, message):
    with pytest.raises(plan.Refusal, match=message):
        plan.plan_serving(**{"model_dtype": BF16, **arguments})


def test_a_pool_of_three_pages_may_be_given():
    assert plan.plan_serving(model_dtype=BF16, max_total_tokens=192) == plan.plan_serving(model_dtype=BF16)


def test_page_size_64_may_be_given():
    assert plan.plan_serving(model_dtype=BF16, page_size=64) == plan.plan_serving(model_dtype=BF16)


def test_a_forced_implementation_applies_where_it_exists(monkeypatch):
    monkeypatch.setenv("SGLANG_DSA_PLUGIN_IMPL", "torch")
    assert plan.forced_impl("sparse_mla") == "torch"
    choices = plan.operator_choices("cpu", "bf16_1152")
    assert all("asked for by name" in choice.reason for choice in choices.values())


def test_an_implementation_that_one_operator_lacks_leaves_it_to_the_table(monkeypatch):
    extra = support.Implementation("sparse_mla", "extra", lambda: None)
    monkeypatch.setattr(support, "_ROWS", [*support.rows(), extra])
    support._choose.cache_clear()
    monkeypatch.setenv("SGLANG_DSA_PLUGIN_IMPL", "extra")
    try:
        assert plan.forced_impl("sparse_mla") == "extra" and plan.forced_impl("dense_mha") is None
        assert plan.operator_choices("cpu", "bf16_1152")["sparse_mla"].name == "extra"
    finally:
        support._choose.cache_clear()


def test_a_name_that_no_operator_has_is_refused(monkeypatch):
    monkeypatch.setenv("SGLANG_DSA_PLUGIN_IMPL", "tritn")
    with pytest.raises(plan.Refusal, match=r"SGLANG_DSA_PLUGIN_IMPL='tritn': no operator has .* use .*torch"):
        plan.plan_serving(model_dtype=BF16)


@pytest.mark.parametrize(
    ("device", "sm", "layout", "packages", "dense"),
    [
        ("cuda", 90, "bf16_1152", "all", True),
        ("cuda", 90, "bf16_1152", "none", False),
        ("cuda", 120, "fp8_656", "all", False),
        # Without a sparse kernel either, dense is the cheaper of two ways in torch.
        ("cuda", 90, "fp32_2304", "none", True),
        ("cpu", None, "bf16_1152", "none", True),
    ],
)
def test_dense_prefill_only_where_it_is_not_the_slow_way(device, sm, layout, packages, dense):
    dtype = torch.float32 if layout == "fp32_2304" else BF16
    why = plan.why_not_dense(device, plan.operator_choices(device, layout, sm, dtype, 16, packages))
    assert (why is None) == dense
    assert why is None or "no dense kernel" in why


SMS = (80, 86, 89, 90, 100, 103, 120, 121)


@pytest.mark.parametrize("packages", ["all", "none"])
@pytest.mark.parametrize("sm", [None, *SMS])
def test_every_cell_has_something_to_run(sm, packages):
    device = "cpu" if sm is None else "cuda"
    for kv in ("auto", "bf16", "fp8_e4m3"):
        for heads in (8, 16, 32, 64, 128):
            serving = plan.plan_serving(model_dtype=BF16, kv_cache_dtype=kv, device=device, sm=sm, heads=heads)
            layout = serving.latent.name
            choices = plan.operator_choices(device, layout, sm, BF16, heads, packages)
            assert all(choice.reason for choice in choices.values())
            on_cpu = "numba" if packages == "all" and heads <= 32 else "torch"
            assert choices["sparse_mla"].name == (on_cpu if sm is None else "triton")
            assert serving.capturable == (sm is not None)
            for k in (64, 256, 1024, 2048):
                assert support.choose("index_select_paged", device=device, sm=sm, k=k).implementation.load()
            if packages == "none":
                assert all(choice.implementation.package is None for choice in choices.values())


def test_a_choice_says_what_other_numbers_of_rows_take():
    found = plan.operator_choices("cuda", "bf16_1152", 90, BF16, 64, "all", index_heads=64, topk=2048)
    assert found["sparse_mla"].words == "triton, fa3 from 16 rows on, flash_mla from 256"
    assert found["sparse_mla_prefill"].words == "flash_mla"
    assert found["index_select_prefill"].words == "triton, deep_gemm from 256 rows a request on"
    assert found["index_select_paged"].words == "triton, deep_gemm from 16 rows on"
    assert found["dense_mha"].words == "fa3"
    few = plan.operator_choices("cuda", "bf16_1152", 120, BF16, 16, "all", index_heads=32, topk=2048)
    assert few["sparse_mla"].words == "triton"
    assert plan.operator_choices("cpu", "bf16_1152")["sparse_mla"].words == "numba, torch from 16 rows on"


def test_a_flag_of_one_phase_leaves_the_steps_of_the_other():
    found = plan.operator_choices(
        "cuda", "bf16_1152", 90, BF16, 64, "all", index_heads=64, topk=2048, flags=KernelFlags(decode="fa3")
    )
    assert found["sparse_mla"].words == "fa3"
    assert found["sparse_mla_prefill"].words == "triton, fa3 from 16 rows on, flash_mla from 256"


def test_a_decode_graph_needs_every_step_to_be_recordable(monkeypatch):
    slow = support.Implementation("sparse_mla", "slow", lambda: None, first=Where(min_rows=16))
    monkeypatch.setattr(support, "_ROWS", [slow, *support.rows()])
    support._choose.cache_clear()
    try:
        serving = plan.plan_serving(model_dtype=BF16, device="cuda", sm=120)
        assert serving.implementations["sparse_mla"] == "triton" and not serving.capturable
        assert "off, sparse_mla=slow reads values on the host" in serving.reasons["decode CUDA graph"]
    finally:
        support._choose.cache_clear()


@pytest.mark.parametrize(
    ("topk", "whole"), [(None, True), ("torch", True), ("flashinfer", False), ("sgl-kernel", True)]
)
def test_picks_are_whole_where_the_selection_promises_it(topk, whole):
    """sgl-kernel is SGLang's default for this flag and leaves the choice to the table, where the selection is ours."""
    flags = KernelFlags(None, None, topk, None)
    choices = plan.operator_choices(
        "cuda", "bf16_1152", 90, torch.bfloat16, 16, "all", index_heads=64, topk=2048, flags=flags
    )
    assert plan.picks_are_whole(choices) is whole
