// Sparse MLA over packed fp8 rows (512 e4m3, 4 f32 scales, 64 bf16), 16 heads at a time, for Hopper (SM 9.0). The groups
// of a block are those of sparse_mla.cu, but the weights of a tile are made while the products of the next one run; a row
// comes as it is stored, in one bulk copy, and is decoded in registers. 656 bytes begin anywhere within 128: copies of 16
// bytes a lane take a third longer, and with rows as they lie in memory banks are apart.
//
// e4m3 is exact in f16, one instruction for two values, so the 512 columns go through the matrix unit as f16:
//
//   scores   queries as f16 times a power of two that brings a head's largest value near 2^13; the four scales of a row
//            multiply the products of its four blocks of 128 columns. The order of the columns within a product is free:
//            a lane takes four codes that lie together, and four values of the query likewise.
//   sums     a warp has one block of columns. Its weights are the softmax's times the rows' scales for that block, over a
//            power of two above the largest scale so far (the sums' unit), times 2^10: nothing overflows f16, and what
//            underflows lies 2^-35 below the largest. Two f16 numbers make a weight, as two bf16 ones do for bf16 rows.
//
// With up to 8 heads (HEADS 8) picks are the 16 of a score's product, and high and low parts of weights those of a sum's.

#define ROW_BYTES 656
#define ROW_FLOATS (ROW_BYTES / 4)
#define SCALES_AT 512                              // in a row
#define ROPE_AT 528
#define STAGE_BYTES (TILE * ROW_BYTES)
#define RING_BYTES (STAGES * STAGE_BYTES)
#define SLOTS STAGES                               // whole tiles; a row's queries take one, too
#define FULL_ARRIVALS (4 * WARP_COPIES)
#define EMPTY_ARRIVALS (8 * WARP_ARRIVALS)         // warps that read
#define PICKS_FIRST (HEADS == 8)
#define SCORES_REGISTERS 248
#define SUMS_REGISTERS 160
#define WEIGHT_BITS 10                             // weights are up to 2^10 in f16

#define P_PITCH 72                                 // floats of a head's weights, and 8 that keep banks apart

#include "sparse_mla_parts.cuh"

__device__ __forceinline__ void store_weights(u32 weights, u32 head, u32 row, float p0, float p1) {
    u32 to = weights + 4 * (head * P_PITCH + row);
#if PICKS_FIRST
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(to), "f"(p0) : "memory");
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(to + 4 * P_PITCH), "f"(p1) : "memory");
#else
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(to), "f"(p0), "f"(p1) : "memory");
#endif
}

#include "sparse_mla_fp8_scores.cuh"

// What is copied for a pick that is masked: it has weight 0, and 0 times what lies there must be 0.
__device__ __align__(16) char masked_row[ROW_BYTES];

