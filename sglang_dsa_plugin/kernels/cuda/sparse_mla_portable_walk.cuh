// The walk of both kinds of warps over the picks of an item (sparse_mla_portable.cu).

// The last pick of the block's that is one, plus 1: short rows are mostly -1, and what lies behind is not looked at again.
__device__ __forceinline__ int end_of_picks(const Arguments& a, const Item& item, Shared& s) {
    int last = item.first;
    const slot_t* slots = a.slots + item.row * a.slots_row;
#pragma unroll 8
    for (int at = item.first + threadIdx.x; at < item.end; at += THREADS) {
        slot_t slot = slots[at];
        if (slot >= 0 && slot < a.count) last = at + 1;
    }
    last = __reduce_max_sync(~0u, last);
    if (threadIdx.x % 32 == 0) s.last[threadIdx.x / 32] = (u32)last;
    __syncthreads();
    for (int i = 0; i < WARPS; i++) last = max(last, (int)s.last[i]);
    return last;
}

// One tile after the other, each step for itself: a block goes this way rarely. By the warps of sums.
__device__ __forceinline__ void sum_exactly(const Arguments& a, const Item& item, Shared& s, u32 memory, Copier& copier,
                                            Sums& acc) {
    u32 none = 0;
    copier.queries(a, item, memory);
    copies_wait<0>();
    __syncthreads();
#pragma unroll 1
    for (int at = item.first; at < item.end; at += TILE) {
        __syncthreads();
        copier.tile(a, s, copier.slot(item, at), 0, 0);
        copies_wait<0>();
#if FP8
        __syncwarp();
        unpack<true>(s, 0, 0, none, s.odd[0]);
#endif
        __syncthreads();
        __syncthreads();
        sums_of_tile<true>(s, acc, 0, memory, none, [](int, int) {});
    }
}

__device__ __forceinline__ void score_exactly(const Arguments& a, const Item& item, Shared& s, u32 memory) {
    __syncthreads();
    Scorer scorer;
    scorer.begin<true>(a, s, memory);
#pragma unroll 1
    for (int at = item.first; at < item.end; at += TILE) {
        __syncthreads();
        __syncthreads();
        scorer.tile<true>(s, 0, memory, 0);
        __syncthreads();
    }
    scorer.end(s);
}

// Tile t of a ring of STAGES lies in (t + FIRST_STAGE) % STAGES: those that the queries leave take tiles at once.
#if FP8
#define EARLY (TILES * TILE >= HEADS ? STAGES : 0)
#define FIRST_STAGE 0
#define FIRST_ASKED STAGES                  // the first tile that is copied in the loop
#else
#define EARLY (STAGES * TILE > HEADS ? STAGES - HEADS / TILE : 0)
#define FIRST_STAGE (HEADS / TILE % STAGES)
#define FIRST_ASKED (STAGES - 1)
#endif

