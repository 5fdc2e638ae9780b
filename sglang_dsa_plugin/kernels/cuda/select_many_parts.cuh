// Parts of select_many.cu: what a block shares, a search by counts, and a threshold from a sample.

#include "select_scores.cuh"
#include "select_picks.cuh"
#include "select_flags.cuh"
#include "copies.cuh"

#define BINS 2048                   // 11 bits of a key at a time
#define ROOM_FOR_PICKS (8 * BATCH * THREADS)  // of a short row: in the ring, two bytes each
#define ROOM_FOR_PAGES (2 * LISTED)           // and where its list would lie
#define WIDE 4                      // entries of the list that a thread looks at together
#define LEAST_NUMBER (-INF_KEY)     // the key of -inf

struct Shared {
    alignas(128) float ring[WARPS][4 * CHUNK];  // scores on their way, a chunk each; picks in the end
    alignas(16) int bins[ROW_BINS]; // counts; zero between searches
    union {
        alignas(16) int2 list[LISTED];  // candidates, a score's bits and its element; ascending within a chunk
        float4 sample[STRATA];      // before there are any
    };
    u32 chunk[CHUNKS];              // where a chunk's candidates begin, and how many they are: begin << 11 | number
    Barrier arrived[WARPS];
    int above[WARPS], equal[WARPS];
    int sums[WARPS], best[WARPS];
    int lowest[WARPS], highest[WARPS];
    int few[FEW], few_of[FEW];      // candidates of the bin that holds the k-th best, and the warps that found them
    int found[6];                   // bin, counts above it, counts in it
    int count, few_count;
    Target target;                  // of a short row
};
static_assert(sizeof(Shared) <= SHARED, "more shared memory than the launch gives");
static_assert(ROW_BINS == BINS, "three digits make a key");
static_assert(2 * STRATA <= LISTED, "the sample lies where the list does, and short rows fill it");
static_assert(STRATA < THREADS || STRATA % THREADS == 0, "threads take whole turns at the sample");

#include "select_counts.cuh"

__device__ __forceinline__ int* pages_of(Shared& sh) { return (int*)sh.list; }

// Position p to place i of the picks.
__device__ __forceinline__ void put(const Shared&, const Target& to, int i, u32 p) {
    put(to, i, p + to.offset, WRITE == POSITIONS ? 0 : slot_of(to, p));
}

// Candidates are the scores whose keys reach `least`. plateau: `least - 1` is a key that many scores share. best: a key
// that few scores lie above, if any.
struct Threshold {
    int least, best;
    bool plateau;
};

// f(unsigned key) for the scores of the sample that are this thread's; keys have the order of the scores.
template <class F>
__device__ __forceinline__ void each_of_sample(const Shared& sh, F f) {
#pragma unroll
    for (int i = 0; i < (STRATA + THREADS - 1) / THREADS; i++) {
        if (STRATA < THREADS && threadIdx.x >= STRATA) break;
        const float4 x = sh.sample[i * THREADS + threadIdx.x];
        f((u32)order_key(x.x) ^ 0x80000000u), f((u32)order_key(x.y) ^ 0x80000000u);
        f((u32)order_key(x.z) ^ 0x80000000u), f((u32)order_key(x.w) ^ 0x80000000u);
    }
}

// Reads a sample of the row: vectors at jittered places of equal strata. At the ends are a few scores that do not
// compete, which makes no difference.
__device__ __forceinline__ void take_sample(Shared& sh, const Stretch& r) {
    const u32 thread = threadIdx.x, vector0 = r.first / 4, vectors = (r.end + 3) / 4 - vector0;
#pragma unroll
    for (u32 i = thread; i < STRATA; i += THREADS) {
        const u32 jitter = (i * 0x9E3779B1u >> 16) * (vectors / STRATA) >> 16;
        copy16(&sh.sample[i], (const float4*)r.base + vector0 + i * vectors / STRATA + jitter);
    }
    wait16();
}

// The score of that rank, or about it, in a sample of the row.
__device__ __forceinline__ Threshold sample_threshold(Shared& sh, const Stretch& r, int rank) {
    take_sample(sh, r);
    u32 top = 0;
    each_of_sample(sh, [&](u32 key) {
        top = max(top, key);
        atomicAdd(&sh.bins[key >> 21], 1);
    });
    const int most = __reduce_max_sync(ALL, (int)(top ^ 0x80000000u));
    if (threadIdx.x % 32 == 0) sh.best[threadIdx.x / 32] = most;
    __syncthreads();
    const int best = __reduce_max_sync(ALL, threadIdx.x % 32 < WARPS ? sh.best[threadIdx.x % 32] : INT_MIN);
    find_bin(sh, rank);
    const int many = rank / 8 + 4;
    u32 least = (u32)sh.found[0] << 21;
    int need = rank - sh.found[1];
    each_of_sample(sh, [&](u32 key) {
        if (key >> 21 == least >> 21) atomicAdd(&sh.bins[key >> 10 & BINS - 1], 1);
    });
    __syncthreads();
    find_bin(sh, need);
    least |= (u32)sh.found[0] << 10;
    need -= sh.found[1];
    bool plateau = false;
    if (sh.found[2] > many) {
        each_of_sample(sh, [&](u32 key) {
            if (key >> 10 == least >> 10) atomicAdd(&sh.bins[key & 1023], 1);
        });
        __syncthreads();
        find_bin(sh, need);
        plateau = sh.found[2] > many;
        least |= (u32)sh.found[0];
    }
    const int found = (int)(least ^ 0x80000000u) + plateau;
    if (found <= LEAST_NUMBER) return {LEAST_NUMBER + 1, max(best, LEAST_NUMBER + 1), false};
    return {found, max(best, found), plateau};
}
