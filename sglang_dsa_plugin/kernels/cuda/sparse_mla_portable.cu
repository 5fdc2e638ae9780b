// Sparse MLA for many heads, with what every GPU from SM 8.0 on has: cp.async, ldmatrix, mma.sync. A block has 64 (or 32)
// heads of a row of queries and one split of its picks, which it gathers in tiles of 32 through a ring. Rows are bf16, or
// packed fp8 that becomes bf16 (sparse_mla_portable_fp8.cuh).
//
//   scores   a warp has 16 heads and a part of the 576 columns, with its part of the queries in registers: what it reads
//            from shared memory for 16 heads is a tile's columns and nothing else. The parts are summed by the softmax.
//   softmax  a warp has 8 (4) heads: running maximum, weights to shared memory, factors of what was summed so far.
//   sums     a warp has 64 of the 512 columns of all heads, in registers: 128 (64) numbers a thread.
//
// The sums of a tile and the scores of the next stand between the same two barriers, so that warps which are ahead keep
// the tensor cores busy while others still read.
//
// A weight rounded to bf16 is off by more than the bounds allow. Sums are therefore products of f16: weights times 2^9,
// which keeps what lies down to 2^-23 of the largest whole, and values converted on their way from shared memory. bf16
// has values that f16 has not, and a weight in f16 is off by up to 2^-11 of itself: where sums are not finite, so small
// that what f16 cuts off could be seen, or what is left of much larger terms (the largest value times the root of the sum
// of squared weights tells), the block does its work again with weights as two bf16 numbers, the second what the first
// cut off (EXACT).
//
// The 16-byte pieces of 128 bytes are swapped by the row number, so that eight rows' pieces lie in different banks.
//
// Compile-time: FP8, HEADS (32 or 64), WARP_TILES, STAGES, PARTIAL, HAS_LENGTHS, HAS_SINK, SLOTS64, PDL
// (kernels/cuda/sparse_mla_portable.py).

#include "cluster.cuh"
#include "tiles.cuh"

typedef unsigned short u16;

#if SLOTS64
typedef long long slot_t;
#else
typedef int slot_t;
#endif

#define THREADS 256
#define TILE 32                             // rows
#define ROW_BYTES 1152                      // of bf16 numbers, as products take them
#define STAGE_BYTES (TILE * ROW_BYTES)
#if FP8
#define TILES 2                             // of bf16 numbers; the ring has packed ones
#define PACKED_BYTES 656
#define COPIES 6                            // of a thread, for a tile
#else
#define TILES STAGES
#define COPIES 9
#endif
#define Q_STAGES (HEADS / 32)               // of the ring, which the queries pass through
#define HEAD_TILES (HEADS / 16)
#define WARP_ROWS (HEAD_TILES / WARP_TILES) // of warps: each has the scores of WARP_TILES times 16 heads
#define PARTS (8 / WARP_ROWS)               // of the columns that scores sum over
#define STEPS (36 / PARTS)                  // of 16 columns, in the scores of a warp
#define GROUP_STEPS (4 / PARTS)             // of them in 128 bytes
#define LANES (256 / HEADS)                 // that share a head in the softmax
#define WEIGHT_BITS 9
#define SLACK 6                             // bits that a score may lie above the maximum before that goes up
#define LEAST 2.44140625e-04f               // 2^-12: smaller sums are made again
#define LOG2E 1.4426950408889634f
#define LN2 0.6931471805599453f

struct Arguments {
    const u16* q;
    const u16* q_rope;
    const char* rows;
    const slot_t* slots;
    const int* lengths;
    const float* sink;
    void* out;
    float* lse;
    long long q_row, q_head, rope_row, rope_head, kv_stride, slots_row, out_row, out_head;
    int count, heads, picks, split_picks, splits;
    float scale_log2;
};

struct Shared {
    char tiles[TILES][STAGE_BYTES];
    float scores[PARTS][HEADS][TILE];       // 16-byte pieces of a head swapped, see `swapped`
    u16 weights[2][HEADS][TILE];            // f16, or bf16 and what it cut off; pieces swapped by half the head number
    float factor[HEADS];                    // of what was summed so far; at the end of the sums
    float maximum[HEADS], total[HEADS];
    u32 largest[8][HEADS];                  // bits of the largest |sum| in a warp's columns
    unsigned char real[STAGES][TILE];       // whether there is such a pick
    int last[8];
#if FP8
    int odd, unused[3];                     // whether scales or values of a row are not for the fast way
    float scales[TILE][4];                  // of the tile, in the exact way
    char packed[STAGES][TILE][PACKED_BYTES];
#endif
};

