"""Kernels that are compiled while the server starts, because nothing else of the start brings them and a request would
wait for them: those in CUDA C++, index scores of short prefills, keys that prefill expands, and what decode takes where
no graph fits.
"""

from __future__ import annotations

import itertools
import logging
import time
from typing import TYPE_CHECKING

import torch

from sglang_dsa_plugin import plan, settings
from sglang_dsa_plugin.cache.layouts import PAGE_SIZE, ROPE_DIM, ROW_DIM
from sglang_dsa_plugin.kernels.cuda import prepare
from sglang_dsa_plugin.ops import latent_rows, mha_keys
from sglang_dsa_plugin.support_row import SOME_ROWS

if TYPE_CHECKING:
    from sglang_dsa_plugin.adapter.pool import DsaPool
    from sglang_dsa_plugin.config import DsaConfig
    from sglang_dsa_plugin.support import Choice

logger = logging.getLogger(__name__)

_WORTH_A_LINE = 0.5  # seconds of compiling
# Of prefill with a few new tokens for each of many requests, and of decode outside of graphs. Up to each of these
# numbers the kernel is one; past the last it is that of long prompts, which the warm-up brings.
ROWS_OF_REQUESTS = tuple(1 << power for power in range(11))
# New tokens of each request: where all have equally many, several rows are scored together.
ROWS_EACH = (1, 2, 4)
# Scores and selection in one whose selection is this package's on a GPU.
_SELECTS_BY_OURS = ("triton", "deep_gemm")
_PORTABLE = "cuda_portable"  # how names of sparse attention for GPUs without a vendor's kernel begin


def load_kernels(
    choices: dict[str, Choice],
    config: DsaConfig,
    pool: DsaPool,
    device: torch.device,
    context: int,
    heads: int,
    requests: int,
    dtype: torch.dtype,
) -> None:
    """Compile or load what `choices` will run on a GPU. context: tokens of the longest request. heads: of this rank.
    requests: that may run at once. dtype: of the model.
    """
    layout = pool.layout.name
    attention = choices["sparse_mla"].names | choices["sparse_mla_prefill"].names
    # Asked for by name, Triton selects as well, and NVRTC need not work.
    selects = choices["index_select_paged"].name in _SELECTS_BY_OURS and settings.forced_impl() != "triton"
    columns = context + PAGE_SIZE if selects else 0
    portable = None
    if any(name.startswith(_PORTABLE) for name in attention):
        # Asked for by name it runs with fewer rows than the table gives it.
        by_name = (settings.forced_impl() or "").startswith(_PORTABLE)
        portable = layout, heads, 1 if by_name else SOME_ROWS
    begun = time.monotonic()
    found = prepare.prepare(device, columns, config.index_topk, layout if "cuda" in attention else None, portable)
    compiled = time.monotonic()
    load_scores(choices, config, pool, requests)
    if plan.why_not_dense(device.type, choices) is None:
        load_expanded(config, pool, heads, dtype)
    if (done := time.monotonic()) - begun > _WORTH_A_LINE:
        logger.info(
            "sglang-dsa-plugin loaded %d kernels in CUDA C++ in %.1f s, and those of index scores and expanded keys by "
            "Triton and DeepGEMM, which are not counted, in %.1f s",
            found,
            compiled - begun,
            done - compiled,
        )


def load_scores(choices: dict[str, Choice], config: DsaConfig, pool: DsaPool, requests: int) -> None:
    """Have the scores compiled that neither decode's graphs nor the warm-up bring: Triton's for a few rows of each of
    many requests, whoever selects from them; DeepGEMM's for decode outside of graphs, where as many requests as it is
    taken from on may run. Never raises: a server that compiles late is better than none.
    """
    decode = choices["index_select_paged"]
    prefill = choices.get(plan.INDEX_PREFILL, decode)
    pages = next((pages for pages in pool.index_pages.buffer if len(pages)), None)
    if pages is None:
        return
    from sglang_dsa_plugin.kernels.triton import index_select

    sizes = config.index_n_heads, config.index_topk
    of_decode = decode.steps or ((0, decode.implementation),)
    taken = [row for _, row in (*of_decode, *prefill.steps)] + [prefill.implementation]
    ours = any(row.name == "triton" for row in taken)
    try:
        if ours or any(dict(row.arguments).get("scores") == "triton" for row in taken):
            for rows, each in itertools.product(ROWS_OF_REQUESTS, ROWS_EACH):
                if 0 < rows // each < 2 * requests:
                    index_select.load(pages, *sizes, rows, each, selection=ours)
        for least, row in of_decode:
            if row.plans is not None and least <= requests:
                from sglang_dsa_plugin.kernels.vendor import deep_gemm_load

                deep_gemm_load.load(pages, *sizes, requests, **dict(row.arguments))
    except Exception as error:
        logger.warning("sglang-dsa-plugin: scores of some steps were not compiled at start: %r", error)


def load_expanded(config: DsaConfig, pool: DsaPool, heads: int, dtype: torch.dtype) -> None:
    """Have compiled what prefill on expanded keys launches besides attention (adapter/prefill.py): the warm-up's short
    prompts fit prefill graphs, which are sparse. Nothing is written to the cache. Never raises, as `load_scores`.
    """
    rows, layout = pool.rows_of(pool.start_layer), pool.layout.name
    # One row of each, as far apart as SGLang's.
    width = config.qk_nope_head_dim + config.v_head_dim
    expanded = torch.empty(1, heads, width, dtype=dtype, device=rows.device)[..., : config.qk_nope_head_dim]
    rope = torch.empty(1, config.q_lora_rank + ROW_DIM, dtype=dtype, device=rows.device)[:, -ROPE_DIM:]
    try:
        mha_keys.join(expanded, rope, impl=plan.forced_impl("mha_keys"))
        # The new rows have slots of SGLang's, a cached prefix those of its table.
        for slot in (torch.int64, torch.int32):
            nowhere = torch.full((1,), -1, dtype=slot, device=rows.device)
            latent_rows.load_parts(rows, nowhere, layout, dtype, impl=plan.forced_impl("latent_rows_load"))
    except Exception as error:
        logger.warning("sglang-dsa-plugin: keys of prefill were not compiled at start: %r", error)
