// Sparse MLA for many heads, with what every GPU from SM 8.0 on has: cp.async, ldmatrix, mma.sync. A block has 64 (or 32)
// heads of a row of queries and one split of its picks, which it gathers in tiles of 32 (or 16) through a ring. Rows are
// bf16, or packed fp8 that becomes f16 (sparse_mla_portable_fp8.cuh).
//
// Warps of two kinds work at the same time, on different tiles:
//
//   scores  one warp for 16 heads, with their queries in registers as far as these go, the rest in shared memory. The
//           scores of a head lie in four lanes, which make weights of them: running maximum, weights to shared memory,
//           factors of what was summed so far. Or two warps TOGETHER have 32 heads, and half of the columns each
//           (sparse_mla_portable_scores.cuh).
//   sums    eight warps, each with 64 of the 512 columns of all heads, in registers: 128 (64) numbers a thread. They
//           copy, too.
//
// Between two barriers one kind multiplies the weights of a tile with its values, the other makes those of the next tile.
// A scheduler has one warp of scores and two of sums, so what one of them waits for is time for the others. No unit is the
// limit by itself; to share the products out more evenly took longer (docs/tried.md).
//
// __syncthreads_or has no place where only some warps come to it: with a vote that is a constant the compiler (CUDA 13) made
// two barriers of one. Flags that stand behind a barrier do the same.
//
// A weight rounded to bf16 is off by more than the bounds allow. Sums are therefore products of f16: weights times 2^9,
// which keeps what lies down to 2^-23 of the largest whole, and values, of bf16 rows converted on their way from shared
// memory. bf16 has values that f16 has not, and a weight in f16 is off by up to 2^-11 of itself: where sums are not
// finite, so small that what f16 cuts off could be seen, or what is left of much larger terms (the largest value times the
// root of the sum of squared weights tells), the block does its work again with weights as two bf16 numbers, the second
// what the first cut off (EXACT).
//
// Compile-time: FP8, HEADS (32 or 64), TILE (16 or 32), STAGES, Q_KEPT, TOGETHER (1 or 2), SPREAD, PARTIAL, HAS_LENGTHS,
// HAS_SINK, SLOTS64, PDL (kernels/cuda/sparse_mla_portable.py).

#include "cluster.cuh"
#include "tiles.cuh"

typedef unsigned short u16;

#if SLOTS64
typedef long long slot_t;
#else
typedef int slot_t;
#endif

#define HEAD_TILES (HEADS / 16)
#define SUM_WARPS 8
#define SUM_THREADS (32 * SUM_WARPS)
#define WARPS (SUM_WARPS + HEAD_TILES)      // those of sums first
#define THREADS (32 * WARPS)
#define ROW_BYTES 1168                      // of 576 bf16 numbers and 16 bytes, by which eight rows lie in different banks
#define WEIGHT_ROW (TILE + 8)               // numbers, likewise
#define STAGE_BYTES (TILE * ROW_BYTES)
#define COPIERS (SUM_THREADS / TILE)        // threads that copy a row
#if FP8
#define TILES 3                             // unpacked ones; the ring has packed ones
#define ROW_PIECES 41                       // of 16 bytes
#else
#define TILES STAGES
#define ROW_PIECES 72
#endif
#define PACKED_BYTES 656
// Whether slots of tiles to come lie in shared memory, copied as rows are: where that was measured faster. A thread's slot
// of the next tile is in a register else, which the compiler puts on the stack, where it is waited for.
#define ASKS (FP8 || SPREAD)
#define SLOTS_AHEAD (FP8 ? STAGES : ASKS ? STAGES - 2 : 1)  // tiles: as many groups of copies later slots have come
#define ASKED (SLOTS_AHEAD == 1 ? 2 : 4)    // tiles whose slots have a place
#define COPIES ((ROW_PIECES + COPIERS - 1) / COPIERS)  // of a thread, for a tile
// Copies in a run; ahead of the first of each the compiler puts three loads of nothing. As they were measured faster.
#define COPIES_TOGETHER (FP8 || SPREAD || TILE == 16 || HEADS == 32 ? 3 : 9)
#define STEPS 36                            // of 16 columns
#define OWN_STEPS (STEPS / TOGETHER)
#define BLOCK_STEPS (8 / TOGETHER)          // in the 128 columns of a scale
#define PICK_TILES (TILE / 8)
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
    char tiles[TILES][STAGE_BYTES];         // at first the queries, with what follows if these are few
