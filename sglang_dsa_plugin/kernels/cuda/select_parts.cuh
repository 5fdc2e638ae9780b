// Parts of select.cu: what a block shares, how candidates are looked at and picks are written.

#include "select_scores.cuh"
#include "select_picks.cuh"
#include "select_flags.cuh"
#include "copies.cuh"

#define BINS 256
#define EACH (BINS / 32)      // bins that a thread of a warp looks at
#define GROUPS 128            // bins of the sample
#define LIST 256              // members of a bin that are ranked at once
#define ROOM_FOR_PICKS (8 * BATCH * THREADS)  // of a short row: in the ring, two bytes each
#define ROOM_FOR_PAGES PAGES

// What is known of the k-th best: `above` scores come before all `members`, one of which it is. The same for what lies
// in the stretches of earlier blocks.
struct Place {
    int above, above_before;
    int members, members_before;
};

#if HELD
typedef unsigned short Entry;  // a score's place in the warp's stretch, which the ring holds
#else
typedef int2 Entry;            // a score's bits and its element
#endif

struct Shared {
    alignas(128) float ring[WARPS][4 * CHUNK];  // a chunk of the row for each warp
    union {
        alignas(16) Entry candidates[WARPS][LISTED];  // of each warp, ascending
        int spare[CLUSTER][BINS];   // as `received`, once the candidates are not looked at any more
        alignas(16) int bins[ROW_BINS];  // counts of a short row; zero between searches
    };
    alignas(16) int received[CLUSTER][BINS];  // counts by bin, of all blocks
    alignas(16) int fine[BINS];     // of this block
    alignas(16) int groups[GROUPS]; // counts of the sample
    int2 ranges[CLUSTER];     // lowest and highest key of the members of each block
    Barrier arrived[WARPS];   // copies to the ring
    Barrier counted[2], listed, ranged;  // what other blocks store: counts, in two places in turn, the list, ranges
    int list[LIST];           // keys of the chosen bin's members, of all blocks in their order
    int warp_of[LIST];        // of this block's members
    int lowest[WARPS], highest[WARPS];
    int above[WARPS], equal[WARPS];
    int sums[WARPS], few[FEW], few_of[FEW], few_count;  // of a short row, as in select_many.cu
    int found[8];
    Place place;
    Target target;            // of a short row
    int count;                // of this block's members
    int pages[PAGES];         // entries of the page table for this block's stretch
};
static_assert(sizeof(Shared) <= SHARED, "more shared memory than the launch gives");
static_assert(!HELD || LISTED == 4 * CHUNK, "where all scores are held, their list has room for all");

// f(element, score) for this warp's `number` candidates, or, where there is no list (-1), for all its scores. The
// warp's threads go together, in ascending position; a score that does not compete is NaN.
template <class F>
__device__ __forceinline__ void each(const Stretch& r, const Entry* candidates, int number, F f) {
    const int lane = threadIdx.x & 31, first = 4 * (r.vector - lane), end = number < 0 ? 128 * r.steps : number;
#pragma unroll 1
    for (int i = lane; i - lane < end; i += 32) {
        int u = first + i;
        float x = __int_as_float(0x7fc00000);
#if HELD
        if (number >= 0) u = i < number ? first + candidates[i] : r.end;
        if (competes(r, u)) x = r.base[u];
#else
        if (number >= 0) {
            const int2 entry = candidates[min(i, number - 1)];
            u = entry.y;
            if (i < number) x = __int_as_float(entry.x);
        } else if (competes(r, u)) {
            x = r.base[u];
        }
#endif
        f(u, x);
    }
}

__device__ __forceinline__ int* pages_of(Shared& sh) { return sh.pages; }

// Position p to place i of the picks.
__device__ __forceinline__ void put(const Shared& sh, const Target& to, int i, u32 p) {
    put(to, i, p + to.offset, WRITE == POSITIONS ? 0 : sh.pages[p / PAGE - to.first_page] * PAGE + p % PAGE);
}
