// Exact top-k of few long rows (SM 9.0 and later): one cluster of blocks a row. See ops/select.py for the order.
//
//   1. A row not longer than k: the identity, written without looking at a score.
//   2. A sample of the row, the same in every block, gives a linear map of scores to bins. Whatever it is, it rises
//      with the score, so a bin holds all scores between two, and bin 0 all below; a bad sample costs time, never a
//      pick.
//   3. Each block counts its stretch of the row by bins. The sums over the cluster tell which bin holds the k-th best,
//      how many scores lie above it, and how many of those lie before the block's stretch.
//   4. The members of that bin, a few, are handed to every block. Each ranks them and knows the k-th best for itself.
//   5. The picks leave in ascending position: every warp knows how many go before its own.
//
// A bin of more members than a list holds (thousands of equal scores, or scores that the map does not spread) is first
// cut down by the bits in which the members differ, 11 at a time, until few are left or all are equal.
//
// Scores are read once and kept in registers (HELD vectors of four a thread), or, HELD = 0, read again from the cache.
// Blocks meet at two cluster barriers in the usual case. After the last one no block touches another's memory.
//
// Compile-time: THREADS (128 .. 1024), CLUSTER (1 .. 16), HELD, BLOCKS (on a processor), PAGE (positions of a page),
// WRITE.

#include "select_parts.cuh"
#include "select_bins.cuh"
#include "select_ties.cuh"

