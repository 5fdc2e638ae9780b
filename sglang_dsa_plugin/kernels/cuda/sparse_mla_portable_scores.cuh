// Scores and weights, one warp for 16 heads (sparse_mla_portable.cu). A lane has heads g and g + 8 of them and of each
// eight picks 2 c and the next, where it is lane 4 g + c. With TOGETHER 2 a warp multiplies every second step of 16 columns
// for its own heads and those of its neighbour, and they swap parts: half the reads of rows, for a barrier of two warps.

#define CHAINS (TILE == 16 ? 2 : 1)         // of sums: with few picks products would wait for one another

struct Scorer {
    u32 q[Q_KEPT][TOGETHER][4];  // left operands of steps: own heads, then the other warp's
    float unit[2];         // of a head's scores, to powers of two
    // Of a head: the maximum that weights are relative to, and this lane's sums of weights and of squared weights, in
    // both of which 2^WEIGHT_BITS is a weight of 1.
    float m[2], total[2], squares[2];

    static __device__ __forceinline__ u32 head_tile() { return this_thread() / 32 - SUM_WARPS; }
    // The head tile of operand m, and the step of all columns that is this warp's step i.
    static __device__ __forceinline__ u32 tile_of(int m) { return head_tile() ^ m; }
    static __device__ __forceinline__ int step_of(int i) { return TOGETHER == 1 ? i : 2 * i + (int)(head_tile() & 1); }
    static __device__ __forceinline__ u32 head(int h) { return head_tile() * 16 + this_thread() % 32 / 4 + 8 * h; }

    // From the queries in shared memory. Of others than this warp nobody looks at what it puts there.
    template <bool EXACT>
    __device__ __forceinline__ void begin(const Arguments& a, Shared& s, u32 memory) {
        u32 lane = this_thread() % 32;
#pragma unroll
        for (int h = 0; h < 2; h++) {
#if FP8
            unit[h] = EXACT ? a.scale_log2 : s.unit[head(h)];
#else
            unit[h] = a.scale_log2;
#endif
            m[h] = minus_inf(), total[h] = squares[h] = 0;
        }
#pragma unroll
        for (int k = 0; k < TOGETHER; k++) {
            u32 at = memory + (tile_of(k) * 16 + lane % 16) * ROW_BYTES + lane / 16 * 16;
#pragma unroll
            for (int i = 0; i < OWN_STEPS; i++) {
                u32 x[4];
                matrices(x, at + 32 * step_of(i));
                if (i < Q_KEPT) {
#pragma unroll
                    for (int j = 0; j < 4; j++) q[i < Q_KEPT ? i : 0][k][j] = x[j];
                } else {
                    s.queries[i - Q_KEPT][k][head_tile()][lane] = make_uint4(x[0], x[1], x[2], x[3]);
                }
            }
        }
    }

    // EXACT: packed values are there as they are stored, and blocks of columns count in their scales.
    template <bool EXACT>
    __device__ __forceinline__ void products(Shared& s, u32 tile, float (&d)[PICK_TILES][4]) {
        u32 lane = this_thread() % 32;
        u32 at = tile + (lane % 8 + lane / 16 * 8) * ROW_BYTES + lane / 8 % 2 * 16 + 32 * step_of(0);
        const uint4* rest = &s.queries[0][0][head_tile()][lane];
        float part[CHAINS * TOGETHER][PICK_TILES][4] = {};
#if FP8
        float sum[TOGETHER][PICK_TILES][4] = {};
#endif
        u32 x[2][TILE / 16][4];
        uint4 left[2][TOGETHER];
        auto load = [&](int i) {
            if (i >= Q_KEPT)
#pragma unroll
                for (int k = 0; k < TOGETHER; k++)
                    left[i % 2][k] = rest[((i - Q_KEPT) * TOGETHER + k) * HEAD_TILES * 32];
#pragma unroll
            for (int n = 0; n < TILE / 16; n++)
                matrices(x[i % 2][n], at + i * 32 * TOGETHER + 16 * n * ROW_BYTES);
        };
        load(0);
#pragma unroll
        for (int i = 0; i < OWN_STEPS; i++) {
            if (i + 1 < OWN_STEPS) load(i + 1);
            loads_stay();
            const auto& own = x[i % 2];
#pragma unroll
            for (int k = 0; k < TOGETHER; k++) {
                const uint4& more = left[i % 2][k];
                const u32 other[4] = {more.x, more.y, more.z, more.w};
                u32 by[4];
#pragma unroll
                for (int j = 0; j < 4; j++) by[j] = i < Q_KEPT ? q[i < Q_KEPT ? i : 0][k][j] : other[j];
                auto& to = part[TOGETHER > 1 ? k : EXACT ? 0 : i % CHAINS];
#pragma unroll
                for (int n = 0; n < PICK_TILES; n++)
                    if (FP8 && !EXACT && in_latent(i))
                        product_f16(to[n], by, own[n / 2][n % 2 * 2], own[n / 2][n % 2 * 2 + 1]);
                    else product(to[n], by, own[n / 2][n % 2 * 2], own[n / 2][n % 2 * 2 + 1]);
#if FP8
                if (EXACT && in_latent(i) && i % BLOCK_STEPS == BLOCK_STEPS - 1) add_block(to, sum[k], s, i / BLOCK_STEPS);
#endif
            }
        }
#if FP8
        if constexpr (EXACT) {
#pragma unroll
            for (int k = 0; k < TOGETHER; k++)
#pragma unroll
                for (int n = 0; n < PICK_TILES; n++)
#pragma unroll
                    for (int j = 0; j < 4; j++) part[k][n][j] += sum[k][n][j];
        }
#endif
#pragma unroll
        for (int n = 0; n < PICK_TILES; n++)
#pragma unroll
            for (int j = 0; j < 4; j++) {
                d[n][j] = part[0][n][j];
                if (CHAINS > 1 && TOGETHER == 1 && !EXACT) d[n][j] += part[CHAINS - 1][n][j];
            }
#if TOGETHER == 2
        float4* to = &parts(s)[head_tile() * PICK_TILES * 32 + lane];
        const float4* from = &parts(s)[(head_tile() ^ 1) * PICK_TILES * 32 + lane];
#pragma unroll
        for (int n = 0; n < PICK_TILES; n++)
            to[32 * n] = make_float4(part[1][n][0], part[1][n][1], part[1][n][2], part[1][n][3]);
        pair_sync(1 + head_tile() / 2);
#pragma unroll
        for (int n = 0; n < PICK_TILES; n++) {
            float4 more = from[32 * n];
            d[n][0] += more.x, d[n][1] += more.y, d[n][2] += more.z, d[n][3] += more.w;
        }
#endif
    }

