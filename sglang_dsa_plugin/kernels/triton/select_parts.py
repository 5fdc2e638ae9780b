"""Pieces of the exact selection (kernels/triton/select.py), inlined into its kernels.

A score is compared through an int32 key whose order is the order of ops/select.py. An entry of a list of candidates is
one int64, the score's bits above, the position below. Lists are in ascending position, so ties and the order of the
picks come for free from prefix sums. They lie at addresses of which the compiler knows nothing, so that a warp reads
32 neighbours, one a thread: the layout that scattered stores take, and there a word of flags is one instruction.
Flags of 32 neighbours are gathered into words first: prefix sums, which cost most, work on words.
"""

from __future__ import annotations

import triton
import triton.language as tl

NAN_KEY = tl.constexpr(-(2**31) + 1)  # every NaN
OUTSIDE = tl.constexpr(-(2**31))  # not an entry
LAST_NUMBER = tl.constexpr(-0x7F800000)  # the key of -inf


@triton.jit
def order_key(x):
    """f32 -> int32: score order as integer order; -0.0 and 0.0 share a key, all NaN share the lowest."""
    bits = x.to(tl.int32, bitcast=True)
    sign = bits >> 31
    key = (bits ^ (sign & 0x7FFFFFFF)) - sign
    return tl.where((bits & 0x7FFFFFFF) > 0x7F800000, NAN_KEY, key)


