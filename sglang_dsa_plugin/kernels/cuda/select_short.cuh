// Part of select.cu and select_many.cu: a short row, which one block decides alone from what its threads hold.
//
// A captured graph launches for the columns that a page table covers, whatever the lengths. Here a row costs what a
// block's instructions do, not its memory: blocks that share it would wait for each other longer than that takes.
//
//   1. A line from scores to bins (select_registers.cuh), and one count of the scores by bins.
//   2. The bin of the k-th best has few members, which every warp ranks for itself. What the line does not suit, as
//      thousands of equal scores, is narrowed down by the bits in which the members of the bin differ.
//   3. Picks are put in order in shared memory, and leave from there side by side.

// A bin of too many members, or bin 0, without a line everything: `above` scores lie above.
__device__ __noinline__ void select_by_narrowing(Shared& sh, Stretch r, Target to, Line line, float bin, int above,
                                                 int want, int init) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
    int least = INT_MAX, most = INT_MIN;
    reread(r, [&](int u, float x) {
        const int key = order_key(x);
        if (competes(r, u) && (!line.good || line.bin(x) == bin)) least = min(least, key), most = max(most, key);
    });
    least = __reduce_min_sync(ALL, least), most = __reduce_max_sync(ALL, most);
    if (lane == 0) sh.lowest[warp] = least, sh.highest[warp] = most;
    __syncthreads();
    least = __reduce_min_sync(ALL, lane < WARPS ? sh.lowest[lane] : INT_MAX);
    most = __reduce_max_sync(ALL, lane < WARPS ? sh.highest[lane] : INT_MIN);
#pragma unroll 1
    while (least < most) {
        const u32 span = (u32)most - (u32)least;
        const int digit = max(0, 21 - __clz(span));
        reread(r, [&](int u, float x) {
            const int key = order_key(x);
            if (key >= least && key <= most && competes(r, u)) atomicAdd(&sh.bins[((u32)key - (u32)least) >> digit], 1);
        });
        __syncthreads();
        find_bin(sh, want - above);
        above += sh.found[1];
        const u32 skipped = (u32)sh.found[0] << digit;
        least = (int)((u32)least + skipped);
        most = (int)((u32)least + min((1u << digit) - 1, span - skipped));
        __syncthreads();  // all have read what was found
    }
    write_with_ties(sh, r, to, least, want - above, 0, 0, init);
}

// The k-th best of the listed members, `room` picks of the `same` that equal it.
struct ShortEdge {
    int key, room, same;
};

// By a warp. key: each lane's member, from the last on INT_MIN.
__device__ __forceinline__ ShortEdge edge_of(int key, int members, int need) {
    int more = 0, same = 0;
#pragma unroll 1
    for (int i = 0; i < members; i += 4)
#pragma unroll
        for (int c = 0; c < 4; c++) {
            const int other = __shfl_sync(ALL, key, i + c);
            more += other > key, same += other == key;
        }
    const int who = __ffs(__ballot_sync(ALL, more < need && need <= more + same)) - 1;
    return {__shfl_sync(ALL, key, who), need - __shfl_sync(ALL, more, who), __shfl_sync(ALL, same, who)};
}

// A warp's picks, places in the row, to `picks`. flags: this thread's, of vector after vector.
template <int V, bool HALVES>
__device__ __forceinline__ void put_in_order(unsigned short* picks, const Scores<V, HALVES>& scores, u32 flags,
                                             int place) {
    u32 counts = flags - (flags >> 1 & 0x55555555u);  // of each vector, in four bits
    counts = (counts & 0x33333333u) + (counts >> 2 & 0x33333333u);
    // Sums of four vectors' at once, of which none is above 128.
    const u32 even = counts >> 4 & 0x0f0f0f0fu, odd = counts & 0x0f0f0f0fu, first = V > 4 ? even : even | odd >> 16;
    const u32 upto = sum_upto(first), before = upto - first, all = __shfl_sync(ALL, upto, 31);
    const u32 upto_odd = V > 4 ? sum_upto(odd) : upto << 16, before_odd = V > 4 ? upto_odd - odd : before << 16;
    const u32 all_odd = V > 4 ? __shfl_sync(ALL, upto_odd, 31) : all << 16;
    scores.steps([&](int s) {
        const int byte = 24 - s / 2 * 8;
        unsigned short* next = picks + ((s % 2 ? before_odd : before) >> byte & 255);
#pragma unroll
        for (int c = 0; c < 4; c++)
            if (flags >> (31 - 4 * s - c) & 1) *next++ = place + 128 * s + c;
        picks += (s % 2 ? all_odd : all) >> byte & 255;
    });
}

