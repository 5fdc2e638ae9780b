// Sparse MLA over bf16 rows, 16 heads at a time, for Hopper (SM 9.0). Three warpgroups share the work of a block:
//
//   copies   fill a ring of tiles of 64 picked rows, 16 bytes a copy
//   scores   [16 heads, 64 rows] = q . rows^T, with q in registers; running maximum, weights to shared memory
//   sums     [16 heads, 512] += weights . rows[:, :512], 128 columns a warp; the output
//
// Scores of one tile, sums of the one before and copies of those behind overlap, since each group waits only for what
// it needs. Products are m16n8k16 with the heads as the 16. A row is read from shared memory twice and written once,
// whatever the number of heads; that traffic and the copies bound the kernel in prefill.
// The 16-byte pieces of 128 bytes are swapped by the row number, so that eight rows' pieces lie in different banks.
//
// Weights go in as two bf16 numbers, the second what the first cut off (as in sparse_mla_hopper.py).
//
// CLUSTER > 1 splits the picks of a row over the blocks of a cluster, which join their sums through each other's shared
// memory, in the order of the splits: no second launch, no partial results in memory, the same result on every run.
// CLUSTER 1: blocks walk over the rows, and the copies of the next row start before the last is finished.
//
#define ROW_BYTES 1152
#define STAGE_BYTES (TILE * ROW_BYTES)
#define WARP_BYTES (16 * ROW_BYTES)
#define SCORES_REGISTERS 240
#define SUMS_REGISTERS 152
#define AHEAD 3                            // steps of 32 columns that are fetched ahead of their products

#define P_PITCH 144                        // bytes of a head's weights, and 16 that keep banks apart
#define P_BYTES (16 * P_PITCH)             // of the high parts, before the low ones

#include "sparse_mla_parts.cuh"

__device__ __forceinline__ void store_weights(u32 weights, u32 head, u32 row, float p0, float p1) {
    u32 high = pair(p0, p1);
    u32 low = pair(p0 - low_half(high), p1 - high_half(high));
    u32 to = weights + head * P_PITCH + 2 * row;
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(high) : "memory");
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(to + P_BYTES), "r"(low) : "memory");
}

__device__ __forceinline__ void copy_tile(const Arguments& a, u32 to, int slot, const Copier& me) {
#pragma unroll
    for (int r = 0; r < 4; r++) {
        u32 local = 4 * r + me.own;
        int from_slot = __shfl_sync(~0u, slot, local);
        const char* from = a.rows + max(from_slot, 0) * a.kv_stride + me.piece;
        u32 there = to + local * ROW_BYTES + (me.piece ^ local % 8 * 16);
#pragma unroll
        for (int j = 0; j < 9; j++) copy16(there + 128 * j, from + 128 * j, from_slot >= 0);
    }
}

// q . rows^T for this warp's 16 rows of a tile, columns 32 I to the end; fetched[]: what is already in registers.
template <int I, bool WITH_STEPS>
__device__ __forceinline__ void products(float (&part)[2][2][4], u32 (&fetched)[AHEAD + 1][2][4],
                                         const u32 (&q)[36][4], u32 at, Steps& steps) {
    if constexpr (I < 18) {
        if constexpr (I + AHEAD < 18) {
            constexpr int next = I + AHEAD;
#pragma unroll
            for (int n = 0; n < 2; n++)
                matrices(fetched[next % (AHEAD + 1)][n], (at ^ next % 2 * 64) + 8 * n * ROW_BYTES + next / 2 * 128);
        }
        if constexpr (WITH_STEPS) steps.template run_at<I>();
#pragma unroll
        for (int k = 0; k < 2; k++)
#pragma unroll
            for (int n = 0; n < 2; n++) {
                const u32(&x)[4] = fetched[I % (AHEAD + 1)][n];
                product(part[n][k], q[2 * I + k], x[2 * k], x[2 * k + 1]);
            }
        products<I + 1, WITH_STEPS>(part, fetched, q, at, steps);
    }
}

