// The walk over the picks of an item, and its end (sparse_mla_portable.cu).

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

// From maximum and total of a head: its log-sum-exp to memory, and what turns its sums into the output. False where sums
// of f16 do not tell the output.
__device__ __forceinline__ bool finish_head(const Arguments& a, const Item& item, Shared& s) {
    u32 local = threadIdx.x;
    int head = item.head0 + local;
    float m = s.maximum[local], total = s.total[local];
    // A sum of weights is NaN when a row holds NaN, and must stay so.
    bool some = m > minus_inf() || total != total;
    float lse = some ? m - WEIGHT_BITS + log2_of(total) : minus_inf(), factor = some ? 1 / total : 0.f;
    u32 largest = 0;
#pragma unroll
    for (int i = 0; i < SUM_WARPS; i++) largest = max(largest, s.largest[i][local]);
    float most = __uint_as_float(largest) * factor;
    float value = 0;
#pragma unroll
    for (int i = 0; i < SUM_WARPS; i++) value = fmaxf(value, __uint_as_float(s.last[i]));
    // What rounded weights may add to an output: some 2^-11 of this, as independent errors add up. Those of equal weights
    // are not independent, and no sum over weights tells how values go with them: docs/operators.md says what holds.
    float spread = value * sqrtf(s.squares[local]) * factor;
    bool told = !some || (largest < 0x7f800000u && most >= LEAST && spread <= fminf(2 * fmaxf(1, most), 16 * most));
    if (head < a.heads) {
#if PARTIAL
        a.lse[(item.row * a.splits + item.split) * a.heads + head] = lse;
#else
#if HAS_SINK
        if (some) factor /= 1 + exp2_of(a.sink[head] * LOG2E - lse);
#endif
        a.lse[item.row * a.heads + head] = lse * LN2;
#endif
    }
    s.factor[0][local] = factor;
    return told || head >= a.heads;
}

