// Sparse MLA over bf16 rows, 16 heads at a time, for Hopper (SM 9.0). Three warpgroups share the work of a block:
//
//   copies   fill a ring of tiles of 64 picked rows: a row a copy, by the unit for copies of tensors (TENSOR_COPIES), or 16
//            bytes a copy, which is faster in clusters
//   scores   [16 heads, 64 rows] = q . rows^T, with q in registers; running maximum, weights to shared memory
//   sums     [16 heads, 512] += weights . rows[:, :512], 128 columns a warp; the output
//
// Scores of one tile, sums of the one before and copies of those behind overlap, since each group waits only for what
// it needs. Products are m16n8k16 with the heads as the 16. A row is read from shared memory twice and written once,
// whatever the number of heads. In prefill the group of scores is busy nearly all the time and the GPU's clock follows
// its power, so what counts are products and what stands between them.
// The 16-byte pieces of 128 bytes are swapped, so that eight rows' pieces lie in different banks: by the row's number, or
// as the tensor unit does it.
//
// Weights go in as two bf16 numbers, the second what the first cut off (as in sparse_mla_hopper.py): in two products, or
// with up to 8 heads (HEADS 8) as the 16 of one.
//
// CLUSTER > 1 splits the picks of a row over the blocks of a cluster, which join their sums through each other's shared
// memory, in the order of the splits: no second launch, no partial results in memory, the same result on every run.
// CLUSTER 1: blocks walk over the rows, and the copies of the next row start before the last is finished.
//
// Compile-time, beside what sparse_mla_parts.cuh names: TENSOR_COPIES, as OWN_MAXIMA with CLUSTER 1 only.

#define ROW_BYTES 1152
#define STAGE_BYTES (TILE * ROW_BYTES)
#define SLOTS (4 * STAGES)                 // quarters of tiles
#define SLOT_BYTES (STAGE_BYTES / 4)
#define RING_BYTES (STAGES * STAGE_BYTES)
#define FULL_ARRIVALS WARP_COPIES
#define EMPTY_ARRIVALS (4 * WARP_ARRIVALS) // the warps of sums; those of scores where queries lie
#define SCORES_REGISTERS 240
#define SUMS_REGISTERS 168
#define AHEAD 3                            // steps of 32 columns that are fetched ahead of their products
#define PICKS_FIRST 0
#define CHAINS 4                           // of products for a score, each of which waits for the one before

#define P_PITCH 144                        // bytes of a head's weights, and 16 that keep banks apart
#define P_BYTES (HEADS * P_PITCH)          // of the high parts, before the low ones

#include "sparse_mla_parts.cuh"
#include "sparse_mla_quarters.cuh"

__device__ __forceinline__ void store_weights(u32 weights, u32 head, u32 row, float p0, float p1) {
    u32 high = pair(p0, p1);
    u32 low = pair(p0 - low_half(high), p1 - high_half(high));
    u32 to = weights + head * P_PITCH + 2 * row;
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(high) : "memory");
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(to + P_BYTES), "r"(low) : "memory");
}

#include "sparse_mla_scores.cuh"

// The group of scores, a quarter of a tile each warp. A tile's weights are made at once: between the products of the next
// tile they would have to wait for its rows. The last turn of an item hands over what turns the sums into the output.
__device__ void scores(const Arguments& a, const Shared& s) {
    u32 lane = threadIdx.x % 32, warp = threadIdx.x % GROUP / 32, g = lane / 4, c = lane % 4;
    const Info* info = s.infos();
    Place place = {0, 0};
    Turn<2> hand = {0, 1};
    for (int i = blockIdx.x / CLUSTER; i < a.items; i += gridDim.x / CLUSTER) {
        u32 q[36][4];
        barrier_wait(place.full(s), place.parity);
        {
            // Left operand: heads 0-7 and 8-15, columns 0-7 and 8-15 of 16.
            u32 at = place.at(s) + lane % 16 * ROW_BYTES + ((lane / 16 ^ lane % 8) * 16);
#pragma unroll
            for (int j = 0; j < 36; j++) matrices(q[j], (at ^ j % 4 * 32) + j / 4 * 128);
        }
        done_reading();
        warp_arrive(place.empty(s), lane == 0);
        place.add(1);

#if OWN_MAXIMA
        Stream own;
        own.m[0] = own.m[1] = LOWEST;
        bool first = true;
#else
        Softmax own;
        own.m[0] = own.m[1] = minus_inf();
#endif
        own.total[0] = own.total[1] = 0;
        for (bool last = false; !last; place.add(4)) {
            Place mine = place.plus(warp);
            barrier_wait(mine.full(s), mine.parity);
            u32 bits = (u32)info[mine.slot].mask >> 2 * c;
            last = info[mine.slot].last;
            float d[2][4];
            scores_of_quarter(d, q, mine.at(s), lane);
            done_reading();
#pragma unroll
            for (int n = 0; n < 2; n++)
#pragma unroll
                for (int j = 0; j < 4; j++)
                    own.d[n][j] = bits >> (8 * n + j % 2) & 1 ? d[n][j] * a.scale_log2 : minus_inf();
            barrier_wait(s.taken + 8 * hand.stage, hand.parity);
#if OWN_MAXIMA
            own.hand_over(s, hand.stage, first, warp, g, c);
            first = false;
#else
            Steps steps = {s, own, hand.stage, warp, g, c};
            steps.run_all();
#endif
            hand.next();
        }
        end_row(a, s, Item(a, i), own.m, own.total, hand.stage, hand.parity);
        hand.next();
    }
}