#define FEW_BLOCKS 32  // beside which those of a next kernel find as much room as they want

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) select_rows(
    const float* scores, long long stride, const void* lengths, const void* starts, int* out,
    int* slots_out, const void* table, long long table_stride, const void* requests, const void* offsets, int width,
    int k, int init, int local, int wide  // bits: lengths, starts, table, requests, offsets are int64
) {
    __shared__ __align__(16) Shared sh;
    const int thread = threadIdx.x, lane = thread & 31, warp = thread / 32;
    const int rank = cluster_rank();
    const long long row = cluster_id();
    for (int i = thread; i < 2 * BINS / 4; i += THREADS) ((int4*)sh.fine)[i] = make_int4(0, 0, 0, 0);
    if (thread == 0) sh.count = 0;
    wait_for_earlier();

    const float* line = scores + row * stride;
    const int length = window_of(line, lengths, starts, row, width, wide);

    if (length <= k || gridDim.x <= FEW_BLOCKS) let_next_start();

    Target to = target_of(out, slots_out, table, table_stride, requests, offsets, row, k, wide);
    put_undecided(to, length, k, init, local, rank * THREADS + thread, CLUSTER * THREADS);
    const int want = k - init - local;
    if (length <= k || want == 0) return;

    // This block's stretch of the row, a part of it to each warp.
    Stretch r = stretch_of(line, init, length - local);
    const int rivals = r.end - r.first, vector0 = r.first / 4, vectors = (r.end + 3) / 4 - vector0;
    const int steps = (vectors + CLUSTER * THREADS - 1) / (CLUSTER * THREADS);
    const int block_first = vector0 + rank * THREADS * steps;
    r.vector = block_first + warp * 32 * steps;
    r.steps = max(0, min(steps, (vector0 + vectors - r.vector + 31) / 32));
    const int vector_end = r.vector + 32 * r.steps;
    r.edge = 4 * r.vector < r.first || 4 * vector_end > r.end;
    r.vector += lane;
    float4 held[HELD + 1];
#if HELD
#pragma unroll
    for (int s = 0; s < HELD; s++)
        if (s < r.steps) held[s] = load_scores(r, r.vector + 32 * s);
#endif
    const int sampled = vector0 + (int)((u64)thread * vectors / THREADS);
    float4 seen = load_scores(r, sampled);
    to.first_page = max(0, 4 * block_first - r.shift) / PAGE;
    if (WRITE != POSITIONS) {
        const int last = (min(4 * (block_first + THREADS * steps), r.end) - r.shift - 1) / PAGE;
#pragma unroll 1
        for (int i = thread; i <= last - to.first_page; i += THREADS)
            sh.pages[i] = page_of(to, to.first_page + i);
    }

    // The map: from the lowest of the groups' best, so that few scores but more than `want` lie above it, to the best.
    int best = INT_MIN, worst = INT_MAX;
    cut(r, sampled, seen);
    const float sample[4] = {seen.x, seen.y, seen.z, seen.w};
#pragma unroll
    for (int c = 0; c < 4; c++) {
        const int key = order_key(sample[c]);
        if (key > -INF_KEY && key < INF_KEY) best = max(best, key), worst = min(worst, key);
    }
    int low = worst;
    if (2 * want <= rivals) {
        low = best;
#pragma unroll 1
        for (int o = 1; o < 16 && 4 * o * want <= rivals; o *= 2) low = max(low, __shfl_xor_sync(ALL, low, o));
        if (low == INT_MIN) low = INT_MAX;
    }
    low = __reduce_min_sync(ALL, low), best = __reduce_max_sync(ALL, best);
    if (lane == 0) sh.lowest[warp] = low, sh.highest[warp] = best;
    __syncthreads();
    low = __reduce_min_sync(ALL, lane < WARPS ? sh.lowest[lane] : INT_MAX);
    best = __reduce_max_sync(ALL, lane < WARPS ? sh.highest[lane] : INT_MIN);
    Map map;
    map.origin = score_of(low);
    map.scale = __fdividef(BINS - 2, score_of(best) - map.origin);
    const bool maps = low < best && map.scale > 0.0f && map.scale < __int_as_float(INF_KEY);
    if (!maps) map.scale = __int_as_float(0x7fc00000);

#if HELD
    if (r.edge) {
#pragma unroll
        for (int s = 0; s < HELD; s++) cut(r, r.vector + 32 * s, held[s]);
    }
#endif
    const auto count = [&](float x) {
        const float h = height(map, x);
        if (h >= 1.0f) atomicAdd(&sh.fine[0][(int)fminf(h, BINS - 1)], 1);
    };
    sweep(r, held, [&](int, int, const float4& x) { count(x.x), count(x.y), count(x.z), count(x.w); }, [](int) {});
    __syncthreads();
    sum_groups(sh, 0);
    cluster_sync();
    if (warp == 0) find_bin(sh, 0, want, rank);
    __syncthreads();

    const Bin bin = bin_of(max(sh.found[0], 0));
    Place place = {sh.found[1], sh.found[2], sh.found[3], sh.found[4]};
    if (sh.found[0] < 0) {  // among those below all counted ones
        place.members = rivals - place.above;
        place.members_before = min(max(4 * block_first - r.first, 0), rivals) - place.above_before;
    }
    if (place.members <= LIST) {
        // How many scores of each warp lie above the bin; and the few members to every block's list.
        int above = 0;
        u32 few = 0;
        const auto judge = [&](int bit, float x) {
            const float h = height(map, x);
            above += h >= bin.upto;
            few |= (u32)in_bin(bin, h) << bit;
        };
        sweep(
            r, held,
            [&](int i, int, const float4& x) {
                judge(4 * i, x.x), judge(4 * i + 1, x.y), judge(4 * i + 2, x.z), judge(4 * i + 3, x.w);
            },
            [&](int first) {
#pragma unroll 1
                for (; few != 0; few &= few - 1) {
                    const int bit = __ffs(few) - 1, u = first + 128 * (bit / 4) + bit % 4;
                    if (competes(r, u)) list(sh, place.members_before, order_key(r.base[u]));
                }
            }
        );
        above = __reduce_add_sync(ALL, above);
        if (lane == 0) sh.above[warp] = above;
        cluster_sync();
    } else {
        cut_down(sh, r, rank, want, map, bin, place);
        place = sh.place;
        if (place.members > LIST) {
            const int room = want - place.above;
            write_with_ties(sh, r, to, sh.found[5], room, place.above_before, place.members_before, init);
            return;
        }
    }

    // The list is whole. Each warp ranks some of it; the k-th best has too few above it, but not with its equals.
    const int need = want - place.above;
    int keys[LIST / 32];
#pragma unroll
    for (int i = 0; i < LIST / 32; i++) keys[i] = 32 * i + lane < place.members ? sh.list[32 * i + lane] : INT_MIN;
#pragma unroll 1
    for (int c = warp; c < place.members; c += WARPS) {
        const int key = sh.list[c];
        int counts = 0;
#pragma unroll
        for (int i = 0; i < LIST / 32; i++)
            if (32 * i < place.members) counts += (keys[i] > key) + ((keys[i] == key) << 16);
        counts = __reduce_add_sync(ALL, counts);
        const int more = counts & 0xffff, same = counts >> 16;
        if (more < need && need <= more + same && lane == 0) sh.found[5] = key, sh.found[6] = more, sh.found[7] = same;
    }
    __syncthreads();
    const int edge = sh.found[5], room = need - sh.found[6];
    int counts = 0;
#pragma unroll
    for (int i = 0; i < LIST / 32; i++)
        if (32 * i + lane < place.members_before) counts += (keys[i] > edge) + ((keys[i] == edge) << 16);
    counts = __reduce_add_sync(ALL, counts);
    const int next = place.above_before + (counts & 0xffff), equals = counts >> 16;
    if (room < sh.found[7] || edge == NAN_KEY) {
        write_with_ties(sh, r, to, edge, room, next, equals, init);
        return;
    }
    int earlier = lane < warp ? sh.above[lane] : 0;
#pragma unroll 1
    for (int i = lane; i < sh.count; i += 32)
        earlier += sh.warp_of[i] < warp && sh.list[place.members_before + i] >= edge;
    // All that reach `edge` are picks.
    int next_pick = init + next + equals + __reduce_add_sync(ALL, earlier);
    const float reached = score_of(edge);
    const u32 below = (1u << lane) - 1;
    sweep(
        r, held,
        [&](int, int u, const float4& x) {
            u32 picked = (x.x >= reached) | (x.y >= reached) << 1 | (x.z >= reached) << 2 | (x.w >= reached) << 3;
            int i = next_pick;
#pragma unroll
            for (int c = 0; c < 4; c++) {
                const u32 votes = __ballot_sync(ALL, picked >> c & 1);
                i += __popc(votes & below), next_pick += __popc(votes);
            }
#pragma unroll 1
            for (; picked != 0; picked &= picked - 1) put(sh, to, i++, u + __ffs(picked) - 1 - r.shift);
        },
        [](int) {}
    );
}
