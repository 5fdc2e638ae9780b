"""A row of scores streamed into a list of candidates, above a threshold that a sample gives (select.py, steps 2 and 3);
inlined into the kernels of select_kernels.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .select_parts import NAN_KEY, append, bits_set, float_above, keep_best, kth_key, order_key, to_words


@triton.jit
def passing_words(line, base, low, high, threshold, TILE: tl.constexpr, WIDE_READ: tl.constexpr):
    """Words [TILE // 32] of line[base : base + TILE]: `not score <= threshold`, and the position in low .. high - 1.

    WIDE_READ: 31 scores past `high` may be read, which lets the loads be vectors.
    """
    W: tl.constexpr = TILE // 32
    word = base + tl.arange(0, W) * 32
    p = word[:, None] + tl.arange(0, 32)[None, :]
    readable = p < high
    if WIDE_READ:
        readable = tl.broadcast_to((word < high)[:, None], p.shape)
    # The mask is worth its price: with it all loads of a tile are in flight together.
    x = tl.load(line + p, mask=readable, other=0.0)
    passed = (x <= threshold) == 0
    if (base >= low) & (base + TILE <= high):
        words = to_words(passed, W)
    else:
        words = to_words(passed & (p >= low) & (p < high), W)
    return words


@triton.jit
def stream(
    line,
    begin,
    end,
    low,
    high,
    threshold,
    entries,
    want,
    C: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDE_READ: tl.constexpr,
):
    """Collect into a list what may be among the `want` best scores line[begin:end]; returns how many.

    Only positions low .. high - 1 count, and only scores with `not score <= threshold`. A list that would overflow is
    cut to its `want` best and the threshold rises, so whatever the data none of the best that passed is lost.
    want <= C / 2.
    """
    WORDS: tl.constexpr = TILE // 32
    PARTS: tl.constexpr = (2 * TILE + C - 1) // C  # a part of a tile always fits behind `want` entries
    count = begin * 0
    for base in range(begin, end, TILE):
        words = passing_words(line, base, low, high, threshold, TILE, WIDE_READ)
        total = tl.sum(bits_set(words), 0)
        if count + total <= C:
            append(words, base, line, entries, count)
            count += total
        else:
            part = count * 0
            while part < PARTS:
                some = tl.where(tl.arange(0, WORDS) // (WORDS // PARTS) == part, words, 0)
                total = tl.sum(bits_set(some), 0)
                if count + total <= C:
                    append(some, base, line, entries, count)
                    count += total
                    part += 1
                else:  # and try the part again
                    threshold = keep_best(entries, count, want, C, BLOCK)
                    count = want
    return count


@triton.jit
def sampled_threshold(row, low, n, want, SAMPLE: tl.constexpr):
    """A threshold that about 1.4 * want of the n scores from row[low] on pass, want of them almost surely.

    Looks at SAMPLE scores, four together at jittered places of equal strata. A bad guess costs time, never a pick.
    """
    STRATA: tl.constexpr = SAMPLE // 4
    i = tl.arange(0, STRATA)
    span = tl.minimum(tl.maximum(n // STRATA - 3, 0), 32767)
    jitter = (((i.to(tl.uint32) * 0x9E3779B1) >> 16).to(tl.int32) * span) >> 16
    first = (low + (i.to(tl.int64) * n // STRATA).to(tl.int32) + jitter) // 4 * 4
    x = tl.load(row + first[:, None] + tl.arange(0, 4)[None, :])
    expected = want.to(tl.float32) * SAMPLE / n.to(tl.float32)
    rank = tl.minimum((expected + 4.0 * tl.sqrt(expected) + 2.0).to(tl.int32), SAMPLE)
    keys = tl.reshape(order_key(x), [SAMPLE])
    key, _ = kth_key(keys, rank, rank * 0 + SAMPLE, rank + rank // 16, False)
    return float_above(tl.maximum(key - 1, NAN_KEY))
