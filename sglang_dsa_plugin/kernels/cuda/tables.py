"""Shapes to launches for the CUDA C++ kernels. Only speed depends on these numbers, never a result."""

from __future__ import annotations

import dataclasses
import functools

from sglang_dsa_plugin.kernels.triton.index_tables import Gpu
from sglang_dsa_plugin.support_row import CLUSTER_SMS, INDEX_MAX_K, MANY_ROWS, MORE_ROWS

# Where select.cu was measured faster than the Triton kernels; elsewhere it is taken by name.
SELECT_MEASURED_SMS = frozenset({90})

_BINS = 2048  # BINS of select_many_parts.cuh
_MOST_COLUMNS = (1 << 20) + 1024
_MEDIUM, _LONG = 24 * 1024, 32 * 1024 + 3  # columns past which select_many.cu is taken for fewer rows, too
_PAIRED = 64 * 1024  # columns past which blocks of a cluster may share a processor
_ROUND = 4 * 512  # scores that the smallest block looks at together
_LARGE_KIB = 160  # of shared memory, from which on two blocks find room
_BATCHES = (1, 2, 4, 8)
_VECTORS = 8  # of four scores, that registers of a thread hold
_SIXTEEN_SMS = frozenset({90, 100, 103})  # whose clusters may have 16 blocks


