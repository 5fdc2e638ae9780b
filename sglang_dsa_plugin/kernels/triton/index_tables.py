"""Shapes to tiles for the indexer's Triton kernels. Only speed depends on these numbers, never a result."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import torch


@dataclasses.dataclass(frozen=True)
class Gpu:
    """What the tables ask of a device: kind "cuda", "hip" or "cpu" (the interpreter), SM as 10 * major + minor."""

    kind: str
    sm: int
    processors: int
    shared_kib: int


def gpu_of(device: torch.device) -> Gpu:
    """The `Gpu` of a torch device."""
    if device.type == "cpu":
        return Gpu("cpu", 0, 4, 1024)
    return _gpu(device.index if device.index is not None else torch.cuda.current_device())


@functools.cache
def _gpu(index: int) -> Gpu:
    found = torch.cuda.get_device_properties(index)
    kind = "hip" if torch.version.hip else "cuda"
    shared = getattr(found, "shared_memory_per_block_optin", 64 * 1024)
    return Gpu(kind, 10 * found.major + found.minor, found.multi_processor_count, shared // 1024)


@dataclasses.dataclass(frozen=True)
class SelectTiles:
    """One selection launch.

    chunks: programs per row, a power of two; 1 walks whole rows, `programs` of them at a time.
    capacity: entries of a candidate list, a power of two, at least 2 k.
    tile: scores read at a time, a power of two, at least capacity / 2.
    block: entries of a list written at a time, a power of two, at most capacity.
    sample: scores looked at for the first threshold, a power of two.
    registers: cap per thread, so that enough programs share a processor; None leaves it to the compiler.
    """

    chunks: int
    programs: int
    capacity: int
    tile: int
    block: int
    sample: int
    warps: int
    registers: int | None = None

    @property
    def lists(self) -> int:
        """Candidate lists of all programs; split rows have one more each, for the whole row."""
        return self.programs + (self.programs // self.chunks if self.chunks > 1 else 0)

    @property
    def list_bytes(self) -> int:
        """Memory of the candidate lists: a score and a position an entry."""
        return 8 * self.capacity * self.lists


_LISTS_PER_PROCESSOR = 8  # programs of 128 threads with 64 registers that fit


@functools.lru_cache(maxsize=4096)
def select_tiles(gpu: Gpu, rows: int, width: int, k: int) -> SelectTiles:
    """Tiles for `rows` rows of `width` columns and k picks."""
    capacity = max(4096, 2 * power_of_two(k))
    warps = capacity // 1024
    if rows <= gpu.processors:
        # Latency counts: many threads share a list, and a row is split as long as processors are idle.
        tile = 2 * capacity if width > 8 * capacity else capacity
        chunks = 1
        while 2 * chunks * rows <= gpu.processors and chunks * tile < width:
            chunks *= 2
        return SelectTiles(chunks, rows * chunks, capacity, tile, capacity, 4096, 2 * warps)
    sample = 2048 if width <= 48 * 1024 else 4096
    turns = -(-rows // max(1, _LISTS_PER_PROCESSOR * gpu.processors * 4 // warps))
    registers = 64 if gpu.kind == "cuda" else None
    return SelectTiles(1, -(-rows // turns), capacity, capacity, capacity // 4, sample, warps, registers)


def rows_in_budget(
    gpu: Gpu,
    rows: int,
    width: int,
    k: int,
    row_bytes: int,
    budget_bytes: int,
    whole: Callable[[int], int],
    without_lists: bool = False,
) -> int:
    """Rows of a group whose scores, `row_bytes` a row, fit the budget together with the candidate lists of the
    selection from them; 0 where those of one row do not. whole: rounds a number of rows down. without_lists: the
    selection has none.

    The last group is smaller, and its lists may be more: it splits rows. Lists of less than a few rows do not shrink
    with their number, so a budget below four times those of one row is kept by the scores alone.
    """

    def fitting(left: int) -> int:
        most = max(0, left) // row_bytes
        return rows if most >= rows else whole(most)

    def lists(group: int) -> int:
        return max(select_tiles(gpu, n, width, k).list_bytes for n in (group, rows % group) if n)

    group = fitting(budget_bytes)
    if not without_lists and budget_bytes > 4 * select_tiles(gpu, 1, width, k).list_bytes:
        while group and group * row_bytes + lists(group) > budget_bytes:
            group = max(1, fitting(budget_bytes - lists(group))) if group > 1 else 0
    return group


@dataclasses.dataclass(frozen=True)
class ScoreTiles:
    """One scoring launch.

    keys: keys of a tile. rows: rows that walk over one tile. bundle: rows in one product, a power of two.
    programs: of the streaming kernel. stages: of the pipeline; with several rows half of them are for the page table.
    """

    keys: int
    rows: int
    bundle: int
    programs: int
    stages: int
    warps: int


_STREAM_ROWS = 1024  # the streaming kernel plans all rows in every program
_STREAM_ROWS_PER_REQUEST = 4
FILLED_COLUMNS = 1024  # that a program fills at a time
_FILL_PER_PROCESSOR = 8
STREAM_FEW_ROWS = 16  # up to which other numbers are the fastest, and programs wait to let a selection start


def score_kind(gpu: Gpu, dtype: torch.dtype) -> str:
    """The KIND of index_scores_parts.py for queries of `dtype`."""
    if dtype == torch.float8_e4m3fn:
        return "fp8" if gpu.kind == "cuda" and gpu.sm >= 89 else "bytes"
    return "f32" if dtype == torch.float32 else "plain"


def stream_tiles(gpu: Gpu, kind: str, heads: int, rows: int, requests: int) -> ScoreTiles | None:
    """Tiles of the streaming kernel, or None where rows per request are too many for it to pay."""
    per_request = rows // max(1, requests)
    if rows > _STREAM_ROWS or per_request > _STREAM_ROWS_PER_REQUEST:
        return None
    bundle = 1
    if rows % max(1, requests) == 0 and per_request > 1:
        bundle = min(power_of_two(per_request), max(1, 128 // padded_heads(heads)))
        bundle = bundle if per_request % bundle == 0 else 1
    keys, stages, warps, resident = 128, 8, 4, 2
    if kind == "f32":
        keys, stages, bundle = 32, 1, 1
    elif kind == "plain":
        stages = 3 if gpu.shared_kib >= 160 else 2
    elif gpu.shared_kib < 120:
        stages = 4
    elif rows > STREAM_FEW_ROWS:
        # H200, 64 heads, microseconds with 2 programs and 6 / 8 / 10 stages or 3 programs and 6: 64 rows of 8K 25.1 /
        # 24.9 / 26.1 / 26.2, of 32K 81.2 / 78.4 / 80.4 / 77.5, of 128K 317 / 301 / 287 / 285; 16 rows of 8K 10.5 / 11.0
        # / 11.2 / 12.0, of 32K 24.7 / 24.3 / 25.6 / 25.3. Where a processor has room for one more program than these,
        # programs that take their places early (pdl.py) lie unevenly, which cost 64 rows 16 %.
        stages, resident = 6, 3
    if rows == 1:
        stages = _row_stages(gpu, kind)
    return ScoreTiles(keys, rows, bundle, resident * gpu.processors, stages, warps)


def _row_stages(gpu: Gpu, kind: str) -> int:
    """Tiles that the pipeline of a single row holds; the page table is not in it (index_scores_row.py)."""
    if kind == "f32":
        return 1
    if kind == "plain":
        return 2
    if gpu.shared_kib < 120:
        return 3
    # Five leave no room for a third program, also of the next kernel: with four, 76 KB, programs lie unevenly, and
    # scores of 128K took 9.1 instead of 8.0 on an H200. On SM 8.0 two programs of five do not fit.
    return 5 if gpu.shared_kib >= 200 else 4


def walk_tiles(gpu: Gpu, kind: str, heads: int, rows: int, width: int) -> ScoreTiles:
    """Tiles of the kernel that walks rows over a tile of keys."""
    padded = padded_heads(heads)
    if kind == "f32":
        return ScoreTiles(32, 16, 1, 0, 1, 4)
    bundle, keys, stages, warps = max(1, 64 // padded), 128, 3, 8
    if gpu.kind == "cuda" and gpu.sm == 90:
        if kind == "plain":
            keys = 256
        else:
            bundle, warps = max(1, 128 // padded), 4
    elif gpu.kind == "cuda" and 100 <= gpu.sm < 120:
        warps = 4
    if kind == "plain" or (kind == "bytes" and padded == 128 and gpu.shared_kib < 160):
        # Keys as bytes become f16 for the products: 128 heads want 105 KiB on SM 8.x with 3 stages, 100 heads 129.
        stages = 2
    walk = 64
    while walk > bundle and -(-rows // walk) * -(-width // keys) < 4 * gpu.processors:
        walk //= 2
    return ScoreTiles(keys, max(walk, bundle), bundle, 0, stages, warps)


def fill_programs(gpu: Gpu, rows: int, width: int) -> int:
    """Programs that fill the columns past a row's window: several where rows are too few to occupy the GPU."""
    return max(1, min(-(-width // FILLED_COLUMNS), _FILL_PER_PROCESSOR * gpu.processors // max(1, rows)))


def head_period(gpu: Gpu) -> int:
    """The PERIOD of index_scores_parts.py: one for all tiles of a GPU, since the order of a sum follows from it.

    Of eight columns in a line of a product, four threads hold two neighbours each; where mma.sync makes it, a second
    warp may hold every other eight. Where they lie otherwise the sum is the same, and its parts are moved.
    """
    return 8 if gpu.kind == "cuda" and 90 <= gpu.sm < 120 else 16


def padded_heads(heads: int) -> int:
    """Heads rounded up to what the matrix unit takes: a power of two, at least 16."""
    return max(16, power_of_two(heads))


def power_of_two(n: int) -> int:
    """The smallest power of two not below n >= 1."""
    return 1 << (n - 1).bit_length()
