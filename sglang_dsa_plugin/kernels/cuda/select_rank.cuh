// Parts of select.cu: the map that a sample of a row gives, and the k-th best among few members.

// The highest of the sample's groups that `rank` of its scores reach, 0 where none is. By a warp: each thread has the
// counts of four groups, from the highest down, and their sums.
__device__ __forceinline__ int group_of(const int4& of, int upto, int rank) {
    const u32 votes = __ballot_sync(ALL, upto >= rank);
    const int who = __ffs(votes) - 1;
    int sum = upto - of.x - of.y - of.z - of.w + of.w, at = 3;
    if (sum < rank) sum += of.z, at = 2;
    if (sum < rank) sum += of.y, at = 1;
    if (sum < rank) at = 0;
    at = __shfl_sync(ALL, at, who & 31);
    return votes == 0 ? 0 : 4 * (31 - who) + at;
}

// By all threads. seen: the scores of a vector, another one for each thread. Each group of threads tells its best; the
// lowest of these and the highest give a first map, by which the sample is counted. Its scores of two ranks are the ends
// of the map: one that almost surely more than `want` scores of the row reach, and one that fewer do.
__device__ __forceinline__ Map map_of_sample(Shared& sh, const float4& seen, int vector, const Stretch& r, int want) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x / 32, rivals = r.end - r.first;
    const float sample[4] = {seen.x, seen.y, seen.z, seen.w};
    int best = INT_MIN, worst = INT_MAX;
#pragma unroll
    for (int c = 0; c < 4; c++) {
        const int key = order_key(sample[c]);
        if (key > -INF_KEY && key < INF_KEY && competes(r, 4 * vector + c))
            best = max(best, key), worst = min(worst, key);
    }
    int low = worst;
    if (2 * want <= rivals) {
        low = best;
#pragma unroll 1
        for (int o = 1; o < 32 && (o < 16 ? 4 : 8) * o * want <= rivals; o *= 2)
            low = max(low, __shfl_xor_sync(ALL, low, o));
        if (low == INT_MIN) low = INT_MAX;
    }
    low = __reduce_min_sync(ALL, low), best = __reduce_max_sync(ALL, best);
    if (lane == 0) sh.lowest[warp] = low, sh.highest[warp] = best;
    __syncthreads();
    low = __reduce_min_sync(ALL, lane < WARPS ? sh.lowest[lane] : INT_MAX);
    best = __reduce_max_sync(ALL, lane < WARPS ? sh.highest[lane] : INT_MIN);
    const Map coarse = map_between(low, score_of(best), GROUPS);
#pragma unroll
    for (int c = 0; c < 4; c++)
        if (sample[c] >= coarse.origin && competes(r, 4 * vector + c))
            atomicAdd(&sh.groups[(int)fminf(height(coarse, sample[c]), GROUPS - 1)], 1);
    __syncthreads();
    const int4 of = ((int4*)sh.groups)[31 - lane];
    const int upto = sum_upto(of.x + of.y + of.z + of.w);
    const float expected = __fdividef((float)want * (4 * THREADS), rivals), width = __fdividef(1.0f, coarse.scale);
    const int from = group_of(of, upto, (int)(1.5f * expected) + 24);
    const int to = group_of(of, upto, (int)(expected / 4));
    if (from > 0) {
        const float top = to == 0 || to == GROUPS - 1 ? score_of(best) : coarse.origin + to * width;
        const Map finer = map_between(order_key(coarse.origin + (from - 1) * width), top, BINS);
        if (finer.scale == finer.scale) return finer;
    }
    return map_between(low, score_of(best), BINS);
}

// The k-th best, `room` picks of the `same` members that equal it, and how many members lie before this warp: above it
// and equal to it in earlier blocks, either of both in earlier warps of this block.
struct Edge {
    int key, room, same;
    int next, equals, earlier;
};

// By all threads, the list being whole: the `need`-th best of its members. Each warp ranks some of them.
__device__ __forceinline__ Edge rank_members(Shared& sh, const Place& place, int need) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
#pragma unroll 1
    for (int c = warp; c < place.members; c += WARPS) {
        const int key = sh.list[c];
        int counts = 0;
#pragma unroll 1
        for (int i = lane; i < place.members; i += 32) counts += (sh.list[i] > key) + ((sh.list[i] == key) << 16);
        counts = __reduce_add_sync(ALL, counts);
        const int more = counts & 0xffff, same = counts >> 16;
        if (more < need && need <= more + same && lane == 0)
            sh.found[5] = key, sh.found[6] = more, sh.found[7] = same;
    }
    __syncthreads();
    Edge edge;
    edge.key = sh.found[5], edge.room = need - sh.found[6], edge.same = sh.found[7];
    int counts = 0;
#pragma unroll 1
    for (int i = lane; i < place.members_before + sh.count; i += 32) {
        const int key = sh.list[i], own = i - place.members_before;
        if (own < 0)
            counts += (key > edge.key) + ((key == edge.key) << 10);
        else
            counts += (sh.warp_of[own] < warp && key >= edge.key) << 20;
    }
    counts = __reduce_add_sync(ALL, counts);
    edge.next = counts & 0x3ff, edge.equals = counts >> 10 & 0x3ff, edge.earlier = counts >> 20;
    return edge;
}