#if FP8
    char packed[STAGES][TILE][PACKED_BYTES];
#endif
    uint4 queries[OWN_STEPS - Q_KEPT][TOGETHER][HEAD_TILES][32];  // left operands that registers have no room for, by lane
    u16 weights[2][HEADS][WEIGHT_ROW];      // f16 of a tile and the next; in the exact way bf16 and what that cuts off
    float factor[2][HEADS];                 // of what was summed so far; at the end of the sums
    float maximum[HEADS], total[HEADS], squares[HEADS];
    // Bits of the largest |sum| in a warp's columns; until then what warps that work TOGETHER have of each other's scores.
    u32 largest[TOGETHER == 2 ? TILE : SUM_WARPS][HEADS];
#if ASKS
    slot_t asked[ASKED][TILE];              // by the tile's number
#endif
    unsigned char real[MARKS][TILE];        // whether there is such a pick, by the tile's number
    unsigned char changed[2][4];            // by warps of scores: whether a factor of theirs is not 1
    int again, unused;                      // whether sums of f16 do not tell the output
    u32 last[16];                           // of warps: where their picks end; in the end bits of their largest |value|
#if FP8
    float unit[HEADS];                      // of a head's scores, to powers of two
    int odd[4];                             // whether scales or values of a row are not for the fast way: of tiles in turn
    float scales[TILE][4];                  // of the tile, in the exact way
#endif
};

// What a block works on: heads head0 .. head0 + HEADS - 1 of a row, picks first .. end - 1.
struct Item {
    long long row;
    int head0, split, first, end;
};

__device__ __forceinline__ float4* parts(Shared& s) { return (float4*)s.largest; }

__device__ __forceinline__ u32 address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

#include "sparse_mla_portable_copies.cuh"

// Both of the two bf16 numbers as f16; what f16 does not hold becomes infinite.
__device__ __forceinline__ u32 to_f16(u32 both) { return pair_f16(low_half(both), high_half(both)); }

// Whether a step of the scores has columns of the latent, not roped ones.
__device__ __forceinline__ constexpr bool in_latent(int step) { return step < 32 / TOGETHER; }

#if FP8
#include "sparse_mla_portable_fp8.cuh"
#endif
#include "sparse_mla_portable_scores.cuh"

// acc[m][n]: heads 16 m + g (0, 1) and g + 8 (2, 3), columns 64 warp + 8 n + 2 c and the next.
typedef float Sums[HEAD_TILES][8][4];

// turn: which of the weights. largest: of |values|, as two f16 numbers. between(step,
// steps): what stands ahead of the products of a step.
template <bool EXACT, class Between>
__device__ __forceinline__ void sums_of_tile(const Shared& s, Sums& acc, u32 turn, u32 tile, u32& largest,
                                             Between between) {
    constexpr int ALL = TILE / 4;
    u32 thread = this_thread(), lane = thread % 32, warp = thread / 32, g = lane / 4;
    u32 from = address(s.weights[turn]) + lane % 16 * (2 * WEIGHT_ROW) + lane / 16 * 16;
    u32 values = tile + lane % 16 * ROW_BYTES + 128 * warp + lane / 16 * 16;
    u32 y[2][4];
    auto load = [&](u32 (&x)[4], int step) {
        matrices_turned(x, values + step % 4 * 32 + step / 4 * 16 * ROW_BYTES);
    };
    load(y[0], 0);
    u32 p[HEAD_TILES][4], low[HEAD_TILES][4];
#pragma unroll
    for (int m = 0; m < HEAD_TILES; m++) matrices(p[m], from + m * 32 * WEIGHT_ROW);
    if (*(const u32*)s.changed[turn]) {
#pragma unroll
        for (int m = 0; m < HEAD_TILES; m++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                float factor = s.factor[turn][16 * m + 8 * h + g];
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
                matrices(low[m], from + (u32)sizeof(s.weights[0]) + k * 32 + m * 32 * WEIGHT_ROW);
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

#include "sparse_mla_portable_walk.cuh"
#include "sparse_mla_portable_end.cuh"