// The copying group.
__device__ void copies(const Arguments& a, const Shared& s, u32 rank) {
    const Copier me;
    u32 lane = me.lane, warp = me.warp;
    Info* info = s.infos();
    Turn<STAGES> turn = {0, 1};
    int i = blockIdx.x / CLUSTER, step = gridDim.x / CLUSTER;
    if (i >= a.items) return;
    Picks picks(a, Item(a, i), rank, warp, lane);
    for (; i < a.items; i += step) {
        // The next item's first picks come while this one's rows do.
        Picks following(a, Item(a, min(i + step, a.items - 1)), rank, warp, lane);
        u32 full = s.full + 8 * turn.stage;
        barrier_wait(s.empty + 8 * turn.stage, turn.parity);
        copy_queries(a, Item(a, i), s.ring + turn.stage * STAGE_BYTES, 4 * warp + me.own, me.piece);
        arrive_when_copied(full);
        if (lane == 0) barrier_arrive(full);
        turn.next();
#pragma unroll 1
        for (int t = 0; t < picks.tiles; t++) {
            int slot = picks.next(a);
            u32 mask = __ballot_sync(~0u, slot >= 0) & 0xffff;
            full = s.full + 8 * turn.stage;
            barrier_wait(s.empty + 8 * turn.stage, turn.parity);
            // What lay there was read, and queries were written, by other means than bulk copies.
            fence_bulk();
            if (lane == 0) {
                ((u16*)&info[turn.stage].mask)[warp] = mask;
                if (warp == 0) info[turn.stage].last = t == picks.tiles - 1;
                barrier_expect(full, 16 * ROW_BYTES);
            }
            if (lane < 16)
                copy_bulk(s.ring + turn.stage * STAGE_BYTES + (16 * warp + lane) * ROW_BYTES,
                          slot >= 0 ? a.rows + slot * a.kv_stride : masked_row, ROW_BYTES, full);
            warp_arrive_copied(full, lane == 0);
            turn.next();
        }
        picks = following;
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
}

// The group of scores. The weights of a tile are made while the products of the next one run. The last turn of an item
// hands over what turns the sums into the output.
__device__ void scores(const Arguments& a, const Shared& s) {
    u32 lane = threadIdx.x % 32, warp = threadIdx.x % GROUP / 32, g = lane / 4, c = lane % 4;
    const Info* info = s.infos();
    Turn<STAGES> turn = {0, 0};
    Turn<2> hand = {0, 1};
    for (int i = blockIdx.x / CLUSTER; i < a.items; i += gridDim.x / CLUSTER) {
        Queries q;
        barrier_wait(s.full + 8 * turn.stage, turn.parity);
        q.load(s.ring + turn.stage * STAGE_BYTES, lane);
        done_reading();
        warp_arrive(s.empty + 8 * turn.stage, lane == 0);
        turn.next();

        Softmax own;
        own.m[0] = own.m[1] = minus_inf();
        own.total[0] = own.total[1] = 0;
        bool first = true;
        for (bool last = false; !last; turn.next(), first = false) {
            u32 stage = s.ring + turn.stage * STAGE_BYTES;
            barrier_wait(s.full + 8 * turn.stage, turn.parity);
            u32 mine = (u32)(info[turn.stage].mask >> (16 * warp + lane_row(g, c)));
            last = info[turn.stage].last;
            u32 rows = stage + (16 * warp + lane % 8) * ROW_BYTES + lane / 8 * 16;
            u32 scales = stage + (16 * warp + lane_row(g, c)) * ROW_BYTES + SCALES_AT;
            Products these;
            Steps steps = {s, own, hand.stage, warp, g, c};
            these.clear();
            these.fetch<0>(rows);
            if (first) {
                these.run<0, false>(q, rows, s.floats(scales), steps);
            } else {
                barrier_wait(s.taken + 8 * hand.stage, hand.parity);
                these.run<0, true>(q, rows, s.floats(scales), steps);
                hand.next();
            }
            done_reading();
            warp_arrive(s.empty + 8 * turn.stage, lane == 0);
#pragma unroll
            for (int n = 0; n < LANE_TILES; n++)
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    float back = q.back[PICKS_FIRST ? j % 2 : j / 2];
                    float sum = these.d[n][j] * back + (these.part[n][0][j] + these.part[n][1][j]);
                    own.d[n][j] = mine >> further_row(n, j) & 1 ? sum * a.scale_log2 : minus_inf();
                }
        }
        {
            Steps steps = {s, own, hand.stage, warp, g, c};
            barrier_wait(s.taken + 8 * hand.stage, hand.parity);
            steps.run_all();
            hand.next();
        }
        end_row(a, s, Item(a, i), own.m, own.total, hand.stage, hand.parity);
        hand.next();
    }
}