// acc[m][n] times the heads' factors to memory.
__device__ __forceinline__ void store(const Arguments& a, const Item& item, const Shared& s, const Sums& acc) {
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, c = lane % 4;
#pragma unroll
    for (int m = 0; m < HEAD_TILES; m++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            u32 local = 16 * m + 8 * h + g;
            int head = item.head0 + local;
            float by = s.factor[0][local];
#if PARTIAL
            if (head >= a.heads || item.end <= item.first) continue;  // the merge never reads a split without picks
            float* to = (float*)a.out + ((item.row * a.splits + item.split) * a.heads + head) * 512 + 64 * warp + 2 * c;
#pragma unroll
            for (int n = 0; n < 8; n++)
                *(float2*)(to + 8 * n) = make_float2(acc[m][n][2 * h] * by, acc[m][n][2 * h + 1] * by);
#else
            // Two lanes swap halves, so that each has four columns and four lanes have 32 bytes.
            u16* to = (u16*)a.out + item.row * a.out_row + head * a.out_head + 64 * warp + c % 2 * 8 + c / 2 * 4;
#pragma unroll
            for (int n = 0; n < 8; n += 2) {
                u32 x0 = pair(acc[m][n][2 * h] * by, acc[m][n][2 * h + 1] * by);
                u32 x1 = pair(acc[m][n + 1][2 * h] * by, acc[m][n + 1][2 * h + 1] * by);
                u32 other = __shfl_xor_sync(~0u, c % 2 ? x0 : x1, 1);
                if (head < a.heads) *(uint2*)(to + 8 * n) = c % 2 ? make_uint2(other, x1) : make_uint2(x0, other);
            }
#endif
        }
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
#else
#define EARLY (STAGES * TILE > HEADS ? STAGES - HEADS / TILE : 0)
#define FIRST_STAGE (HEADS / TILE % STAGES)
#endif

// Tiles on their way while others are worked on. item.end becomes the end of the picks. False where the block has to go
// the exact way. In both kinds of warps the same barriers follow one another: the queries are here; they are read; the
// first tile is here; then for each tile one behind which its weights and the next tile are here, and nobody reads the
// last one.
__device__ __forceinline__ bool sum(const Arguments& a, Item& item, Shared& s, u32 memory, Copier& copier, Sums& acc,
                                    u32& largest) {
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
    copier.ahead = copier.slot(item, item.first + TILE * STAGES);
    const int end = max(item.end, item.first);
    // From two tiles ahead of the first on, for which there is nothing to sum yet.
#pragma unroll 1
    for (int at = item.first - 2 * TILE; at < end; at += TILE) {
        bool summing = at >= item.first;
        if (at != item.first - 2 * TILE) __syncthreads();
        // What was unpacked behind the last barrier but one: the next such writes elsewhere.
        if (summing && s.odd[(number + 1) % 2]) break;
        unpack_next(summing ? number % 2 : 1);
        copier.begin(a, s, copier.ahead, next, copied++);
        copier.ahead = copier.slot(item, at + TILE * (STAGES + 3));
        if (summing) {
            sums_of_tile<false>(s, acc, number % 2, memory + tile * STAGE_BYTES, largest,
                                [&](int step, int steps) { copier.at_step(step, steps); });
            number++;
            tile = tile == 2 ? 0 : tile + 1;
        } else {
#pragma unroll
            for (int j = 0; j < COPIES; j++) copier.part(j);
        }
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
    copier.ahead = slots[STAGES - 1];
    u32 stage = FIRST_STAGE, last = (FIRST_STAGE + STAGES - 1) % STAGES;  // of this tile, and of the one before
    copies_wait<STAGES - 2>();
    __syncthreads();
    copies_wait<STAGES - 3>();
#pragma unroll 1
    for (int at = item.first; at < item.end; at += TILE) {
        __syncthreads();
        copier.begin(a, s, copier.ahead, last, number + STAGES - 1);
        copier.ahead = copier.slot(item, at + TILE * STAGES);
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

// The item's output and log-sum-exp, unless sums of f16 do not tell it: false then, and nothing holds.
template <bool EXACT>
__device__ __forceinline__ bool attend_sums(const Arguments& a, Item& item, Shared& s, u32 memory) {
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    Copier copier;
    copier.slots = a.slots + item.row * a.slots_row;
    Sums acc;
#pragma unroll
    for (int m = 0; m < HEAD_TILES; m++)
#pragma unroll
        for (int n = 0; n < 8; n++)
#pragma unroll
            for (int j = 0; j < 4; j++) acc[m][n][j] = 0;
    u32 values = 0;
    bool told = true;
    if constexpr (EXACT) sum_exactly(a, item, s, memory, copier, acc);
    else told = sum(a, item, s, memory, copier, acc, values);
    // Nobody needs where picks ended any longer.
    u32 value = __reduce_max_sync(~0u, __float_as_uint(fmaxf(f16_low(values), f16_high(values))));
    if (lane == 0) s.last[warp] = value;
#pragma unroll
    for (int m = 0; m < HEAD_TILES; m++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            // As bits, of which those of NaN are the largest.
            u32 largest = 0;
#pragma unroll
            for (int n = 0; n < 8; n++)
#pragma unroll
                for (int j = 0; j < 2; j++) largest = max(largest, __float_as_uint(acc[m][n][2 * h + j]) & 0x7fffffffu);
            largest = max(largest, __shfl_xor_sync(~0u, largest, 1));
            largest = max(largest, __shfl_xor_sync(~0u, largest, 2));
            if (lane % 4 == 0) s.largest[warp][16 * m + 8 * h + lane / 4] = largest;
        }
    __syncthreads();
    if (threadIdx.x < HEADS) told = finish_head(a, item, s) && told;
    if (!told) s.again = 1;
    __syncthreads();
    if (!EXACT && s.again) return false;
    store(a, item, s, acc);
    return true;
}

template <bool EXACT>
__device__ __forceinline__ bool attend(const Arguments& a, Item& item, Shared& s, u32 memory) {
    if (threadIdx.x < SUM_THREADS) return attend_sums<EXACT>(a, item, s, memory);
    if constexpr (EXACT) score_exactly(a, item, s, memory);
    else score(a, item, s, memory);
    __syncthreads();
    __syncthreads();
    return EXACT || !s.again;
}

// q bf16 [R, H, 512] and q_rope [R, H, 64], rows of 1152 (FP8: 656) bytes every kv_stride bytes, all on 16-byte bounds; strides of
// q, q_rope, out and slots in elements. out bf16 [R, H, 512], lse f32 [R, H], natural; or, when PARTIAL, normalised out
// f32 [R, splits, H, 512] and lse f32 [R, splits, H], base 2, as sparse_mla_merge.py takes them.
// Grid: R * splits * ceil(H / HEADS) blocks, head tiles of one split side by side: the second finds the rows in L2.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
sparse_mla_portable(const u16* q, const u16* q_rope, const char* rows, const slot_t* slots, const int* lengths,
                    const float* sink, void* out, float* lse, long long q_row, long long q_head, long long rope_row,
                    long long rope_head, long long kv_stride, long long slots_row, long long out_row,
                    long long out_head, int count, int heads, int picks, int split_picks, int splits,
                    float scale_log2) {
    extern __shared__ __align__(128) char shared[];
    Shared& s = *(Shared*)shared;
    Arguments a = {q, q_rope, rows, slots, lengths, sink, out, lse, q_row, q_head, rope_row, rope_head, kv_stride,
                   slots_row, out_row, out_head, count, heads, picks, split_picks, splits, scale_log2};
#if PDL
    wait_for_earlier();
#endif
    Item item;
    int head_tiles = (heads + HEADS - 1) / HEADS, i = blockIdx.x / head_tiles;
    item.head0 = blockIdx.x % head_tiles * HEADS;
    item.split = i % splits;
    item.row = i / splits;
    item.first = item.split * split_picks;
    item.end = min(picks, item.first + split_picks);
#if HAS_LENGTHS
    item.end = min(item.end, lengths[item.row]);
#endif
    u32 memory = address(shared);
    if (!attend<false>(a, item, s, memory)) {
        __syncthreads();
        attend<true>(a, item, s, memory);
    }
#if PDL
    let_next_start();
#endif
}
