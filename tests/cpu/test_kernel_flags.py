"""SGLang's kernel flags: every value it accepts is served or refused by name, on mocked GPUs."""

import argparse
import itertools

import pytest
import torch

from sglang_dsa_plugin import kernel_flags, plan, support
from sglang_dsa_plugin.kernel_flags import ATTENTION, DECODE, LOGITS, PREFILL, TOPK, KernelFlags, Refusal

BF16 = torch.bfloat16
SMS = (80, 86, 89, 90, 100, 103, 120, 121)
KV = {"bf16_1152": "bf16", "fp8_656": "fp8_e4m3", "fp8_576": "fp8_e4m3"}


@pytest.fixture(autouse=True)
def all_packages(monkeypatch):
    monkeypatch.setattr("sglang_dsa_plugin.support_row.unusable", lambda package: None)
    support._choose.cache_clear()
    yield
    support._choose.cache_clear()


def serving(sm=90, kv="auto", dtype=BF16, heads=16, index_heads=64, topk=2048, **flags):
    """picker: the flag of the selection, as topk is the number of picks."""
    flags = {"topk" if name == "picker" else name: value for name, value in flags.items()}
    return plan.plan_serving(
        model_dtype=dtype,
        kv_cache_dtype=kv,
        device="cuda",
        sm=sm,
        heads=heads,
        index_heads=index_heads,
        topk=topk,
        flags=KernelFlags(**flags),
    )


@pytest.mark.parametrize(
    ("sm", "kv", "flags", "prefill", "decode"),
    [
        (90, "bf16", {"prefill": "flashmla_sparse"}, "flash_mla", "triton"),
        (90, "bf16", {"decode": "flashmla_sparse"}, "cuda", "flash_mla"),
        (90, "bf16", {"prefill": "flashmla_sparse", "decode": "fa3"}, "flash_mla", "fa3"),
        (90, "bf16", {"prefill": "fa3", "decode": "triton"}, "fa3", "triton"),
        (90, "fp8_e4m3", {"prefill": "flashmla_kv", "decode": "flashmla_kv"}, "flash_mla_kv", "flash_mla_kv"),
        (90, "fp8_e4m3", {"prefill": "triton_sparse_mla", "decode": "flashmla_kv"}, "triton", "flash_mla_kv"),
        (90, "bf16", {"prefill": "flashmla_auto"}, "flash_mla", "triton"),
        (90, "fp8_e4m3", {"prefill": "flashmla_auto"}, "flash_mla_kv", "triton"),
        (100, "fp8_e4m3", {"prefill": "trtllm", "decode": "trtllm"}, "trtllm_fp8", "trtllm_fp8"),
        (100, "fp8_e4m3", {"prefill": "triton", "decode": "trtllm"}, "triton", "trtllm_fp8"),
        (100, "fp8_e4m3", {"prefill": "trtllm", "decode": "triton"}, "trtllm_fp8", "triton"),
        (100, "fp8_e4m3", {"decode": "trtllm"}, "triton", "trtllm_fp8"),
        (103, "bf16", {"prefill": "flashmla_sparse", "decode": "trtllm"}, "flash_mla", "trtllm"),
        (120, "fp8_e4m3", {"prefill": "triton", "decode": "triton"}, "triton", "triton"),
        (80, "bf16", {"decode": "triton"}, "triton", "triton"),
    ],
)
def test_a_phase_gets_the_kernel_of_its_flag(sm, kv, flags, prefill, decode):
    found = serving(sm, kv, **flags)
    assert found.implementations["sparse_mla_prefill"] == prefill
    assert found.implementations["sparse_mla"] == decode
    assert found.capturable
    assert found.latent.name == ("fp8_576" if "trtllm_fp8" in (prefill, decode) else found.latent.name)


