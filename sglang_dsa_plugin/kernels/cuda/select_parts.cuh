// Parts of select.cu: what a block shares, how scores are read again and picks are written.

#include "select_scores.cuh"
#include "select_picks.cuh"

#define BINS 2048
#define GROUP 16              // bins that are summed over the cluster together first
#define COARSE (BINS / GROUP)
#define LIST 256              // members of a bin that are ranked at once
#define BATCH 4               // vectors in flight where they are not held
#define PAGES 4096            // entries of the page table that a block's stretch may take

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

// Position p to place i of the picks.
__device__ __forceinline__ void put(const Shared& sh, const Target& to, int i, u32 p) {
    put(to, i, p + to.offset, WRITE == POSITIONS ? 0 : sh.pages[p / PAGE - to.first_page] * PAGE + p % PAGE);
}
