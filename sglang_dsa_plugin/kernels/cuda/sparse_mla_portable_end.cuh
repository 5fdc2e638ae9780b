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
    for (int i = 0; i < 8; i++) last = max(last, (int)s.last[i]);
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
    for (int i = 0; i < 8; i++) largest = max(largest, s.largest[i][local]);
    float most = __uint_as_float(largest) * factor;
    float value = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) value = fmaxf(value, __uint_as_float(s.last[i]));
    // What rounded weights may add to an output: some 2^-11 of this, as independent errors add up. Those of equal weights
    // are not independent, and no sum over weights tells how values go with them: docs/operators.md says what holds.
    float spread = value * sqrtf(s.scores[0][local][0]) * factor;
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
    s.factor[local] = factor;
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
            float by = s.factor[local];
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

// The queries through the tiles into registers: left operands of this warp's heads and columns.
__device__ __forceinline__ void load_queries(u32 (&q)[STEPS][4], u32 memory) {
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    u32 at = memory + (warp % HEAD_TILES * 16 + lane % 16) * ROW_BYTES;
    at += (warp / HEAD_TILES * 2 * GROUP_STEPS + lane / 16) * 16;
#pragma unroll
    for (int i = 0; i < STEPS; i++) matrices(q[i], at + i % GROUP_STEPS * 32 + i / GROUP_STEPS * 128);
}

// One tile after the other, each step for itself: a block goes this way rarely.
__device__ __forceinline__ void walk_exact(const Arguments& a, const Item& item, Shared& s, u32 memory, u32 weights,
                                           Copier& copier, Softmax& softmax, Sums& acc) {
    copier.queries(a, item, memory);
    copies_wait<0>();
    __syncthreads();
    u32 q[STEPS][4], none = 0;
    load_queries(q, memory);
#pragma unroll 1
    for (int at = item.first; at < item.end; at += TILE) {
        __syncthreads();
        copier.tile(a, s, copier.slot(item, at), 0, 0);
        copies_wait<0>();
        __syncthreads();
#if FP8
        unpack<true>(s, 0, 0, none);
        __syncthreads();
#endif
        scores_of_tile<true>(s, q, memory);
        __syncthreads();
        bool changed = softmax.tile<true>(a, s, 0);
        changed = __syncthreads_or(changed);
        sums_of_tile<true>(s, acc, weights, memory, changed, none, [](int, int) {});
    }
}