@pytest.mark.parametrize("heads", [8, 16, 32, 64, 128])
@pytest.mark.parametrize("value", ATTENTION)
@pytest.mark.parametrize("sm", SMS)
@pytest.mark.parametrize("kv", ["bf16", "fp8_e4m3"])
def test_every_pair_of_value_and_gpu_is_served_as_asked_or_refused_by_its_flag(kv, sm, value, heads):
    """Both phases ask for it where it serves both."""
    both = {"prefill": value} if value in kernel_flags.PREFILL_ONLY else {"prefill": value, "decode": value}
    try:
        found = serving(sm, kv, heads=heads, **both)
    except Refusal as refusal:
        assert f"{PREFILL} {value}" in str(refusal) or f"{DECODE} {value}" in str(refusal)
        assert "leave the flag out" in str(refusal)
        return
    assert found.implementations["sparse_mla_prefill"] == ATTENTION[value][found.latent.name]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"prefill": "flashmla_kv"},
            f"{PREFILL} flashmla_kv reads fp8_656 rows, and the pool holds bf16_1152; use one",
        ),
        ({"decode": "flashmla_kv"}, f"{DECODE} flashmla_kv reads fp8_656 rows, and the pool holds bf16_1152; use one"),
        ({"kv": "fp8_e4m3", "decode": "fa3"}, f"{DECODE} fa3 reads bf16_1152 rows, and the pool holds fp8_656"),
        ({"kv": "fp8_e4m3", "decode": "flashmla_sparse"}, f"{DECODE} flashmla_sparse reads bf16_1152 rows"),
        ({"kv": "fp8_e4m3", "prefill": "flashmla_sparse"}, "use one of flashmla_kv, flashmla_auto, triton, "),
        (
            {"kv": "fp8_e4m3", "prefill": "flashmla_kv", "decode": "trtllm"},
            f"{PREFILL} flashmla_kv and {DECODE} trtllm read different fp8 rows .fp8_656 and fp8_576. and cannot share",
        ),
        (
            {"kv": "fp8_e4m3", "prefill": "flashmla_sparse", "decode": "trtllm", "sm": 100},
            f"{PREFILL} flashmla_sparse reads bf16_1152 rows, and the pool holds fp8_576; use one of trtllm, triton, ",
        ),
        (
            {"kv": "fp8_e4m3", "prefill": "tilelang", "decode": "trtllm"},
            f"{PREFILL} tilelang is part of SGLang's own attention",
        ),
        ({"decode": "flashmla_auto"}, f"{DECODE} flashmla_auto chooses among kernels for prefill only; use one of"),
        ({"decode": "triton_sparse_mla"}, f"{DECODE} triton_sparse_mla chooses among kernels for prefill only"),
        ({"prefill": "flashmla_sparse_q8"}, f"{PREFILL} flashmla_sparse_q8 rounds .* use flashmla_sparse"),
        ({"prefill": "tilelang"}, f"{PREFILL} tilelang is part of SGLang's own attention .* use triton"),
        ({"decode": "aiter"}, f"{DECODE} aiter is for AMD GPUs"),
        ({"decode": "intel_xpu"}, f"{DECODE} intel_xpu is for Intel GPUs"),
        ({"decode": "flashinfer_sparse_mla"}, f"{DECODE} flashinfer_sparse_mla is not served; use triton"),
        ({"decode": "new_one"}, f"{DECODE} new_one is not known here; use one of flashmla_sparse, "),
        ({"sm": 80, "decode": "fa3"}, f"{DECODE} fa3 cannot be served here: .*built for SM 9.0, this GPU is SM 8.0"),
        (
            {"sm": 120, "prefill": "flashmla_sparse"},
            "built for SM 9.0, 10.0, 10.3, this GPU is SM 12.0; leave the flag",
        ),
        ({"sm": 90, "decode": "trtllm"}, f"{DECODE} trtllm cannot be served here: .*built for SM 10.0, 10.3"),
        (
            {"dtype": torch.float32, "kv": "bf16", "decode": "fa3"},
            f"{DECODE} fa3 cannot .* takes bfloat16, not float32",
        ),
        ({"dtype": torch.float32, "decode": "fa3"}, "reads bf16_1152 rows, and the pool holds fp32_2304; give another"),
        ({"topk": 1024, "logits": "cutedsl"}, f"{LOGITS} cutedsl is part of SGLang's own indexer .* use deepgemm"),
        ({"logits": "aiter"}, f"{LOGITS} aiter is for AMD GPUs"),
        ({"logits": "deepgemm", "sm": 120}, f"{LOGITS} deepgemm cannot be served here: .*built for SM 9.0, 10.0, 10.3"),
        ({"logits": "deepgemm", "index_heads": 128}, f"{LOGITS} deepgemm cannot .* takes 1-64 heads, not 128"),
        (
            {"logits": "deepgemm", "dtype": torch.float32},
            f"{LOGITS} deepgemm cannot .* takes float8_e4m3fn, not float32",
        ),
        ({"picker": "flashinfer", "topk": 4096}, f"{TOPK} flashinfer cannot .* takes k up to 2048, not 4096"),
        ({"picker": "other"}, f"{TOPK} other is not known here; use one of sgl-kernel, torch, flashinfer"),
    ],
)
def test_each_refusal_names_its_flag_and_the_remedy(arguments, message):
    flags = {"topk" if name == "picker" else name: arguments[name] for name in FLAGS if name in arguments}
    rest = {name: value for name, value in arguments.items() if name not in FLAGS}
    with pytest.raises(Refusal, match=message) as refusal:
        plan.plan_serving(
            model_dtype=rest.get("dtype", BF16),
            kv_cache_dtype=rest.get("kv", "auto"),
            device="cuda",
            sm=rest.get("sm", 90),
            heads=16,
            index_heads=rest.get("index_heads", 64),
            topk=rest.get("topk", 2048),
            flags=KernelFlags(**flags),
        )
    assert "leave the flag out" in str(refusal.value) or "leave one of the flags out" in str(refusal.value)


