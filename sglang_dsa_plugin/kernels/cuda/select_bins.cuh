// Parts of select.cu: which bin holds the k-th best, and few members of it for every block to rank.

// Sums of GROUP bins; the threads of a warp look at neighbours. After all counts are in.
__device__ __forceinline__ void sum_groups(Shared& sh, int buffer) {
    constexpr int each = BINS / THREADS, sharing = GROUP / each;
    struct alignas(4 * each) Counts {
        int of[each];
    };
    const Counts mine = ((const Counts*)counts(sh, buffer))[threadIdx.x];
    int sum = 0;
#pragma unroll
    for (int i = 0; i < each; i++) sum += mine.of[i];
#pragma unroll
    for (int o = 1; o < sharing; o *= 2) sum += __shfl_xor_sync(ALL, sum, o);
    if (threadIdx.x % sharing == 0) sh.coarse[buffer][threadIdx.x / sharing] = sum;
}

// By one warp, after a cluster barrier: the bin of the cluster in which the `need`-th count from the top lies, and what
// lies above it, to sh.found: bin, above, above in earlier blocks, members, members in earlier blocks. Bin -1 where the
// counts are fewer than `need`.
__device__ __forceinline__ void find_bin(Shared& sh, int buffer, int need, int rank) {
    const int lane = threadIdx.x & 31;
    int total[4] = {0, 0, 0, 0}, before[4] = {0, 0, 0, 0};
#pragma unroll
    for (int first = 0; first < CLUSTER; first += 8) {
        int4 part[8];  // in flight together
#pragma unroll
        for (int j = 0; j < 8; j++)
            if (first + j < CLUSTER) part[j] = load4_from(&sh.coarse[buffer][4 * lane], first + j);
#pragma unroll
        for (int j = 0; j < 8; j++) {
            if (first + j >= CLUSTER) break;
            const int weight = first + j < rank;
            total[0] += part[j].x, total[1] += part[j].y, total[2] += part[j].z, total[3] += part[j].w;
            before[0] += weight * part[j].x, before[1] += weight * part[j].y;
            before[2] += weight * part[j].z, before[3] += weight * part[j].w;
        }
    }
    const int own = total[0] + total[1] + total[2] + total[3];
    const int own_before = before[0] + before[1] + before[2] + before[3];
    int above = own, above_before = own_before;
#pragma unroll
    for (int o = 1; o < 32; o *= 2) {
        const int a = __shfl_down_sync(ALL, above, o), b = __shfl_down_sync(ALL, above_before, o);
        if (lane + o < 32) above += a, above_before += b;
    }
    if (__shfl_sync(ALL, above, 0) < need) {
        if (lane == 0) sh.found[0] = -1, sh.found[1] = above, sh.found[2] = above_before;
        return;
    }
    above -= own, above_before -= own_before;
    int who = __ffs(__ballot_sync(ALL, above < need && need <= above + own)) - 1;
    int at = 3;
#pragma unroll
    for (int i = 3; i > 0; i--)
        if (at == i && above + total[i] < need) above += total[i], above_before += before[i], at = i - 1;
    const int group = __shfl_sync(ALL, 4 * lane + at, who);
    above = __shfl_sync(ALL, above, who), above_before = __shfl_sync(ALL, above_before, who);

    const int bin = lane % GROUP, half = lane / GROUP;
    int few[(CLUSTER + 1) / 2];
#pragma unroll
    for (int j = 0; j < (CLUSTER + 1) / 2; j++)
        few[j] = load_from(&counts(sh, buffer)[GROUP * group + bin], CLUSTER == 1 ? 0 : 2 * j + half);
    int here = 0, here_before = 0;
#pragma unroll
    for (int j = 0; j < (CLUSTER + 1) / 2; j++) here += few[j], here_before += (2 * j + half < rank) * few[j];
    if (CLUSTER > 1) {
        here += __shfl_xor_sync(ALL, here, GROUP);
        here_before += __shfl_xor_sync(ALL, here_before, GROUP);
    }
    int higher = here, higher_before = here_before;
#pragma unroll
    for (int o = 1; o < GROUP; o *= 2) {
        const int a = __shfl_down_sync(ALL, higher, o, GROUP), b = __shfl_down_sync(ALL, higher_before, o, GROUP);
        if (bin + o < GROUP) higher += a, higher_before += b;
    }
    above += higher - here, above_before += higher_before - here_before;
    who = __ffs(__ballot_sync(ALL, above < need && need <= above + here)) - 1;
    if (lane == who) {
        sh.found[0] = GROUP * group + bin;
        sh.found[1] = above;
        sh.found[2] = above_before;
        sh.found[3] = here;
        sh.found[4] = here_before;
    }
}

