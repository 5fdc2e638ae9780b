// Barriers in shared memory, in PTX (SM 9.0 and later). An address is that of eight bytes.

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void barrier_init(u32 at, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at), "r"(count) : "memory");
}

// Between other accesses to shared memory, of this thread or before a barrier that it waited for, and its bulk copies.
__device__ __forceinline__ void fence_bulk() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Until as many rounds are complete as leave this parity: 0 for the first, 1 for the second, and so on in turn.
__device__ __forceinline__ void barrier_wait(u32 at, u32 parity) {
    asm volatile(
        "{\n.reg .pred done;\nagain:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n}" ::"r"(at), "r"(parity) : "memory");
}
