// The end of a row in the sparse MLA kernels: from the group of scores to that of sums, and between the blocks of a
// cluster; and how a block's threads part into groups.

// The end of a row in the group of scores: from the maximum and this lane's sum of weights of its heads, what
// turns the sums into the output. The turn of the hand is the row's last.
__device__ __forceinline__ void end_row(const Arguments& a, const Shared& s, const Item& item, const float (&m)[2],
                                        const float (&total)[2], u32 hand, u32 parity) {
    u32 lane = threadIdx.x % 32, warp = threadIdx.x % GROUP / 32, g = lane / 4, c = lane % 4;
    float* sums = s.floats(s.maxima) + 64 * hand;
#if OWN_MAXIMA
    // Maxima go where weights were, and sums where the group of sums has read the last maxima.
    float* own_maxima = s.floats(s.weights + hand * WEIGHT_BYTES);
    barrier_wait(s.taken + 8 * hand, parity);
#endif
#pragma unroll
    for (int h = 0; h < LANE_HEADS; h++) {
        float sum = lanes_sum(total[h]);
        if (speaks(g, c)) {
            sums[lane_head(g, c, h) * 4 + warp] = sum;
#if OWN_MAXIMA
            own_maxima[lane_head(g, c, h) * 4 + warp] = m[h];
#endif
        }
    }
    group_sync(1);
#if !OWN_MAXIMA
    barrier_wait(s.taken + 8 * hand, parity);
#endif
    if (warp == 0) {
#pragma unroll
        for (int h = 0; h < LANE_HEADS; h++) {
            const u32 local = lane_head(g, c, h);
            float4 x = *(const float4*)(sums + local * 4);
            float most = m[h];
#if OWN_MAXIMA
            most = sums_in_common(x, *(const float4*)(own_maxima + local * 4));
#endif
            float sum = (x.x + x.y) + (x.z + x.w), weight = 1;
#if CLUSTER > 1
            s.floats(s.stats)[local] = most;
            s.floats(s.stats)[local + 16] = sum;
#else
            // A sum of weights is NaN when a row holds NaN, and must stay so.
            bool some = most > minus_inf() || sum != sum;
            float lse = some ? most + log2_of(sum) : minus_inf();
            weight = some ? 1 / sum : 0.f;
            int head = item.head0 + local;
            if (head < a.heads) {
#if HAS_SINK
                if (some) weight /= 1 + exp2_of(a.sink[head] * LOG2E - lse);
#endif
                if (speaks(g, c)) a.lse[item.row * a.heads + head] = lse * LN2;
            }
#endif
            if (speaks(g, c)) s.floats(s.factors)[16 * hand + local] = weight;
        }
    }
    warp_arrive(s.ready_at(hand, warp), lane == 0);
}

#if CLUSTER > 1
// Joins the blocks of a cluster: what they left in the ring and in stats. They take turns at four columns of a head. The
// groups of scores and sums.
__device__ void join(const Arguments& a, const Shared& s, u32 rank) {
    Item item(a, blockIdx.x / CLUSTER);
    for (int i = rank * 2 * GROUP + threadIdx.x; i < 16 * 128; i += CLUSTER * 2 * GROUP) {
        int local = i / 128, head = item.head0 + local, column = i % 128 * 4;
        float m[CLUSTER], most = minus_inf(), total = 0;
#pragma unroll
        for (u32 b = 0; b < CLUSTER; b++) {
            m[b] = load_cluster(in_block(s.stats + 4 * local, b));
            most = fmaxf(most, m[b]);
        }
        float lift = most == minus_inf() ? 0.f : most;
        float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll
        for (u32 b = 0; b < CLUSTER; b++) {
            float w = exp2_of(m[b] - lift);
            total += w * load_cluster(in_block(s.stats + 4 * (local + 16), b));
            float4 x = load_cluster4(in_block(s.ring + 4 * (local * O_PITCH + column), b));
            sum.x += w * x.x;
            sum.y += w * x.y;
            sum.z += w * x.z;
            sum.w += w * x.w;
        }
        bool some = most > minus_inf() || total != total;
        float lse = some ? lift + log2_of(total) : minus_inf();
        float weight = some ? 1 / total : 0.f;
        if (head < a.heads) {
#if HAS_SINK
            if (some) weight /= 1 + exp2_of(a.sink[head] * LOG2E - lse);
#endif
            if (column == 0) a.lse[item.row * a.heads + head] = lse * LN2;
            uint2 both = make_uint2(pair(sum.x * weight, sum.y * weight), pair(sum.z * weight, sum.w * weight));
            *(uint2*)(a.out + item.row * a.out_row + head * a.out_head + column) = both;
        }
    }
}
#endif

// What every thread of a block does at its end; group: its warpgroup, 2 the one that only copied.
__device__ __forceinline__ void leave(const Arguments& a, const Shared& s, u32 rank, u32 group) {
#if CLUSTER > 1
    cluster_sync();
    if (group != 2) join(a, s, rank);
    cluster_sync();  // nobody leaves while its shared memory is read
#endif
}

// What a kernel is but for its arguments.
__device__ __forceinline__ void run_block(const Arguments& a, char* memory) {
    Shared s(memory);
    u32 rank = 0;
#if CLUSTER > 1
    rank = cluster_rank();
#endif
    if (threadIdx.x == 0) s.init();
    wait_for_earlier();
    __syncthreads();
    // 168 registers a thread at the start; what copying does not need, the queries in registers do.
    u32 group = threadIdx.x / GROUP;
    if (group == 2) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
        copies(a, s, rank);
        leave(a, s, rank, 2);
    } else if (group == 1) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(SUMS_REGISTERS));
        sums(a, s);
        leave(a, s, rank, 1);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(SCORES_REGISTERS));
        scores(a, s);
        leave(a, s, rank, 0);
    }
}