// What the sums of 64 columns take of 16 rows: weights of high and low parts, and values.
struct Weights {
    u32 high[4], low[4];
    float m[2];  // with OWN_MAXIMA: with which they count, of a lane's heads
};
struct Values { u32 x[4][4]; };

__device__ __forceinline__ void fetch(Weights& w, u32 at) {
    matrices(w.high, at);
    if constexpr (HEADS > 8) matrices(w.low, at + P_BYTES);
}

__device__ __forceinline__ void fetch(float (&m)[2], const float* maxima, u32 g, u32 above) {
    m[0] = maxima[g];
    m[1] = maxima[g + above];
}

__device__ __forceinline__ void fetch(Values& v, u32 at) {
#pragma unroll
    for (int n = 0; n < 4; n++) matrices_turned(v.x[n], at ^ n * 32);
}

// The group of sums and of the output.
__device__ void sums(const Arguments& a, const Shared& s) {
    u32 lane = threadIdx.x % 32, warp = threadIdx.x % GROUP / 32, g = lane / 4, c = lane % 4;
    constexpr int above = HEADS > 8 ? 8 : 0;  // rows 8 to 15 of a product are heads of their own, or low parts
    const float* factors = s.floats(s.factors);
    const Info* info = s.infos();
    Place place = {0, 0};
    Turn<2> hand = {0, 0};
    for (int i = blockIdx.x / CLUSTER; i < a.items; i += gridDim.x / CLUSTER) {
        place.add(1);      // the queries are not for this group
        float acc[16][4];  // columns 128 warp + 8 n + 2 c and the next, of heads g (0, 1) and g + above (2, 3)
#pragma unroll
        for (int n = 0; n < 16; n++)
#pragma unroll
            for (int j = 0; j < 4; j++) acc[n][j] = 0;
#if OWN_MAXIMA
        float m[2] = {LOWEST, LOWEST};
#endif
        for (bool last = false; !last; place.add(4)) {
            // The group of scores has seen that the rows are there.
            barrier_wait(s.ready_at(hand.stage, 0), hand.parity);
            u32 weights = s.weights + hand.stage * WEIGHT_BYTES + lane % 16 * P_PITCH + lane / 16 * 16;
            u32 inside[2];
#pragma unroll
            for (int half = 0; half < 2; half++)
                inside[half] = lane % 16 * ROW_BYTES + 256 * warp + 128 * half + swapped(lane / 16, lane, 2 * warp + half);
            Weights w[2];
            Values v[2];
            fetch(w[0], weights);
            fetch(v[0], place.at(s) + inside[0]);
            last = info[place.slot].last;
#if OWN_MAXIMA
            const float* maxima = s.floats(s.maxima) + 64 * hand.stage;
            fetch(w[0].m, maxima, g, above);
#else
            float factor[2] = {factors[16 * hand.stage + g], factors[16 * hand.stage + g + above]};
            if (__any_sync(~0u, factor[0] != 1 || factor[1] != 1)) {
#pragma unroll
                for (int n = 0; n < 16; n++)
#pragma unroll
                    for (int j = 0; j < 4; j++) acc[n][j] *= factor[j / 2];
            }
#endif
#pragma unroll
            for (int part = 0; part < 8; part++) {
                const int k = part / 2, half = part % 2, next = (part + 1) / 2;
#if OWN_MAXIMA
                if (half == 0) {
                    Weights& own = w[k % 2];
                    if (__any_sync(~0u, own.m[0] != m[0] || own.m[1] != m[1]))
                        in_common(own.high, own.low, own.m, m, acc);
                    fetch(v[1], place.plus(k).at(s) + inside[1]);
                }
#else
                if (part < 7) {
                    if (half == 1) fetch(w[next % 2], weights + 32 * next);
                    fetch(v[(part + 1) % 2], place.plus(next).at(s) + inside[1 - half]);
                }
#endif
                // A sum waits for its last product, so eight others come in between.
                const u32(&x)[4][4] = v[part % 2].x;
#pragma unroll
                for (int n = 0; n < 8; n++)
                    product(acc[8 * half + n], w[k % 2].high, x[n / 2][n % 2 * 2], x[n / 2][n % 2 * 2 + 1]);
                if (half == 1) {
                    done_reading();
                    warp_arrive(place.plus(k).empty(s), lane == 0);
#if OWN_MAXIMA
                    if (k < 3) {  // the quarter is given back before the next is waited for
                        barrier_wait(s.ready_at(hand.stage, next), hand.parity);
                        fetch(w[next % 2], weights + 32 * next);
                        fetch(w[next % 2].m, maxima + 16 * next, g, above);
                        fetch(v[0], place.plus(next).at(s) + inside[0]);
                    }
#endif
                }
                if constexpr (HEADS > 8) {
#pragma unroll
                    for (int n = 0; n < 8; n++)
                        product(acc[8 * half + n], w[k % 2].low, x[n / 2][n % 2 * 2], x[n / 2][n % 2 * 2 + 1]);
                }
            }
            warp_arrive(s.taken + 8 * hand.stage, lane == 0);
            hand.next();
        }

        barrier_wait(s.ready_at(hand.stage, 0), hand.parity);
        if constexpr (HEADS == 8) {
#pragma unroll
            for (int n = 0; n < 16; n++)
#pragma unroll
                for (int j = 0; j < 2; j++) acc[n][j] += acc[n][j + 2];
        }
#if CLUSTER == 1
        float weight[2] = {factors[16 * hand.stage + g], factors[16 * hand.stage + g + above]};
        warp_arrive(s.taken + 8 * hand.stage, lane == 0);
        Item item(a, i);
#pragma unroll
        for (int h = 0; h < HEADS / 8; h++) {
            int head = item.head0 + g + 8 * h;
            if (head < a.heads) {
                u32* to = (u32*)(a.out + item.row * a.out_row + head * a.out_head + 128 * warp + 2 * c);
#pragma unroll
                for (int n = 0; n < 16; n++)
                    to[4 * n] = pair(acc[n][2 * h] * weight[h], acc[n][2 * h + 1] * weight[h]);
            }
        }
#else
        // The ring is idle once all warps are here: its memory takes the sums.
        group_sync(2);
        float* joined = s.floats(s.ring);
#pragma unroll
        for (int n = 0; n < 16; n++)
#pragma unroll
            for (int h = 0; h < HEADS / 8; h++)
                *(float2*)(joined + (g + 8 * h) * O_PITCH + 128 * warp + 8 * n + 2 * c) =
                    make_float2(acc[n][2 * h], acc[n][2 * h + 1]);
#endif
        hand.next();
    }
}

