// Copies of whole stretches to shared memory that tell a barrier there when they have come, in PTX (SM 9.0 and later).

#include "barriers.cuh"

struct Barrier {
    u64 state;
};

// By one thread; others may wait after a __syncthreads().
__device__ __forceinline__ void barrier_init(Barrier& b) {
    barrier_init(shared_address(&b), 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// bytes: a multiple of 16, as are both addresses. once: what the L2 cache holds of it may go first.
__device__ __forceinline__ void copy(void* to, const void* from, u32 bytes, bool once, Barrier& b) {
    const u32 at = shared_address(&b), there = shared_address(to);
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at), "r"(bytes) : "memory");
    if (once) {
        u64 policy;
        asm("createpolicy.fractional.L2::evict_first.b64 %0;" : "=l"(policy));
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, "
                     "[%3], %4;" ::"r"(there), "l"(from), "r"(bytes), "r"(at), "l"(policy) : "memory");
    } else {
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                         there), "l"(from), "r"(bytes), "r"(at) : "memory");
    }
}

// Until as many copies have come as leave this parity.
__device__ __forceinline__ void wait(Barrier& b, u32 parity) { barrier_wait(shared_address(&b), parity); }

// 16 bytes, past the L1 cache, which has no room for many lines at a time beside much shared memory.
__device__ __forceinline__ void copy16(void* to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from)
                 : "memory");
}

// Until those of this thread have come.
__device__ __forceinline__ void wait16() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Four floats, past the L1 cache, too.
__device__ __forceinline__ float4 load16(const float4* from) {
    float4 x;
    asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "l"(from) : "memory");
    return x;
}
