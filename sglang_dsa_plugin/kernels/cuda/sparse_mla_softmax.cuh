// The weights of a tile in the sparse MLA kernels for Hopper: which scores a lane has, and the softmax over four warps and
// all tiles of a row (with OWN_MAXIMA that of sparse_mla_streams.cuh).

// Lane 4 g + c of a warp has, of a tile's scores of the warp's 16 rows, those of heads g and g + 8 and of rows 8 n + 2 c and
// the next; with PICKS_FIRST those of heads 2 c and the next and of rows g and g + 8.
#if PICKS_FIRST
#define LANE_HEADS 2
#define LANE_TILES 1  // of 8 columns of products: of n
#define LANE_STEP 4   // from a lane of a head to the next
#else
#define LANE_HEADS (HEADS / 8)
#define LANE_TILES 2
#define LANE_STEP 1
#endif

__device__ __forceinline__ u32 lane_head(u32 g, u32 c, int h) { return PICKS_FIRST ? 2 * c + h : g + 8 * h; }

// The row of d[0][0], and how far behind it that of d[n][j] is.
__device__ __forceinline__ u32 lane_row(u32 g, u32 c) { return PICKS_FIRST ? g : 2 * c; }
__device__ __forceinline__ int further_row(int n, int j) { return PICKS_FIRST ? j / 2 * 8 : 8 * n + j % 2; }

// The lane that speaks for its heads.
__device__ __forceinline__ bool speaks(u32 g, u32 c) { return (PICKS_FIRST ? g : c) == 0; }

// Over the lanes of a head.
__device__ __forceinline__ float lanes_sum(float x) {
#pragma unroll
    for (int i = LANE_STEP; i < (PICKS_FIRST ? 32 : 4); i *= 2) x += __shfl_xor_sync(~0u, x, i);
    return x;
}

// What the group of scores keeps of a row of queries between tiles.
struct Softmax {
    float m[2], total[2];    // running maximum, and the sum of this lane's weights, of each of its heads
    float d[LANE_TILES][4];  // scores of the last tile

    __device__ __forceinline__ float most(int h) const {
        if constexpr (PICKS_FIRST) return fmaxf(d[0][h], d[0][2 + h]);
        return fmaxf(fmaxf(d[0][2 * h], d[0][2 * h + 1]), fmaxf(d[LANE_TILES - 1][2 * h], d[LANE_TILES - 1][2 * h + 1]));
    }
};

// One tile's weights, in steps that can stand between products: what one waits for comes while products run.
struct Steps {
    const Shared& s;
    Softmax& own;
    u32 hand, warp, g, c;
    float best[2], lift[2];

    __device__ __forceinline__ float* maxima() { return s.floats(s.maxima) + 64 * hand; }

    template <int STEP>
    __device__ __forceinline__ void run() {
        if constexpr (STEP == 0) {
#pragma unroll
            for (int h = 0; h < LANE_HEADS; h++) best[h] = own.most(h);
        }
        if constexpr (STEP == 1 || STEP == 2) {
#pragma unroll
            for (int h = 0; h < LANE_HEADS; h++) {
                best[h] = fmaxf(best[h], __shfl_xor_sync(~0u, best[h], LANE_STEP * STEP));
                if constexpr (PICKS_FIRST && STEP == 2) best[h] = fmaxf(best[h], __shfl_xor_sync(~0u, best[h], 16));
            }
        }
        if constexpr (STEP == 3) {
#pragma unroll
            for (int h = 0; h < LANE_HEADS; h++)
                if (speaks(g, c)) maxima()[lane_head(g, c, h) * 4 + warp] = best[h];
        }
        if constexpr (STEP == 4) group_sync(1);
        if constexpr (STEP == 5) {
#pragma unroll
            for (int h = 0; h < LANE_HEADS; h++) {
                float4 x = *(const float4*)(maxima() + lane_head(g, c, h) * 4);
                best[h] = fmaxf(own.m[h], fmaxf(fmaxf(x.x, x.y), fmaxf(x.z, x.w)));
            }
        }
        if constexpr (STEP == 6) {
#pragma unroll
            for (int h = 0; h < LANE_HEADS; h++) {
                lift[h] = best[h] == minus_inf() ? 0.f : best[h];
                float factor = exp2_of(own.m[h] - lift[h]);
                own.m[h] = best[h];
                own.total[h] *= factor;
                if (warp == 0 && speaks(g, c)) s.floats(s.factors)[16 * hand + lane_head(g, c, h)] = factor;
            }
        }
        if constexpr (STEP >= 7 && STEP < 7 + LANE_HEADS * LANE_TILES) {
            constexpr int i = STEP - 7;
            u32 to = s.weights + hand * WEIGHT_BYTES;
            if constexpr (PICKS_FIRST) {
                float p0 = exp2_of(own.d[0][2 * i] - lift[0]), p1 = exp2_of(own.d[0][2 * i + 1] - lift[1]);
                own.total[0] += p0;
                own.total[1] += p1;
                store_weights(to, 2 * c, 16 * warp + 8 * i + g, p0, p1);
            } else {
                constexpr int h = i / 2, n = i % 2;
                float p0 = exp2_of(own.d[n][2 * h] - lift[h]), p1 = exp2_of(own.d[n][2 * h + 1] - lift[h]);
                own.total[h] += p0 + p1;
                store_weights(to, g + 8 * h, 16 * warp + 8 * n + 2 * c, p0, p1);
            }
        }
        if constexpr (STEP == 11) warp_arrive(s.ready_at(hand, warp), g == 0 && c == 0);
    }
    // What may stand ahead of the products of part I: a step as early as the one before allows, for the sums wait for these
    // weights, and the tile stays in the ring until then.
    template <int I>
    __device__ __forceinline__ void run_at() {
        if constexpr (I < 3) run<I>();
        if constexpr (I == 2) run<3>();
        if constexpr (I >= 3 && I < 6) run<I + 1>();
        if constexpr (I == 6 || I == 7) {
            run<2 * I - 5>();
            run<2 * I - 4>();
        }
        if constexpr (I == 8) run<11>();
    }
    template <int I = 0>
    __device__ __forceinline__ void run_all() {
        run_at<I>();
        if constexpr (I < 8) run_all<I + 1>();
    }
};
