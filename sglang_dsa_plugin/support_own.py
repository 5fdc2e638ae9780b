"""Rows of the support table (support.py) for this package's own implementations: CUDA C++, Triton, numba and torch."""

from __future__ import annotations

from typing import Any

import torch

from sglang_dsa_plugin.support_row import (
    CLUSTER_SMS,
    HEADS,
    INDEX_MAX_K,
    NO_VENDOR_SMS,
    SOME_ROWS,
    TRITON_SMS,
    Implementation,
    Where,
)

_TORCH = "sglang_dsa_plugin.kernels.torch_impl"
_TRITON = "sglang_dsa_plugin.kernels.triton"
_NUMBA = "sglang_dsa_plugin.kernels.numba"
_CUDA = "sglang_dsa_plugin.kernels.cuda"


def _torch_row(operator: str, module: str, function: str) -> Implementation:
    return Implementation(
        operator, "torch", f"{_TORCH}.{module}:{function}", note="vectorised torch, memory bounded by tiles; any device"
    )


def _triton_row(operator: str, module: str, function: str, also: str = "", **features: Any) -> Implementation:
    return Implementation(
        operator,
        "triton",
        f"{_TRITON}.{module}:{function}",
        devices=frozenset({"cuda"}),
        sm=TRITON_SMS,
        capturable=True,
        note=f"Triton{also}; run on SM 9.0, compiled for 8.0, 8.6, 8.9, 10.0 and 12.0",
        **features,
    )


def _numba_row(operator: str, module: str, function: str, **features: Any) -> Implementation:
    return Implementation(
        operator,
        "numba",
        f"{_NUMBA}.{module}:{function}",
        devices=frozenset({"cpu"}),
        package="numba",
        note="compiled for the CPU it runs on, one thread",
        **features,
    )


_TORCH_ROWS = [
    _torch_row("quantize_keys", "quant", "quantize_keys"),
    _torch_row("quantize_latent", "quant", "quantize_latent"),
    _torch_row("dequantize_latent", "quant", "dequantize_latent"),
    _torch_row("hadamard", "hadamard", "rotate"),
    _torch_row("rope", "rope", "apply"),
    _torch_row("index_scores_ragged", "index_scores", "ragged"),
    _torch_row("index_scores_paged", "index_scores", "paged"),
    _torch_row("topk", "select", "select_rows"),
    _torch_row("topk_slots", "select", "select_rows"),
    _torch_row("topk_ragged", "select", "select_rows"),
    _torch_row("positions_to_slots", "select", "positions_to_slots"),
    _torch_row("index_select_ragged", "index_select", "ragged"),
    _torch_row("index_select_paged", "index_select", "paged"),
    _torch_row("sparse_mla", "sparse_mla", "sparse_mla"),
    _torch_row("dense_mha", "dense_mha", "dense_mha"),
    _torch_row("masked_mha", "masked_mha", "masked_mha"),
    _torch_row("mha_keys", "mha_keys", "join"),
    _torch_row("key_pages_store", "key_pages", "store"),
    _torch_row("key_pages_load", "key_pages", "load"),
    _torch_row("key_pages_move", "key_pages", "move"),
    _torch_row("index_keys_store", "index_front", "store_keys"),
    _torch_row("index_queries", "index_front", "prepare_queries"),
    _torch_row("index_front", "index_front", "store_and_prepare"),
    _torch_row("latent_rows_store", "latent_rows", "store"),
    _torch_row("latent_rows_load", "latent_rows", "load"),
    _torch_row("latent_rows_move", "latent_rows", "move"),
]

