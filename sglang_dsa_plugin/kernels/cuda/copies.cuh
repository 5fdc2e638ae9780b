// Copies of whole stretches to shared memory that tell a barrier there when they have come, in PTX (SM 9.0 and later).

struct Barrier {
    u64 state;
};

// By one thread; others of its warp may wait after a barrier_ready() of all.
__device__ __forceinline__ void barrier_init(Barrier& b) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"((u32)__cvta_generic_to_shared(&b)) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// bytes: a multiple of 16, as are both addresses. once: what the L2 cache holds of it may go first.
__device__ __forceinline__ void copy(void* to, const void* from, u32 bytes, bool once, Barrier& b) {
    const u32 at = (u32)__cvta_generic_to_shared(&b), there = (u32)__cvta_generic_to_shared(to);
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

// Until as many copies have come as leave this parity: 0 for the first, 1 for the second, and so on in turn.
__device__ __forceinline__ void wait(Barrier& b, u32 parity) {
    asm volatile(
        "{\n.reg .pred done;\nagain:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n}" ::"r"((u32)__cvta_generic_to_shared(&b)), "r"(parity) : "memory");
}

// 16 bytes, past the L1 cache, which has no room for many lines at a time beside much shared memory.
__device__ __forceinline__ void copy16(void* to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((u32)__cvta_generic_to_shared(to)), "l"(from)
                 : "memory");
}

// Until those of this thread have come.
__device__ __forceinline__ void wait16() { asm volatile("cp.async.wait_all;" ::: "memory"); }