// q bf16 [R, H, 512] and q_rope [R, H, 64], rows of 1152 bytes every kv_stride bytes, all on 16-byte bounds; strides of
// q, q_rope, out and slots in elements. map: of the rows (kernels/cuda/tensor_maps.py). out bf16 [R, H, 512], lse f32 [R, H], natural. items: R * ceil(H / 16). Grid:
// any number of blocks (CLUSTER 1), or items clusters.
extern "C" __global__ void __launch_bounds__(3 * GROUP, 1)
sparse_mla_bf16(const u16* q, const u16* q_rope, const char* rows, const slot_t* slots, const int* lengths,
                const float* sink, u16* out, float* lse, long long q_row, long long q_head, long long rope_row,
                long long rope_head, long long kv_stride, long long slots_row, long long out_row, long long out_head,
                int count, int heads, int picks, int items, float scale_log2
#if TENSOR_COPIES
                , const __grid_constant__ TensorMap map
#endif
) {
    extern __shared__ __align__(1024) char memory[];
    Arguments a = {q, q_rope, rows, slots, lengths, sink, out, lse, q_row, q_head, rope_row, rope_head, kv_stride,
                   slots_row, out_row, out_head, count, heads, picks, items, scale_log2
#if TENSOR_COPIES
                   , &map
#endif
    };
    run_block(a, memory);
}
