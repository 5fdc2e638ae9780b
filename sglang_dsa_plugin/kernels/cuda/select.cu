// Exact top-k of few long rows (SM 9.0 and later): one cluster of blocks a row. See ops/select.py for the order.
//
//   1. A row not longer than k: the identity, written without looking at a score.
//   2. A sample of the row, the same in every block, gives a linear map of scores to bins that begins below the k-th
//      best, almost surely. Whatever it is, it rises with the score, so a bin holds all scores between two, and bin 0
//      all below; a bad sample costs time, never a pick.
//   3. Each block reads its stretch of the row through shared memory, once. What lies above bin 0, a few per cent, is
//      listed by each warp, and counted by bins. The sums over the cluster tell which bin holds the k-th best, how many
//      scores lie above it, and how many of those lie before the block's stretch.
//   4. The members of that bin, a few, are handed to every block. Each ranks them and knows the k-th best for itself.
//   5. The picks leave in ascending position: every warp knows how many go before its own.
//
// A warp whose list has no room looks at all its scores again instead. A bin of more members than are ranked at once
// (thousands of equal scores, or scores that the map does not spread), and bin 0, which no list holds, is first cut
// down by the bits in which the members differ, 8 at a time, until few are left or all are equal.
//
// Blocks store what they tell each other in the others' memory, and wait for all of it. None ends before.
//
// Code is kept short where little is looked at: a block runs each part of it once, and fetches it first.
//
// A row that the registers of one block hold is that block's alone (select_short.cuh): another one of the cluster from
// row to row, since clusters may share processors.
//
// Compile-time: THREADS (128 .. 1024), CLUSTER (1 .. 16), BATCH (vectors of four scores that a thread looks at
// together: 1, 2, 4 or 8), HELD (a warp has no more), LISTED (candidates of a warp), VECTORS (of four scores of a short
// row that a thread holds: 1, 2, 4 or 8), PAGES (entries of the page table that a block's stretch may take), SHARED
// (bytes), BLOCKS (on a processor), PAGE (positions of a page), WRITE.

#include "select_parts.cuh"
#include "select_bins.cuh"
#include "select_ties.cuh"
#include "select_rank.cuh"
#include "select_counts.cuh"
#include "select_registers.cuh"
#include "select_short.cuh"

