// Instructions of warps and warpgroups that the sparse MLA kernels for Hopper use, in PTX: barriers' arrivals and other
// blocks' memory, beside those of tiles.cuh.

#include "cluster.cuh"
#include "barriers.cuh"
#include "tiles.cuh"

__device__ __forceinline__ void barrier_arrive(u32 at) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(at) : "memory");
}

__device__ __forceinline__ void barrier_arrive(u32 at, u32 times) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(at), "r"(times) : "memory");
}

// The barrier's round waits for so many bytes of bulk copies, too. Before this thread arrives.
__device__ __forceinline__ void barrier_expect(u32 at, u32 bytes) {
    asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(at), "r"(bytes) : "memory");
}

// From global to shared memory in one piece of a multiple of 16 bytes; the barrier counts them when they are there.
__device__ __forceinline__ void copy_bulk(u32 to, const void* from, u32 bytes, u32 bar) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(bar) : "memory");
}

// What the unit that copies tensors knows of one (CUtensorMap), as an argument of a kernel.
struct __align__(64) TensorMap { u64 opaque[16]; };

// Row `row` of a tensor of rows of so many times 128 bytes, zeros where it has no such row; the barrier counts the bytes
// when they are there. The 16-byte pieces of 128 bytes of shared memory come swapped by the number of these 128 bytes.
__device__ __forceinline__ void copy_row(u32 to, const TensorMap* map, int row, u32 bar) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], "
                 "[%1, {%3, %3, %4}], [%2];" ::"r"(to), "l"(map), "r"(bar), "r"(0), "r"(row) : "memory");
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
