// Packed fp8 rows (512 e4m3, 4 f32 scales, 64 bf16) as rows of f16 and, in the last 64 columns, bf16
// (sparse_mla_portable.cu).
//
// A code's bits, moved to the places of an f16 number's, are its value times 2^-8, and a product with a power of two rounds
// nothing where it stays within f16: so a row with scales as this package writes them is one of f16 numbers, for scores and
// sums alike. The queries become f16, too, each head's times a power of two that brings its largest to 2^15. Any other
// scale, and a code that is NaN, send the block the exact way: codes as bf16 without their scales, which multiply the
// scores of their 128 columns, and the weights before the products with these columns.

#define FIRST_SCALE 112                     // exponents of scales from 2^-15 on, so that the smallest code is an f16 number,
#define LAST_SCALE 134                      // up to 2^7, so that the largest is one

// A code's bits in the bytes 1 and 3 of x in the places of numbers of `mantissa` bits.
template <int MANTISSA>
__device__ __forceinline__ u32 two_values(u32 x) {
    constexpr u32 rest = 0x7f00u >> (11 - MANTISSA) & 0x7fffu;
    return (x & 0x80008000u) | (x >> (11 - MANTISSA) & (rest << 16 | rest));
}

// Puts NaN where the code is one.
__device__ __forceinline__ u32 with_nan(u32 x, u32 both) {
    if ((x & 0x7f00) == 0x7f00) both |= 0x7fffu;
    if ((x & 0x7f000000) == 0x7f000000) both |= 0x7fff0000u;
    return both;
}

// This thread's pieces of a packed tile, those that its warp copied, to a tile. EXACT: bf16 without their scales, which go
// to s.scales; else s.odd tells what cannot be done. largest: as in sums_of_tile.
template <bool EXACT>
__device__ __forceinline__ void unpack(Shared& s, u32 stage, u32 tile, u32& largest) {
    u32 local = Copier::local(), own = this_thread() % 8;
    const char* from = s.packed[stage][local];
    char* to = s.tiles[tile] + local * ROW_BYTES;
    float4 scales = *(const float4*)(from + 512);
    const float scale[4] = {scales.x, scales.y, scales.z, scales.w};
    // A scale that is NaN or infinite is one where all its codes are 0, too.
    bool odd = !(fabsf(scales.x) + fabsf(scales.y) + fabsf(scales.z) + fabsf(scales.w) < -minus_inf());
#pragma unroll
    for (int j = 0; j < 4; j++) {
        uint4 codes = *(const uint4*)(from + 128 * j + 16 * own);
        const u32 w[4] = {codes.x, codes.y, codes.z, codes.w};
        u32 factor = 0, x[8], top = 0;
        if constexpr (!EXACT) {
            u32 bits = __float_as_uint(scale[j]), exponent = bits >> 23;
            if ((bits & 0x7fffff) == 0 && exponent >= FIRST_SCALE && exponent <= LAST_SCALE)
                factor = (exponent - 104 << 10) * 0x10001;  // 2^8 times the scale
            else
                odd |= ((w[0] | w[1] | w[2] | w[3]) & 0x7f7f7f7fu) != 0;
        }
#pragma unroll
        for (int i = 0; i < 8; i++) {
            u32 both = __byte_perm(w[i / 2], 0, i % 2 ? 0x3424 : 0x1404);
            if constexpr (EXACT) {
                x[i] = with_nan(both, scaled(two_values<7>(both), 0x7b807b80u));  // 2^120
            } else {
                x[i] = scaled_f16(two_values<10>(both), factor);
                top = larger_f16(top, x[i]);
            }
        }
        if constexpr (!EXACT) {
            largest = larger_f16(largest, top);
            // The code of NaN is the one above that of the largest number.
            odd |= max(top & 0xffff, top >> 16) > (factor & 0xffff | 0x300);
        }
        // 16 codes become two pieces. Half the lanes begin with the second: all eight are in different banks.
        u32 second = own / 4, piece = 2 * own;
        char* group = to + 256 * j + piece / 8 * 128;
        uint4 one = make_uint4(x[0], x[1], x[2], x[3]), two = make_uint4(x[4], x[5], x[6], x[7]);
        *(uint4*)(group + (piece % 8 + second) * 16) = second ? two : one;
        *(uint4*)(group + (piece % 8 + 1 - second) * 16) = second ? one : two;
    }
    *(uint4*)(to + 1024 + own * 16) = *(const uint4*)(from + 528 + 16 * own);
    if constexpr (EXACT) {
        if (own == 0) *(float4*)s.scales[local] = scales;
    } else if (odd) {
        s.odd = 1;
    }
}

// Queries as f16, those of the last 64 columns as bf16, all of a head times a power of two; s.unit takes it back. By all
// threads, with a barrier in between and one to come.
__device__ __forceinline__ void queries_to_f16(u32 (&q)[STEPS][4], const Arguments& a, Shared& s) {
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, part = warp / HEAD_TILES;
    u32 head0 = warp % HEAD_TILES * 16 + lane / 4;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        u32 largest = 0;  // bits, of which those of NaN are the largest
#pragma unroll
        for (int i = 0; i < STEPS; i++)
#pragma unroll
            for (int j = h; j < 4; j += 2)
                if (in_latent(i)) largest = max(largest, max(q[i][j] & 0x7fffu, q[i][j] >> 16 & 0x7fffu));
        largest = max(largest, __shfl_xor_sync(~0u, largest, 1));
        largest = max(largest, __shfl_xor_sync(~0u, largest, 2));
        if (lane % 4 == 0) s.largest[part][head0 + 8 * h] = largest;
    }
    __syncthreads();
#pragma unroll
    for (int h = 0; h < 2; h++) {
        u32 head = head0 + 8 * h, largest = 0;
#pragma unroll
        for (int i = 0; i < PARTS; i++) largest = max(largest, s.largest[i][head]);
        // At least that of 2^-24: the roped part, which may be as large as it likes beside a latent part of nothing, is
        // multiplied by 2^39 at most.
        u32 exponent = min(max(largest >> 7, 103u), 254u);
        float by = __uint_as_float(269 - exponent << 23);  // 2^(142 - exponent)
        if (part == 0 && lane % 4 == 0) s.unit[head] = a.scale_log2 * __uint_as_float(exponent - 15 << 23);
#pragma unroll
        for (int i = 0; i < STEPS; i++)
#pragma unroll
            for (int j = h; j < 4; j += 2) {
                float x = low_half(q[i][j]) * by, y = high_half(q[i][j]) * by;
                q[i][j] = in_latent(i) ? pair_f16(x, y) : pair(x, y);
            }
    }
}

// Behind a step of the scores, in the exact way: what is summed for a block of 128 columns counts in its scales.
__device__ __forceinline__ void add_block(float (&d)[4][4], float (&sum)[4][4], const Shared& s, int step) {
    const int in_block = 2 * GROUP_STEPS;
    if (step % in_block != in_block - 1 && step != STEPS - 1) return;
    int block = step / in_block;
    u32 c = threadIdx.x % 4;
#pragma unroll
    for (int n = 0; n < 4; n++)
#pragma unroll
        for (int j = 0; j < 4; j++) {
            float scale = block < 4 ? s.scales[8 * n + 2 * c + j % 2][block & 3] : 1.f;
            sum[n][j] += d[n][j] * scale;
            d[n][j] = step == STEPS - 1 ? sum[n][j] : 0;
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