// What a block works on: heads head0 .. head0 + HEADS - 1 of a row, picks first .. end - 1.
struct Item {
    long long row;
    int head0, split, first, end;
};

// Where a head's piece of four scores lies: both what a warp writes at a time and what it reads are in different banks.
__device__ __forceinline__ u32 swapped(u32 piece, u32 head) { return piece ^ ((head & 1) << 2 | (head & 2)); }

// One thread's part of the copies: 16 of every 128 bytes of one row of a tile.
struct Copier {
    const slot_t* slots;
    slot_t ahead;      // of this thread's row of the tile that is copied next
    const char* from;  // of the copies at hand
    u32 to;
    bool real;

    static __device__ __forceinline__ u32 local() { return this_thread() / 8; }
    static __device__ __forceinline__ u32 piece() { return this_thread() % 8 * 16; }
    // Where this thread's piece of a tile of bf16 numbers lies.
    static __device__ __forceinline__ u32 place() { return local() * ROW_BYTES + (piece() ^ local() % 8 * 16); }

    // The slot of this thread's row of the tile that begins at pick `at`.
    __device__ __forceinline__ slot_t slot(const Item& item, int at) const {
        at += (int)local();
        return at < item.end ? slots[at] : (slot_t)-1;
    }
    __device__ __forceinline__ void begin(const Arguments& a, Shared& s, slot_t slot, u32 stage) {
        real = slot >= 0 && slot < a.count;
        from = a.rows + (real ? (long long)slot : 0) * a.kv_stride + piece();
#if FP8
        to = (u32)__cvta_generic_to_shared(s.packed[stage][local()] + piece());
#else
        to = (u32)__cvta_generic_to_shared(s.tiles[stage]) + place();
#endif
        if (piece() == 0) s.real[stage][local()] = real;
    }
    // The copies in COPIES parts. What is masked has weight 0, and 0 times what lies there must be 0: it becomes zeros.
    __device__ __forceinline__ void part(int j) const {
#if FP8
        if (j < 4) copy16(to + 128 * j, from + 128 * j, real);
        else if (j == 4) copy16(to + 528, from + 528, real);
        else if (piece() == 0) copy16(to + 512, from + 512, real);
#else
        copy16(to + 128 * j, from + 128 * j, real);
#endif
    }
    __device__ __forceinline__ void tile(const Arguments& a, Shared& s, slot_t slot, u32 stage) {
        begin(a, s, slot, stage);
#pragma unroll
        for (int j = 0; j < COPIES; j++) part(j);
        copies_end();
    }
    // The queries, as rows of the first tiles. Heads that do not exist are zeros; nothing is written for them.
    __device__ __forceinline__ void queries(const Arguments& a, const Item& item, u32 memory) const {
#pragma unroll
        for (int i = 0; i < Q_STAGES; i++) {
            bool real = item.head0 + 32 * i + (int)local() < a.heads;
            int head = real ? item.head0 + 32 * i + local() : 0;
            u32 there = memory + i * STAGE_BYTES + place();
            const char* from = (const char*)(a.q + item.row * a.q_row + head * a.q_head) + piece();
#pragma unroll
            for (int j = 0; j < 8; j++) copy16(there + 128 * j, from + 128 * j, real);
            from = (const char*)(a.q_rope + item.row * a.rope_row + head * a.rope_head) + piece();
            copy16(there + 1024, from, real);
        }
        copies_end();
    }
};

#if FP8
#include "sparse_mla_portable_fp8.cuh"
#endif

// Both of the two bf16 numbers as f16; what f16 does not hold becomes infinite.
__device__ __forceinline__ u32 to_f16(u32 both) { return pair_f16(low_half(both), high_half(both)); }

