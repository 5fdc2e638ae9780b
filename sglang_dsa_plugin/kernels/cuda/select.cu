// Exact top-k of few long rows (SM 9.0 and later): one cluster of blocks a row. See ops/select.py for the order.
//
//   1. A row not longer than k: the identity, written without looking at a score.
//   2. A sample of the row, the same in every block, gives a linear map of scores to bins. Whatever it is, it rises
//      with the score, so a bin holds all scores between two; a bad sample costs time, never a pick. Bin 0 is all below.
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

typedef unsigned int u32;
typedef unsigned long long u64;

#define WARPS (THREADS / 32)
#define ALL 0xffffffffu
#define BINS 2048
#define GROUP 16              // bins that are summed over the cluster together first
#define COARSE (BINS / GROUP)
#define LIST 256              // members of a bin that are ranked at once
#define BATCH 4               // vectors in flight where they are not held
#define PAGES 4096            // entries of the page table that a block's stretch may take
#define POSITIONS 0           // what is written: positions, slots, or positions and slots
#define SLOTS 1
#define BOTH 2
#define INT_MAX 0x7fffffff
#define INT_MIN (-0x7fffffff - 1)
#define NAN_KEY (-0x7fffffff)
#define INF_KEY 0x7f800000

// PTX
__device__ __forceinline__ u32 cluster_rank() { u32 r; asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(r)); return r; }

__device__ __forceinline__ u32 cluster_id() { u32 r; asm("mov.u32 %0, %%clusterid.x;" : "=r"(r)); return r; }

