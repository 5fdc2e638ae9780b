"""Which kernel, tile and number of splits serve a shape of sparse MLA: the only place that knows such numbers.

Everything follows from shapes and the GPU model, never from data, so the same call repeats bit for bit.
"""

from __future__ import annotations

import dataclasses

# Shared memory a program may use, in bytes, by SM; others have at least SMALL_SHARED (SM86, SM89 and SM120).
SHARED_BYTES = {80: 163 << 10, 87: 163 << 10, 90: 227 << 10, 100: 227 << 10, 103: 227 << 10}
SMALL_SHARED = 99 << 10


@dataclasses.dataclass(frozen=True)
class Plan:
    """kernel: "hopper" (sparse_mla_hopper), "wide" (sparse_mla_hopper_wide; `warps` are those it is launched with, it
    starts others) or "gather" (sparse_mla_gather).  block_h: heads of a program.
    block_n: rows of a tile.  split_picks: picks of a split.  splits: 1 writes the result at once.
    """

    kernel: str
    block_h: int
    block_n: int
    warps: int
    stages: int
    split_picks: int
    splits: int


def choose(
    sm: int | None, processors: int, layout: str, rows: int, heads: int, picks: int, hopper: bool, q_parts: int
) -> Plan:
    """sm: compute capability as 10 * major + minor, None off NVIDIA.  processors: streaming multiprocessors.
    hopper: the arguments suit the Hopper kernels.  q_parts: bf16 numbers that hold one value of q.
    """
    if hopper and layout == "bf16_1152" and rows * _tiles(heads, 16) * -(-picks // 32) <= processors:
        # A tile of 32 for each program: a short start counts. H200, 2048 picks, one row of 8 / 16 / 32 heads
        # 7.1 / 7.6 / 8.8 us instead of 7.8 / 9.1 / 12.5 by the Hopper kernel, two of 8 / 16 8.1 / 9.2 instead of
        # 8.4 / 10.4. With three stages instead of two a decode step takes 0.2 to 0.7 more, with splits of 64 attention
        # takes 1.3 more. Not fp8 rows: one of 16 heads 9.1 instead of 9.2, two 10.7 instead of 10.2.
        return Plan("gather", 16, 32, 4, 2, *_split(rows * _tiles(heads, 16), picks, 32, processors))
    if hopper and heads <= 32:
        # fp8 rows travel in registers, which leaves room for the sums of 16 heads.
        block_h = 16
        if layout == "bf16_1152":
            block_h = 8 if heads <= 8 else 16 if heads <= 16 else 32
        programs = rows * _tiles(heads, block_h)
        # One stage lets two programs share a multiprocessor, two stages hide the copies of a program that is alone.
        stages, resident = 1, processors
        if layout == "bf16_1152":
            stages, resident = (1, 2 * processors) if block_h == 8 or programs > processors else (2, processors)
        return Plan("hopper", block_h, 64, 4, stages, *_split(programs, picks, 64, resident))
    # But fp8 rows with a tile for each program at most, as in decode of a single row, go on below: decoding for all
    # heads at once, and the longer start, do not pay (H200, 128 heads, 2048 picks: 20.5 us instead of 23.6; 16 rows
    # 120 instead of 57).
    if hopper and (layout == "bf16_1152" or rows * _tiles(heads, 64) * -(-picks // 64) > processors):
        return Plan("wide", 64, 64, 8, 2, *_split(rows * _tiles(heads, 64), picks, 64, processors))
    if heads > 32 and layout == "bf16_1152" and q_parts == 1 and sm in SHARED_BYTES:
        # 116 KiB. On rows on 16-byte bounds no spills, where four warps on 32 rows spill some 100 bytes a thread, and
        # no product done twice. H200 with mma.sync, 128 heads: prefill 16.1 ms instead of 16.8, 64 rows 258 us instead
        # of 297.
        return Plan("gather", 32, 64, 8, 2, *_split(rows * _tiles(heads, 32), picks, 64, processors))
    # Within SMALL_SHARED: what the parts of a wide q take, its heads have to give.
    block_h = 16 if heads <= 16 or q_parts > 1 else 32
    stages = 1 if q_parts > 2 else 3 if block_h == 16 and q_parts == 1 and sm is not None else 2
    split = _split(rows * _tiles(heads, block_h), picks, 32, 2 * processors)
    return Plan("gather", block_h, 32, 4, stages, *split)


def _tiles(heads: int, block_h: int) -> int:
    return -(-heads // block_h)


def _split(programs: int, picks: int, block_n: int, resident: int) -> tuple[int, int]:
    """Splits that fill `resident` programs once: (split_picks, splits)."""
    tiles = -(-picks // block_n)
    wanted = min(max(1, resident // programs), tiles)
    per_split = -(-tiles // wanted)
    return per_split * block_n, -(-tiles // per_split)