// This warp's part of the scores of a tile: its heads, all 32 picks, the columns of its part. EXACT: packed values are
// there as they are stored, and blocks of columns count in their scales.
template <bool EXACT>
__device__ __forceinline__ void scores_of_tile(Shared& s, const u32 (&q)[STEPS][WARP_TILES][4], u32 tile) {
    constexpr int PICKS = 8 * 4 / WARP_TILES;  // at a time: sums of four products stand beside each other
    u32 thread = this_thread(), lane = thread % 32, warp = thread / 32, g = lane / 4, c = lane % 4;
    u32 part = warp / WARP_ROWS;
    u32 at = tile + (lane % 8 + lane / 16 * 8) * ROW_BYTES;
    at += ((part * 2 * GROUP_STEPS + lane / 8 % 2) ^ lane % 8) * 16;
    float* to = s.scores[part][warp % WARP_ROWS * WARP_TILES * 16 + g];
    u32 own = swapped(c / 2, g) * 4 + c % 2 * 2;
#pragma unroll
    for (int first = 0; first < TILE; first += PICKS) {
        float d[WARP_TILES][PICKS / 8][4];  // heads g (0, 1) and g + 8 (2, 3), picks 8 n + 2 c and the next
#pragma unroll
        for (int m = 0; m < WARP_TILES; m++)
#pragma unroll
            for (int n = 0; n < PICKS / 8; n++)
#pragma unroll
                for (int j = 0; j < 4; j++) d[m][n][j] = 0;
#if FP8
        float sum[WARP_TILES][PICKS / 8][4] = {};
#endif
#pragma unroll
        for (int i = 0; i < STEPS; i++) {
            u32 x[PICKS / 16][4];
#pragma unroll
            for (int n = 0; n < PICKS / 16; n++)
                matrices(x[n], (at ^ i % GROUP_STEPS * 32) + (first + 16 * n) * ROW_BYTES + i / GROUP_STEPS * 128);
#pragma unroll
            for (int n = 0; n < PICKS / 8; n++)
#pragma unroll
                for (int m = 0; m < WARP_TILES; m++)
                    product(d[m][n], q[i][m], x[n / 2][n % 2 * 2], x[n / 2][n % 2 * 2 + 1]);
#if FP8
            if constexpr (EXACT) add_block(d, sum, s, i, first);
#endif
        }
#pragma unroll
        for (int m = 0; m < WARP_TILES; m++)
#pragma unroll
            for (int n = 0; n < PICKS / 8; n++) {
                // A head's pieces are two apart from n to n: an exclusive or, whatever they were swapped with.
                float* there = to + 16 * m * TILE + (own ^ (first + 8 * n));
                *(float2*)there = make_float2(d[m][n][0], d[m][n][1]);
                *(float2*)(there + 8 * TILE) = make_float2(d[m][n][2], d[m][n][3]);
            }
    }
}

// What a lane keeps of its head between tiles: the maximum that weights are relative to, and the sum of weights, in both
// of which 2^WEIGHT_BITS is a weight of 1.
struct Softmax {
    float m, total, squares;  // squares: sum of squared weights

    template <bool EXACT>
    __device__ __forceinline__ void tile(const Arguments& a, Shared& s, u32 stage) {
        u32 thread = this_thread(), lane = thread % 32, own = lane % LANES;
        u32 head = thread / 32 * (HEADS / 8) + lane / LANES;
        float p[8 / LANES][4];
        float best = minus_inf();
#pragma unroll
        for (int i = 0; i < 8 / LANES; i++) {
            u32 piece = own + LANES * i;
            float4 sum = *(const float4*)(s.scores[0][head] + 4 * swapped(piece, head));
#pragma unroll
            for (int part = 1; part < PARTS; part++) {
                float4 more = *(const float4*)(s.scores[part][head] + 4 * swapped(piece, head));
                sum.x += more.x, sum.y += more.y, sum.z += more.z, sum.w += more.w;
            }
            u32 real = *(const u32*)(s.real[stage] + 4 * piece);
            p[i][0] = real & 1 ? sum.x * a.scale_log2 : minus_inf();
            p[i][1] = real & 1 << 8 ? sum.y * a.scale_log2 : minus_inf();
            p[i][2] = real & 1 << 16 ? sum.z * a.scale_log2 : minus_inf();
            p[i][3] = real & 1 << 24 ? sum.w * a.scale_log2 : minus_inf();
            best = fmaxf(best, fmaxf(fmaxf(p[i][0], p[i][1]), fmaxf(p[i][2], p[i][3])));
        }
#pragma unroll
        for (int bits = 1; bits < LANES; bits *= 2) best = fmaxf(best, __shfl_xor_sync(~0u, best, bits));
        // The maximum goes up in large steps only: then what was summed so far has to be multiplied rarely.
        float factor = 1;
        if (best > m + SLACK) {
            factor = exp2_of(m - best);
            m = best;
            total *= factor, squares *= factor * factor;
        }
        if (own == 0) s.factor[head] = factor;
        float lift = m == minus_inf() ? 0.f : m - WEIGHT_BITS;
#pragma unroll
        for (int i = 0; i < 8 / LANES; i++) {
            u32 piece = own + LANES * i, at = (piece / 2 ^ head / 2 % 4) * 8 + piece % 2 * 4;
#pragma unroll
            for (int j = 0; j < 4; j++) {
                p[i][j] = exp2_of(p[i][j] - lift);
                total += p[i][j];
                if constexpr (!EXACT) squares += p[i][j] * p[i][j];
            }
            if constexpr (EXACT) {
                uint2 high = make_uint2(pair(p[i][0], p[i][1]), pair(p[i][2], p[i][3]));
                *(uint2*)(s.weights[0][head] + at) = high;
                *(uint2*)(s.weights[1][head] + at) =
                    make_uint2(pair(p[i][0] - low_half(high.x), p[i][1] - high_half(high.x)),
                               pair(p[i][2] - low_half(high.y), p[i][3] - high_half(high.y)));
            } else {
                *(uint2*)(s.weights[0][head] + at) =
                    make_uint2(pair_f16(p[i][0], p[i][1]), pair_f16(p[i][2], p[i][3]));
            }
        }
    }
};