// By all threads of one block: row r, of which `want` scores are picked. sh.target says where to, with the first of
// `pages` entries of the page table, of which each thread brings one; that, sh.bins and sh.few_count, both zero, were
// written ahead of a barrier still to come.
template <int V, bool HALVES>
__device__ __noinline__ void select_short(Shared& sh, Stretch r, int want, int init, int pages, int page) {
    Scores<V, HALVES> scores;
    scores.load(r);
    const int thread = threadIdx.x, lane = thread & 31, warp = thread / 32, vector0 = r.first / 4;
    scores.cut_ends(r);
    const Line line = line_of(sh, scores, r, want);
    if (thread < pages) pages_of(sh)[thread] = page;
    if (line.good && r.steps > 0) {
        const u32 bins = shared_address(sh.bins) - 4 * (u32)__float_as_int(BIN_0);
        scores.steps([&](int s) {
#pragma unroll
            for (int c = 0; c < 4; c++) count(bins + 4 * __float_as_int(line.bin(scores.x[4 * s + c])));
        });
    }
    __syncthreads();
    find_bin(sh, want);
    const int bin = sh.found[0], over_bin = sh.found[1], members = sh.found[2];
    if (bin <= 0 || members > FEW) {
        scores.keep(sh, r);
        __syncthreads();  // all have read what was found
        select_by_narrowing(sh, r, sh.target, line, BIN_0 + max(bin, 0), over_bin, want, init);
        return;
    }

    // Which lie above the bin, and which in it.
    u32 flags = 0, inside = 0;
    int own = INT_MIN;  // this thread's member, the last of several
    if (r.steps > 0) {
        const float from = BIN_0 + bin, upto = bin == ROW_BINS - 1 ? __int_as_float(INF_KEY) : from;
        scores.steps([&](int s) {
#pragma unroll
            for (int c = 0; c < 4; c++) {
                const float h = line.height(scores.x[4 * s + c]);
                flags = __funnelshift_l(difference(upto, h), flags, 1);
                inside = __funnelshift_l(difference(from - 1.0f, h), inside, 1);
            }
        });
        const int unused = 32 - (scores.whole ? 4 * V : 2 * V);
        inside = (inside ^ flags) << unused, flags <<= unused;
        const int over = __reduce_add_sync(ALL, __popc(flags));
        if (lane == 0) sh.above[warp] = over;
#pragma unroll 1
        for (u32 left = inside; left != 0;) {
            const int e = __clz(left), i = atomicAdd(&sh.few_count, 1);
            left ^= 0x80000000u >> e;
            own = order_key(scores.at(e));
            sh.few[i] = own, sh.few_of[i] = warp;
        }
    } else if (lane == 0) {
        sh.above[warp] = 0;
    }
    __syncthreads();

    unsigned short* picks = (unsigned short*)sh.ring;
    if (r.steps > 0) {
        const int key = lane < members ? sh.few[lane] : INT_MIN;
        const ShortEdge edge = edge_of(key, members, want - over_bin);
        const bool ties = edge.room < edge.same;
        if (thread == 0) sh.found[3] = ties, sh.found[4] = edge.key, sh.found[5] = edge.room;
        if (!ties) {
            // All that reach the edge are picks: how many come before this warp's, and this thread's.
            int before = __reduce_add_sync(ALL, lane < warp ? sh.above[lane] : 0);
            before += __popc(__ballot_sync(ALL, lane < members && sh.few_of[lane & (FEW - 1)] < warp && key >= edge.key));
            if ((inside & (inside - 1)) == 0) {
                flags |= own >= edge.key ? inside : 0;
            } else {
#pragma unroll 1
                for (; inside != 0; inside &= ~(0x80000000u >> __clz(inside)))
                    if (order_key(scores.at(__clz(inside))) >= edge.key) flags |= 0x80000000u >> __clz(inside);
            }
            put_in_order(picks + before, scores, flags, 4 * (r.vector - vector0));
        }
    }
    __syncthreads();
    if (sh.found[3]) {
        scores.keep(sh, r);
        write_with_ties(sh, r, sh.target, sh.found[4], sh.found[5], 0, 0, init);
        return;
    }
    const Target to = sh.target;
    const int position0 = 4 * vector0 - r.shift;
#pragma unroll 4
    for (int i = thread; i < want; i += THREADS) {
        const int p = picks[i] + position0;
        put(to, init + i, p + to.offset,
            WRITE == POSITIONS ? 0 : pages_of(sh)[(u32)p / PAGE - to.first_page] * PAGE + (u32)p % PAGE);
    }
}

// By all threads of one block, with nothing in sh yet: row r, of which `want` scores are picked. Not part of the kernel
// itself, whose registers are others' in a long row.
__device__ __forceinline__ void select_alone(Shared& sh, const Stretch& r, Target to, int want, int init) {
    const int thread = threadIdx.x, first = r.first & -4;
    to.first_page = max(0, first - r.shift) / PAGE;
    const int pages = WRITE == POSITIONS ? 0 : (r.end - r.shift - 1) / PAGE + 1 - to.first_page;
    const int page = thread < pages ? page_of(to, to.first_page + thread) : 0;
#pragma unroll 1
    for (int i = thread + THREADS; i < pages; i += THREADS) pages_of(sh)[i] = page_of(to, to.first_page + i);
    if (thread == 0) {
        to.table = pages_of(sh), to.table_row = -to.first_page, to.wide = false;  // from here on
        sh.target = to;
    }
    if (VECTORS > 1 && r.end - first <= 2 * VECTORS * HOLDERS)
        select_short<VECTORS == 1 ? 1 : VECTORS / 2, (VECTORS > 2)>(sh, r, want, init, pages, page);
    else
        select_short<VECTORS, false>(sh, r, want, init, pages, page);
}
