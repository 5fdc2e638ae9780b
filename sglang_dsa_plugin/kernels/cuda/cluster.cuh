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

__device__ __forceinline__ u32 address_in(const void* p, u32 block) {
    u32 there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"((u32)__cvta_generic_to_shared(p)), "r"(block));
    return there;
}

__device__ __forceinline__ int load_from(const int* p, u32 block) {
    int x;
    asm volatile("ld.shared::cluster.s32 %0, [%1];" : "=r"(x) : "r"(address_in(p, block)));
    return x;
}

__device__ __forceinline__ int4 load4_from(const int* p, u32 block) {
    int4 x;
    asm volatile("ld.shared::cluster.v4.s32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(address_in(p, block)));
    return x;
}

__device__ __forceinline__ void store_to(int* p, u32 block, int x) {
    asm volatile("st.shared::cluster.s32 [%0], %1;" ::"r"(address_in(p, block)), "r"(x) : "memory");
}