// The group of sums and of the output. Warp b has columns 128 b to 128 b + 127, and their weights.
__device__ void sums(const Arguments& a, const Shared& s) {
    u32 lane = threadIdx.x % 32, warp = threadIdx.x % GROUP / 32, g = lane / 4, c = lane % 4;
    constexpr int above = HEADS > 8 ? 8 : 0;  // rows 8 to 15 of a product are heads of their own, or low parts
    const float* factors = s.floats(s.factors);
    const Info* info = s.infos();
    Turn<STAGES> turn = {0, 0};
    Turn<2> hand = {0, 0};
    for (int i = blockIdx.x / CLUSTER; i < a.items; i += gridDim.x / CLUSTER) {
        // The queries are not for this group.
        barrier_wait(s.full + 8 * turn.stage, turn.parity);
        warp_arrive(s.empty + 8 * turn.stage, lane == 0);
        turn.next();

        // acc[2 n] and acc[2 n + 1]: columns 16 n + 4 c (+ 2) and 16 n + 4 c + 1 (+ 2), of heads g (0, 1), g + 8 (2, 3).
        float acc[16][4];
        u32 unit = 1;  // the exponent of a power of two, in which the sums count
#pragma unroll
        for (int n = 0; n < 16; n++)
#pragma unroll
            for (int j = 0; j < 4; j++) acc[n][j] = 0;
        for (bool last = false; !last; turn.next()) {
            barrier_wait(s.full + 8 * turn.stage, turn.parity);
            last = info[turn.stage].last;
            barrier_wait(s.ready + 8 * hand.stage, hand.parity);
            // The unit is above every scale of the warp's block so far; sums in the old one become sums in the new one.
            const float* scales = s.floats(s.ring + turn.stage * STAGE_BYTES + SCALES_AT) + warp;
            float largest = fmaxf(fabsf(scales[ROW_FLOATS * lane]), fabsf(scales[ROW_FLOATS * (lane + 32)]));
            u32 most = __reduce_max_sync(~0u, __float_as_uint(largest));
            u32 next = max(unit, min(exponent_of(__uint_as_float(most)) + 1, 253u));
            float change = power(unit + 127 > next ? unit + 127 - next : 0);
            float by = power(254 - next);
            unit = next;
            float factor[2] = {factors[16 * hand.stage + g] * change, factors[16 * hand.stage + g + above] * change};
            if (__any_sync(~0u, factor[0] != 1 || factor[1] != 1)) {
#pragma unroll
                for (int n = 0; n < 16; n++)
#pragma unroll
                    for (int j = 0; j < 4; j++) acc[n][j] *= factor[j / 2];
            }
            const float* weights = s.floats(s.weights + hand.stage * WEIGHT_BYTES) + g * P_PITCH + 2 * c;
            u32 values = s.ring + turn.stage * STAGE_BYTES + lane % 16 * ROW_BYTES + 128 * warp + lane / 16 * 16;
#pragma unroll
            for (int k = 0; k < TILE / 16; k++) {
                // Heads g and g + 8 in turn, or head g alone and what its high parts cut off, of rows 16 k + 2 c and the next,
                // then of those 8 on.
                u32 high[4], low[4];
#pragma unroll
                for (int j = 0; j < 4; j += HEADS > 8 ? 1 : 2) {
                    int row = 16 * k + j / 2 * 8;
                    float2 p = *(const float2*)(weights + j % 2 * 8 * P_PITCH + row);
                    const float* of = scales + ROW_FLOATS * (row + 2 * c);
                    // In two factors: one alone could overflow.
                    float w0 = p.x * (of[0] * by * (1 << WEIGHT_BITS));
                    float w1 = p.y * (of[ROW_FLOATS] * by * (1 << WEIGHT_BITS));
                    high[j] = pair_f16(w0, w1);
                    (HEADS > 8 ? low[j] : high[j + 1]) = pair_f16(w0 - f16_low(high[j]), w1 - f16_high(high[j]));
                }
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    // Right operands of 64 columns: those of even and of odd columns of 16.
                    u32 v[8][2];
#pragma unroll
                    for (int n = 0; n < 2; n++) {
                        u32 x[4];
                        matrices_turned(x, values + (2 * half + n) * 32 + 16 * k * ROW_BYTES);
#pragma unroll
                        for (int i = 0; i < 4; i++) {
                            // Two columns of a row and of the next: codes change places, then they are those of a column.
                            u32 columns = __byte_perm(x[i], 0, 0x3120);
                            decode(v[4 * n + i / 2 * 2][i % 2], v[4 * n + i / 2 * 2 + 1][i % 2], columns);
                        }
                    }
                    // A sum waits for its last product, so eight others come in between.
#pragma unroll
                    for (int n = 0; n < 8; n++) product_f16(acc[8 * half + n], high, v[n][0], v[n][1]);
                    if constexpr (HEADS > 8) {
#pragma unroll
                        for (int n = 0; n < 8; n++) product_f16(acc[8 * half + n], low, v[n][0], v[n][1]);
                    }
                }
            }
            done_reading();
            warp_arrive(s.taken + 8 * hand.stage, s.empty + 8 * turn.stage, lane == 0);
            hand.next();
        }

        if constexpr (HEADS == 8) {
#pragma unroll
            for (int n = 0; n < 16; n++)
#pragma unroll
                for (int j = 0; j < 2; j++) acc[n][j] += acc[n][j + 2];
        }
        barrier_wait(s.ready + 8 * hand.stage, hand.parity);
        float back = power(unit) / (1 << WEIGHT_BITS);
        float weight[2] = {factors[16 * hand.stage + g] * back, factors[16 * hand.stage + g + above] * back};
        warp_arrive(s.taken + 8 * hand.stage, lane == 0);
        hand.next();
#if CLUSTER > 1
        group_sync(2);  // the ring is idle once all warps are here: its memory takes the sums
#endif
        Item item(a, i);
#pragma unroll
        for (int h = 0; h < HEADS / 8; h++) {
            int local = g + 8 * h, column = 128 * warp + 4 * c;
#pragma unroll
            for (int n = 0; n < 8; n++) {
                float x0 = acc[2 * n][2 * h] * weight[h], x1 = acc[2 * n + 1][2 * h] * weight[h];
                float x2 = acc[2 * n][2 * h + 1] * weight[h], x3 = acc[2 * n + 1][2 * h + 1] * weight[h];
#if CLUSTER == 1
                if (item.head0 + local < a.heads) {
                    u16* to = a.out + item.row * a.out_row + (item.head0 + local) * a.out_head + column;
                    *(uint2*)(to + 16 * n) = make_uint2(pair(x0, x1), pair(x2, x3));
                }
#else
                *(float4*)(s.floats(s.ring) + local * O_PITCH + column + 16 * n) = make_float4(x0, x1, x2, x3);
#endif
            }
        }
    }
}

// As sparse_mla_bf16 of sparse_mla.cu, for rows of 656 bytes; scale_log2 and the rest as there.
extern "C" __global__ void __launch_bounds__(3 * GROUP, 1)
sparse_mla_fp8(const u16* q, const u16* q_rope, const char* rows, const slot_t* slots, const int* lengths,
               const float* sink, u16* out, float* lse, long long q_row, long long q_head, long long rope_row,
               long long rope_head, long long kv_stride, long long slots_row, long long out_row, long long out_head,
               int count, int heads, int picks, int items, float scale_log2) {
    extern __shared__ __align__(128) char memory[];
    Arguments a = {q, q_rope, rows, slots, lengths, sink, out, lse, q_row, q_head, rope_row, rope_head, kv_stride,
                   slots_row, out_row, out_head, count, heads, picks, items, scale_log2};
    run_block(a, memory);
}
