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

#ifndef DECODES
#define DECODES (__CUDA_ARCH__ >= 890)      // an instruction makes codes f16 numbers
#endif

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
// to s.scales; else `odd` tells what cannot be done. largest: as in sums_of_tile.
template <bool EXACT>
__device__ __forceinline__ void unpack(Shared& s, u32 stage, u32 tile, u32& largest, int& not_fast) {
    u32 local = Copier::local(), own = Copier::first();
    const char* from = s.packed[stage][local];
    char* to = s.tiles[tile] + local * ROW_BYTES;
    float4 scales = *(const float4*)(from + 512);
    const float scale[4] = {scales.x, scales.y, scales.z, scales.w};
    // A scale that is NaN or infinite is one where all its codes are 0, too.
    bool odd = !(fabsf(scales.x) + fabsf(scales.y) + fabsf(scales.z) + fabsf(scales.w) < -minus_inf());
    // Pieces of 8 codes, 16 in the columns of a scale, of which a thread has two. It takes them so that what is read at
    // once lies in different banks (rows of 656 bytes begin 16 bytes further each), and what is written, too.
    u32 piece = COPIERS == 8 ? (own + 6 * (local % 2)) % 16 : own;
    u32 top = 0, factor = 0, any = 0;
    bool plain = false;
#pragma unroll
    for (int i = 0; i < 64 / COPIERS; i++) {
        u32 place = (COPIERS == 8 ? i / 2 : 2 * (i / 2) + (int)own / 8) * 16 + (piece ^ i % 2 * 8);
        uint2 codes = *(const uint2*)(from + 8 * place);
        const u32 w[2] = {codes.x, codes.y};
        u32 x[4];
        if constexpr (!EXACT) {
            if (i % 2 == 0) {
                float mine = COPIERS == 8 ? scale[i / 2] : own < 8 ? scale[i / 2 * 2 % 4] : scale[(i / 2 * 2 + 1) % 4];
                float by = DECODES ? mine : 256 * mine;
                factor = pair_f16(by, by);
                u32 bits = __float_as_uint(mine);
                plain = (bits & 0x7fffff) == 0 && bits - (FIRST_SCALE << 23) <= (u32)(LAST_SCALE - FIRST_SCALE) << 23;
                any = w[0] | w[1];
            } else {
                any |= w[0] | w[1];
                odd |= !plain && (any & 0x7f7f7f7fu);
            }
        }
#if DECODES
        if constexpr (!EXACT) {
            from_e4m3(x[0], x[1], w[0]);
            from_e4m3(x[2], x[3], w[1]);
#pragma unroll
            for (int j = 0; j < 4; j++) top = larger_f16_or_nan(top, x[j] = scaled_f16(x[j], factor));
        }
#endif
#pragma unroll
        for (int j = 0; j < 4; j++) {
            u32 both = __byte_perm(w[j / 2], 0, j % 2 ? 0x3424 : 0x1404);
            if constexpr (EXACT) {
                x[j] = with_nan(both, scaled(two_values<7>(both), 0x7b807b80u));  // 2^120
            } else if (!DECODES) {
                x[j] = scaled_f16(two_values<10>(both), factor);
                if (j == 0) top = 0;
                top = larger_f16(top, x[j]);
            }
        }
        if constexpr (!EXACT && !DECODES) {
            largest = larger_f16(largest, top);
            // The code of NaN is the one above that of the largest number.
            odd |= max(top & 0xffff, top >> 16) > (factor & 0xffff | 0x300);
        }
        *(uint4*)(to + 16 * place) = make_uint4(x[0], x[1], x[2], x[3]);
    }
    if (own < 8) *(uint4*)(to + 1024 + own * 16) = *(const uint4*)(from + 528 + 16 * own);
    if constexpr (EXACT) {
        if (own == 0) *(float4*)s.scales[local] = scales;
    } else {
        if (DECODES) {
            largest = larger_f16(largest, top);
            odd |= max(top & 0xffff, top >> 16) > 0x7c00;
        }
        if (odd) not_fast = 1;
    }
}

// The queries, rows of tiles, become f16 in their place, the last 64 columns of them stay bf16, all of a head times a power
// of two; s.unit takes it back. By all threads, with barriers around it. A loop, not code for each operand in registers:
// code that runs once takes longer to come than to run.
__device__ __forceinline__ void queries_to_f16(const Arguments& a, Shared& s) {
    u32 lane = threadIdx.x % 32;
#pragma unroll 1
    for (u32 head = threadIdx.x / 32; head < HEADS; head += WARPS) {
        uint4* row = (uint4*)(s.tiles[0] + head * ROW_BYTES);
        u32 largest = 0;  // bits, of which those of NaN are the largest
#pragma unroll
        for (int i = 0; i < 2; i++) {
            uint4 x = row[32 * i + lane];
            const u32 w[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
            for (int j = 0; j < 4; j++) largest = max(largest, max(w[j] & 0x7fffu, w[j] >> 16 & 0x7fffu));
        }
        largest = __reduce_max_sync(~0u, largest);
        // At least that of 2^-24: the roped part, which may be as large as it likes beside a latent part of nothing, is
        // multiplied by 2^39 at most.
        u32 exponent = min(max(largest >> 7, 103u), 254u);
        float by = __uint_as_float(269 - exponent << 23);  // 2^(142 - exponent)
        if (lane == 0) s.unit[head] = a.scale_log2 * __uint_as_float(exponent - 15 << 23);
#pragma unroll 1
        for (u32 at = lane; at < 72; at += 32) {
            uint4 x = row[at];
            u32 w[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
            for (int j = 0; j < 4; j++) {
                float low = low_half(w[j]) * by, high = high_half(w[j]) * by;
                w[j] = at < 64 ? pair_f16(low, high) : pair(low, high);
            }
            row[at] = make_uint4(w[0], w[1], w[2], w[3]);
        }
    }
}

// In the exact way: what was summed for the block of 128 columns that a step ends counts in its scales.
__device__ __forceinline__ void add_block(float (&d)[PICK_TILES][4], float (&sum)[PICK_TILES][4], const Shared& s,
                                          int block) {
    u32 c = threadIdx.x % 4;
#pragma unroll
    for (int n = 0; n < PICK_TILES; n++)
#pragma unroll
        for (int j = 0; j < 4; j++) {
            sum[n][j] += d[n][j] * s.scales[8 * n + 2 * c + j % 2][block];
            d[n][j] = 0;
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
