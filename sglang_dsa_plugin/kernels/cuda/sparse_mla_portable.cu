// Sparse MLA for many heads, with what every GPU from SM 8.0 on has: cp.async, ldmatrix, mma.sync. A block has 64 (or 32)
// heads of a row of queries and one split of its picks, which it gathers in tiles of 32 through a ring. Rows are bf16, or
// packed fp8 that becomes f16 (sparse_mla_portable_fp8.cuh).
//
//   scores   a warp has 16 heads and a part of the 576 columns, with its part of the queries in registers: what it reads
//            from shared memory for 16 heads is a tile's columns and nothing else. The parts are summed by the softmax.
//   softmax  a warp has 8 (4) heads: running maximum, weights to shared memory, factors of what was summed so far.
//   sums     a warp has 64 of the 512 columns of all heads, in registers: 128 (64) numbers a thread.
//
// The sums of a tile and the scores of the next stand between the same two barriers, so that warps which are ahead keep
// the tensor cores busy while others still read. With two warps a scheduler the time is that of a warp's instructions one
// after the other, each with what it waits for: few of them, and operands that are read a step ahead (loads_stay).
//
// A weight rounded to bf16 is off by more than the bounds allow. Sums are therefore products of f16: weights times 2^9,
// which keeps what lies down to 2^-23 of the largest whole, and values, of bf16 rows converted on their way from shared
// memory. bf16 has values that f16 has not, and a weight in f16 is off by up to 2^-11 of itself: where sums are not
// finite, so small that what f16 cuts off could be seen, or what is left of much larger terms (the largest value times the
// root of the sum of squared weights tells), the block does its work again with weights as two bf16 numbers, the second
// what the first cut off (EXACT).
//
// Compile-time: FP8, HEADS (32 or 64), STAGES, PARTIAL, HAS_LENGTHS, HAS_SINK, SLOTS64, PDL
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
#define ROW_BYTES 1168                      // of 576 bf16 numbers and 16 bytes, by which eight rows lie in different banks
#define WEIGHT_ROW (TILE + 8)               // numbers, likewise
#define STAGE_BYTES (TILE * ROW_BYTES)
#if FP8
#define TILES 2                             // unpacked ones; the ring has packed ones
#define PACKED_BYTES 656
#define COPIES 6                            // of a thread, for a tile
#else
#define TILES STAGES
#define COPIES 9
#endif
#define COPIES_TOGETHER 3                   // ahead of the first of a run of them the compiler puts three loads of nothing
#define Q_STAGES (HEADS / TILE)             // of the ring, which the queries pass through
#define HEAD_TILES (HEADS / 16)
#define PARTS (8 / HEAD_TILES)              // of the columns that scores sum over
#define STEPS (36 / PARTS)                  // of 16 columns, in the scores of a warp
#define GROUP_STEPS (4 / PARTS)             // of them in 128 bytes
#define LANES (256 / HEADS)                 // that share a head in the softmax
#define WEIGHT_BITS 9
#define MARKS 8                             // tiles that `real` has room for: those on their way and those at hand
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
    u16 weights[HEADS][WEIGHT_ROW];         // f16, or bf16
    float factor[HEADS];                    // of what was summed so far; at the end of the sums
    float maximum[HEADS], total[HEADS];
    u32 largest[8][HEADS];                  // bits of the largest |sum| in a warp's columns
    unsigned char real[MARKS][TILE];        // whether there is such a pick, by the tile's number
    u32 last[8];                            // of warps: where their picks end; in the end bits of their largest |value|
#if FP8
    int odd, unused[3];                     // whether scales or values of a row are not for the fast way
    float scales[TILE][4];                  // of the tile, in the exact way
    float unit[HEADS];                      // of a head's scores, to powers of two
    char packed[STAGES][TILE][PACKED_BYTES];
#endif
};

// What a block works on: heads head0 .. head0 + HEADS - 1 of a row, picks first .. end - 1.
struct Item {
    long long row;
    int head0, split, first, end;
};

// The exact way has one tile, and beside it what the weights cut off.
__device__ __forceinline__ u16* low_weights(Shared& s) { return (u16*)s.tiles[1]; }
__device__ __forceinline__ u32 low_weights_at() {
    return (u32)STAGE_BYTES - (u32)(TILES * STAGE_BYTES + sizeof(float) * PARTS * HEADS * TILE);
}

