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

// A barrier of one warp, by all its lanes: the first initialises it, and may begin copies that tell it; others may wait
// after a __syncwarp(). All have its address in a register, needed or not: compute-sanitizer takes what any lane has
// there for written (docs/racecheck.md).
__device__ __forceinline__ void warp_barrier_init(Barrier& b, int lane) {
    asm volatile("" ::"r"(shared_address(&b)));
    if (lane == 0) barrier_init(b);
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

// By one thread, once for each round of a barrier that others' stores tell: how many bytes it is to wait for.
__device__ __forceinline__ void expect(Barrier& b, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&b)), "r"(bytes)
                 : "memory");
}

// Stores to the same places of another block of the cluster, which tell its barrier. Unlike a cluster barrier they make
// no thread wait until all that it wrote, to memory too, can be seen. That block must not end before they have come; a
// launch without clusters has no such instruction.
__device__ __forceinline__ void store_to(int4* p, u32 block, const int4& x, Barrier& b) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.s32 [%0], {%1, %2, %3, %4}, [%5];"
                 ::"r"(address_in(p, block)), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w), "r"(address_in(&b, block))
                 : "memory");
}

__device__ __forceinline__ void store_to(int2* p, u32 block, const int2& x, Barrier& b) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.s32 [%0], {%1, %2}, [%3];"
                 ::"r"(address_in(p, block)), "r"(x.x), "r"(x.y), "r"(address_in(&b, block)) : "memory");
}

__device__ __forceinline__ void store_to(int* p, u32 block, int x, Barrier& b) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.s32 [%0], %1, [%2];"
                 ::"r"(address_in(p, block)), "r"(x), "r"(address_in(&b, block)) : "memory");
}

// Until the stores of all blocks have come, as `wait`.
__device__ __forceinline__ void wait_for_stores(Barrier& b, u32 parity) {
    asm volatile(
        "{\n.reg .pred done;\nagain:\n"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n}" ::"r"(shared_address(&b)), "r"(parity) : "memory");
}

// One more at an address in shared memory.
__device__ __forceinline__ void count(u32 at) { asm volatile("red.shared.add.u32 [%0], 1;" ::"r"(at) : "memory"); }

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
