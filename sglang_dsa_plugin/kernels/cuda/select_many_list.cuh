// Parts of select_many.cu: candidates to the list, and from the list to picks.

// A warp's chunks of the row, every WARPS-th of all.
struct Chunks {
    int vector0, vector_end;        // of the row
    int number;                     // of the row
    int turn;                       // how many this warp has looked at

    __device__ __forceinline__ void fetch(Shared& sh, const Stretch& r, int j) const {
        const int warp = threadIdx.x / 32, vector = vector0 + j * CHUNK;
        copy(sh.ring[warp], (const float4*)r.base + vector, 16 * min(CHUNK, vector_end - vector), ONCE,
             sh.arrived[warp]);
    }

    // The first of them on its way.
    __device__ __forceinline__ void begin(Shared& sh, const Stretch& r) const {
        const int warp = threadIdx.x / 32;
        if (threadIdx.x % 32 == 0 && warp < number) fetch(sh, r, warp);
    }
};

// What lies above `passed` to the list, if there is room; sh.count tells for how much there should have been.
__device__ __forceinline__ void collect(Shared& sh, const Stretch& r, Chunks& chunks, float passed) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
#pragma unroll 1
    for (int j = warp; j < chunks.number; j += WARPS, chunks.turn++) {
        const float* own = sh.ring[warp] + 4 * BATCH * lane;
        wait(sh.arrived[warp], chunks.turn & 1);
        u32 flags = flags_of(own, passed);
        const int u = 4 * (chunks.vector0 + j * CHUNK + BATCH * lane);
        if (j == 0 || j == chunks.number - 1) flags = within(flags, u, r.first, r.end);
        const int mine = __popc(flags), upto = sum_upto(mine);
        int begin = 0;
        if (lane == 31) {
            begin = atomicAdd(&sh.count, upto);
            sh.chunk[j] = (u32)begin << 11 | upto;
            begin = begin + upto <= LISTED ? begin : -1;
        }
        begin = __shfl_sync(ALL, begin, 31);
        if (begin >= 0) {
            int2* next = &sh.list[begin + upto - mine];
#pragma unroll 1
            while (flags != 0) {
                const int e = __clz(flags);
                flags ^= 0x80000000u >> e;
                *next++ = make_int2(__float_as_int(own[e]), u + e);
            }
        }
        fence_bulk();  // behind every lane's reads, ahead of the copy to where they read
        __syncwarp();
        if (lane == 0 && j + WARPS < chunks.number) chunks.fetch(sh, r, j + WARPS);
    }
}

// The keys from least to least + span: of the list's entries in it, `members`, the `need`-th best is the last pick.
struct Range {
    int least;
    u32 span;
    int need, members;
};

// Cuts the list's range down until few members are left, or all are equal.
__device__ __forceinline__ Range range_of_edge(Shared& sh, const Threshold& from, int count, int need) {
    Range range = {from.least, (u32)from.best - (u32)from.least, need, count};
    u32 reach = 0xffffffffu;
    do {
        const int digit = max(0, 21 - __clz(range.span));
#pragma unroll 4
        for (int i = threadIdx.x; i < count; i += THREADS) {
            const u32 d = (u32)order_key(__int_as_float(sh.list[i].x)) - (u32)range.least;
            if (d <= reach) atomicAdd(&sh.bins[min(d >> digit, BINS - 1u)], 1);
        }
        __syncthreads();
        find_bin(sh, range.need);
        const u32 skipped = (u32)sh.found[0] << digit;
        range.need -= sh.found[1], range.members = sh.found[2];
        range.least = (int)((u32)range.least + skipped);
        if (reach != 0xffffffffu)
            range.span = min((1u << digit) - 1, range.span - skipped);
        else {
            // The last bin has no end, and no key lies above that of infinity: a range past it would begin with NaN.
            const u32 most = (u32)INF_KEY - (u32)range.least;
            range.span = sh.found[0] == BINS - 1 ? most : min((1u << digit) - 1, most);
        }
        reach = range.span;
    } while (range.members > FEW && range.span > 0);
    return range;
}