// Where a head's piece of four scores lies: both what a warp writes at a time and what it reads are in different banks.
__device__ __forceinline__ u32 swapped(u32 piece, u32 head) { return piece ^ ((head & 1) << 2 | (head & 2)); }

#include "sparse_mla_portable_copies.cuh"

// Whether a step of the scores has columns of the latent, not roped ones.
__device__ __forceinline__ constexpr bool in_latent(int step) { return step / GROUP_STEPS < 8; }

#if FP8
#include "sparse_mla_portable_fp8.cuh"
#endif

// Both of the two bf16 numbers as f16; what f16 does not hold becomes infinite.
__device__ __forceinline__ u32 to_f16(u32 both) { return pair_f16(low_half(both), high_half(both)); }

// This warp's part of the scores of a tile: its heads, all 32 picks, the columns of its part. EXACT: packed values are
// there as they are stored, and blocks of columns count in their scales.
template <bool EXACT>
__device__ __forceinline__ void scores_of_tile(Shared& s, const u32 (&q)[STEPS][4], u32 tile) {
    u32 thread = this_thread(), lane = thread % 32, warp = thread / 32, g = lane / 4, c = lane % 4;
    u32 part = warp / HEAD_TILES;
    u32 at = tile + (lane % 8 + lane / 16 * 8) * ROW_BYTES + (part * 2 * GROUP_STEPS + lane / 8 % 2) * 16;
    float* to = s.scores[part][warp % HEAD_TILES * 16 + g];
    u32 place = swapped(c / 2, g) * 4 + c % 2 * 2;
    float d[4][4] = {};  // heads g (0, 1) and g + 8 (2, 3), picks 8 n + 2 c and the next
#if FP8
    float sum[4][4] = {};
#endif
    u32 x[2][2][4];
    auto load = [&](u32 (&x)[2][4], int i) {
#pragma unroll
        for (int n = 0; n < 2; n++)
            matrices(x[n], at + i % GROUP_STEPS * 32 + 16 * n * ROW_BYTES + i / GROUP_STEPS * 128);
    };
    load(x[0], 0);
#pragma unroll
    for (int i = 0; i < STEPS; i++) {
        if (i + 1 < STEPS) load(x[(i + 1) % 2], i + 1);
        loads_stay();
        const auto& own = x[i % 2];
#pragma unroll
        for (int n = 0; n < 4; n++)
            if (FP8 && !EXACT && in_latent(i)) product_f16(d[n], q[i], own[n / 2][n % 2 * 2], own[n / 2][n % 2 * 2 + 1]);
            else product(d[n], q[i], own[n / 2][n % 2 * 2], own[n / 2][n % 2 * 2 + 1]);
#if FP8
        if constexpr (EXACT) add_block(d, sum, s, i);
#endif
    }
#pragma unroll
    for (int n = 0; n < 4; n++) {
        // A head's pieces are two apart from n to n: an exclusive or, whatever they were swapped with.
        float* there = to + (place ^ 8 * n);
        *(float2*)there = make_float2(d[n][0], d[n][1]);
        *(float2*)(there + 8 * TILE) = make_float2(d[n][2], d[n][3]);
    }
}

// What a lane keeps of its head between tiles: the maximum that weights are relative to, and the sum of weights, in both
// of which 2^WEIGHT_BITS is a weight of 1.
struct Softmax {
    float m, total, squares;  // squares: sum of squared weights

