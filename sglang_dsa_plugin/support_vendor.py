"""Rows of the support table for kernels of other packages, and where a measurement puts them ahead of ours."""

from __future__ import annotations

from typing import Any

import torch

from sglang_dsa_plugin.support_row import HEADS, INDEX_MAX_K, MANY_ROWS, SOME_ROWS, TRITON_SMS, Implementation, Where

_VENDOR = "sglang_dsa_plugin.kernels.vendor"
_BF16 = frozenset({torch.bfloat16})
_HOPPER = frozenset({90})
_BLACKWELL = frozenset({100, 103})
_BY_NAME = Where(sm=frozenset())
_MANY_HEADS = frozenset(range(49, 129))
_MANY_INDEX_ROWS = Where(sm=_HOPPER, heads=frozenset({64}), min_rows=MANY_ROWS)

# The kernels of other packages that the table takes unasked: those that were run on a GPU against fp64 and measured
# faster than ours there (docs/benchmarks.md). All others are taken by name only, or where a GPU's own measured choices
# (tuned.py) name them. To move one, add or change its entry.
MEASURED: dict[tuple[str, str], Where] = {
    ("sparse_mla", "flash_mla"): Where(sm=_HOPPER, heads=_MANY_HEADS, min_rows=MANY_ROWS),
    # H200, S = 32K, k = 2048, 128 heads, 2026-11-30, microseconds of theirs, adapter included, against Triton: bf16
    # 34.3 / 37.7 (B = 16), 75 / 110 (64), fp8 17.2 / 17.3 (1), 37.6 / 56.3 (16); and with triton 3.6 64
    # rows of fp8 89.4 / 150, prefill of 4096 rows 4085 / 5977, fp8 5136 / 8675. With 64 heads and 16 rows
    # CUDA C++ is ahead on an H200 (2026-12-01: 28.7 / 26.6 in bf16, 29.6 / 29.2 in fp8), where tuned/ decides.
    ("sparse_mla", "fa3"): Where(sm=_HOPPER, heads=_MANY_HEADS, min_rows=SOME_ROWS),
    ("sparse_mla", "flash_mla_kv"): Where(sm=_HOPPER, heads=_MANY_HEADS, min_rows=SOME_ROWS),
    ("dense_mha", "fa3"): Where(sm=_HOPPER),
    # H200, 64 heads, T = 4096, S = 128K, 2026-11-30: scores and selection 12457 us ours, 10710 with scores by DeepGEMM.
    # Rows of a paged call are those of a request on average: with fewer, gathering the keys costs what scoring gains.
    ("index_scores_ragged", "deep_gemm"): _MANY_INDEX_ROWS,
    ("index_select_ragged", "deep_gemm"): _MANY_INDEX_ROWS,
    ("index_select_paged", "deep_gemm"): _MANY_INDEX_ROWS,
}
# The same of a step that makes what its layers need once. H200, 64 heads, a whole decode step (bf16 rows, 16 attention
# heads) of 1 / 16 / 64 rows, 2026-11-30, microseconds ours and with scores by DeepGEMM: S = 8K 24.2 / 44.0 / 86.3 and
# 25.3 / 42.8 / 83.0, 32K 24.9 / 56.9 / 142.6 and 25.4 / 55.9 / 137.9, 128K 29.5 / 112.2 / 363.9 and 29.0 / 109.7 /
# 357.3; with rows of 1024, none of which is scored, 15.5 / 21.7 / 35.1 and 16.1 / 21.9 / 35.9.
PLANNED: dict[tuple[str, str], Where] = {
    ("index_select_paged", "deep_gemm"): Where(sm=_HOPPER, heads=frozenset({64}), min_rows=SOME_ROWS),
}


def _vendor_row(
    operator: str, name: str, target: str, *, sm: frozenset[int], note: str, **features: Any
) -> Implementation:
    return Implementation(
        operator,
        name,
        f"{_VENDOR}.{target}",
        devices=frozenset({"cuda"}),
        sm=sm,
        first=MEASURED.get((operator, name), _BY_NAME),
        planned=PLANNED.get((operator, name)),
        note=note,
        **features,
    )


def _attention_row(
    name: str, target: str, layouts: set[str], sm: frozenset[int], note: str, **more: Any
) -> Implementation:
    return _vendor_row(
        "sparse_mla",
        name,
        target,
        sm=sm,
        layouts=frozenset(layouts),
        heads=HEADS,
        dtypes=_BF16,
        capturable=True,
        note=note,
        **more,
    )


