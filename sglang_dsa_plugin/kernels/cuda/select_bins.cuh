// Parts of select.cu: which bin holds the k-th best, and few members of it for every block to rank.

// By all threads, after a barrier behind the counts: those of this block to every block; the first warp then has all.
// round: of a row's exchanges. A block that is ahead stores the next counts beside those that others still look at.
__device__ __forceinline__ void exchange_counts(Shared& sh, int rank, int round) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
    int(*to)[BINS] = round & 1 ? sh.spare : sh.received;
#if CLUSTER == 1
    if (warp == 0)
        for (int i = lane; i < BINS; i += 32) to[0][i] = sh.fine[i];
    __syncwarp();
#else
    Barrier& counted = sh.counted[round & 1];
    if (threadIdx.x == 0) expect(counted, sizeof(sh.received));
#pragma unroll 1
    for (int j = warp; j < CLUSTER; j += WARPS) {
#pragma unroll
        for (int i = lane; i < BINS / 4; i += 32) store_to((int4*)to[rank] + i, j, ((int4*)sh.fine)[i], counted);
    }
    wait_for_stores(counted, round >> 1 & 1);
#endif
}

// By one warp: the bin of the cluster in which the `need`-th count from the top lies, and what lies above it, to
// sh.found: bin, above, above in earlier blocks, members, members in earlier blocks. Bin -1 where the counts are fewer
// than `need`.
__device__ __forceinline__ void find_bin(Shared& sh, int round, int need, int rank) {
    const int lane = threadIdx.x & 31, first = EACH * (31 - lane);
    int total[EACH], before[EACH], own = 0, own_before = 0;
#pragma unroll
    for (int i = 0; i < EACH; i++) total[i] = before[i] = 0;
#pragma unroll 1
    for (int j = 0; j < CLUSTER; j++) {
        const int* of = &(round & 1 ? sh.spare : sh.received)[j][first];
#pragma unroll
        for (int i = 0; i < EACH; i += 4) {
            const int4 x = *(const int4*)&of[i];
            const int part[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
            for (int c = 0; c < 4; c++) total[i + c] += part[c], before[i + c] += j < rank ? part[c] : 0;
        }
    }
#pragma unroll
    for (int i = 0; i < EACH; i++) own += total[i], own_before += before[i];
    const int upto = sum_upto(own), upto_before = sum_upto(own_before);
    const u32 votes = __ballot_sync(ALL, upto >= need);
    if (votes == 0) {
        if (lane == 31) sh.found[0] = -1, sh.found[1] = upto, sh.found[2] = upto_before;
    } else if (lane == __ffs(votes) - 1) {
        int above = upto - own, above_before = upto_before - own_before, at = EACH - 1;
        int here = total[at], here_before = before[at];
#pragma unroll
        for (int i = EACH - 1; i > 0; i--)
            if (at == i && above + here < need)
                above += here, above_before += here_before, at = i - 1, here = total[at], here_before = before[at];
        sh.found[0] = first + at;
        sh.found[1] = above;
        sh.found[2] = above_before;
        sh.found[3] = here;
        sh.found[4] = here_before;
    }
}

// Scores to bins: from `origin`, where bin 1 begins, a straight line, cut off at the end. Rounding keeps its order.
// below: the next score below the origin.
struct Map {
    float origin, scale, below;
};

// All NaN, so that it has no score in a bin above 0, where there is no line.
__device__ __forceinline__ Map map_between(int low, float top, int bins) {
    Map map = {score_of(low), 0.0f, score_of(low - 1)};
    map.scale = __fdividef(bins - 2, top - map.origin);
    const float none = __int_as_float(0x7fc00000);
    if (!(map.origin < top && map.scale > 0.0f && map.scale < __int_as_float(INF_KEY))) map = {none, none, none};
    return map;
}

__device__ __forceinline__ float height(const Map& map, float x) {
    return __fmaf_rn(__fsub_rn(x, map.origin), map.scale, 1.0f);
}

// A bin holds what reaches `from` but not `upto` and lies not below the map's origin; bin 0 what does, and NaN.
struct Bin {
    float from, upto;
};

__device__ __forceinline__ Bin bin_of(int number) {
    return {(float)number, number == BINS - 1 ? __int_as_float(0x7fc00000) : number + 1.0f};
}

__device__ __forceinline__ bool in_bin(const Bin& bin, const Map& map, float x) {
    const float h = height(map, x);
    return x >= map.origin ? h >= bin.from && !(h >= bin.upto) : bin.from == 0.0f;
}

// A member of the chosen bin, to the list of every block.
__device__ __forceinline__ void list(Shared& sh, int members_before, int key) {
    const int i = atomicAdd(&sh.count, 1);
    sh.warp_of[i] = threadIdx.x / 32;
#if CLUSTER == 1
    sh.list[members_before + i] = key;
#else
#pragma unroll 1
    for (int j = 0; j < CLUSTER; j++) store_to(&sh.list[members_before + i], j, key, sh.listed);
#endif
}

// By all threads, when this block's are there: until all are, and what this block's warps have found can be read.
__device__ __forceinline__ void finish_list(Shared& sh, int members) {
    if (CLUSTER > 1 && threadIdx.x == 0) expect(sh.listed, sizeof(int) * members);
    __syncthreads();
    if (CLUSTER > 1) wait_for_stores(sh.listed, 0);
}

// Range of the members' keys over the cluster.
__device__ __forceinline__ void key_range(Shared& sh, const Stretch& r, int rank, const Map& map, const Bin& bin,
                                          int& low, int& high) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
    low = INT_MAX, high = INT_MIN;
    reread(r, [&](int u, float x) {
        if (in_bin(bin, map, x) && competes(r, u)) low = min(low, order_key(x)), high = max(high, order_key(x));
    });
    low = __reduce_min_sync(ALL, low), high = __reduce_max_sync(ALL, high);
    if (lane == 0) sh.lowest[warp] = low, sh.highest[warp] = high;
    if (CLUSTER > 1 && threadIdx.x == 0) expect(sh.ranged, sizeof(sh.ranges));
    __syncthreads();
    low = __reduce_min_sync(ALL, lane < WARPS ? sh.lowest[lane] : INT_MAX);
    high = __reduce_max_sync(ALL, lane < WARPS ? sh.highest[lane] : INT_MIN);
    if (CLUSTER == 1) return;
    if (warp == 0 && lane < CLUSTER) store_to(&sh.ranges[rank], lane, make_int2(low, high), sh.ranged);
    wait_for_stores(sh.ranged, 0);
    low = __reduce_min_sync(ALL, lane < CLUSTER ? sh.ranges[lane].x : INT_MAX);
    high = __reduce_max_sync(ALL, lane < CLUSTER ? sh.ranges[lane].y : INT_MIN);
}

