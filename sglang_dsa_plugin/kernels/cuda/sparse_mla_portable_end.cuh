// The end of an item, and the kernel (sparse_mla_portable.cu).

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
