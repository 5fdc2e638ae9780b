// What a block of a cluster knows and does beyond its own memory, in PTX (SM 9.0 and later).

typedef unsigned int u32;
typedef unsigned long long u64;

__device__ __forceinline__ u32 cluster_rank() { u32 r; asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(r)); return r; }

__device__ __forceinline__ u32 cluster_id() { u32 r; asm("mov.u32 %0, %%clusterid.x;" : "=r"(r)); return r; }

// Programmatic dependent launch, as in kernels/triton/pdl.py. Behind the wait the kernels ahead are done and their writes
// seen; every thread, before it touches what another kernel may write or read. And no read-only loads (__ldg, const
// __restrict__): the compiler moves them ahead of the wait.
__device__ __forceinline__ void wait_for_earlier() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// From here on the next kernel may take its place, once all blocks have come here or ended.
__device__ __forceinline__ void let_next_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// All threads of all blocks of the cluster; what they wrote before can be read by all after.
__device__ __forceinline__ void cluster_sync() {
    __syncwarp();
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// A barrier of all blocks of the cluster in two halves, by all threads: behind the second all blocks have come to the
// first and initialised their barriers. Nothing else of theirs can be seen: see store_to of copies.cuh for that.
__device__ __forceinline__ void cluster_arrive() {
    __syncwarp();
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

__device__ __forceinline__ void cluster_wait() {
    __syncwarp();
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// The address of `at`, or of what `p` points to, in the shared memory of the cluster's block `block`.
__device__ __forceinline__ u32 in_block(u32 at, u32 block) {
    u32 there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(at), "r"(block));
    return there;
}

__device__ __forceinline__ u32 address_in(const void* p, u32 block) {
    return in_block((u32)__cvta_generic_to_shared(p), block);
}