#define FEW_BLOCKS 32  // beside which those of a next kernel find as much room as they want

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) select_rows(
    const float* scores, long long stride, const void* lengths, const void* starts, int* out,
    int* slots_out, const void* table, long long table_stride, const void* requests, const void* offsets, int width,
    int k, int init, int local, int wide  // bits: lengths, starts, table, requests, offsets are int64
) {
    extern __shared__ __align__(128) char shared[];
    Shared& sh = *(Shared*)shared;
    const int thread = threadIdx.x, lane = thread & 31, warp = thread / 32;
    const int rank = cluster_rank();
    const long long row = cluster_id();
    warp_barrier_init(sh.arrived[warp], lane);
    if (thread == 0) {
        sh.count = 0;
        barrier_init(sh.counted[0]), barrier_init(sh.counted[1]), barrier_init(sh.listed), barrier_init(sh.ranged);
    }
    for (int i = thread; i < BINS; i += THREADS) sh.fine[i] = 0;
    if (thread < GROUPS) sh.groups[thread] = 0;
    cluster_arrive();
    wait_for_earlier();

    // What is read of other tensors is asked for together.
    Target to = target_of(out, slots_out, table, table_stride, requests, offsets, row, k, wide);
    const float* line = scores + row * stride;
    const int length = window_of(line, lengths, starts, row, width, wide);
    if (length <= k || gridDim.x <= FEW_BLOCKS) let_next_start();

    put_undecided(to, length, k, init, local, rank * THREADS + thread, CLUSTER * THREADS);
    const int want = k - init - local;
    if (length <= k || want == 0) return;

    Stretch r = stretch_of(line, init, length - local);
    if (is_short(r, want)) {
        if (rank != (int)(row % CLUSTER)) return;
        for (int i = thread; i < ROW_BINS / 4; i += THREADS) ((int4*)sh.bins)[i] = make_int4(0, 0, 0, 0);
        if (thread == 0) sh.few_count = 0;
        select_alone(sh, r, to, want, init);
        return;
    }

    // This block's stretch of the row, a part of it to each warp.
    const int rivals = r.end - r.first, vector0 = r.first / 4, vectors = (r.end + 3) / 4 - vector0;
    const int steps = (vectors + CLUSTER * THREADS - 1) / (CLUSTER * THREADS);
    const int block_first = vector0 + rank * THREADS * steps;
    const int warp_first = block_first + warp * 32 * steps;
    r.steps = max(0, min(steps, (vector0 + vectors - warp_first + 31) / 32));
    r.vector = warp_first + lane;
    const int first = max(4 * warp_first, r.first), last = min(4 * (warp_first + 32 * r.steps), r.end);
    const auto fetch = [&](int vector) {
        const int number = min(min(CHUNK, warp_first + 32 * r.steps - vector), vector0 + vectors - vector);
        copy(sh.ring[warp], (const float4*)r.base + vector, 16 * number, false, sh.arrived[warp]);
    };
    const float4 seen = load16((const float4*)r.base + vector0 + (int)((u64)thread * vectors / THREADS));
    if (lane == 0 && r.steps > 0) fetch(warp_first);
    to.first_page = max(0, 4 * block_first - r.shift) / PAGE;
    const int pages =
        WRITE == POSITIONS
            ? 0
            : (min(4 * (block_first + THREADS * steps), r.end) - r.shift - 1 + PAGE) / PAGE - to.first_page;
    const int page = thread < pages ? page_of(to, to.first_page + thread) : 0;

    const Map map = map_of_sample(sh, seen, (int)((u64)thread * vectors / THREADS) + vector0, r, want);

    // Candidates: what lies above bin 0. Two at a time, so that one score comes while the other is counted.
    int number = 0;
    const float* own = sh.ring[warp] + 4 * BATCH * lane;
#pragma unroll 1
    for (int chunk = 0; BATCH * chunk < r.steps; chunk++) {
        const int vector = warp_first + CHUNK * chunk, u = 4 * (vector + BATCH * lane);
        wait(sh.arrived[warp], chunk & 1);
        u32 flags = within(flags_of(own, map.below), u, first, last);
        const int mine = __popc(flags), upto = sum_upto(mine);
        Entry* next = &sh.candidates[warp][number + upto - mine];
        number += __shfl_sync(ALL, upto, 31);
        const bool room = HELD || number <= LISTED;
#pragma unroll 1
        for (; flags != 0; next += 2) {
            const int e = __clz(flags);
            flags ^= 0x80000000u >> e;
            const bool both = flags != 0;
            const int e2 = both ? __clz(flags) : e;
            if (both) flags ^= 0x80000000u >> e2;
            const float x = own[e], x2 = own[e2];
#if HELD
            next[0] = 4 * BATCH * lane + e;
            if (both) next[1] = 4 * BATCH * lane + e2;
#else
            if (room) next[0] = make_int2(__float_as_int(x), u + e);
            if (room && both) next[1] = make_int2(__float_as_int(x2), u + e2);
#endif
            atomicAdd(&sh.fine[(int)fminf(height(map, x), BINS - 1)], 1);
            if (both) atomicAdd(&sh.fine[(int)fminf(height(map, x2), BINS - 1)], 1);
        }
        if (!HELD) fence_bulk();  // behind every lane's reads, ahead of the copy to where they read
        __syncwarp();
        if (!HELD && lane == 0 && BATCH * (chunk + 1) < r.steps) fetch(vector + CHUNK);
    }
    if (number > LISTED) number = -1;
    const Entry* candidates = sh.candidates[warp];
#if HELD
    r.base = sh.ring[warp] - 4 * warp_first;  // from here on
#endif
    if (thread < pages) sh.pages[thread] = page;
#pragma unroll 1
    for (int i = thread + THREADS; i < pages; i += THREADS) sh.pages[i] = page_of(to, to.first_page + i);
    __syncthreads();
    cluster_wait();
    exchange_counts(sh, rank, 0);
    if (warp == 0) find_bin(sh, 0, want, rank);
    __syncthreads();

    const Bin bin = bin_of(max(sh.found[0], 0));
    Place place = {sh.found[1], sh.found[2], sh.found[3], sh.found[4]};
    if (sh.found[0] >= 0 && place.members <= LIST) {
        // How many scores of each warp lie above the bin; and the few members to every block's list.
        int above = 0;
        each(r, candidates, number, [&](int, float x) {
            above += height(map, x) >= bin.upto;
            if (in_bin(bin, map, x)) list(sh, place.members_before, order_key(x));
        });
        above = __reduce_add_sync(ALL, above);
        if (lane == 0) sh.above[warp] = above;
        finish_list(sh, place.members);
    } else {
        if (sh.found[0] < 0) {  // among those below all counted ones
            place.members = rivals - place.above;
            place.members_before = min(max(4 * block_first - r.first, 0), rivals) - place.above_before;
        }
        cut_down(sh, r, rank, want, map, bin, place);
        place = sh.place;
        if (place.members > LIST) {
            const int room = want - place.above;
            write_with_ties(sh, r, to, sh.found[5], room, place.above_before, place.members_before, init);
            return;
        }
        number = -1;
    }

    // The list is whole.
    const Edge edge = rank_members(sh, place, want - place.above);
    if (edge.room < edge.same || edge.key == NAN_KEY) {
        write_with_ties(sh, r, to, edge.key, edge.room, place.above_before + edge.next, edge.equals, init);
        return;
    }
    // All that reach the edge are picks.
    int next = init + place.above_before + edge.next + edge.equals + edge.earlier;
    next += __reduce_add_sync(ALL, lane < warp ? sh.above[lane] : 0);
    const float reached = score_of(edge.key);
    each(r, candidates, number, [&](int u, float x) {
        const bool picked = x >= reached;
        const u32 votes = __ballot_sync(ALL, picked);
        if (picked) put(sh, to, next + __popc(votes & ((1u << lane) - 1)), u - r.shift);
        next += __popc(votes);
    });
}