template <bool WITH_STEPS>
__device__ __forceinline__ void scores_of_tile(float (&d)[2][4], const u32 (&q)[36][4], u32 stage, u32 warp, u32 lane,
                                               Steps& steps) {
    u32 at = stage + (16 * warp + lane % 8) * ROW_BYTES + ((lane / 8 ^ lane % 8) * 16);
    float part[2][2][4];
    u32 fetched[AHEAD + 1][2][4];
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
        for (int j = 0; j < 4; j++) part[n][0][j] = part[n][1][j] = 0;
#pragma unroll
    for (int i = 0; i < AHEAD; i++)
#pragma unroll
        for (int n = 0; n < 2; n++) matrices(fetched[i][n], (at ^ i % 2 * 64) + 8 * n * ROW_BYTES + i / 2 * 128);
    products<0, WITH_STEPS>(part, fetched, q, at, steps);
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
        for (int j = 0; j < 4; j++) d[n][j] = part[n][0][j] + part[n][1][j];
}

// The group of scores. The weights of a tile are made while the products of the next one run. The last turn of an item
// hands over what turns the sums into the output.
__device__ void scores(const Arguments& a, const Shared& s) {
    u32 lane = threadIdx.x % 32, warp = threadIdx.x % GROUP / 32, g = lane / 4, c = lane % 4;
    const Info* info = s.infos();
    Turn<STAGES> turn = {0, 0};
    Turn<2> hand = {0, 1};
    for (int i = blockIdx.x / CLUSTER; i < a.items; i += gridDim.x / CLUSTER) {
        u32 q[36][4];
        barrier_wait(s.full + 8 * turn.stage, turn.parity);
        {
            // Left operand: heads 0-7 and 8-15, columns 0-7 and 8-15 of 16.
            u32 at = s.ring + turn.stage * STAGE_BYTES + lane % 16 * ROW_BYTES + ((lane / 16 ^ lane % 8) * 16);
#pragma unroll
            for (int j = 0; j < 36; j++) matrices(q[j], (at ^ j % 4 * 32) + j / 4 * 128);
        }
        warp_arrive(s.empty + 8 * turn.stage, lane == 0);
        turn.next();

        Softmax own;
        float(&m)[2] = own.m, (&total)[2] = own.total;
        m[0] = m[1] = minus_inf();
        total[0] = total[1] = 0;
        bool first = true;
        for (bool last = false; !last; turn.next(), first = false) {
            u32 stage = s.ring + turn.stage * STAGE_BYTES;
            barrier_wait(s.full + 8 * turn.stage, turn.parity);
            u32 mine = (u32)(info[turn.stage].mask >> (16 * warp + 2 * c));
            last = info[turn.stage].last;
            float d[2][4];
            Steps steps = {s, own, hand.stage, warp, g, c};
            if (first) {
                scores_of_tile<false>(d, q, stage, warp, lane, steps);
            } else {
                barrier_wait(s.taken + 8 * hand.stage, hand.parity);
                scores_of_tile<true>(d, q, stage, warp, lane, steps);
                hand.next();
            }
            warp_arrive(s.empty + 8 * turn.stage, lane == 0);
#pragma unroll
            for (int n = 0; n < 2; n++)
#pragma unroll
                for (int j = 0; j < 4; j++)
                    own.d[n][j] = mine >> (8 * n + j % 2) & 1 ? d[n][j] * a.scale_log2 : minus_inf();
        }
        {
            Steps steps = {s, own, hand.stage, warp, g, c};
            barrier_wait(s.taken + 8 * hand.stage, hand.parity);
            steps.run_all();
            hand.next();
        }

        end_row(a, s, Item(a, i), m, total, hand.stage, hand.parity);
        hand.next();
    }
}