@dataclasses.dataclass(frozen=True)
class SelectShape:
    """One launch of select.cu.

    threads: of a block. cluster: blocks that share a row, a power of two. batch: vectors of four scores that a thread
    looks at together: 1, 2, 4 or 8. held: shared memory has room for all scores of a block. listed: candidates that a
    warp has room for. blocks: that share a processor. vectors: of each thread, in a row that one block decides alone.
    """

    threads: int
    cluster: int
    batch: int
    held: bool
    listed: int
    blocks: int
    vectors: int = _VECTORS

    @property
    def pages(self) -> int:
        """Entries of the page table that a block has room for."""
        return 1024 if self.batch == 8 else 4096

    @property
    def shared_bytes(self) -> int:
        """Of a block: scores, candidates, bins, members of one, pages, and what is small."""
        warps, counts = self.threads // 32, 4 * 256 * self.cluster  # 256: BINS of select_parts.cuh
        scores = self.threads * 16 * self.batch
        listed = max((2 if self.held else 8) * self.listed * warps, counts, 4 * max(_BINS, 4 * self.threads))
        small = 4 * 256 + 4 * 128 + 8 * self.cluster + 28 * warps + 2 * 4 * 256 + 4 * self.pages + 8 * 32 + 192
        return -(-(scores + listed + counts + small) // 128) * 128

    def serves(self, width: int, page_size: int) -> bool:
        """Whether a block's part of the page table fits its memory."""
        most_columns = 4 * self.threads * -(-(width + 6) // (4 * self.threads * self.cluster))
        return most_columns // page_size + 2 <= self.pages


@dataclasses.dataclass(frozen=True)
class ManyShape:
    """One launch of select_many.cu, a block a row.

    threads: of a block. blocks: that share a processor. batch: vectors of four scores that a thread looks at together:
    4 or 8. strata: vectors that the first threshold follows from, a power of two. listed: candidates that a block has
    room for. chunks: of a row, each of 32 * batch vectors. once: the L2 cache need not keep what was read. vectors: as
    in SelectShape.
    """

    threads: int
    blocks: int
    batch: int
    strata: int
    listed: int
    chunks: int
    once: bool
    vectors: int = _VECTORS

    cluster = 1

    @property
    def shared_bytes(self) -> int:
        """Of a block: scores on their way, bins, candidates, chunks, and what is small."""
        ring = self.threads * 16 * self.batch
        small = self.threads // 32 * 32 + 384
        return -(-(ring + 4 * _BINS + 8 * self.listed + 4 * self.chunks + small) // 128) * 128

    def serves(self, width: int, page_size: int) -> bool:
        """Whether the chunks of a row, which may begin within a group of four, have a place each."""
        return width + 6 <= self.chunks * 128 * self.batch


def prefers_select(gpu: Gpu, rows: int, width: int, k: int, page_size: int) -> bool:
    """Whether a kernel of here is taken unasked for such a selection: it was measured faster, and can run."""
    measured = gpu.kind == "cuda" and gpu.sm in SELECT_MEASURED_SMS
    if not measured or rows < 1 or not k < width or k > INDEX_MAX_K:
        return False
    return launch_shape(gpu, rows, width, k, page_size) is not None


def launch_shape(gpu: Gpu, rows: int, columns: int, k: int, page_size: int) -> SelectShape | ManyShape | None:
    """The launch for so many rows of up to `columns` columns, None where no kernel of here can run."""
    shapes = [many_shape(gpu, columns, k)]
    if rows <= _few_rows(gpu, columns):
        shapes = [short_shape(gpu, columns), select_shape(gpu, rows, columns), *shapes]
    return next((shape for shape in shapes if shape is not None and shape.serves(columns, page_size)), None)


def _few_rows(gpu: Gpu, columns: int) -> int:
    """Rows up to which select.cu is taken. H200, 2026-11-30, microseconds, here / select_many.cu: 64 rows of 32K 11.2 /
    13.2, of 128K 45 / 24; 200 rows, a block each, 12.9 of 8K and 34 of 24K / 13.0 and 20.6 for 255 of 8K and 32K.
    """
    if columns > _LONG:
        return min(MORE_ROWS - 1, gpu.processors)
    return gpu.processors if columns <= _MEDIUM else gpu.processors // 2


@functools.lru_cache(maxsize=4096)
def short_shape(gpu: Gpu, columns: int) -> SelectShape | None:
    """The launch for rows of which one block decides each alone, None where there are longer ones or no room.

    H200, 2026-12-01, k 2048, positions and slots, microseconds for 1 / 16 / 64 / 132 rows, here and with clusters of
    `select_shape`, of which one block works: of 8K 4.3 / 4.9 / 5.8 / 6.4 and 4.4 / 5.3 / 6.0 / 8.0; of 16K 5.6 / 6.1 /
    7.3 / 8.9 and 5.7 / 6.6 / 8.4 / 10.9.
    """
    shape = SelectShape(512, 1, 8, True, 1024, 1)
    held = 4 * shape.threads * shape.vectors
    usable = gpu.kind == "cuda" and gpu.sm in CLUSTER_SMS and shape.shared_bytes <= _room(gpu, 1)
    return shape if usable and columns <= held else None


@functools.lru_cache(maxsize=4096)
def select_shape(gpu: Gpu, rows: int, columns: int) -> SelectShape | None:
    """The launch for rows of up to `columns` columns, None where the kernel cannot run.

    H200, 2026-11-30, k 2048, positions and slots, microseconds with T threads, clusters of C and batches of B: 1 row of
    8K T512 C4 B1 5.7, B2 5.9, T256 C8 B1 5.7; of 32K T512 C8 B2 6.4, B4 6.5, C16 B1 6.8, T256 C8 B4 6.6; of 128K T512
    C16 B4 7.3, C8 B8 7.3, T256 C16 B8 7.6. 16 rows of 8K T512 C4 B1 6.9, T256 C8 B1 7.4; of 32K T512 C4 B4 7.8, C2 B8
    8.3, C8 B2 8.9; of 128K T512 C8 B8 11.7, B4 in two turns 11.4, T1024 C4 B8 11.7. 24 rows of 160K T512 C8 B4 13.4, B8
    14.3; 40 of 64K T1024 C2 B8 13.2, T512 C4 B8 17.5; 64 of 8K T512 C2 B2 8.1, B4 8.5, C4 B1 13.0, of 32K T1024 C2 B4
    11.2, T512 C2 B8 11.5; 100 of 24K T512 C2 B8 13.0. Blocks that share a processor gain only where rows are long. On
    2026-12-01, 16 rows of 2K / 12K / 32K / 64K / 128K in 128K columns: T512 C8 B8 1.45 / 8.3 / 9.7 / 10.9 / 11.1, T1024
    C4 B8 1.46 / 7.2 / 9.4 / 9.8 / 10.5; 4 rows 1.2 / 5.9 / 7.2 / 7.3 / 7.4 and 1.4 / 6.6 / 8.6 / 8.6 / 8.8.
    """
    if gpu.kind != "cuda" or gpu.sm not in CLUSTER_SMS:
        return None
    # A row is split while each block has scores for all its threads; where 8 blocks hold all scores 16 gain nothing.
    threads, cluster = 512, 1
    while (
        cluster < 16
        and 4 * threads * cluster * (8 if cluster == 8 else 1) < columns
        and _run_at_once(gpu, rows, columns, 2 * cluster)
    ):
        cluster *= 2
    if cluster == 8 and columns <= 4 * 1024 * 4 * 8 and not 4 * rows * cluster <= 3 * gpu.processors:
        threads, cluster = 1024, 4  # blocks of clusters of eight would share processors
    if cluster == 2 and 4 * threads * 4 < columns and 2 * rows <= gpu.processors:
        threads = 1024  # clusters of four would not all run at once: as many threads in clusters of two
    blocks = _blocks(gpu, threads)
    steps = -(-columns // (4 * threads * cluster))
    whole = next((batch for batch in _BATCHES if steps <= batch), 4)
    for batch in reversed(_BATCHES):
        held = steps <= batch
        shape = SelectShape(threads, cluster, batch, held, 128 * batch if held else min(128 * batch, 256), blocks)
        if batch <= whole and shape.shared_bytes <= _room(gpu, blocks):
            return shape
    return None


@functools.lru_cache(maxsize=4096)
def many_shape(gpu: Gpu, columns: int, k: int) -> ManyShape | None:
    """The launch for many rows of up to `columns` columns and k picks, None where the kernel cannot run.

    H200, 2026-11-30, k 2048, positions and slots, microseconds at 8K / 32K / 64K / 128K columns: 4096 rows 150 / 203 /
    301 / 553 (Triton 312 / 432 / 632 / 948); three blocks of 512 threads and half the chunk 126 / 207 / 351 / 645, four
    of 256 119 / 222 / 389 / 719. 64, 132 and 255 rows 11.8, 14.4, 20.6 at 32K and 24, 32, 49 at 128K; select.cu 12.9,
    21.3, 35.1 and 37, 79, 152, at 8K 7.8, 9.4, 12.0 where this takes 9.0, 9.8, 13.0.
    """
    most = columns + 6  # a row begins anywhere in a group of four
    if gpu.kind != "cuda" or gpu.sm not in CLUSTER_SMS or most > _MOST_COLUMNS:
        return None
    threads, large = 512, gpu.shared_kib >= _LARGE_KIB
    blocks, batch = 2 if large else 1, 8 if large and k <= 2048 else 4
    strata = 512 if columns <= 48 * 1024 else 1024
    chunks = next(n for n in (1088 // batch, 8448 // batch) if most <= n * 128 * batch)
    bare = ManyShape(threads, blocks, batch, strata, 0, chunks, strata > 512)
    room = _room(gpu, blocks) - bare.shared_bytes
    return dataclasses.replace(bare, listed=room // 8 // 32 * 32)


@functools.cache
def select_shapes(gpu: Gpu, columns: int, k: int, page_size: int) -> tuple[SelectShape | ManyShape, ...]:
    """All launches that are taken unasked for rows of up to `columns` columns."""
    if not (gpu.kind == "cuda" and gpu.sm in SELECT_MEASURED_SMS) or columns < 1:
        return ()
    # Launches change where rows fill one more round of a block's scores, and at the last column, which may lie three
    # further where rows begin within a group of four.
    widths = {min(w, columns) for w in range(1, columns + _ROUND, _ROUND)} | {columns + 3}
    found = (launch_shape(gpu, rows, width, k, page_size) for rows in range(1, MANY_ROWS + 1) for width in widths)
    return tuple(dict.fromkeys(shape for shape in found if shape is not None))


def _blocks(gpu: Gpu, threads: int) -> int:
    """Blocks of select.cu that share a processor."""
    return 1024 // threads if gpu.shared_kib >= _LARGE_KIB else 1


def _room(gpu: Gpu, blocks: int) -> int:
    """Bytes of shared memory for each of so many blocks: a processor has 1 KiB more than a block may have, and keeps
    1 KiB for each.
    """
    return (gpu.shared_kib + 1) * 1024 // blocks - 1024


def _run_at_once(gpu: Gpu, rows: int, columns: int, cluster: int) -> bool:
    """Whether a cluster of `cluster` blocks of 512 threads a row all fit: a row that waits doubles the time. Clusters
    lie within a group of some 16 processors, so the larger they are, the more places stay empty.
    """
    shared = columns > _PAIRED or cluster == 2
    places = gpu.processors * (_blocks(gpu, 512) if shared else 1)
    if cluster == 16:
        return gpu.sm in _SIXTEEN_SMS and 32 * rows <= gpu.processors
    return rows * cluster <= (places if cluster == 2 else places * 3 // 4)
