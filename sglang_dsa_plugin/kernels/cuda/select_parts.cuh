// Parts of select.cu: what a block shares, how candidates are looked at and picks are written.

#include "select_scores.cuh"
#include "select_picks.cuh"
#include "select_flags.cuh"
#include "copies.cuh"

#define BINS 2048
#define GROUP 16              // bins that are summed over the cluster together first
#define COARSE (BINS / GROUP)
#define LIST 256              // members of a bin that are ranked at once

// What is known of the k-th best: `above` scores come before all `members`, one of which it is. The same for what lies
// in the stretches of earlier blocks.
struct Place {
    int above, above_before;
    int members, members_before;
};

struct Shared {
    union {
        alignas(128) float ring[WARPS][4 * CHUNK];  // a chunk of the row for each warp
        int spare[BINS];                            // counts, once the ring is not looked at any more
    };
    alignas(16) int2 candidates[WARPS][LISTED];     // of each warp: a score's bits and its element, ascending
    alignas(16) int fine[BINS];     // counts by bin, of this block's stretch
    alignas(16) int coarse[2][COARSE];  // the same by GROUP bins; of `fine` and of `spare`
    int list[LIST];           // keys of the chosen bin's members, of all blocks in their order
    int warp_of[LIST];        // of this block's members
    Barrier arrived[WARPS];
    int lowest[WARPS], highest[WARPS];
    int above[WARPS], equal[WARPS];
    int ranges[2][16];        // lowest and highest key of the members of each block
    int found[8];
    Place place;
    int count;                // of this block's members
    int pages[PAGES];         // entries of the page table for this block's stretch
};
static_assert(sizeof(Shared) <= SHARED, "more shared memory than the launch gives");

__device__ __forceinline__ int* counts(Shared& sh, int buffer) { return buffer ? sh.spare : sh.fine; }

// What a warp looks at after its stretch was read: its list of candidates, or, where that has no room for them, all
// scores once more, from the ring that holds them or from the row.
struct Candidates {
    const int2* list;
    int number;               // -1: no list
    const float* raw;
    int raw_first;            // the element that `raw` begins with
};

// f(element, score) for this warp's candidates, and maybe other scores. The warp's threads go together, in ascending
// position; a score that is none, or does not compete, is NaN.
template <class F>
__device__ __forceinline__ void each(const Stretch& r, const Candidates& c, F f) {
    const int lane = threadIdx.x & 31, first = 4 * (r.vector - lane);
    const int number = c.number < 0 ? 128 * r.steps : c.number;
#pragma unroll 1
    for (int i = lane; i - lane < number; i += 32) {
        int2 entry = {0x7fc00000, first + i};
        if (c.number >= 0) {
            if (i < number) entry = c.list[i];
        } else if (competes(r, first + i)) {
            entry.x = __float_as_int(c.raw[first + i - c.raw_first]);
        }
        f(entry.y, __int_as_float(entry.x));
    }
}

// Position p to place i of the picks.
__device__ __forceinline__ void put(const Shared& sh, const Target& to, int i, u32 p) {
    put(to, i, p + to.offset, WRITE == POSITIONS ? 0 : sh.pages[p / PAGE - to.first_page] * PAGE + p % PAGE);
}
