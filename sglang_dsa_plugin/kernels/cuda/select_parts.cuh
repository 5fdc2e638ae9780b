// Parts of select.cu: what a block knows of its row, how scores are read and picks are written.

#include "cluster.cuh"

#define WARPS (THREADS / 32)
#define ALL 0xffffffffu
#define BINS 2048
#define GROUP 16              // bins that are summed over the cluster together first
#define COARSE (BINS / GROUP)
#define LIST 256              // members of a bin that are ranked at once
#define BATCH 4               // vectors in flight where they are not held
#define PAGES 4096            // entries of the page table that a block's stretch may take
#define POSITIONS 0           // what is written: positions, slots, or positions and slots
#define SLOTS 1
#define BOTH 2
#define INT_MAX 0x7fffffff
#define INT_MIN (-0x7fffffff - 1)
#define NAN_KEY (-0x7fffffff)
#define INF_KEY 0x7f800000

// What is known of the k-th best: `above` scores come before all `members`, one of which it is. The same for what lies
// in the stretches of earlier blocks.
struct Place {
    int above, above_before;
    int members, members_before;
};

struct Shared {
    int fine[2][BINS];        // counts by bin, of this block's stretch
    int coarse[2][COARSE];    // the same by GROUP bins
    int list[LIST];           // keys of the chosen bin's members, of all blocks in their order
    int warp_of[LIST];        // of this block's members
    int lowest[WARPS], highest[WARPS];
    int above[WARPS], equal[WARPS];
    int ranges[2][16];        // lowest and highest key of the members of each block
    int found[8];
    Place place;
    int count;                // of this block's members
    int pages[PAGES];         // entries of the page table for this block's stretch
};

// What a block knows of its row. Element u of `base`, aligned to 16 bytes, is position u - shift of the window.
struct Stretch {
    const float* base;
    int shift;
    int first, end;           // elements that compete: forced picks do not
    int vector;               // this thread's first
    int steps;                // this warp's: vectors of 32 threads
    bool edge;                // some of this warp's elements do not compete
};

struct Target {
    int* out;
    int* slots_out;           // where slots go while positions go to out
    int offset;
    int first_page;           // that of sh.pages[0]
};

__device__ __forceinline__ int load_int(const void* p, long long i, bool wide) {
    return wide ? (int)__ldg((const long long*)p + i) : __ldg((const int*)p + i);
}

// Score order as integer order; -0.0 and 0.0 share a key, all NaN share the lowest.
__device__ __forceinline__ int order_key(float x) {
    const int bits = __float_as_int(x), sign = bits >> 31;
    const int key = (bits ^ (sign & 0x7fffffff)) - sign;
    return x != x ? NAN_KEY : key;
}

__device__ __forceinline__ float score_of(int key) {
    return key == NAN_KEY ? __int_as_float(0x7fc00000) : __int_as_float(key < 0 ? (key - 1) ^ 0x7fffffff : key);
}

__device__ __forceinline__ bool competes(const Stretch& r, int u) { return u >= r.first && u < r.end; }

// NaN in place of elements that do not compete.
__device__ __forceinline__ void cut(const Stretch& r, int vector, float4& x) {
    const float none = __int_as_float(0x7fc00000);
    const int u = 4 * vector;
    x.x = competes(r, u) ? x.x : none;
    x.y = competes(r, u + 1) ? x.y : none;
    x.z = competes(r, u + 2) ? x.z : none;
    x.w = competes(r, u + 3) ? x.w : none;
}

// Four scores at once. The caller says that groups of four can be read whole at both ends of a row.
__device__ __forceinline__ float4 load_scores(const Stretch& r, int vector) {
    const float none = __int_as_float(0x7fc00000);
    return 4 * vector < r.end ? __ldg((const float4*)r.base + vector) : make_float4(none, none, none, none);
}

// f(number, first element, four scores) for each of this thread's vectors, and done(first element of number 0) after
// every few, when numbers begin again; a warp's threads go together, in ascending position.
template <class F, class D>
__device__ __forceinline__ void sweep(const Stretch& r, const float4* held, F f, D done) {
#if HELD
#pragma unroll
    for (int s = 0; s < HELD; s++)
        if (s < r.steps) f(s, 4 * (r.vector + 32 * s), held[s]);
    done(4 * r.vector);
#else
#pragma unroll 1
    for (int s = 0; s < r.steps; s += BATCH) {
        float4 x[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; i++)
            if (s + i < r.steps) x[i] = load_scores(r, r.vector + 32 * (s + i));
        if (r.edge) {
#pragma unroll
            for (int i = 0; i < BATCH; i++) cut(r, r.vector + 32 * (s + i), x[i]);
        }
#pragma unroll
        for (int i = 0; i < BATCH; i++)
            if (s + i < r.steps) f(i, 4 * (r.vector + 32 * (s + i)), x[i]);
        done(4 * (r.vector + 32 * s));
    }
#endif
}

// f(element, score), reading the scores again: for what is rare and has to stay out of the usual path's way.
template <class F>
__device__ __forceinline__ void reread(const Stretch& r, F f) {
#pragma unroll 1
    for (int s = 0; s < r.steps; s++) {
        const int vector = r.vector + 32 * s;
        float4 x = load_scores(r, vector);
        cut(r, vector, x);
        f(4 * vector, x.x);
        f(4 * vector + 1, x.y);
        f(4 * vector + 2, x.z);
        f(4 * vector + 3, x.w);
    }
}

__device__ __forceinline__ void put(const Target& to, int i, int position, int slot) {
    to.out[i] = WRITE == SLOTS ? slot : position;
    if (WRITE == BOTH) to.slots_out[i] = slot;
}

// Position p to place i of the picks.
__device__ __forceinline__ void put(const Shared& sh, const Target& to, int i, u32 p) {
    put(to, i, p + to.offset, WRITE == POSITIONS ? 0 : sh.pages[p / PAGE - to.first_page] * PAGE + p % PAGE);
}
