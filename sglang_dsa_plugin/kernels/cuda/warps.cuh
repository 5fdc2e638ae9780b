// Instructions of warps and warpgroups that the sparse MLA kernels use, in PTX: barriers' arrivals, other blocks' memory,
// matrix operands and products, and numbers in 16 bits.

#include "cluster.cuh"
#include "barriers.cuh"

__device__ __forceinline__ float minus_inf() { return __int_as_float(0xff800000); }

__device__ __forceinline__ void barrier_arrive(u32 at) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(at) : "memory");
}

// A warp tells a barrier, or two, that all its lanes are done with what lies before; `first` is true in one of them. Its
// arrival says nothing of the other lanes' loads and stores, which __syncwarp() orders before it. compute-sanitizer's
// racecheck does not follow that, and reports as many races without it as with it. It follows lanes that arrive each for
// itself (LANES_ARRIVE), which costs prefill 1 to 2 % and clusters nothing. Barriers count WARP_ARRIVALS for a warp.
#if LANES_ARRIVE
#define WARP_ARRIVALS 32
#else
#define WARP_ARRIVALS 1
#endif

__device__ __forceinline__ void warp_arrive(u32 at, bool first) {
    __syncwarp();
    if (LANES_ARRIVE || first) barrier_arrive(at);
}

__device__ __forceinline__ void warp_arrive(u32 at, u32 other, bool first) {
    __syncwarp();
    if (LANES_ARRIVE || first) {
        barrier_arrive(at);
        barrier_arrive(other);
    }
}

// All threads of one warpgroup; id 1 or 2.
__device__ __forceinline__ void group_sync(u32 id) {
    asm volatile("bar.sync %0, 128;" ::"r"(id) : "memory");
}

__device__ __forceinline__ float load_cluster(u32 at) {
    float x;
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(x) : "r"(at) : "memory");
    return x;
}

__device__ __forceinline__ float4 load_cluster4(u32 at) {
    float4 x;
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "r"(at) : "memory");
    return x;
}

__device__ __forceinline__ void matrices(u32 (&x)[4], u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(at) : "memory");
}

__device__ __forceinline__ void matrices_turned(u32 (&x)[4], u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(at) : "memory");
}

__device__ __forceinline__ void product(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ float exp2_of(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float log2_of(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Two floats as bf16, x in the lower half.
__device__ __forceinline__ u32 pair(float x, float y) {
    u32 both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(y), "f"(x));
    return both;
}

__device__ __forceinline__ float low_half(u32 both) { return __uint_as_float(both << 16); }
__device__ __forceinline__ float high_half(u32 both) { return __uint_as_float(both & 0xffff0000u); }