// Tiles on their way while others are worked on. item.end becomes the end of the picks. False where the block has to go
// the exact way. In both kinds of warps the same barriers follow one another: the queries are here (FP8: and are f16);
// they are read; the first tile is here; then for each tile one behind which its weights and the next tile are here, and
// nobody reads the last one; and one at the end.
__device__ __forceinline__ bool sum(const Arguments& a, Item& item, Shared& s, u32 memory, Copier& copier, Sums& acc,
                                    u32& largest) {
#if ASKS
#pragma unroll
    for (int t = 0; t < SLOTS_AHEAD; t++)
        copier.ask(s, item, item.first + TILE * (FIRST_ASKED + t), FIRST_ASKED + t);
#endif
    copier.queries(a, item, memory);
    slot_t slots[STAGES];
#pragma unroll
    for (int t = 0; t < STAGES; t++) slots[t] = copier.slot(item, item.first + TILE * t);
#pragma unroll
    for (int t = 0; t < EARLY; t++) copier.tile(a, s, slots[t], (t + FIRST_STAGE) % STAGES, t);
#if !HAS_LENGTHS
    item.end = end_of_picks(a, item, s);
#endif
    copies_wait<EARLY>();
    if (threadIdx.x == 0) s.again = 0;
    if (threadIdx.x < 2 * 4) s.changed[threadIdx.x / 4][threadIdx.x % 4] = 0;
#if FP8
    if (threadIdx.x < 2) s.odd[threadIdx.x] = 0;
    __syncthreads();
    queries_to_f16(a, s);
#endif
    __syncthreads();
    __syncthreads();
    u32 number = 0;  // of the tile at hand
#if FP8
#pragma unroll
    for (int t = EARLY; t < STAGES; t++) copier.tile(a, s, slots[t], t, t);
    // Tile t waits unpacked in tiles[t % 3]. A warp unpacks the rows that it copied.
    u32 next = 0, place = 0;  // where the next tile waits packed, and goes to
    auto unpack_next = [&](int odd) {
        copies_wait<STAGES - 1>();
        __syncwarp();
        unpack<false>(s, next, place, largest, s.odd[odd]);
        __syncwarp();  // other lanes have read what the next copies overwrite
    };
    u32 tile = 0, copied = STAGES;
    const int end = max(item.end, item.first);
    // From two tiles ahead of the first on, for which there is nothing to sum yet.
#pragma unroll 1
    for (int at = item.first - 2 * TILE; at < end; at += TILE) {
        bool summing = at >= item.first;
        if (at != item.first - 2 * TILE) __syncthreads();
        // What was unpacked behind the last barrier but one: the next such writes elsewhere.
        if (summing && s.odd[(number + 1) % 2]) break;
        unpack_next(summing ? number % 2 : 1);
        copier.begin(a, s, copier.asked(s, item, at + TILE * (STAGES + 2), copied), next, copied);
        copier.ask(s, item, at + TILE * (STAGES + 2 + SLOTS_AHEAD), copied + SLOTS_AHEAD);
        if (summing) {
            sums_of_tile<false>(s, acc, number % 2, memory + tile * STAGE_BYTES, largest,
                                [&](int step, int steps) { copier.at_step(step, steps); });
            number++;
            tile = tile == 2 ? 0 : tile + 1;
        } else {
#pragma unroll
            for (int j = 0; j < COPIES; j++) copier.part(j);
        }
        copied++;
        copies_end();
        place = place == 2 ? 0 : place + 1;
        next = next + 1 == STAGES ? 0 : next + 1;
    }
    copies_wait<0>();
    __syncthreads();
    return !(s.odd[0] | s.odd[1]);
#else
#pragma unroll
    for (int t = EARLY; t < STAGES - 1; t++) copier.tile(a, s, slots[t], (t + FIRST_STAGE) % STAGES, t);
#if !ASKS
    copier.ahead = slots[STAGES - 1];
#endif
    u32 stage = FIRST_STAGE, last = (FIRST_STAGE + STAGES - 1) % STAGES;  // of this tile, and of the one before
    copies_wait<STAGES - 2>();
    __syncthreads();
    copies_wait<STAGES - 3>();
#pragma unroll 1
    for (int at = item.first; at < item.end; at += TILE) {
        __syncthreads();
        u32 coming = number + STAGES - 1;
        copier.begin(a, s, copier.asked(s, item, at + TILE * (STAGES - 1), coming), last, coming);
        copier.ask(s, item, at + TILE * (STAGES - 1 + SLOTS_AHEAD), coming + SLOTS_AHEAD);
        sums_of_tile<false>(s, acc, number % 2, memory + stage * STAGE_BYTES, largest,
                            [&](int step, int steps) { copier.at_step(step, steps); });
        copies_end();
        copies_wait<STAGES - 3>();
        last = stage;
        stage = stage + 1 == STAGES ? 0 : stage + 1;
        number++;
    }
    copies_wait<0>();
    __syncthreads();
    return true;
#endif
}

__device__ __forceinline__ void score(const Arguments& a, Item& item, Shared& s, u32 memory) {
#if !HAS_LENGTHS
    item.end = end_of_picks(a, item, s);
#endif
#if FP8
    __syncthreads();
    queries_to_f16(a, s);
#endif
    __syncthreads();
    Scorer scorer;
    scorer.begin<false>(a, s, memory);
    __syncthreads();
    __syncthreads();
    u32 next = 0, tile = FIRST_STAGE;  // what is scored next
    // The first tile stands in the loop or ahead of it, as each was timed: in it, tiles of 16 bf16 rows took 9293, not 9051.
#if FP8
    const int end = max(item.end, item.first);
#pragma unroll 1
    for (int at = item.first - TILE; at < end; at += TILE) {
        bool summing = at >= item.first;
        if (summing) __syncthreads();
        if (summing && s.odd[next % 2]) break;
        if (at + TILE < item.end) scorer.tile<false>(s, next % 2, memory + tile * STAGE_BYTES, next);
        next++;
        tile = tile + 1 == TILES ? 0 : tile + 1;
    }
#else
    if (item.first < item.end) scorer.tile<false>(s, 0, memory + tile * STAGE_BYTES, 0);
#pragma unroll 1
    for (int at = item.first; at < item.end; at += TILE) {
        __syncthreads();
        next++;
        tile = tile + 1 == TILES ? 0 : tile + 1;
        if (at + TILE < item.end) scorer.tile<false>(s, next % 2, memory + tile * STAGE_BYTES, next);
    }
#endif
    scorer.end(s);
    __syncthreads();
}
