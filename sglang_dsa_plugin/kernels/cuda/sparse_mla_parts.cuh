// What the sparse MLA kernels for Hopper share (sparse_mla.cu, sparse_mla_fp8.cu): synchronisation and matrix instructions,
// the ring of tiles, and what happens to the sums at a row's end. The including file defines
//
//   STAGE_BYTES     of a tile in the ring
//   store_weights   how two of a tile's weights are left for the group of sums
//
// Compile-time: CLUSTER, STAGES, HAS_LENGTHS, HAS_SINK, SLOTS64 (kernels/cuda/sparse_mla.py).

#include "cluster.cuh"

typedef unsigned short u16;

#define TILE 64
#define QUERY_BYTES 1152                   // of a head's query, which is copied through the ring, too
#define GROUP 128                          // threads of a warpgroup: scores, sums, copies
#define WEIGHT_BYTES (16 * 64 * 4 + 16 * 32)  // of a tile: 16 heads, and some bytes a head that keep banks apart
#define LOG2E 1.4426950408889634f
#define LN2 0.6931471805599453f
#define O_PITCH 516                        // floats of a head's sums when a cluster joins them

#if SLOTS64
typedef long long slot_t;
#else
typedef int slot_t;
#endif

struct Info { u64 mask; u32 last, none; };

__device__ __forceinline__ float minus_inf() { return __int_as_float(0xff800000); }

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void barrier_init(u32 at, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at), "r"(count) : "memory");
}

__device__ __forceinline__ void barrier_arrive(u32 at) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(at) : "memory");
}

__device__ __forceinline__ void barrier_wait(u32 at, u32 parity) {
    asm volatile(
        "{\n.reg .pred done;\nagain:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n}" ::"r"(at), "r"(parity) : "memory");
}

// All threads of one warpgroup; id 1 or 2.
__device__ __forceinline__ void group_sync(u32 id) {
    asm volatile("bar.sync %0, 128;" ::"r"(id) : "memory");
}

// The address of `at` in the shared memory of the cluster's block `rank`.
__device__ __forceinline__ u32 in_block(u32 at, u32 rank) {
    u32 there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(at), "r"(rank));
    return there;
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

// Addresses in shared memory. The ring has STAGES turns; weights, factors, maxima, ready and taken have two, so that
// what is written for one tile does not overtake the reading of the one before.
struct Shared {
    u32 ring;     // tiles; a row's queries take a turn, too
    u32 weights;  // [2][16 heads] of 64 rows, in the form of store_weights
    u32 factors;  // f32 [2][16 heads]: of what was summed so far; at a row's end of the sums
    u32 maxima;   // f32 [2][16 heads][4 warps]
    u32 stats;    // f32 [maximum, sum of weights][16 heads]
    u32 info;     // Info [STAGES]
    u32 full, empty, ready, taken;
    char* memory;

    __device__ __forceinline__ Shared(char* at) : memory(at) {
        ring = shared_address(at);
        weights = ring + STAGES * STAGE_BYTES;
        factors = weights + 2 * WEIGHT_BYTES;
        maxima = factors + 2 * 64;
        stats = maxima + 2 * 16 * 16;
        info = stats + 32 * 4;
        full = info + STAGES * 16;
        empty = full + STAGES * 8;
        ready = empty + STAGES * 8;
        taken = ready + 16;
    }
    __device__ __forceinline__ float* floats(u32 address) const { return (float*)(memory + (address - ring)); }
    __device__ __forceinline__ Info* infos() const { return (Info*)(memory + (info - ring)); }

    // One thread, before all others go on.
    __device__ __forceinline__ void init() const {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(full + 8 * i, GROUP + 4);  // copies of a thread, and a word of each warp
            barrier_init(empty + 8 * i, 8);         // warps that read
        }
        for (int i = 0; i < 2; i++) {
            barrier_init(ready + 8 * i, 4);
            barrier_init(taken + 8 * i, 4);
        }
    }
};

struct Arguments {
    const u16* q;
    const u16* q_rope;
    const char* rows;
    const slot_t* slots;
    const int* lengths;
    const float* sink;
    u16* out;
    float* lse;
    long long q_row, q_head, rope_row, rope_head, kv_stride, slots_row, out_row, out_head;
    int count, heads, picks, items;
    float scale_log2;
};

// A ring position: stage and the parity of its next completed phase.
template <u32 N>
struct Turn {
    u32 stage, parity;
    __device__ __forceinline__ void next() {
        if (++stage == N) { stage = 0; parity ^= 1; }
    }
};

// What a block, or a block of a cluster, works on: heads head0 .. head0 + 15 of a row.
struct Item {
    long long row;
    int head0;
    __device__ __forceinline__ Item(const Arguments& a, int item) {
        int tiles = (a.heads + 15) / 16;
        row = item / tiles;
        head0 = item % tiles * 16;
    }
};

// 16 bytes from global to shared memory, or zeros where `real` is false; nothing is read then.
__device__ __forceinline__ void copy16(u32 to, const void* from, bool real) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(real ? 16 : 0) : "memory");
}