// acc[m][n]: heads 16 m + g (0, 1) and g + 8 (2, 3), columns 64 warp + 8 n + 2 c and the next.
typedef float Sums[HEAD_TILES][8][4];

// between(step): what stands ahead of the products of each of the 8 steps.
template <bool EXACT, class Between>
__device__ __forceinline__ void sums_of_tile(const Shared& s, Sums& acc, u32 weights, u32 tile, u32& value,
                                             Between between) {
    u32 thread = this_thread(), lane = thread % 32, warp = thread / 32, g = lane / 4;
    // Lane l looks at heads l and l + 32.
    bool changed = s.factor[lane] != 1;
    if constexpr (HEADS == 64) changed |= s.factor[lane + 32] != 1;
    if (__any_sync(~0u, changed)) {
#pragma unroll
        for (int m = 0; m < HEAD_TILES; m++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                float factor = s.factor[16 * m + 8 * h + g];
#pragma unroll
                for (int n = 0; n < 8; n++) acc[m][n][2 * h] *= factor, acc[m][n][2 * h + 1] *= factor;
            }
    }
    u32 from = weights + lane % 16 * (2 * TILE) + (lane / 16 ^ lane % 16 / 2 % 4) * 16;
    u32 values = tile + lane % 16 * ROW_BYTES + 128 * warp + (lane / 16 ^ lane % 8) * 16;
#pragma unroll
    for (int k = 0; k < TILE / 16; k++) {
        u32 p[HEAD_TILES][4], low[HEAD_TILES][4];
#pragma unroll
        for (int m = 0; m < HEAD_TILES; m++) matrices(p[m], (from ^ k * 32) + m * 16 * 2 * TILE);
        if constexpr (EXACT) {
#pragma unroll
            for (int m = 0; m < HEAD_TILES; m++) {
                matrices(low[m], (from ^ k * 32) + (HEADS + m * 16) * 2 * TILE);
#if FP8
                scale_weights(p[m], low[m], s, k);
#endif
            }
        }
#pragma unroll
        for (int n = 0; n < 4; n++) {
            u32 x[4];
            matrices_turned(x, (values ^ n * 32) + k * 16 * ROW_BYTES);
            between(4 * k + n);
            if constexpr (!EXACT) {
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    value = max(value, max(x[j] & 0x7fffu, x[j] >> 16 & 0x7fffu));
                    x[j] = to_f16(x[j]);
                }
            }
#pragma unroll
            for (int j = 0; j < 2; j++)
#pragma unroll
                for (int m = 0; m < HEAD_TILES; m++) {
                    float(&to)[4] = acc[m][2 * n + j];
                    if constexpr (EXACT) product(to, p[m], x[2 * j], x[2 * j + 1]);
                    else product_f16(to, p[m], x[2 * j], x[2 * j + 1]);
                }
            if constexpr (EXACT) {
#pragma unroll
                for (int m = 0; m < HEAD_TILES; m++)
#pragma unroll
                    for (int j = 0; j < 2; j++) product(acc[m][2 * n + j], low[m], x[2 * j], x[2 * j + 1]);
            }
        }
    }
}

#include "sparse_mla_portable_end.cuh"
