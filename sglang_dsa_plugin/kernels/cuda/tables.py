"""Shapes to launches for the CUDA C++ kernels. Only speed depends on these numbers, never a result."""

from __future__ import annotations

import dataclasses
import functools

from sglang_dsa_plugin.kernels.triton.index_tables import Gpu
from sglang_dsa_plugin.support_row import INDEX_MAX_K, MANY_ROWS

# Capabilities with clusters of blocks.
CLUSTER_SMS = frozenset({90, 100, 103, 120, 121})


@dataclasses.dataclass(frozen=True)
class SelectShape:
    """One launch of select.cu.

    threads: of a block. cluster: blocks that share a row, a power of two. held: vectors of four scores that a thread
    keeps in registers; 0 reads them again. blocks: that share a processor. early: may start before the kernel ahead of
    it is done. more: macros, for trials.
    """

    threads: int
    cluster: int
    held: int
    blocks: int
    early: bool = False
    more: tuple[tuple[str, int], ...] = ()

    def most_columns(self, width: int) -> int:
        """Columns that one block may look at."""
        return 4 * self.threads * -(-(width + 6) // (4 * self.threads * self.cluster))


def serves(gpu: Gpu, rows: int, width: int, k: int) -> bool:
    """Whether select.cu is the faster selection, and can run."""
    return gpu.kind == "cuda" and gpu.sm in CLUSTER_SMS and 0 < rows < MANY_ROWS and k <= INDEX_MAX_K and k < width


@functools.lru_cache(maxsize=4096)
def select_shape(gpu: Gpu, rows: int, columns: int) -> SelectShape | None:
    """The launch for rows of up to `columns` columns, None where the kernel cannot run."""
    if gpu.kind != "cuda" or gpu.sm not in CLUSTER_SMS:
        return None
    threads, blocks = (1024, 1) if rows <= gpu.processors else (512, 2)
    cluster = 1
    while cluster < 8 and 2 * cluster * rows <= gpu.processors and 4 * threads * cluster < columns:
        cluster *= 2
    steps = -(-columns // (4 * threads * cluster))
    return SelectShape(threads, cluster, 4 if steps <= 4 else 0, blocks)
