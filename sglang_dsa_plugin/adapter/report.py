"""What the server says about itself: the start-up line and the prefill counters."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from sglang_dsa_plugin import __version__, settings
from sglang_dsa_plugin.backend.dense_fallback import Decision
from sglang_dsa_plugin.cache.layouts import FP8, index_token_bytes

if TYPE_CHECKING:
    from sglang_dsa_plugin.adapter.backend import DsaBackend
    from sglang_dsa_plugin.adapter.pool import DsaPool


def serving_line(backend: DsaBackend, pool: DsaPool) -> str:
    """One line: backend, pool, indexer and KV layout in use, each with the reason."""
    keys = pool.index_pages.key_dtype
    layers, indexing = pool.layer_num, sum(pages.shape[0] > 0 for pages in pool.index_pages.buffer)
    config = backend.config
    used = "; ".join(f"{op}={choice.words}: {choice.reason}" for op, choice in backend.choices.items())
    return (
        f"sglang-dsa-plugin {__version__} serves {config.architecture}: "
        f"backend={type(backend).__name__} ({used}); "
        f"pool={type(pool).__name__} ({pool.size} tokens, page {pool.page_size}, "
        f"{pool.get_kv_size_bytes() / 2**20:.1f} MiB); "
        f"KV layout={pool.layout.name} ({pool.layout.row_bytes} B a token and layer, {layers} layers; KV dtype "
        f"{_name(pool.dtype)}); "
        f"indexer=DsaIndexer (k={config.index_topk}, {config.index_n_heads} heads, {config.index_rope_layout} rope, "
        f"{'rotated ' if keys == FP8 else ''}{_name(keys)} keys of {index_token_bytes(keys)} B in {indexing} of "
        f"{layers} layers, because "
        f"SGLANG_DSA_PLUGIN_INDEX_KEYS={settings.index_keys()}); "
        f"{backend.describe_prefill()}"
    )


def _name(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


class PrefillMetrics:
    """Prometheus counters of prefill batches and rows by path, served by SGLang's /metrics when --enable-metrics is
    on.
    """

    def __init__(self) -> None:
        from prometheus_client import Counter

        self._batches = Counter("sglang_dsa_prefill_batches", "Prefill batches by attention path", ["path"])
        self._rows = Counter("sglang_dsa_prefill_rows", "Prefill rows (query tokens) by attention path", ["path"])

    def count(self, decision: Decision, rows: int) -> None:
        """Note one prefill batch."""
        self._batches.labels(decision.path).inc()
        self._rows.labels(decision.path).inc(rows)


class NoMetrics:
    """Without --enable-metrics nothing is counted."""

    def count(self, decision: Decision, rows: int) -> None:
        """Do nothing."""


_metrics: PrefillMetrics | NoMetrics | None = None


def prefill_metrics(counting_rank: bool) -> PrefillMetrics | NoMetrics:
    """The process's counters, made once: prometheus_client refuses a second registration of a name.

    counting_rank: whether this rank counts. Every rank sees every batch and /metrics adds up the processes, so one rank
    of a replica counts for all.
    SGLang sets PROMETHEUS_MULTIPROC_DIR before it starts its processes when --enable-metrics is given; without that
    directory counters of this process would reach nobody.
    """
    global _metrics
    if _metrics is None:
        exported = counting_rank and os.environ.get("PROMETHEUS_MULTIPROC_DIR")
        _metrics = PrefillMetrics() if exported else NoMetrics()
    return _metrics