// The group of sums and of the output.
__device__ void sums(const Arguments& a, const Shared& s) {
    u32 lane = threadIdx.x % 32, warp = threadIdx.x % GROUP / 32, g = lane / 4, c = lane % 4;
    const float* factors = s.floats(s.factors);
    const Info* info = s.infos();
    Turn<STAGES> turn = {0, 0};
    Turn<2> hand = {0, 0};
    for (int i = blockIdx.x / CLUSTER; i < a.items; i += gridDim.x / CLUSTER) {
        // The queries are not for this group.
        barrier_wait(s.full + 8 * turn.stage, turn.parity);
        warp_arrive(s.empty + 8 * turn.stage, lane == 0);
        turn.next();

        float acc[16][4];  // columns 128 warp + 8 n + 2 c and the next, of heads g (0, 1) and g + 8 (2, 3)
#pragma unroll
        for (int n = 0; n < 16; n++)
#pragma unroll
            for (int j = 0; j < 4; j++) acc[n][j] = 0;
        for (bool last = false; !last; turn.next()) {
            barrier_wait(s.full + 8 * turn.stage, turn.parity);
            last = info[turn.stage].last;
            barrier_wait(s.ready + 8 * hand.stage, hand.parity);
            float factor[2] = {factors[16 * hand.stage + g], factors[16 * hand.stage + g + 8]};
            if (__any_sync(~0u, factor[0] != 1 || factor[1] != 1)) {
#pragma unroll
                for (int n = 0; n < 16; n++)
#pragma unroll
                    for (int j = 0; j < 4; j++) acc[n][j] *= factor[j / 2];
            }
            u32 weights = s.weights + hand.stage * WEIGHT_BYTES + lane % 16 * P_PITCH + lane / 16 * 16;
            u32 values = s.ring + turn.stage * STAGE_BYTES + lane % 16 * ROW_BYTES + 256 * warp;
            values += (lane / 16 ^ lane % 8) * 16;
#pragma unroll
            for (int k = 0; k < TILE / 16; k++) {
                u32 high[4], low[4];
                matrices(high, weights + 32 * k);
                matrices(low, weights + 32 * k + P_BYTES);
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    u32 v[4][4];
#pragma unroll
                    for (int n = 0; n < 4; n++)
                        matrices_turned(v[n], (values ^ n * 32) + 16 * k * ROW_BYTES + half * 128);
                    // A sum waits for its last product, so eight others come in between.
#pragma unroll
                    for (int n = 0; n < 8; n++)
                        product(acc[8 * half + n], high, v[n / 2][n % 2 * 2], v[n / 2][n % 2 * 2 + 1]);
#pragma unroll
                    for (int n = 0; n < 8; n++)
                        product(acc[8 * half + n], low, v[n / 2][n % 2 * 2], v[n / 2][n % 2 * 2 + 1]);
                }
            }
            warp_arrive(s.taken + 8 * hand.stage, s.empty + 8 * turn.stage, lane == 0);
            hand.next();
        }

        barrier_wait(s.ready + 8 * hand.stage, hand.parity);
#if CLUSTER == 1
        float weight[2] = {factors[16 * hand.stage + g], factors[16 * hand.stage + g + 8]};
        warp_arrive(s.taken + 8 * hand.stage, lane == 0);
        Item item(a, i);
#pragma unroll
        for (int h = 0; h < 2; h++) {
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
            for (int h = 0; h < 2; h++)
                *(float2*)(joined + (g + 8 * h) * O_PITCH + 128 * warp + 8 * n + 2 * c) =
                    make_float2(acc[n][2 * h], acc[n][2 * h + 1]);
#endif
        hand.next();
    }
}

// q bf16 [R, H, 512] and q_rope [R, H, 64], rows of 1152 bytes every kv_stride bytes, all on 16-byte bounds; strides of
// q, q_rope, out and slots in elements. out bf16 [R, H, 512], lse f32 [R, H], natural. items: R * ceil(H / 16). Grid:
// any number of blocks (CLUSTER 1), or items clusters.
extern "C" __global__ void __launch_bounds__(3 * GROUP, 1)
sparse_mla_bf16(const u16* q, const u16* q_rope, const char* rows, const slot_t* slots, const int* lengths,
                const float* sink, u16* out, float* lse, long long q_row, long long q_head, long long rope_row,
                long long rope_head, long long kv_stride, long long slots_row, long long out_row, long long out_head,
                int count, int heads, int picks, int items, float scale_log2) {
    extern __shared__ __align__(128) char memory[];
    Arguments a = {q, q_rope, rows, slots, lengths, sink, out, lse, q_row, q_head, rope_row, rope_head, kv_stride,
                   slots_row, out_row, out_head, count, heads, picks, items, scale_log2};
    run_block(a, memory);
}