// Where a bin has more members than a list takes, or is bin 0: cuts it down, puts what is known then to sh.place, and
// makes the list. Or finds that all members are equal, to which sh.found[5] is set then, and makes none.
__device__ __noinline__ void cut_down(Shared& sh, Stretch r, int rank, int want, Map map, Bin bin, Place place) {
    int least, most;
    key_range(sh, r, rank, map, bin, least, most);
    int round = 1;
#pragma unroll 1
    for (; place.members > LIST && least < most; round++) {
        const u32 span = (u32)most - (u32)least;
        const int digit = max(0, 24 - __clz(span));
        for (int i = threadIdx.x; i < BINS; i += THREADS) sh.fine[i] = 0;
        __syncthreads();
        reread(r, [&](int u, float x) {
            const int key = order_key(x);
            if (key >= least && key <= most && competes(r, u))
                atomicAdd(&sh.fine[((u32)key - (u32)least) >> digit], 1);
        });
        __syncthreads();
        exchange_counts(sh, rank, round);
        if (threadIdx.x < 32) find_bin(sh, round, want - place.above, rank);
        __syncthreads();
        place = {place.above + sh.found[1], place.above_before + sh.found[2], sh.found[3], sh.found[4]};
        const u32 skipped = (u32)sh.found[0] << digit;
        least = (int)((u32)least + skipped);
        most = (int)((u32)least + min((1u << digit) - 1, span - skipped));
    }
    int above = 0;
    if (place.members <= LIST)
        reread(r, [&](int u, float x) {
            const int key = order_key(x);
            above += key > most;
            if (key >= least && key <= most && competes(r, u)) list(sh, place.members_before, key);
        });
    above = __reduce_add_sync(ALL, above);
    if (threadIdx.x % 32 == 0) sh.above[threadIdx.x / 32] = above;
    if (threadIdx.x == 0) sh.place = place, sh.found[5] = least;
    if (place.members <= LIST)
        finish_list(sh, place.members);
    else
        __syncthreads();
}