// The score of entry i, NaN from `end` on.
__device__ __forceinline__ float entry_of(const Shared& sh, int i, int end) {
    return __int_as_float(i < end ? sh.list[i].x : 0x7fc00000);
}

// Picks in ascending position to `picks`, from a list with `range` as above.
__device__ __forceinline__ void pick(Shared& sh, const Stretch& r, const Chunks& chunks, const Range& range,
                                     int* picks) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
    const float low = score_of(range.least), high = score_of((int)((u32)range.least + range.span));
    // Each warp has a share of the chunks. How many picks come before it: above the range, and of its members.
    const int each = (chunks.number + WARPS - 1) / WARPS, last = min(chunks.number, (warp + 1) * each);
    int above = 0, equal = 0;
#pragma unroll 1
    for (int j = warp * each; j < last; j++) {
        const int begin = sh.chunk[j] >> 11, end = begin + (sh.chunk[j] & 2047);
#pragma unroll 1
        for (int first = begin; first < end; first += 32 * WIDE) {
            float x[WIDE];
#pragma unroll
            for (int q = 0; q < WIDE; q++) x[q] = entry_of(sh, first + 32 * q + lane, end);
#pragma unroll
            for (int q = 0; q < WIDE; q++) {
                above += x[q] > high;
                if (x[q] >= low && x[q] <= high) {
                    equal++;
                    if (range.span > 0) {
                        const int at = atomicAdd(&sh.few_count, 1);
                        sh.few[at] = order_key(x[q]), sh.few_of[at] = warp;
                    }
                }
            }
        }
    }
    above = __reduce_add_sync(ALL, above), equal = __reduce_add_sync(ALL, equal);
    if (lane == 0) sh.above[warp] = above, sh.equal[warp] = equal;
    __syncthreads();
    int next = __reduce_add_sync(ALL, lane < warp ? sh.above[lane] : 0), equals;
    int edge = range.least, room = range.need, same = range.members;
    if (range.span == 0) {
        equals = __reduce_add_sync(ALL, lane < warp ? sh.equal[lane] : 0);
    } else {
        const int key = lane < range.members ? sh.few[lane] : INT_MIN;
        int more = 0;
        same = 0;
#pragma unroll 1
        for (int i = 0; i < range.members; i++) {
            const int other = __shfl_sync(ALL, key, i);
            more += other > key, same += other == key;
        }
        const int who = __ffs(__ballot_sync(ALL, more < range.need && range.need <= more + same)) - 1;
        edge = __shfl_sync(ALL, key, who), same = __shfl_sync(ALL, same, who);
        room -= __shfl_sync(ALL, more, who);
        const bool before = lane < range.members && sh.few_of[lane] < warp;
        next += __popc(__ballot_sync(ALL, before && key > edge));
        equals = __popc(__ballot_sync(ALL, before && key == edge));
    }
    const float reached = score_of(edge);
    const u32 below = (1u << lane) - 1;
    // next: picks above the edge so far. Those equal to it stand among them by how many came first.
#pragma unroll 1
    for (int j = warp * each; j < last; j++) {
        const int begin = sh.chunk[j] >> 11, end = begin + (sh.chunk[j] & 2047);
#pragma unroll 1
        for (int first = begin; first < end; first += 32 * WIDE) {
            float x[WIDE];
#pragma unroll
            for (int q = 0; q < WIDE; q++) x[q] = entry_of(sh, first + 32 * q + lane, end);
#pragma unroll
            for (int q = 0; q < WIDE; q++) {
                if (first + 32 * q >= end) break;
                const int p = sh.list[min(first + 32 * q + lane, LISTED - 1)].y - r.shift;
                if (room == same) {
                    const u32 votes = __ballot_sync(ALL, x[q] >= reached);
                    if (x[q] >= reached) picks[next + equals + __popc(votes & below)] = p;
                    next += __popc(votes);
                } else {
                    const u32 overs = __ballot_sync(ALL, x[q] > reached), ties = __ballot_sync(ALL, x[q] == reached);
                    const int e = equals + __popc(ties & below);
                    if (x[q] > reached || (x[q] == reached && e < room))
                        picks[next + __popc(overs & below) + min(e, room)] = p;
                    next += __popc(overs), equals += __popc(ties);
                }
            }
        }
    }
}
