// Instructions of warps and warpgroups that the sparse MLA kernels for Hopper use, in PTX: barriers' arrivals and other
// blocks' memory, beside those of tiles.cuh.

#include "cluster.cuh"
#include "barriers.cuh"
#include "tiles.cuh"

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
