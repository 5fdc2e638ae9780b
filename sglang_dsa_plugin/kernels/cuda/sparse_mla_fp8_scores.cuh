// Packed fp8 rows in registers: decoding, products with f16, and the scores of a tile (sparse_mla_fp8.cu).

// Four codes -> two registers of two f16, the first code lowest.
__device__ __forceinline__ void decode(u32& low, u32& high, u32 codes) {
    asm("{\n.reg .b16 a, b;\nmov.b32 {a, b}, %2;\ncvt.rn.f16x2.e4m3x2 %0, a;\ncvt.rn.f16x2.e4m3x2 %1, b;\n}"
        : "=r"(low), "=r"(high) : "r"(codes));
}

__device__ __forceinline__ u32 exponent_of(float x) { return __float_as_uint(x) >> 23 & 255; }
__device__ __forceinline__ float power(u32 exponent) { return __uint_as_float(exponent << 23); }

// A row of queries, blocks of 16 columns of the latent part as f16, then four of the rope part as bf16: as left operands of
// heads g and g + 8, or as right ones (PICKS_FIRST) of head g.
struct Queries {
    static constexpr int OF_LANE = PICKS_FIRST ? 1 : 2;  // heads
    u32 nope[32][2 * OF_LANE], rope[4][2 * OF_LANE];
    float back[2];  // what undoes the powers of two of the heads that this lane has scores of

    __device__ __forceinline__ void load(u32 stage, u32 lane) {
        u32 g = lane / 4, c = lane % 4;
        u32 at = stage + lane % 16 * QUERY_BYTES + ((lane / 16 ^ lane % 8) * 16) + 1024;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            u32 x[4];
            matrices(x, at ^ j * 32);
#pragma unroll
            for (int i = 0; i < 2 * OF_LANE; i++) rope[j][i] = x[i * 2 / OF_LANE];
        }
        float up[OF_LANE];
#pragma unroll
        for (int h = 0; h < OF_LANE; h++) {
            float most = 0;
#pragma unroll
            for (int k = 0; k < 32; k++) {
                u32 x[2];
                quad(x, stage, g + 8 * h, k, c);
#pragma unroll
                for (int i = 0; i < 2; i++)
                    most = fmaxf(most, fmaxf(fabsf(low_half(x[i])), fabsf(high_half(x[i]))));
            }
            most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
            most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
            // 2^13 <= most * up < 2^14, but for what is 0, infinite or below 2^-113.
            u32 exponent = exponent_of(most);
            exponent = exponent == 0 || exponent == 255 ? 127 : min(267 - exponent, 253u);
            up[h] = power(exponent);
            back[h] = power(254 - exponent);
        }
        if constexpr (PICKS_FIRST) {
            float own = back[0];
#pragma unroll
            for (int h = 0; h < 2; h++) back[h] = __shfl_sync(~0u, own, 4 * lane_head(g, c, h));
        }
#pragma unroll
        for (int k = 0; k < 32; k++)
#pragma unroll
            for (int h = 0; h < OF_LANE; h++) {
                u32 x[2];
                quad(x, stage, g + 8 * h, k, c);
#pragma unroll
                for (int i = 0; i < 2; i++)
                    nope[k][OF_LANE * i + h] = pair_f16(low_half(x[i]) * up[h], high_half(x[i]) * up[h]);
            }
    }

    // Columns 16 k + 4 c to + 3 of a head.
    static __device__ __forceinline__ void quad(u32 (&x)[2], u32 stage, u32 head, int k, u32 c) {
        u32 at = stage + head * QUERY_BYTES + k / 4 * 128 + (((k % 4 * 2 + c / 2) ^ head % 8) * 16) + c % 2 * 8;
        asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(x[0]), "=r"(x[1]) : "r"(at) : "memory");
    }
};

// Products of this warp's 16 rows of a tile, in 18 parts: two for each half of a block of 128 columns, two for rope.
struct Products {
    float d[LANE_TILES][4];        // finished: the latent part
    float part[LANE_TILES][2][4];  // of the block at hand and, in turns that do not wait for each other, two sums of it
    u32 x[2][2][4];                // codes of two halves of a block, or what rope is stored as

    template <int HALF>
    __device__ __forceinline__ void fetch(u32 rows) {
        if constexpr (HALF < 10) {
#pragma unroll
            for (int n = 0; n < 2; n++)
                matrices(x[HALF % 2][n], rows + 8 * n * ROW_BYTES + (HALF < 8 ? HALF * 64 : ROPE_AT + (HALF - 8) * 64));
        }
    }

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int n = 0; n < LANE_TILES; n++)
#pragma unroll
            for (int j = 0; j < 4; j++) part[n][0][j] = part[n][1][j] = 0;
    }

    // What is summed for a block counts in its scales, row by row.
    __device__ __forceinline__ void add_block(int b, const float* scales, bool first) {
#pragma unroll
        for (int n = 0; n < LANE_TILES; n++)
#pragma unroll
            for (int j = 0; j < 4; j++) {
                float sum = (part[n][0][j] + part[n][1][j]) * scales[ROW_FLOATS * further_row(n, j) + b];
                d[n][j] = first ? sum : d[n][j] + sum;
            }
        clear();
    }

    template <void product_of(float (&)[4], const u32 (&)[4], u32, u32)>
    __device__ __forceinline__ void multiply(int k, const u32 (&q)[2 * Queries::OF_LANE], const u32 (&y)[2][2]) {
#if PICKS_FIRST
        const u32 rows[4] = {y[0][0], y[1][0], y[0][1], y[1][1]};
        product_of(part[0][k], rows, q[0], q[1]);
#else
#pragma unroll
        for (int n = 0; n < 2; n++) product_of(part[n][k], q, y[n][0], y[n][1]);
#endif
    }

    template <int PART, bool WITH_STEPS>
    __device__ __forceinline__ void run(const Queries& q, u32 rows, const float* scales, Steps& steps) {
        if constexpr (PART < 18) {
            constexpr int half = PART < 16 ? PART / 2 : PART - 8;
            if constexpr (PART < 16 ? PART % 2 == 0 : true) fetch<half + 1>(rows);
            if constexpr (WITH_STEPS) steps.template run_at<PART>();
#pragma unroll
            for (int k = 0; k < 2; k++) {
                // 16 columns of rows 0 to 7 (n 0) and 8 to 15 of the warp, the first and the second half of them.
                u32 y[2][2];
#pragma unroll
                for (int n = 0; n < 2; n++) {
                    if constexpr (PART < 16) {
                        decode(y[n][0], y[n][1], x[half % 2][n][PART % 2 * 2 + k]);
                    } else {
                        y[n][0] = x[half % 2][n][2 * k];
                        y[n][1] = x[half % 2][n][2 * k + 1];
                    }
                }
                if constexpr (PART < 16) multiply<product_f16>(k, q.nope[2 * PART + k], y);
                else multiply<product>(k, q.rope[(PART - 16) * 2 + k], y);
            }
            if constexpr (PART % 4 == 3 && PART < 16) add_block(PART / 4, scales, PART == 3);
            run<PART + 1, WITH_STEPS>(q, rows, scales, steps);
        }
    }
};
