"""The start-up line names everything in use, by number of rows where it differs."""

from types import SimpleNamespace

import torch

from sglang_dsa_plugin import plan
from sglang_dsa_plugin.adapter import report
from sglang_dsa_plugin.cache.layouts import FP8, LATENT_LAYOUTS


def line(**asked):
    config = SimpleNamespace(
        architecture="DeepseekV32ForCausalLM", index_topk=2048, index_n_heads=64, index_rope_layout="half"
    )
    choices = plan.operator_choices(
        "cuda", "bf16_1152", dtype=torch.bfloat16, packages="all", index_heads=64, topk=2048, **asked
    )
    backend = SimpleNamespace(config=config, choices=choices, describe_prefill=lambda: "prefill as it comes")
    pool = SimpleNamespace(
        index_pages=SimpleNamespace(key_dtype=FP8, buffer=[torch.empty(1), torch.empty(0)]),
        layer_num=2,
        size=64,
        page_size=64,
        get_kv_size_bytes=lambda: 1 << 20,
        layout=LATENT_LAYOUTS["bf16_1152"],
        dtype=torch.bfloat16,
    )
    return report.serving_line(backend, pool)


def test_where_rows_decide_each_step_is_named_once():
    found = line(sm=90, heads=64)
    assert "sparse_mla=triton, fa3 from 16 rows on, flash_mla from 256: first of the table" in found
    assert "sparse_mla_prefill=flash_mla: " in found and found.count("fa3 from 16 rows on") == 1
    assert "index_select_prefill=triton, deep_gemm from 256 rows a request on: " in found
    assert "keys of 132 B in 1 of 2 layers" in found


def test_where_they_do_not_there_is_one_name():
    assert "sparse_mla=triton: " in line(sm=120, heads=16)