    // Whether this lane's factor is not 1. number: of the tile.
    template <bool EXACT>
    __device__ __forceinline__ bool tile(const Arguments& a, Shared& s, u32 number) {
        u32 thread = this_thread(), lane = thread % 32, own = lane % LANES;
        u32 head = thread / 32 * (HEADS / 8) + lane / LANES;
#if FP8
        const float unit = EXACT ? a.scale_log2 : s.unit[head];
#else
        const float unit = a.scale_log2;
#endif
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
            u32 real = *(const u32*)(s.real[number % MARKS] + 4 * piece);
            p[i][0] = real & 1 ? sum.x * unit : minus_inf();
            p[i][1] = real & 1 << 8 ? sum.y * unit : minus_inf();
            p[i][2] = real & 1 << 16 ? sum.z * unit : minus_inf();
            p[i][3] = real & 1 << 24 ? sum.w * unit : minus_inf();
            best = fmaxf(best, fmaxf(fmaxf(p[i][0], p[i][1]), fmaxf(p[i][2], p[i][3])));
        }
        // The maximum goes up in large steps only: then what was summed so far has to be multiplied rarely.
        bool higher = false;
        if (__any_sync(~0u, best > m + SLACK)) {
#pragma unroll
            for (int bits = 1; bits < LANES; bits *= 2) best = fmaxf(best, __shfl_xor_sync(~0u, best, bits));
            float factor = 1;
            if (best > m + SLACK) {
                factor = exp2_of(m - best);
                m = best;
                total *= factor, squares *= factor * factor;
                higher = true;
            }
            if (own == 0) s.factor[head] = factor;
        } else if (own == 0) {
            s.factor[head] = 1;
        }
        float lift = m == minus_inf() ? 0.f : m - WEIGHT_BITS;
#pragma unroll
        for (int i = 0; i < 8 / LANES; i++) {
            u32 piece = own + LANES * i, at = 4 * piece;
#pragma unroll
            for (int j = 0; j < 4; j++) {
                p[i][j] = exp2_of(p[i][j] - lift);
                total += p[i][j];
                if constexpr (!EXACT) squares += p[i][j] * p[i][j];
            }
            if constexpr (EXACT) {
                uint2 high = make_uint2(pair(p[i][0], p[i][1]), pair(p[i][2], p[i][3]));
                *(uint2*)(s.weights[head] + at) = high;
                *(uint2*)(low_weights(s) + head * WEIGHT_ROW + at) =
                    make_uint2(pair(p[i][0] - low_half(high.x), p[i][1] - high_half(high.x)),
                               pair(p[i][2] - low_half(high.y), p[i][3] - high_half(high.y)));
            } else {
                *(uint2*)(s.weights[head] + at) =
                    make_uint2(pair_f16(p[i][0], p[i][1]), pair_f16(p[i][2], p[i][3]));
            }
        }
        return higher;
    }
};

// acc[m][n]: heads 16 m + g (0, 1) and g + 8 (2, 3), columns 64 warp + 8 n + 2 c and the next.
typedef float Sums[HEAD_TILES][8][4];

// changed: whether a factor is not 1. largest: of |values|, as two f16 numbers. between(step, steps): what stands ahead of
// the products of a step.
template <bool EXACT, class Between>
__device__ __forceinline__ void sums_of_tile(const Shared& s, Sums& acc, u32 weights, u32 tile, bool changed,
                                             u32& largest, Between between) {
    constexpr int ALL = TILE / 4;
    u32 thread = this_thread(), lane = thread % 32, warp = thread / 32, g = lane / 4;
    u32 from = weights + lane % 16 * (2 * WEIGHT_ROW) + lane / 16 * 16;
    u32 values = tile + lane % 16 * ROW_BYTES + 128 * warp + lane / 16 * 16;
    u32 y[2][4];
    auto load = [&](u32 (&x)[4], int step) {
        matrices_turned(x, values + step % 4 * 32 + step / 4 * 16 * ROW_BYTES);
    };
    load(y[0], 0);
    u32 p[HEAD_TILES][4], low[HEAD_TILES][4];
#pragma unroll
    for (int m = 0; m < HEAD_TILES; m++) matrices(p[m], from + m * 32 * WEIGHT_ROW);
    if (changed) {
#pragma unroll
        for (int m = 0; m < HEAD_TILES; m++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                float factor = s.factor[16 * m + 8 * h + g];
#pragma unroll
                for (int n = 0; n < 8; n++) acc[m][n][2 * h] *= factor, acc[m][n][2 * h + 1] *= factor;
            }
    }
#pragma unroll
    for (int k = 0; k < TILE / 16; k++) {
        if (k) {
#pragma unroll
            for (int m = 0; m < HEAD_TILES; m++) matrices(p[m], from + k * 32 + m * 32 * WEIGHT_ROW);
        }
        if constexpr (EXACT) {
#pragma unroll
            for (int m = 0; m < HEAD_TILES; m++) {
                matrices(low[m], from + low_weights_at() + k * 32 + m * 32 * WEIGHT_ROW);
#if FP8
                scale_weights(p[m], low[m], s, k);
#endif
            }
        }
#pragma unroll
        for (int n = 0; n < 4; n++) {
            const int step = 4 * k + n;
            if (step + 1 < ALL) load(y[(step + 1) % 2], step + 1);
            loads_stay();
            between(step, ALL);
            auto& x = y[step % 2];
            if constexpr (!EXACT && !FP8) {
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    x[j] = to_f16(x[j]);
                    largest = larger_f16(largest, x[j]);
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