    // Weights of a tile. turn: of the weights. number: of the tile.
    template <bool EXACT>
    __device__ __forceinline__ void tile(Shared& s, u32 turn, u32 tile, u32 number) {
        u32 lane = this_thread() % 32, c = lane % 4;
        float d[PICK_TILES][4];
        products<EXACT>(s, tile, d);
        u32 real = __ballot_sync(~0u, s.real[number % MARKS][lane % TILE]) >> 2 * c;
        float best[2] = {minus_inf(), minus_inf()};
#pragma unroll
        for (int n = 0; n < PICK_TILES; n++)
#pragma unroll
            for (int j = 0; j < 4; j++) {
                d[n][j] = real >> (8 * n + j % 2) & 1 ? d[n][j] * unit[j / 2] : minus_inf();
                best[j / 2] = fmaxf(best[j / 2], d[n][j]);
            }
        // The maximum goes up in large steps only: then what was summed so far has to be multiplied rarely.
        bool higher = __any_sync(~0u, best[0] > m[0] + SLACK || best[1] > m[1] + SLACK);
        if (lane == 0) s.changed[turn][head_tile()] = higher;
        if (higher) {
#pragma unroll
            for (int h = 0; h < 2; h++) {
#pragma unroll
                for (int bits = 1; bits < 4; bits *= 2) best[h] = fmaxf(best[h], __shfl_xor_sync(~0u, best[h], bits));
                float factor = 1;
                if (best[h] > m[h] + SLACK) {
                    factor = exp2_of(m[h] - best[h]);
                    m[h] = best[h];
                    total[h] *= factor, squares[h] *= factor * factor;
                }
                if (c == 0) s.factor[turn][head(h)] = factor;
            }
        } else if (c == 0) {
            s.factor[turn][head(0)] = s.factor[turn][head(1)] = 1;  // of other warps one may have changed
        }
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float lift = m[h] == minus_inf() ? 0.f : m[h] - WEIGHT_BITS;
            u16* to = s.weights[EXACT ? 0 : turn][head(h)] + 2 * c;
#pragma unroll
            for (int n = 0; n < PICK_TILES; n++) {
                float x = exp2_of(d[n][2 * h] - lift), y = exp2_of(d[n][2 * h + 1] - lift);
                total[h] += x, total[h] += y;
                if constexpr (EXACT) {
                    u32 high = pair(x, y);
                    *(u32*)(to + 8 * n) = high;
                    *(u32*)(to + HEADS * WEIGHT_ROW + 8 * n) = pair(x - low_half(high), y - high_half(high));
                } else {
                    squares[h] += x * x, squares[h] += y * y;
                    *(u32*)(to + 8 * n) = pair_f16(x, y);
                }
            }
        }
    }

    __device__ __forceinline__ void end(Shared& s) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
#pragma unroll
            for (int bits = 1; bits < 4; bits *= 2) {
                total[h] += __shfl_xor_sync(~0u, total[h], bits);
                squares[h] += __shfl_xor_sync(~0u, squares[h], bits);
            }
            if (this_thread() % 4 == 0) s.maximum[head(h)] = m[h], s.total[head(h)] = total[h], s.squares[head(h)] = squares[h];
        }
    }
};