// The barrier counts this thread once all its copies so far are there.
__device__ __forceinline__ void arrive_when_copied(u32 at) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(at) : "memory");
}

// What the group of copies walks along for one row: the row's picks from `at` on, a tile's 16 for each warp.
struct Picks {
    const slot_t* slots;
    int at, limit, tiles;
    slot_t ahead;

    __device__ __forceinline__ Picks(const Arguments& a, const Item& item, u32 rank, u32 warp, u32 lane) {
        slots = a.slots + item.row * a.slots_row;
        int picks = a.picks;
#if HAS_LENGTHS
        picks = max(0, min(picks, a.lengths[item.row]));
#endif
        // Whole tiles, as many to each block of the cluster; a block without any takes one that is empty.
        tiles = max(1, (picks + TILE * CLUSTER - 1) / (TILE * CLUSTER));
        int first = rank * tiles * TILE;
        limit = min(picks, first + tiles * TILE);
        tiles = max(1, min(tiles, (limit - first + TILE - 1) / TILE));
        at = first + 16 * warp + lane % 16;
        ahead = at < limit ? slots[at] : (slot_t)-1;
    }

    // The slot of this lane's pick, or -1; the next tile's is on its way then.
    __device__ __forceinline__ int next(const Arguments& a) {
        slot_t slot = ahead;
        at += TILE;
        ahead = at < limit ? slots[at] : (slot_t)-1;
        return slot >= 0 && slot < a.count ? (int)slot : -1;
    }
};

// The queries of 16 heads as rows of the ring, their 16-byte pieces swapped as those of a tile. The copying group.
__device__ __forceinline__ void copy_queries(const Arguments& a, const Item& item, u32 to, u32 warp, u32 lane) {
    // Heads that do not exist are zeros; nothing is written for them.
    u32 local = 4 * warp + lane / 8, piece = lane % 8 * 16;
    bool real = item.head0 + local < a.heads;
    int head = real ? item.head0 + local : 0;
    to += local * QUERY_BYTES + (piece ^ local % 8 * 16);
    const char* from = (const char*)(a.q + item.row * a.q_row + head * a.q_head) + piece;
#pragma unroll
    for (int j = 0; j < 8; j++) copy16(to + 128 * j, from + 128 * j, real);
    from = (const char*)(a.q_rope + item.row * a.rope_row + head * a.rope_head) + piece;
    copy16(to + 1024, from, real);
}

