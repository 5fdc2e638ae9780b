"""The installed kernel packages still have the functions and parameters that the adapters use, read from their sources.

Importing them needs a GPU's libraries, so nothing is imported.
"""

import ast
import importlib.util
from pathlib import Path

import pytest

USED = {
    ("flash_mla", "flash_mla_interface.py", "flash_mla_with_kvcache"): (
        "q", "k_cache", "block_table", "cache_seqlens", "head_dim_v", "tile_scheduler_metadata", "softmax_scale",
        "is_fp8_kvcache", "indices", "attn_sink", "use_legacy",
    ),
    ("flash_mla", "flash_mla_interface.py", "flash_mla_sparse_fwd"): (
        "q", "kv", "indices", "sm_scale", "attn_sink", "topk_length", "use_legacy", "return_log2_lse",
    ),
    ("flash_mla", "flash_mla_interface.py", "get_mla_metadata"): (),
    ("sgl_kernel", "flash_attn.py", "flash_attn_with_kvcache"): (
        "q", "k_cache", "v_cache", "qv", "page_table", "cache_seqlens", "softmax_scale", "causal",
        "return_softmax_lse", "out", "scheduler_metadata",
    ),
    ("sgl_kernel", "flash_attn.py", "get_scheduler_metadata"): (
        "batch_size", "max_seqlen_q", "max_seqlen_k", "num_heads", "num_heads_k", "headdim", "headdim_v",
        "cache_seqlens", "qkv_dtype", "page_size", "causal",
    ),
    ("sgl_kernel", "flash_attn.py", "flash_attn_varlen_func"): (
        "q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "softmax_scale", "causal",
        "return_softmax_lse",
    ),
    ("sgl_kernel", "top_k.py", "fast_topk_v2"): ("score", "lengths", "topk"),
    ("deep_gemm", "__init__.py", "fp8_mqa_logits"): (
        "q", "kv", "weights", "ks", "ke", "clean_logits", "max_seqlen_k",
    ),
    ("deep_gemm", "__init__.py", "fp8_paged_mqa_logits"): (
        "q", "kv_cache", "weights", "context_lens", "block_table", "schedule_meta", "max_context_len", "clean_logits",
    ),
    ("deep_gemm", "__init__.py", "get_paged_mqa_logits_metadata"): ("context_lens", "block_kv", "num_sms"),
    ("flashinfer", "topk.py", "top_k"): ("input", "k", "sorted", "deterministic", "tie_break", "dsa_graph_safe"),
    ("flashinfer", "mla/_core.py", "trtllm_batch_decode_with_kv_cache_mla"): (
        "query", "kv_cache", "workspace_buffer", "qk_nope_head_dim", "kv_lora_rank", "qk_rope_head_dim",
        "block_tables", "seq_lens", "max_seq_len", "sparse_mla_top_k", "out", "bmm1_scale", "bmm2_scale", "backend",
        "lse", "return_lse", "return_lse_base",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("package", "file", "function"), USED)
def test_parameters_are_there(package, file, function):
    found = importlib.util.find_spec(package)
    if found is None:
        pytest.skip(f"{package} is not installed")
    source = (Path(found.origin).parent / file).read_text()
    names = [
        [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef) and node.name == function
    ]
    assert names, f"{function} is gone from {package}/{file}"
    assert set(USED[package, file, function]) <= set(names[0])
