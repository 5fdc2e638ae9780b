"""Kernels that are compiled while the server starts, because nothing else of the start brings them and a request would
wait for them: those in CUDA C++, and index scores of short prefills.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

import torch

from sglang_dsa_plugin import plan
from sglang_dsa_plugin.cache.layouts import PAGE_SIZE
from sglang_dsa_plugin.kernels.cuda import prepare

if TYPE_CHECKING:
    from sglang_dsa_plugin.adapter.pool import DsaPool
    from sglang_dsa_plugin.config import DsaConfig
    from sglang_dsa_plugin.support import Choice

logger = logging.getLogger(__name__)

_WORTH_A_LINE = 0.5  # seconds of compiling
# Of prefill with a few new tokens for each of many requests. Up to each of these numbers the kernel is one, unless the
# requests have equally many: such a batch, and one of more rows, may still compile in a request.
ROWS_OF_PREFILL = (32, 64, 128, 256)
# Scores and selection in one whose selection is this package's on a GPU.
_SELECTS_BY_OURS = ("triton", "deep_gemm")


def load_kernels(
    choices: dict[str, Choice], config: DsaConfig, pool: DsaPool, device: torch.device, context: int, heads: int
) -> None:
    """Compile or load what `choices` will run on a GPU. context: tokens of the longest request. heads: of this rank."""
    layout = pool.layout.name
    attention = choices["sparse_mla"].names | choices["sparse_mla_prefill"].names
    selects = choices["index_select_paged"].name in _SELECTS_BY_OURS
    begun = time.monotonic()
    columns = context + PAGE_SIZE if selects else 0
    portable = (layout, heads) if any(name.startswith("cuda_portable") for name in attention) else None
    found = prepare.prepare(device, columns, config.index_topk, layout if "cuda" in attention else None, portable)
    load_scores(choices, config, pool)
    if (took := time.monotonic() - begun) > _WORTH_A_LINE:
        logger.info("sglang-dsa-plugin loaded %d CUDA kernels in %.1f s", found, took)


def load_scores(choices: dict[str, Choice], config: DsaConfig, pool: DsaPool) -> None:
    """Where decode's graphs do not bring the scores of prefill with few rows a request, have these compiled. Never
    raises: a server that compiles late is better than none.
    """
    decode = choices["index_select_paged"]
    prefill = choices.get(plan.INDEX_PREFILL, decode)
    pages = next((pages for pages in pool.index_pages.buffer if len(pages) and pages.dtype == torch.uint8), None)
    if pages is None or decode.names == {"triton"} or "triton" not in prefill.names:
        return
    from sglang_dsa_plugin.kernels.triton import index_select

    try:
        for rows in ROWS_OF_PREFILL:
            index_select.load(pages, config.index_n_heads, config.index_topk, rows)
    except Exception as error:
        logger.warning("sglang-dsa-plugin: scores of short prefills were not compiled at start: %r", error)