// Over the four lanes of a head.
__device__ __forceinline__ float lanes_sum(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

// What the group of scores keeps of a row of queries between tiles. Lane 4 g + c of a warp holds heads g and g + 8.
struct Softmax {
    float m[2], total[2];  // running maximum, and the sum of this lane's weights
    float d[2][4];         // scores of the last tile: heads g (0, 1) and g + 8 (2, 3), rows 8 n + 2 c and the next
};

// One tile's weights, in steps that can stand between products: what one waits for comes while products run.
struct Steps {
    const Shared& s;
    Softmax& own;
    u32 hand, warp, g, c;
    float best[2], lift[2];

    __device__ __forceinline__ float* maxima() { return s.floats(s.maxima) + 64 * hand; }

    template <int STEP>
    __device__ __forceinline__ void run() {
        if constexpr (STEP == 0) {
#pragma unroll
            for (int h = 0; h < 2; h++)
                best[h] = fmaxf(fmaxf(own.d[0][2 * h], own.d[0][2 * h + 1]), fmaxf(own.d[1][2 * h], own.d[1][2 * h + 1]));
        }
        if constexpr (STEP == 1 || STEP == 2) {
#pragma unroll
            for (int h = 0; h < 2; h++) best[h] = fmaxf(best[h], __shfl_xor_sync(~0u, best[h], STEP));
        }
        if constexpr (STEP == 3) {
#pragma unroll
            for (int h = 0; h < 2; h++)
                if (c == 0) maxima()[(g + 8 * h) * 4 + warp] = best[h];
        }
        if constexpr (STEP == 4) group_sync(1);
        if constexpr (STEP == 5) {
#pragma unroll
            for (int h = 0; h < 2; h++) {
                float4 x = *(const float4*)(maxima() + (g + 8 * h) * 4);
                best[h] = fmaxf(own.m[h], fmaxf(fmaxf(x.x, x.y), fmaxf(x.z, x.w)));
            }
        }
        if constexpr (STEP == 6) {
#pragma unroll
            for (int h = 0; h < 2; h++) {
                lift[h] = best[h] == minus_inf() ? 0.f : best[h];
                float factor = exp2_of(own.m[h] - lift[h]);
                own.m[h] = best[h];
                own.total[h] *= factor;
                if (warp == 0 && c == 0) s.floats(s.factors)[16 * hand + g + 8 * h] = factor;
            }
        }
        if constexpr (STEP >= 7 && STEP < 11) {
            constexpr int h = (STEP - 7) / 2, n = (STEP - 7) % 2;
            float p0 = exp2_of(own.d[n][2 * h] - lift[h]), p1 = exp2_of(own.d[n][2 * h + 1] - lift[h]);
            own.total[h] += p0 + p1;
            store_weights(s.weights + hand * WEIGHT_BYTES, g + 8 * h, 16 * warp + 8 * n + 2 * c, p0, p1);
        }
        if constexpr (STEP == 11) {
            __syncwarp();
            if (g == 0 && c == 0) barrier_arrive(s.ready + 8 * hand);
        }
    }
    // What stands ahead of the products of part I: a step as early as the one before allows, for the sums wait for these
    // weights, and the tile stays in the ring until then.
    template <int I>
    __device__ __forceinline__ void run_at() {
        if constexpr (I < 3) run<I>();
        if constexpr (I == 2) run<3>();
        if constexpr (I >= 3 && I < 6) run<I + 1>();
        if constexpr (I == 6 || I == 7) {
            run<2 * I - 5>();
            run<2 * I - 4>();
        }
        if constexpr (I == 8) run<11>();
    }
    template <int I = 0>
    __device__ __forceinline__ void run_all() {
        run_at<I>();
        if constexpr (I < 8) run_all<I + 1>();
    }
};

// The end of a row in the group of scores: from the maximum and this lane's sum of weights of heads g and g + 8, what
// turns the sums into the output. The turn of the hand is the row's last.
__device__ __forceinline__ void end_row(const Arguments& a, const Shared& s, const Item& item, const float (&m)[2],
                                        const float (&total)[2], u32 hand, u32 parity) {
    u32 lane = threadIdx.x % 32, warp = threadIdx.x % GROUP / 32, g = lane / 4, c = lane % 4;
    float* sums = s.floats(s.maxima) + 64 * hand;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float sum = lanes_sum(total[h]);
        if (c == 0) sums[(g + 8 * h) * 4 + warp] = sum;
    }
    group_sync(1);
    barrier_wait(s.taken + 8 * hand, parity);
    if (warp == 0) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float4 x = *(const float4*)(sums + (g + 8 * h) * 4);
            float sum = (x.x + x.y) + (x.z + x.w), weight = 1;
#if CLUSTER > 1
            s.floats(s.stats)[g + 8 * h] = m[h];
            s.floats(s.stats)[g + 8 * h + 16] = sum;
#else
            // A sum of weights is NaN when a row holds NaN, and must stay so.
            bool some = m[h] > minus_inf() || sum != sum;
            float lse = some ? m[h] + log2_of(sum) : minus_inf();
            weight = some ? 1 / sum : 0.f;
            int head = item.head0 + g + 8 * h;
            if (head < a.heads) {
#if HAS_SINK
                if (some) weight /= 1 + exp2_of(a.sink[head] * LOG2E - lse);
#endif
                if (c == 0) a.lse[item.row * a.heads + head] = lse * LN2;
            }
#endif
            if (c == 0) s.floats(s.factors)[16 * hand + g + 8 * h] = weight;
        }
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(s.ready + 8 * hand);
}

#if CLUSTER > 1
// Joins the blocks of a cluster: what they left in the ring and in stats. They take turns at four columns of a head. The
// groups of scores and sums.
__device__ void join(const Arguments& a, const Shared& s, u32 rank) {
    Item item(a, blockIdx.x / CLUSTER);
    for (int i = rank * 2 * GROUP + threadIdx.x; i < 16 * 128; i += CLUSTER * 2 * GROUP) {
        int local = i / 128, head = item.head0 + local, column = i % 128 * 4;
        float m[CLUSTER], most = minus_inf(), total = 0;
#pragma unroll
        for (u32 b = 0; b < CLUSTER; b++) {
            m[b] = load_cluster(in_block(s.stats + 4 * local, b));
            most = fmaxf(most, m[b]);
        }
        float lift = most == minus_inf() ? 0.f : most;
        float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll
        for (u32 b = 0; b < CLUSTER; b++) {
            float w = exp2_of(m[b] - lift);
            total += w * load_cluster(in_block(s.stats + 4 * (local + 16), b));
            float4 x = load_cluster4(in_block(s.ring + 4 * (local * O_PITCH + column), b));
            sum.x += w * x.x;
            sum.y += w * x.y;
            sum.z += w * x.z;
            sum.w += w * x.w;
        }
        bool some = most > minus_inf() || total != total;
        float lse = some ? lift + log2_of(total) : minus_inf();
        float weight = some ? 1 / total : 0.f;
        if (head < a.heads) {
#if HAS_SINK
            if (some) weight /= 1 + exp2_of(a.sink[head] * LOG2E - lse);
#endif
            if (column == 0) a.lse[item.row * a.heads + head] = lse * LN2;
            uint2 both = make_uint2(pair(sum.x * weight, sum.y * weight), pair(sum.z * weight, sum.w * weight));
            *(uint2*)(a.out + item.row * a.out_row + head * a.out_head + column) = both;
        }
    }
}
#endif

// What every thread of a block does at its end; group: its warpgroup, 2 the one that only copied.
__device__ __forceinline__ void leave(const Arguments& a, const Shared& s, u32 rank, u32 group) {
#if CLUSTER > 1
    cluster_sync();
    if (group != 2) join(a, s, rank);
    cluster_sync();  // nobody leaves while its shared memory is read
#endif
}