FLAGS = ("prefill", "decode", "picker", "logits")


@pytest.mark.parametrize(
    ("flags", "decode", "prefill"),
    [
        ({}, "triton", "deep_gemm"),
        ({"topk": "sgl-kernel", "logits": "auto"}, "triton", "deep_gemm"),
        ({"topk": "torch"}, "torch_topk", None),
        ({"topk": "flashinfer"}, "flashinfer", None),
        ({"logits": "deepgemm"}, "deep_gemm", "deep_gemm"),
        ({"logits": "deepgemm", "topk": "flashinfer"}, "deep_gemm_flashinfer", "flashinfer"),
        ({"logits": "deepgemm", "topk": "torch"}, "deep_gemm_torch_topk", "torch_topk"),
    ],
)
def test_index_flags(flags, decode, prefill):
    """The flag for scores is decode's, and the table takes DeepGEMM's in prefill; the selection is for both phases."""
    found = plan.plan_serving(
        model_dtype=BF16, device="cuda", sm=90, heads=16, index_heads=64, topk=2048, flags=KernelFlags(**flags)
    )
    assert found.implementations["index_select_paged"] == decode
    assert found.implementations.get(plan.INDEX_PREFILL) == prefill
    assert found.capturable


@pytest.mark.parametrize("value", ["torch", "sgl-kernel", None])
def test_on_a_cpu_selection_is_torch_already(value):
    found = plan.plan_serving(model_dtype=BF16, flags=KernelFlags(topk=value))
    assert found.implementations["index_select_paged"] == "torch"


@pytest.mark.parametrize(
    ("flags", "flag"),
    [
        *(({"prefill": value}, f"{PREFILL} {value}") for value in ATTENTION),
        ({"decode": "fa3"}, f"{DECODE} fa3"),
        ({"topk": "flashinfer"}, f"{TOPK} flashinfer"),
        ({"logits": "deepgemm"}, f"{LOGITS} deepgemm"),
    ],
)
def test_on_a_cpu_gpu_kernels_are_refused(flags, flag):
    with pytest.raises(Refusal, match=f"{flag} names a GPU kernel, and this server runs on a CPU; leave the flag out"):
        plan.plan_serving(model_dtype=BF16, flags=KernelFlags(**flags))


def test_a_flag_comes_before_the_switch(monkeypatch):
    monkeypatch.setenv("SGLANG_DSA_PLUGIN_IMPL", "torch")
    found = serving(decode="fa3")
    assert found.implementations["sparse_mla"] == "fa3" and found.implementations["sparse_mla_prefill"] == "torch"
    assert found.reasons["sparse_mla"] == "fa3 (by --dsa-decode-backend fa3)"


def test_flags_survive_the_way_to_a_worker():
    for value in (None, "fa3", "flashmla_kv"):
        there = KernelFlags.published(kernel_flags.declared(value), kernel_flags.declared(None), "torch", "auto")
        assert there == KernelFlags(value, None, "torch", "auto")
    assert kernel_flags.declared(None) == "sglang_dsa_plugin" != kernel_flags.declared("fa3")