@triton.jit
def float_above(key):
    """Scalar int32 -> f32 t such that `not x <= t` holds for every x whose key is above `key`.

    It holds for no other number; a NaN x passes always, and everything passes t = NaN. Both are harmless: what passes
    is only a candidate.
    """
    bits = tl.where(key < 0, (key - 1) ^ 0x7FFFFFFF, key)
    return tl.where(key < LAST_NUMBER, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def unsigned(key):
    """int32 -> uint32 in the same order, so that distances cannot overflow."""
    return key.to(tl.uint32, bitcast=True) ^ 0x80000000


@triton.jit
def signed(key):
    """The inverse of `unsigned`."""
    return (key ^ 0x80000000).to(tl.int32, bitcast=True)


@triton.jit
def kth_key(keys, want, count, enough, INTERPOLATE: tl.constexpr):
    """Search for the `want`-th largest of the `count` keys that are not OUTSIDE, count >= want >= 1.

    Returns (key, room): the entries above `key`, then the first `room` entries equal to it, are `want` in all. With
    `enough` above want, it stops as soon as want .. enough entries reach `key`, and only `key` means something.

    Every step counts the entries above a guess between two bounds. The guess is the middle; or (INTERPOLATE) twice a
    linear estimate and then the middle, which takes 8 steps where 13 halvings would go, if the keys begin near the
    wanted one as those of a list of candidates do. One guess is whether they begin with a plateau that reaches it.
    """
    low = unsigned(tl.min(tl.where(keys == OUTSIDE, 0x7FFFFFFF, keys), 0))
    high = unsigned(tl.max(keys, 0)) + 1
    at_low = count
    at_high = count * 0
    step = count * 0
    # at_low entries reach `low`, at least want; at_high entries reach `high`, fewer than want
    while (high - low > 1) & (at_low > enough):
        middle = low + ((high - low) >> 1)
        if INTERPOLATE:
            share = (at_low - want).to(tl.float32) / (at_low - at_high).to(tl.float32)
            guess = low + ((high - low).to(tl.float32) * share).to(tl.uint32)
            guess = tl.minimum(tl.maximum(guess, low + 1), high - 1)
            middle = tl.where(step % 3 == 2, middle, tl.where(step == 3, low + 1, guess))
            step += 1
        reached = tl.sum((keys >= signed(middle)).to(tl.int32), 0)
        up = reached >= want
        low = tl.where(up, middle, low)
        at_low = tl.where(up, reached, at_low)
        high = tl.where(up, high, middle)
        at_high = tl.where(up, at_high, reached)
    # Stopped early with exactly want entries: all that reach `low` are in, however many equal it.
    return signed(low), tl.where(at_low == want, count, want - at_high)


@triton.jit
def bits_set(words):
    """Number of set bits of each int32."""
    w = words.to(tl.uint32, bitcast=True)
    w = w - ((w >> 1) & 0x55555555)
    w = (w & 0x33333333) + ((w >> 2) & 0x33333333)
    return (((w + (w >> 4)) & 0x0F0F0F0F) * 0x01010101 >> 24).to(tl.int32)


@triton.jit
def lowest_bit(words):
    """Index of the lowest set bit of each int32 (rubbish for 0): a power of two as a float is its exponent."""
    low = (words & -words).to(tl.uint32, bitcast=True)
    return (low.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127


@triton.jit
def to_words(flags, W: tl.constexpr):
    """bool [W, 32] -> int32 [W], one word per thread: a reduction alone leaves copies of each in several threads."""
    bit = (tl.arange(0, 32) * 0 + 1) << tl.arange(0, 32)
    return tl.gather(tl.sum(tl.where(flags, bit[None, :], 0), 1), tl.arange(0, W), 0)


@triton.jit
def append(words, base, line, entries, count):
    """Append the scores whose bits are set to a list of `count`; bit b of word i stands for line[base + 32 i + b]."""
    per_word = bits_set(words)
    place = entries + count + tl.cumsum(per_word, 0) - per_word
    first = base + tl.arange(0, words.shape[0]) * 32
    for _ in range(tl.max(per_word, 0)):
        p = first + lowest_bit(words)
        x = tl.load(line + p, mask=words != 0, other=0.0)
        tl.store(place, pack(x, p), mask=words != 0)
        place += 1
        words = words & (words - 1)


@triton.jit
def pack(x, position):
    """Score f32 and position int32 -> int64 entry."""
    return (x.to(tl.int32, bitcast=True).to(tl.int64) << 32) | position.to(tl.int64)


@triton.jit
def score_of(entry):
    """int64 entry -> score f32."""
    return (entry >> 32).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def kth_of_list(entries, count, want, C: tl.constexpr):
    """`kth_key` of a list of `count` <= C entries; what is read past them does not matter."""
    i = tl.arange(0, C)
    keys = tl.where(i < count, order_key(score_of(tl.load(entries + i))), OUTSIDE)
    return kth_key(keys, want, count, want, True)


@triton.jit
def best_of_block(entry, inside, key, room, tied):
    """Of entries [W, 32], those with a key above `key` and the first `room` with that key (all of them, unless `tied`).

    Returns (taken?, how many are taken before each, how many in all, how many with that key).
    """
    lane = tl.arange(0, 32)[None, :]
    bit = (lane * 0 + 1) << lane
    keys = tl.where(inside, order_key(score_of(entry)), OUTSIDE)
    take = keys >= key
    equal_taken = room * 0
    if tied:
        equal = tl.sum(tl.where(keys == key, bit, 0), 1)
        there = bits_set(equal)
        before = (tl.cumsum(there, 0) - there)[:, None] + bits_set(equal[:, None] & (bit - 1))
        take = (keys > key) | ((keys == key) & (before < room))
        equal_taken = tl.minimum(tl.sum(there, 0), room)
    words = tl.sum(tl.where(take, bit, 0), 1)
    per_word = bits_set(words)
    place = (tl.cumsum(per_word, 0) - per_word)[:, None] + bits_set(words[:, None] & (bit - 1))
    return take, place, tl.sum(per_word, 0), equal_taken


@triton.jit
def keep_best(entries, count, want, C: tl.constexpr, BLOCK: tl.constexpr):
    """Cut a list of `count` > want entries to its `want` best, in place; returns the threshold for later ones.

    Later entries have higher positions, so one equal to the last that is kept has lost.
    """
    i = tl.arange(0, BLOCK // 32)[:, None] * 32 + tl.arange(0, 32)[None, :]
    tl.debug_barrier()
    key, room = kth_of_list(entries, count, want, C)
    tied = room < count
    kept = entries
    for base in range(0, count, BLOCK):
        entry = tl.load(entries + base + i)
        take, place, taken, equal_taken = best_of_block(entry, base + i < count, key, room, tied)
        tl.debug_barrier()  # places are not above what is read by now
        place, entry, take = tl.reshape(place, [BLOCK]), tl.reshape(entry, [BLOCK]), tl.reshape(take, [BLOCK])
        tl.store(kept + place, entry, mask=take)
        kept += taken
        room -= equal_taken
    tl.debug_barrier()
    return float_above(key)


@triton.jit
def write_best(
    out,
    slots_out,
    entries,
    count,
    want,
    table_row,
    offset,
    WRITE: tl.constexpr,
    PAGE: tl.constexpr,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The positions of the `want` best of a list of `count` >= want entries -> `write` at out, slots_out, in the list's
    order.
    """
    i = tl.arange(0, BLOCK // 32)[:, None] * 32 + tl.arange(0, 32)[None, :]
    tl.debug_barrier()
    key, room = kth_of_list(entries, count, want, C)
    tied = room < count
    for base in range(0, count, BLOCK):
        entry = tl.load(entries + base + i)
        take, place, taken, equal_taken = best_of_block(entry, base + i < count, key, room, tied)
        p, place, take = tl.reshape(entry.to(tl.int32), [BLOCK]), tl.reshape(place, [BLOCK]), tl.reshape(take, [BLOCK])
        write(out + place, slots_out + place, p, take, take, table_row, offset, WRITE, PAGE)
        out += taken
        slots_out += taken
        room -= equal_taken


@triton.jit
def copy_row(line, first, n, entries, C: tl.constexpr):
    """Scores line[first : first + n], n <= C, as a list."""
    i = tl.arange(0, C)
    x = tl.load(line + first + i, mask=i < n, other=0.0)
    tl.store(entries + i, pack(x, first + i), mask=i < n)


@triton.jit
def join_lists(lists, list_stride, first_of, count, joint, CHUNKS: tl.constexpr, C: tl.constexpr):
    """Copy CHUNKS lists of capacity C, `count` <= C entries in all, one after another into one list.

    first_of: int32 [CHUNKS], where each list begins in the whole.
    """
    BLOCK: tl.constexpr = C // 4
    for base in range(0, count, BLOCK):
        i = base + tl.arange(0, BLOCK)
        chunk = i * 0
        for bit in tl.static_range(0, 16):  # binary search for the last list that begins at or before i
            if (CHUNKS >> (bit + 1)) > 0:
                begin = tl.load(first_of + chunk + (CHUNKS >> (bit + 1)))
                chunk = tl.where(i >= begin, chunk + (CHUNKS >> (bit + 1)), chunk)
        begin = tl.load(first_of + chunk)
        entry = tl.load(lists + chunk * list_stride + (i - begin), mask=i < count, other=0, cache_modifier=".cg")
        tl.store(joint + i, entry, mask=i < count)


@triton.jit
def slot_of(p, valid, table_row, PAGE: tl.constexpr):
    """Positions -> slots by a page table, int32; -1 where not valid."""
    page = tl.load(table_row + p // PAGE, mask=valid, other=0).to(tl.int32)
    return tl.where(valid, page * PAGE + p % PAGE, -1)


@triton.jit
def write(out, slots_out, p, valid, mask, table_row, offset, WRITE: tl.constexpr, PAGE: tl.constexpr):
    """Positions p -> out, where `mask`, as the caller wants them: "positions" plus an offset, "slots", or "both", slots
    to slots_out then. -1 where not valid.
    """
    if WRITE != "positions":
        slot = slot_of(p, valid, table_row, PAGE)
    if WRITE == "slots":
        tl.store(out, slot, mask=mask)
    else:
        tl.store(out, tl.where(valid, p + offset, -1), mask=mask)
    if WRITE == "both":
        tl.store(slots_out, slot, mask=mask)