_LEAN = frozenset({"q_rope", "prefix", "with_lse"})
_ATTENTION_ROWS = [
    _attention_row(
        "flash_mla",
        "flash_mla:sparse_mla",
        {"bf16_1152"},
        _HOPPER | _BLACKWELL,
        "FlashMLA sparse prefill, which computes 64 or 128 heads; ours computes fewer without padding",
        package="flash_mla",
        takes=_LEAN,
    ),
    _attention_row(
        "flash_mla_kv",
        "flash_mla:sparse_mla_packed",
        {"fp8_656"},
        _HOPPER | _BLACKWELL,
        "FlashMLA sparse decode on packed fp8 rows, which computes 64 or 128 heads",
        package="flash_mla",
        takes=_LEAN,
    ),
    _attention_row(
        "fa3",
        "fa3:sparse_mla",
        {"bf16_1152"},
        _HOPPER,
        "FlashAttention 3 as sgl-kernel builds it, with picks as a page table of single rows",
        package="sgl_kernel",
        takes=_LEAN,
    ),
    _attention_row(
        "trtllm",
        "trtllm:sparse_mla",
        {"bf16_1152"},
        _BLACKWELL,
        "TensorRT-LLM kernels through FlashInfer, not run",
        package="flashinfer",
    ),
    _attention_row(
        "trtllm_fp8",
        "trtllm:sparse_mla",
        {"fp8_576"},
        _BLACKWELL,
        "the same on raw fp8 rows, not run; it rounds the query to e4m3, too, which our bound does not allow for",
        package="flashinfer",
        exact=False,
    ),
    _vendor_row(
        "dense_mha",
        "fa3",
        "fa3:dense_mha",
        sm=_HOPPER,
        dtypes=_BF16,
        package="sgl_kernel",
        takes=frozenset({"with_lse"}),
        capturable=True,
        note="FlashAttention 3 as sgl-kernel builds it; on SM 8.x it takes no values narrower than keys",
    ),
]

_FP8 = frozenset({torch.float8_e4m3fn})
_DEEP_GEMM: dict[str, Any] = {
    "sm": _HOPPER | _BLACKWELL,
    "heads": frozenset(range(1, 65)),
    "dtypes": _FP8,
    "package": "deep_gemm",
}
# Selections of other packages, which pick as they like among equal scores: name -> features.
_SELECTIONS: dict[str, dict[str, Any]] = {
    "sgl_kernel": {"ks": frozenset({2048}), "package": "sgl_kernel", "sm": _HOPPER | _BLACKWELL},
    "flashinfer": {"max_k": 2048, "package": "flashinfer", "sm": TRITON_SMS},
    "torch_topk": {"sm": TRITON_SMS},
}
_GATHERED = (
    "scores by DeepGEMM, selection ours; for many rows a request keys are gathered first, and where these take "
    "more than half of the score budget, scores are Triton's"
)
_INEXACT = "not exact: among equal scores it picks as it likes"


def _index_rows() -> list[Implementation]:
    rows = [
        _vendor_row(
            f"index_scores_{form}",
            "deep_gemm",
            f"deep_gemm:{form}",
            takes=frozenset({"no_start"} if form == "ragged" else ()),
            note="DeepGEMM on fp8 keys, which computes 32 or 64 heads",
            **_DEEP_GEMM,
        )
        for form in ("ragged", "paged")
    ]
    rows.append(
        _vendor_row(
            "index_select_ragged",
            "deep_gemm",
            "index_select:ragged",
            takes=frozenset({"no_start"}),
            capturable=True,
            note="scores by DeepGEMM, selection ours",
            **_DEEP_GEMM,
            max_k=INDEX_MAX_K,
        )
    )
    for name, features in _SELECTIONS.items():
        for operator in ("topk", "topk_slots", "topk_ragged"):
            rows.append(
                _vendor_row(
                    operator,
                    name,
                    "topk:select_rows",
                    arguments=(("by", name),),
                    exact=False,
                    note=_INEXACT,
                    **features,
                )
            )
    for scores in ("triton", "deep_gemm"):
        for selection in ("triton", *_SELECTIONS):
            if scores == selection:
                continue
            exact = selection == "triton"
            features = {"heads": HEADS, "max_k": INDEX_MAX_K, **_SELECTIONS.get(selection, {"sm": TRITON_SMS})}
            name, note = selection, f"scores by Triton, selection by {selection}, {_INEXACT}"
            if scores == "deep_gemm":
                both = tuple(filter(None, (_DEEP_GEMM["package"], features.get("package"))))
                features |= {**_DEEP_GEMM, "sm": _DEEP_GEMM["sm"] & features["sm"], "package": both}
                name = scores if exact else f"{scores}_{selection}"
                note = _GATHERED if exact else f"scores by DeepGEMM, selection by {selection}, {_INEXACT}"
            rows.append(
                _vendor_row(
                    "index_select_paged",
                    name,
                    "index_select:paged",
                    arguments=(("scores", scores), ("selection", selection)),
                    exact=exact,
                    takes=frozenset({"slots_out"}),
                    plans=f"{_VENDOR}.index_select:plan" if scores == "deep_gemm" else None,
                    capturable=True,
                    note=note,
                    **features,
                )
            )
    return rows


VENDOR_ROWS: list[Implementation] = [*_ATTENTION_ROWS, *_index_rows()]
