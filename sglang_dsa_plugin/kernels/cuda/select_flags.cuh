// Part of select.cu and select_many.cu: which of a thread's neighbouring scores in shared memory lie above a score.

#include "compare.cuh"

#define CHUNK (32 * BATCH)          // vectors of four scores that a warp looks at together

// Flags of the scores above `passed` among this thread's 4 * BATCH neighbours, the first in the highest bit.
__device__ __forceinline__ u32 flags_of(const float* own, float passed) {
    const int lane = threadIdx.x & 31, turned = lane * BATCH / 8 % BATCH;  // so that each bank is read once
    u32 flags = 0;
#pragma unroll
    for (int i = 0; i < BATCH; i++) {
        const float4 x = ((const float4*)own)[i ^ turned];
        flags = __funnelshift_l(difference(passed, x.x), flags, 1);
        flags = __funnelshift_l(difference(passed, x.y), flags, 1);
        flags = __funnelshift_l(difference(passed, x.z), flags, 1);
        flags = __funnelshift_l(difference(passed, x.w), flags, 1);
    }
    if (BATCH >= 2 && turned & 1) flags = (flags & 0x0f0f0f0fu) << 4 | (flags >> 4 & 0x0f0f0f0fu);
    if (BATCH >= 4 && turned & 2) flags = __byte_perm(flags, 0, 0x2301);
    if (BATCH >= 8 && turned & 4) flags = __byte_perm(flags, 0, 0x1032);
    return flags << (32 - 4 * BATCH);
}

// Those of elements first .. last - 1, where the thread's own begin at element u.
__device__ __forceinline__ u32 within(u32 flags, int u, int first, int last) {
    const int low = max(first - u, 0), high = max(last - u, 0);
    return flags & (low < 32 ? 0xffffffffu >> low : 0) & ~(high < 32 ? 0xffffffffu >> high : 0);
}

// Sum over this thread and those before it in the warp.
__device__ __forceinline__ int sum_upto(int x) {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int o = 1; o < 32; o *= 2) {
        const int more = __shfl_up_sync(ALL, x, o);
        if (lane >= o) x += more;
    }
    return x;
}