_TRITON_ROWS = [
    _triton_row("index_scores_ragged", "index_scores", "ragged", heads=HEADS),
    _triton_row("index_scores_paged", "index_scores", "paged", heads=HEADS),
    _triton_row("topk", "select", "select_rows", max_k=INDEX_MAX_K),
    _triton_row("topk_slots", "select", "select_rows", max_k=INDEX_MAX_K),
    _triton_row("topk_ragged", "select", "select_rows", max_k=INDEX_MAX_K),
    _triton_row("positions_to_slots", "select", "positions_to_slots", takes=frozenset({"out"})),
    _triton_row("index_keys_store", "index_front", "store_keys"),
    _triton_row("index_queries", "index_front", "prepare_queries"),
    _triton_row("index_front", "index_front", "store_and_prepare"),
    _triton_row("latent_rows_store", "latent_rows", "store"),
    _triton_row("latent_rows_load", "latent_rows", "load"),
    _triton_row("mha_keys", "mha_keys", "join"),
    _triton_row("index_select_ragged", "index_select", "ragged", heads=HEADS, max_k=INDEX_MAX_K),
    _triton_row(
        "index_select_paged",
        "index_select",
        "paged",
        heads=HEADS,
        max_k=INDEX_MAX_K,
        takes=frozenset({"slots_out"}),
    ),
    _triton_row(
        "sparse_mla",
        "sparse_mla",
        "sparse_mla",
        also=", on SM 9.0 Gluon",
        layouts=frozenset({"bf16_1152", "fp8_656", "fp8_576"}),
        heads=HEADS,
        takes=frozenset({"q_rope"}),
    ),
]


def _cuda_row(
    operator: str, module: str, function: str, sm: frozenset[int], what: str, name: str = "cuda", **features: Any
) -> Implementation:
    return Implementation(
        operator,
        name,
        f"{_CUDA}.{module}:{function}",
        devices=frozenset({"cuda"}),
        sm=sm,
        package="cuda.core",
        capturable=True,
        note=f"CUDA C++, compiled for the GPU at hand by NVRTC: {what}",
        **features,
    )


# Ahead of Triton where they were measured faster (docs/benchmarks.md).
_CUDA_ROWS = [
    _cuda_row(
        "sparse_mla",
        "sparse_mla",
        "sparse_mla",
        frozenset({90}),
        "copies, scores and sums in three warpgroups, 16 heads at a time; blocks of a cluster share a row",
        layouts=frozenset({"bf16_1152", "fp8_656"}),
        heads=HEADS,
        dtypes=frozenset({torch.bfloat16}),
        first=Where(sm=frozenset({90}), heads=frozenset(range(1, 17)), min_rows=SOME_ROWS),
        takes=frozenset({"q_rope"}),
    ),
    # What GPUs without a vendor's kernel run for many heads, measured on SM 9.0 against the Triton kernel they ran.
    *(
        _cuda_row(
            "sparse_mla",
            "sparse_mla_portable",
            "sparse_mla",
            TRITON_SMS,
            "mma.sync, 32 or 64 heads a block, 99 KiB of shared memory, 163 where there are as many; a wider bound "
            "where values of many picks cancel (docs/operators.md); run on SM 9.0 only, compiled for "
            "8.0, 8.6, 8.9, 10.0, 12.0",
            name=name,
            layouts=frozenset({layout}),
            heads=HEADS,
            dtypes=frozenset({torch.bfloat16}),
            first=Where(sm=NO_VENDOR_SMS, heads=frozenset(range(33, 129)), min_rows=SOME_ROWS),
            takes=frozenset({"q_rope"}),
        )
        for name, layout in (("cuda_portable", "bf16_1152"), ("cuda_portable_fp8", "fp8_656"))
    ),
    _cuda_row(
        "latent_rows_store",
        "latent_rows",
        "store",
        CLUSTER_SMS,
        "a warp a row, run on SM 9.0; fewer than 16 rows, and what is not a plain copy, go to Triton",
        layouts=frozenset({"bf16_1152"}),
        first=Where(sm=frozenset({90})),
    ),
    *(
        _cuda_row(
            operator,
            "select",
            "select_rows",
            CLUSTER_SMS,
            "a cluster of blocks a row, one block if rows are many, run on SM 9.0; what it cannot read goes to Triton",
            max_k=INDEX_MAX_K,
            first=Where(sm=frozenset({90})),
        )
        for operator in ("topk", "topk_slots", "topk_ragged")
    ),
]

_NUMBA_ROWS = [
    _numba_row("index_keys_store", "index_keys", "store_keys"),
    # One thread: with more rows or heads the products of torch, on all threads, win.
    _numba_row(
        "sparse_mla",
        "sparse_mla",
        "sparse_mla",
        first=Where(heads=frozenset(range(1, 33)), below_rows=SOME_ROWS),
        takes=frozenset({"q_rope"}),
    ),
]

# In order of preference; torch is what remains for other devices, dtypes and sizes.
OWN_ROWS = [*_CUDA_ROWS, *_TRITON_ROWS, *_NUMBA_ROWS, *_TORCH_ROWS]