// Tiles on their way while others are worked on. item.end becomes the end of the picks. False where the block has to go
// the exact way.
__device__ __forceinline__ bool walk(const Arguments& a, Item& item, Shared& s, u32 memory, u32 weights, Copier& copier,
                                     Softmax& softmax, Sums& acc, u32& largest) {
    copier.queries(a, item, memory);
    // Stages that the queries leave take tiles at once. Tile t goes to stage (t + FIRST) % STAGES.
#if FP8
    constexpr int EARLY = STAGES, FIRST = 0;
#else
    constexpr int EARLY = STAGES - Q_STAGES, FIRST = Q_STAGES % STAGES;
#endif
    slot_t slots[STAGES];
#pragma unroll
    for (int t = 0; t < STAGES; t++) slots[t] = copier.slot(item, item.first + TILE * t);
#pragma unroll
    for (int t = 0; t < EARLY; t++) copier.tile(a, s, slots[t], (t + FIRST) % STAGES, t);
#if !HAS_LENGTHS
    item.end = end_of_picks(a, item, s);
#endif
    copies_wait<EARLY>();
#if FP8
    if (threadIdx.x == 0) s.odd = 0;
#endif
    __syncthreads();
    u32 q[STEPS][4];
    load_queries(q, memory);
#if FP8
    queries_to_f16(q, a, s);
#endif
    __syncthreads();
#pragma unroll
    for (int t = EARLY; t < STAGES - 1; t++) copier.tile(a, s, slots[t], (t + FIRST) % STAGES, t);
    u32 number = 0;  // of the tile at hand

#if FP8
    // Tile t waits unpacked in tiles[t % 2]. A warp unpacks the rows that it copied.
    copies_wait<STAGES - 1>();
    __syncwarp();
    unpack<false>(s, 0, 0, largest);
    __syncthreads();
    copier.tile(a, s, copier.slot(item, item.first + TILE * STAGES), 0, STAGES);
    copier.ahead = copier.slot(item, item.first + TILE * (STAGES + 1));
    u32 next = 1 % STAGES;  // where the next tile waits packed
    if (item.first < item.end) scores_of_tile<false>(s, q, memory);
#pragma unroll 1
    for (int at = item.first; at < item.end; at += TILE) {
        copies_wait<STAGES - 1>();
        __syncthreads();
        // Here are the scores of this tile, the next tile packed, and nobody who still reads the last one.
        bool changed = softmax.tile<false>(a, s, number);
        unpack<false>(s, next, (number + 1) % 2, largest);
        changed = __syncthreads_or(changed);
        if (s.odd) break;  // written ahead of that barrier only, so all threads see the same
        copier.begin(a, s, copier.ahead, next, number + 1 + STAGES);
        copier.ahead = copier.slot(item, at + TILE * (STAGES + 2));
        sums_of_tile<false>(s, acc, weights, memory + number % 2 * STAGE_BYTES, changed, largest,
                            [&](int step, int steps) { copier.at_step(step, steps); });
        copies_end();
        number++;
        next = next + 1 == STAGES ? 0 : next + 1;
        if (at + TILE < item.end) scores_of_tile<false>(s, q, memory + number % 2 * STAGE_BYTES);
    }
    copies_wait<0>();
    __syncthreads();
    return !s.odd;
#else
    copier.ahead = slots[STAGES - 1];
    u32 stage = FIRST, last = (FIRST + STAGES - 1) % STAGES;  // of this tile, and of the one before
    copies_wait<STAGES - 2>();
    __syncthreads();
    if (item.first < item.end) scores_of_tile<false>(s, q, memory + stage * STAGE_BYTES);
#pragma unroll 1
    for (int at = item.first; at < item.end; at += TILE) {
        __syncthreads();
        // Here are the scores of this tile, and nobody who still reads the last one, whose place the tile gets that comes
        // STAGES - 1 behind this.
        if constexpr (STAGES == 2) {
            copier.tile(a, s, copier.ahead, last, number + STAGES - 1);
            copier.ahead = copier.slot(item, at + TILE * STAGES);
        }
        bool changed = softmax.tile<false>(a, s, number);
        if constexpr (STAGES > 2) copies_wait<(STAGES > 2 ? STAGES - 3 : 0)>();
        changed = __syncthreads_or(changed);
        // Here are the weights, and the next tile.
        if constexpr (STAGES > 2) {
            copier.begin(a, s, copier.ahead, last, number + STAGES - 1);
            copier.ahead = copier.slot(item, at + TILE * STAGES);
        }
        sums_of_tile<false>(s, acc, weights, memory + stage * STAGE_BYTES, changed, largest, [&](int step, int steps) {
            if constexpr (STAGES > 2) copier.at_step(step, steps);
        });
        if constexpr (STAGES > 2) {
            copies_end();
        } else {
            copies_wait<0>();
            __syncthreads();
        }
        last = stage;
        stage = stage + 1 == STAGES ? 0 : stage + 1;
        number++;
        if (at + TILE < item.end) scores_of_tile<false>(s, q, memory + stage * STAGE_BYTES);
    }
    copies_wait<0>();
    return true;
#endif
}

// The item's output and log-sum-exp, unless sums of f16 do not tell it: false then, and nothing holds.
template <bool EXACT>
__device__ __forceinline__ bool attend(const Arguments& a, Item& item, Shared& s, u32 memory) {
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    u32 weights = memory + TILES * STAGE_BYTES + PARTS * HEADS * TILE * 4;
    Copier copier;
    copier.slots = a.slots + item.row * a.slots_row;
    Sums acc;
#pragma unroll
    for (int m = 0; m < HEAD_TILES; m++)
#pragma unroll
        for (int n = 0; n < 8; n++)
#pragma unroll
            for (int j = 0; j < 4; j++) acc[m][n][j] = 0;
    Softmax softmax = {minus_inf(), 0, 0};
    u32 values = 0;
    bool told = true;
    if constexpr (EXACT) walk_exact(a, item, s, memory, weights, copier, softmax, acc);
    else told = walk(a, item, s, memory, weights, copier, softmax, acc, values);
    {
        u32 head = warp * (HEADS / 8) + lane / LANES;
        float total = softmax.total;
#pragma unroll
        for (int bits = 1; bits < LANES; bits *= 2) {
            total += __shfl_xor_sync(~0u, total, bits);
            softmax.squares += __shfl_xor_sync(~0u, softmax.squares, bits);
        }
        u32 value = __reduce_max_sync(~0u, __float_as_uint(fmaxf(f16_low(values), f16_high(values))));
        // Nobody needs scores, or where picks ended, any longer.
        if (lane % LANES == 0) s.maximum[head] = softmax.m, s.total[head] = total, s.scores[0][head][0] = softmax.squares;
        if (lane == 0) s.last[warp] = value;
    }
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
    if (__syncthreads_or(!told) && !EXACT) return false;
    store(a, item, s, acc);
    return true;
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
    u32 memory = (u32)__cvta_generic_to_shared(shared);
    if (!attend<false>(a, item, s, memory)) {
        __syncthreads();
        attend<true>(a, item, s, memory);
    }
#if PDL
    let_next_start();
#endif
}