// Scores to bins: from `origin`, which is bin 1, a straight line, cut off at the end. Rounding keeps its order. below: the
// next score below the origin, -inf if there is none.
struct Map {
    float origin, scale, below;
};

// All NaN, so that it has no score in a bin above 0, where there is no line.
__device__ __forceinline__ Map map_between(int low, float top) {
    Map map = {score_of(low), 0.0f, score_of(low - 1)};
    map.scale = __fdividef(BINS - 2, top - map.origin);
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
#pragma unroll
    for (int j = 0; j < CLUSTER; j++) store_to(&sh.list[members_before + i], j, key);
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
    __syncthreads();
    if (warp == 0) {
        low = __reduce_min_sync(ALL, lane < WARPS ? sh.lowest[lane] : INT_MAX);
        high = __reduce_max_sync(ALL, lane < WARPS ? sh.highest[lane] : INT_MIN);
        if (lane < CLUSTER) {
            store_to(&sh.ranges[0][rank], lane, low);
            store_to(&sh.ranges[1][rank], lane, high);
        }
    }
    cluster_sync();
    low = __reduce_min_sync(ALL, lane < CLUSTER ? sh.ranges[0][lane] : INT_MAX);
    high = __reduce_max_sync(ALL, lane < CLUSTER ? sh.ranges[1][lane] : INT_MIN);
}

// Where a bin has more members than a list takes: cuts it down, puts what is known then to sh.place, and makes the
// list. Or finds that all members are equal, to which sh.found[5] is set then, and makes none.
__device__ __noinline__ void cut_down(Shared& sh, Stretch r, int rank, int want, Map map, Bin bin, Place place) {
    int least, most;
    for (int i = threadIdx.x; i < BINS / 4; i += THREADS) ((int4*)sh.spare)[i] = make_int4(0, 0, 0, 0);
    key_range(sh, r, rank, map, bin, least, most);
    int buffer = 1;
#pragma unroll 1
    while (place.members > LIST && least < most) {
        const u32 span = (u32)most - (u32)least;
        const int digit = max(0, 21 - __clz(span));
        reread(r, [&](int u, float x) {
            const int key = order_key(x);
            if (key >= least && key <= most && competes(r, u))
                atomicAdd(&counts(sh, buffer)[((u32)key - (u32)least) >> digit], 1);
        });
        __syncthreads();
        sum_groups(sh, buffer);
        cluster_sync();
        if (threadIdx.x < 32) find_bin(sh, buffer, want - place.above, rank);
        __syncthreads();
        place = {place.above + sh.found[1], place.above_before + sh.found[2], sh.found[3], sh.found[4]};
        const u32 skipped = (u32)sh.found[0] << digit;
        least = (int)((u32)least + skipped);
        most = (int)((u32)least + min((1u << digit) - 1, span - skipped));
        // Every block has read the other buffer: it did so before the barrier.
        buffer ^= 1;
        for (int i = threadIdx.x; i < BINS / 4; i += THREADS) ((int4*)counts(sh, buffer))[i] = make_int4(0, 0, 0, 0);
        __syncthreads();
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
    cluster_sync();  // also because a block that is still looking for a bin reads the others'
}