FIELDS = {"prefill": PREFILL, "decode": DECODE, "topk": TOPK, "logits": LOGITS}
ATTENTION_VALUES = [*ATTENTION, *kernel_flags._NOT_SERVED, "new_one"]
VALUES = {
    "prefill": ATTENTION_VALUES,
    "decode": ATTENTION_VALUES,
    "topk": ["sgl-kernel", "torch", "flashinfer", "new_one"],
    "logits": ["auto", "deepgemm", "cutedsl", "aiter", "new_one"],
}
# By what each kernel documents; all others read either.
FP8_ROWS = {"flashmla_kv": "fp8_656", "flashmla_auto": "fp8_656", "trtllm": "fp8_576"}


def refused(**asked):
    try:
        serving(**asked)
    except Refusal as refusal:
        return str(refusal)
    return None


@pytest.mark.parametrize(
    ("sm", "kv"), [(90, "bf16"), (90, "fp8_e4m3"), (100, "bf16"), (100, "fp8_e4m3"), (120, "bf16")]
)
@pytest.mark.parametrize("fields", list(itertools.combinations(FIELDS, 2)), ids="-".join)
def test_a_pair_is_refused_for_what_is_true_of_it(fields, sm, kv):
    """As each flag alone, by the flag that is at fault, unless both are attention and no row suits both."""
    place = {"sm": sm, "kv": kv, "topk": 4096 if sm == 120 else 2048}
    named = {field: "picker" if field == "topk" else field for field in fields}
    alone = {(f, v): refused(**place, **{named[f]: v}) for f in fields for v in VALUES[f]}
    for pair in itertools.product(*(VALUES[field] for field in fields)):
        message = refused(**place, **dict(zip(named.values(), pair)))
        at_fault = [f"{FIELDS[f]} {v} " for f, v in zip(fields, pair) if alone[f, v] is not None]
        apart = kv == "fp8_e4m3" and len({FP8_ROWS[v] for v in pair if v in FP8_ROWS}) == 2
        if message is None:
            assert not at_fault and not apart, pair
        elif "share a pool" in message:
            assert apart and f"{PREFILL} {pair[0]} and {DECODE} {pair[1]} read different fp8 rows" in message
        else:
            assert any(map(message.startswith, at_fault)), message


def test_rows_are_chosen_by_the_kernel_that_reads_one_kind_only():
    for other in ("triton", "triton_sparse_mla", None):
        assert KernelFlags(other, "trtllm").fp8_layout() == "fp8_576"
    assert KernelFlags("trtllm", "triton").fp8_layout() == KernelFlags("trtllm").fp8_layout() == "fp8_576"
    for flags in (KernelFlags("flashmla_kv", "triton"), KernelFlags("triton", "flashmla_kv")):
        assert flags.fp8_layout() == "fp8_656"
    assert KernelFlags("triton", "triton").fp8_layout() is KernelFlags().fp8_layout() is None


def test_rows_of_the_setting_are_named_as_such(monkeypatch):
    monkeypatch.setenv("SGLANG_DSA_PLUGIN_LATENT_LAYOUT", "fp8_656")
    message = refused(sm=100, kv="fp8_e4m3", decode="trtllm")
    assert "pool holds fp8_656" in message and "unset SGLANG_DSA_PLUGIN_LATENT_LAYOUT" in message
    assert "--kv-cache-dtype" not in message


def test_scores_and_selection_of_two_packages_need_both(monkeypatch):
    monkeypatch.setattr(
        "sglang_dsa_plugin.support_row.unusable",
        lambda package: f"{package} is not installed" if package == "flashinfer" else None,
    )
    support._choose.cache_clear()
    with pytest.raises(ValueError, match="flashinfer is not installed"):
        support.choose("index_select_paged", device="cuda", sm=90, impl="deep_gemm_flashinfer")


def test_every_value_sglang_accepts_is_known():
    arguments = pytest.importorskip("sglang.srt.server_args").ServerArgs
    parser = argparse.ArgumentParser()
    arguments.add_cli_args(parser)
    accepted = {option: action.choices for action in parser._actions for option in action.option_strings}
    for field, flag in FIELDS.items():
        for value in accepted[flag]:
            try:
                KernelFlags(**{field: value}).forced("bf16_1152", "cuda")
            except Refusal as refusal:
                assert str(refusal).startswith(f"{flag} {value} ") and "not known" not in str(refusal)
