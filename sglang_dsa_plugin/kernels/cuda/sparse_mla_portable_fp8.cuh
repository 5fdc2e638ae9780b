// Packed fp8 rows (512 e4m3, 4 f32 scales, 64 bf16) as rows of bf16 (sparse_mla_portable.cu).
//
// A code's bits, moved to the places of a bf16 number's, are its value times 2^-120, and a product with a power of two
// rounds nothing: where scales are powers of two, as this package writes them, the row is a row of bf16 numbers. Any other
// scale, and a code that is NaN, send the block the exact way: codes without their scales, which multiply the scores of
// their 128 columns, and the weights before the products with these columns.

#define FIRST_SCALE 27                      // exponents of scales from 2^-100 on, so that values are normal numbers,
#define LAST_SCALE 134                      // up to 2^7, so that 2^120 times the scale is a bf16 number

// What brings values from codes to bf16 in both halves, and whether it is exact.
__device__ __forceinline__ bool factor_of(u32& factor, float scale) {
    u32 bits = __float_as_uint(scale), exponent = bits >> 23;
    factor = bits == 0 ? 0 : ((exponent + 120) << 7 & 0x7fff) * 0x10001;
    return bits == 0 || ((bits & 0x7fffff) == 0 && exponent >= FIRST_SCALE && exponent <= LAST_SCALE);
}

// Two codes in the bytes 1 and 3 of x.
__device__ __forceinline__ u32 two_values(u32 x, u32 factor) {
    return scaled((x & 0x80008000u) | (x >> 4 & 0x07f007f0u), factor);
}

// Whether one of four codes is NaN.
__device__ __forceinline__ bool has_nan(u32 codes) { return ((codes & 0x7f7f7f7fu) + 0x01010101u) & 0x80808080u; }

// Puts NaN where the code is one.
__device__ __forceinline__ u32 with_nan(u32 x, u32 both) {
    if ((x & 0x7f00) == 0x7f00) both |= 0x7fffu;
    if ((x & 0x7f000000) == 0x7f000000) both |= 0x7fff0000u;
    return both;
}

// This thread's pieces of a packed tile, those that it copied, to a tile of bf16. EXACT: without their scales, which go
// to s.scales; else s.odd tells what cannot be done.
template <bool EXACT>
__device__ __forceinline__ void unpack(Shared& s, u32 stage, u32 tile) {
    u32 local = Copier::local(), own = this_thread() % 8;
    const char* from = s.packed[stage][local];
    char* to = s.tiles[tile] + local * ROW_BYTES;
    float4 scales = *(const float4*)(from + 512);
    const float scale[4] = {scales.x, scales.y, scales.z, scales.w};
    bool odd = false;
#pragma unroll
    for (int j = 0; j < 4; j++) {
        uint4 codes = *(const uint4*)(from + 128 * j + 16 * own);
        u32 factor = 0x7b807b80u;  // 2^120
        if constexpr (!EXACT) {
            odd |= !factor_of(factor, scale[j]);
            odd |= has_nan(codes.x) | has_nan(codes.y) | has_nan(codes.z) | has_nan(codes.w);
        }
        const u32 w[4] = {codes.x, codes.y, codes.z, codes.w};
        u32 x[8];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            u32 low = __byte_perm(w[i], 0, 0x1404), high = __byte_perm(w[i], 0, 0x3424);
            x[2 * i] = two_values(low, factor), x[2 * i + 1] = two_values(high, factor);
            if constexpr (EXACT) {
                x[2 * i] = with_nan(low, x[2 * i]);
                x[2 * i + 1] = with_nan(high, x[2 * i + 1]);
            }
        }
        // 16 codes become two pieces. Half the lanes begin with the second: all eight are in different banks.
        u32 second = own / 4, piece = 2 * own;
        char* group = to + 256 * j + piece / 8 * 128;
        uint4 one = make_uint4(x[0], x[1], x[2], x[3]), two = make_uint4(x[4], x[5], x[6], x[7]);
        *(uint4*)(group + ((piece % 8 + second) ^ local % 8) * 16) = second ? two : one;
        *(uint4*)(group + ((piece % 8 + 1 - second) ^ local % 8) * 16) = second ? one : two;
    }
    *(uint4*)(to + 1024 + (own ^ local % 8) * 16) = *(const uint4*)(from + 528 + 16 * own);
    if constexpr (EXACT) {
        if (own == 0) *(float4*)s.scales[local] = scales;
    } else if (odd) {
        s.odd = 1;
    }
}

// Behind a step of the scores, in the exact way: what is summed for a block of 128 columns counts in its scales.
template <int N>
__device__ __forceinline__ void add_block(float (&d)[WARP_TILES][N][4], float (&sum)[WARP_TILES][N][4], const Shared& s,
                                          int step, int first) {
    const int in_block = 2 * GROUP_STEPS;
    if (step % in_block != in_block - 1 && step != STEPS - 1) return;
    int block = step / in_block;
    u32 c = threadIdx.x % 4;
#pragma unroll
    for (int m = 0; m < WARP_TILES; m++)
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int j = 0; j < 4; j++) {
                float scale = block < 4 ? s.scales[first + 8 * n + 2 * c + j % 2][block & 3] : 1.f;
                sum[m][n][j] += d[m][n][j] * scale;
                d[m][n][j] = step == STEPS - 1 ? sum[m][n][j] : 0;
            }
}

// Weights of 16 picks as left operands, two bf16 numbers each, times the scales of the picks for this warp's columns.
__device__ __forceinline__ void scale_weights(u32 (&high)[4], u32 (&low)[4], const Shared& s, int k) {
    u32 c = threadIdx.x % 4, block = threadIdx.x / 64;
#pragma unroll
    for (int j = 0; j < 4; j++) {
        int pick = 16 * k + j / 2 * 8 + 2 * c;
        float x = (low_half(high[j]) + low_half(low[j])) * s.scales[pick][block];
        float y = (high_half(high[j]) + high_half(low[j])) * s.scales[pick + 1][block];
        high[j] = pair(x, y);
        low[j] = pair(x - low_half(high[j]), y - high_half(high[j]));
    }
}
