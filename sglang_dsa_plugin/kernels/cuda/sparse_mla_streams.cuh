// Weights with which no warp of the group of scores waits for another: each has a maximum of its own, of a quarter of every
// tile. So quarters of a tile are scored, summed up and given back one after the other, and the ring has more room for
// copies that are on their way.
//
// A maximum is a whole number, and counts until a score exceeds it by more than 2^GROWTH. A row's first tile has one for
// all four warps. So they differ in few tiles, and where they do weights differ by a power of two, which the group of
// sums takes into account without an error. Results do not depend on which warp comes first.

#define GROWTH 8
#define LOWEST -3.402823466e38f  // the maximum of nothing; minus infinity less itself would be no number

// The bits of 2^x, for a whole number x up to 0: below -126 those of 0. 2^23 + 127 leaves the exponent in the low bits.
__device__ __forceinline__ u32 power_bits(float x) { return __float_as_uint(fmaxf(x, -127.f) + 8388735.f) << 23; }
__device__ __forceinline__ float power_of(float x) { return __uint_as_float(power_bits(x)); }

// What a warp of scores keeps of a row of queries between tiles. Its lane 4 g + c has heads g and g + 8.
struct Stream {
    float m[2], total[2];  // maximum, and the sum of this lane's weights, of each of its heads
    float d[2][4];         // scores of the last quarter

    // The quarter's weights, for the group of sums.
    __device__ __forceinline__ void hand_over(const Shared& s, u32 hand, bool first, u32 warp, u32 g, u32 c) {
        float* maxima = s.floats(s.maxima) + 64 * hand + 16 * warp;
        float best[2];
#pragma unroll
        for (int h = 0; h < HEADS / 8; h++)
            best[h] = fmaxf(fmaxf(d[0][2 * h], d[0][2 * h + 1]), fmaxf(d[1][2 * h], d[1][2 * h + 1]));
#pragma unroll
        for (int i = 1; i < 4; i *= 2)
#pragma unroll
            for (int h = 0; h < HEADS / 8; h++) best[h] = fmaxf(best[h], __shfl_xor_sync(~0u, best[h], i));
        if (first) {
            float* firsts = s.floats(s.firsts);
#pragma unroll
            for (int h = 0; h < HEADS / 8; h++)
                if (c == 0) firsts[(g + 8 * h) * 4 + warp] = best[h];
            group_sync(1);
#pragma unroll
            for (int h = 0; h < HEADS / 8; h++) {
                float4 x = *(const float4*)(firsts + (g + 8 * h) * 4);
                m[h] = fmaxf(LOWEST, ceilf(fmaxf(fmaxf(x.x, x.y), fmaxf(x.z, x.w))));
            }
        }
#pragma unroll
        for (int h = 0; h < HEADS / 8; h++) {
            float most = best[h] > m[h] + GROWTH ? ceilf(best[h]) : m[h];
            total[h] *= power_of(m[h] - most);
            m[h] = most;
            if (c == 0) maxima[g + 8 * h] = most;
        }
#pragma unroll
        for (int h = 0; h < HEADS / 8; h++)
#pragma unroll
            for (int n = 0; n < 2; n++) {
                float p0 = exp2_of(d[n][2 * h] - m[h]), p1 = exp2_of(d[n][2 * h + 1] - m[h]);
                total[h] += p0 + p1;
                store_weights(s.weights + hand * WEIGHT_BYTES, g + 8 * h, 16 * warp + 8 * n + 2 * c, p0, p1);
            }
        warp_arrive(s.ready_at(hand, warp), g == 0 && c == 0);
    }
};

// The sums of the four warps as they count with the largest of their maxima, which is returned; minus infinity if there
// is none.
__device__ __forceinline__ float sums_in_common(float4& sum, const float4& m) {
    float most = fmaxf(fmaxf(m.x, m.y), fmaxf(m.z, m.w));
    sum.x *= power_of(m.x - most);
    sum.y *= power_of(m.y - most);
    sum.z *= power_of(m.z - most);
    sum.w *= power_of(m.w - most);
    return most == LOWEST ? minus_inf() : most;
}

// A quarter's weights, which count with the maxima `own`, and sums so far, which count with m, brought to the larger of
// both; of heads g (0) and g + 8 (1).
__device__ __forceinline__ void in_common(u32 (&high)[4], u32 (&low)[4], const float (&own)[2], float (&m)[2],
                                          float (&acc)[16][4]) {
    u32 by[2];
    float change[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float most = fmaxf(m[h], own[h]);
        by[h] = power_bits(own[h] - most);
        by[h] |= by[h] >> 16;  // two bf16 numbers
        change[h] = power_of(m[h] - most);
        m[h] = most;
    }
#pragma unroll
    for (int j = 0; j < 4; j++) {
        high[j] = scaled(high[j], by[j % 2]);
        if constexpr (HEADS > 8) low[j] = scaled(low[j], by[j % 2]);
    }
    if (__any_sync(~0u, change[0] != 1 || change[1] != 1)) {
#pragma unroll
        for (int n = 0; n < 16; n++)
#pragma unroll
            for (int j = 0; j < 4; j++) acc[n][j] *= change[j / 2];
    }
}