// All blocks of the cluster. ONE_FENCE: what all threads of the block wrote becomes visible by a fence of one warp.
__device__ __forceinline__ void cluster_sync() {
#if ONE_FENCE
    __syncthreads();
    if (threadIdx.x < 32) {
        asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
    } else {
        asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
    }
#else
    __syncwarp();
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// What the kernel ahead in the stream wrote can be read from here on; matters where this one may start early.
__device__ __forceinline__ void wait_for_inputs() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

__device__ __forceinline__ u32 address_in(const void* p, u32 block) {
    u32 there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"((u32)__cvta_generic_to_shared(p)), "r"(block));
    return there;
}

__device__ __forceinline__ int load_from(const int* p, u32 block) {
    int x;
    asm volatile("ld.shared::cluster.s32 %0, [%1];" : "=r"(x) : "r"(address_in(p, block)));
    return x;
}

__device__ __forceinline__ int4 load4_from(const int* p, u32 block) {
    int4 x;
    asm volatile("ld.shared::cluster.v4.s32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(address_in(p, block)));
    return x;
}

__device__ __forceinline__ void store_to(int* p, u32 block, int x) {
    asm volatile("st.shared::cluster.s32 [%0], %1;" ::"r"(address_in(p, block)), "r"(x) : "memory");
}
// end of PTX

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

// What a block knows of its row. Element u of `base`, aligned to 16 bytes, is position u - shift of the window.
struct Stretch {
    const float* base;
    int shift;
    int first, end;           // elements that compete: forced picks do not
    int vector;               // this thread's first
    int steps;                // this warp's: vectors of 32 threads
    bool edge;                // some of this warp's elements do not compete
};

struct Target {
    int* out;
    int* slots_out;           // where slots go while positions go to out
    int offset;
    int first_page;           // that of sh.pages[0]
};

__device__ __forceinline__ int load_int(const void* p, long long i, bool wide) {
    return wide ? (int)__ldg((const long long*)p + i) : __ldg((const int*)p + i);
}

// Score order as integer order; -0.0 and 0.0 share a key, all NaN share the lowest.
__device__ __forceinline__ int order_key(float x) {
    const int bits = __float_as_int(x), sign = bits >> 31;
    const int key = (bits ^ (sign & 0x7fffffff)) - sign;
    return x != x ? NAN_KEY : key;
}

__device__ __forceinline__ float score_of(int key) {
    return key == NAN_KEY ? __int_as_float(0x7fc00000) : __int_as_float(key < 0 ? (key - 1) ^ 0x7fffffff : key);
}

__device__ __forceinline__ bool competes(const Stretch& r, int u) { return u >= r.first && u < r.end; }

// NaN in place of elements that do not compete.
__device__ __forceinline__ void cut(const Stretch& r, int vector, float4& x) {
    const float none = __int_as_float(0x7fc00000);
    const int u = 4 * vector;
    x.x = competes(r, u) ? x.x : none;
    x.y = competes(r, u + 1) ? x.y : none;
    x.z = competes(r, u + 2) ? x.z : none;
    x.w = competes(r, u + 3) ? x.w : none;
}

// Four scores at once. The caller says that groups of four can be read whole at both ends of a row.
__device__ __forceinline__ float4 load_scores(const Stretch& r, int vector) {
    const float none = __int_as_float(0x7fc00000);
    return 4 * vector < r.end ? __ldg((const float4*)r.base + vector) : make_float4(none, none, none, none);
}

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

// f(element, score), reading the scores again: for what is rare and has to stay out of the usual path's way.
template <class F>
__device__ __forceinline__ void reread(const Stretch& r, F f) {
#pragma unroll 1
    for (int s = 0; s < r.steps; s++) {
        const int vector = r.vector + 32 * s;
        float4 x = load_scores(r, vector);
        cut(r, vector, x);
        f(4 * vector, x.x);
        f(4 * vector + 1, x.y);
        f(4 * vector + 2, x.z);
        f(4 * vector + 3, x.w);
    }
}

__device__ __forceinline__ void put(const Target& to, int i, int position, int slot) {
    to.out[i] = WRITE == SLOTS ? slot : position;
    if (WRITE == BOTH) to.slots_out[i] = slot;
}

// Position p to place i of the picks.
__device__ __forceinline__ void put(const Shared& sh, const Target& to, int i, u32 p) {
    put(to, i, p + to.offset, WRITE == POSITIONS ? 0 : sh.pages[p / PAGE - to.first_page] * PAGE + p % PAGE);
}

// Sums of GROUP bins; the threads of a warp look at neighbours. After all counts are in.
__device__ __forceinline__ void sum_groups(Shared& sh, int buffer) {
    constexpr int each = BINS / THREADS, sharing = GROUP / each;
    int sum = 0;
#pragma unroll
    for (int i = 0; i < each; i++) sum += sh.fine[buffer][threadIdx.x * each + i];
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
    for (int first = 0; first < CLUSTER; first += 4) {
        int4 part[4];  // in flight together
#pragma unroll
        for (int j = 0; j < 4; j++)
            if (first + j < CLUSTER) part[j] = load4_from(&sh.coarse[buffer][4 * lane], first + j);
#pragma unroll
        for (int j = 0; j < 4; j++) {
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
        few[j] = load_from(&sh.fine[buffer][GROUP * group + bin], CLUSTER == 1 ? 0 : 2 * j + half);
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

// Scores to bins: a straight line, cut off at both ends. Rounding keeps its order.
struct Map {
    float origin, scale;
};

__device__ __forceinline__ float height(const Map& map, float x) {
    return __fmaf_rn(__fsub_rn(x, map.origin), map.scale, 1.0f);
}

// A bin holds what reaches `from` but not `upto`; bin 0, from 0, also what is below it, and NaN.
struct Bin {
    float from, upto;
};

__device__ __forceinline__ Bin bin_of(int number) {
    return {(float)number, number == BINS - 1 ? __int_as_float(0x7fc00000) : number + 1.0f};
}

__device__ __forceinline__ bool in_bin(const Bin& bin, float h) {
    return fmaxf(h, 0.0f) >= bin.from && !(h >= bin.upto);
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
        if (in_bin(bin, height(map, x)) && competes(r, u)) low = min(low, order_key(x)), high = max(high, order_key(x));
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
    key_range(sh, r, rank, map, bin, least, most);
    int buffer = 1;
#pragma unroll 1
    while (place.members > LIST && least < most) {
        const u32 span = (u32)most - (u32)least;
        const int digit = max(0, 21 - __clz(span));
        reread(r, [&](int u, float x) {
            const int key = order_key(x);
            if (key >= least && key <= most && competes(r, u))
                atomicAdd(&sh.fine[buffer][((u32)key - (u32)least) >> digit], 1);
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
        for (int i = threadIdx.x; i < BINS / 4; i += THREADS) ((int4*)sh.fine[buffer])[i] = make_int4(0, 0, 0, 0);
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

// Picks are the scores above `edge` and the first `room` equal to it. next, equals: of either, how many come before
// this block's. init: picks before the first.
__device__ __noinline__ void write_with_ties(Shared& sh, Stretch r, Target to, int edge, int room, int next, int equals,
                                             int init) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
    const u32 below = (1u << lane) - 1;
    int more = 0, same = 0;
    reread(r, [&](int u, float x) {
        const int key = order_key(x);
        more += key > edge;
        same += key == edge && competes(r, u);
    });
    more = __reduce_add_sync(ALL, more), same = __reduce_add_sync(ALL, same);
    if (lane == 0) sh.above[warp] = more, sh.equal[warp] = same;
    __syncthreads();
    next += __reduce_add_sync(ALL, lane < warp ? sh.above[lane] : 0);
    equals += __reduce_add_sync(ALL, lane < warp ? sh.equal[lane] : 0);
#pragma unroll 1
    for (int s = 0; s < r.steps; s++) {
        const int vector = r.vector + 32 * s;
        float4 x = load_scores(r, vector);
        cut(r, vector, x);
        const float score[4] = {x.x, x.y, x.z, x.w};
        u32 over = 0, tied = 0;
        int i = next, e = equals;
#pragma unroll
        for (int c = 0; c < 4; c++) {
            const int key = order_key(score[c]);
            const bool o = key > edge, t = key == edge && competes(r, 4 * vector + c);
            const u32 overs = __ballot_sync(ALL, o), ties = __ballot_sync(ALL, t);
            over |= o << c, tied |= t << c;
            i += __popc(overs & below), e += __popc(ties & below);
            next += __popc(overs), equals += __popc(ties);
        }
#pragma unroll 1
        for (int c = 0; c < 4; c++) {
            const bool o = over >> c & 1, t = tied >> c & 1;
            if (o || (t && e < room)) put(sh, to, init + i + min(e, room), 4 * vector + c - r.shift);
            i += o, e += t;
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) select_rows(
    const float* __restrict__ scores, long long stride, const void* lengths, const void* starts, int* out,
    int* slots_out, const void* table, long long table_stride, const void* requests, const void* offsets, int width, int k, int init,
    int local, int wide  // bits: lengths, starts, table, requests, offsets are int64
) {
    __shared__ __align__(16) Shared sh;
    const int thread = threadIdx.x, lane = thread & 31, warp = thread / 32;
    const int rank = cluster_rank();
    const long long row = cluster_id();
    wait_for_inputs();

    const float* line = scores + row * stride;
    int length = load_int(lengths, row, wide & 1);
    if (starts != nullptr) {
        const int start = load_int(starts, row, wide & 2);
        line += start;
        length = min(length, width - start);
    }
    length = max(min(length, width), 0);

    Target to;
    to.out = out + row * k;
    to.slots_out = slots_out + row * k;
    to.offset = offsets == nullptr ? 0 : load_int(offsets, row, wide & 16);
    const long long table_row = WRITE != POSITIONS ? load_int(requests, row, wide & 8) * table_stride : 0;

    // Picks that no score decides.
    if (length <= k || init + local > 0) {
#pragma unroll 1
        for (int i = rank * THREADS + thread; i < k; i += CLUSTER * THREADS) {
            const bool late = i >= k - local;
            if (length > k && i >= init && !late) continue;
            const int p = length > k && late ? length - k + i : i < length ? i : -1;
            int slot = -1;
            if (WRITE != POSITIONS && p >= 0) slot = load_int(table, table_row + p / PAGE, wide & 4) * PAGE + p % PAGE;
            put(to, i, p < 0 ? -1 : p + to.offset, slot);
        }
    }
    const int want = k - init - local;
    if (length <= k || want == 0) return;

    // This block's stretch of the row, a part of it to each warp.
    Stretch r;
    r.shift = (int)((u64)line / 4 % 4);
    r.base = line - r.shift;
    r.first = r.shift + init;
    r.end = r.shift + length - local;
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
            sh.pages[i] = load_int(table, table_row + to.first_page + i, wide & 4);
    }
    for (int i = thread; i < 2 * BINS / 4; i += THREADS) ((int4*)sh.fine)[i] = make_int4(0, 0, 0, 0);
    if (thread == 0) sh.count = 0;

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
                    if (competes(r, u)) list(sh, place.members_before, order_key(__ldg(r.base + u)));
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
