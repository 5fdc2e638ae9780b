// Part of select.cu and select_many.cu: a short row's scores in the registers of one block, and a line from scores to bins.

#define BIN_0 8388608.0f      // 2^23: from here on floats are whole numbers, and their last bits the bin
#define LAST_BIN (BIN_0 + (ROW_BINS - 1))

// Threads that hold scores. More warps would each do over again what every one has to, as ranking.
#define HOLDERS (THREADS < 512 ? THREADS : 512)
// From the group of four in which a row begins to its end, at most: room for scores, and for pages.
#define SHORT_BY_PAGES (WRITE == POSITIONS ? 1LL << 30 : (ROOM_FOR_PAGES - 2LL) * PAGE)
#define SHORT (int)(4 * VECTORS * HOLDERS < SHORT_BY_PAGES ? 4 * VECTORS * HOLDERS : SHORT_BY_PAGES)

// Whether one block alone takes such a row.
__device__ __forceinline__ bool is_short(const Stretch& r, int want) {
    return r.end - (r.first & -4) <= SHORT && (SHORT <= ROOM_FOR_PICKS || want <= ROOM_FOR_PICKS);
}

// The scores of this thread, V vectors of four; NaN where none competes. A warp's vectors lie together, 32 in a step.
// HALVES: a row of half as many or fewer takes half the steps.
template <int V, bool HALVES>
struct Scores {
    float x[4 * V];
    bool whole;  // in V steps: the same for all threads

    // Sets r.vector and r.steps.
    __device__ __forceinline__ void load(Stretch& r) {
        const int vector0 = r.first / 4, vectors = (r.end + 3) / 4 - vector0;
        whole = !HALVES || vectors > V / 2 * HOLDERS;
        const int most = whole ? V : V / 2, begin = (int)threadIdx.x / 32 * 32 * most;
        r.vector = vector0 + begin + threadIdx.x % 32;
        r.steps = max(0, min(most, (vectors - begin + 31) / 32));
        const int left = (r.end + 3) / 4 - r.vector;
        const float4* from = (const float4*)r.base + r.vector;
        const float none = __int_as_float(0x7fc00000);
#pragma unroll
        for (int s = 0; s < V; s++) {
            float4 four = make_float4(none, none, none, none);
            if (32 * s < left && (whole || s < V / 2)) four = load16(from + 32 * s);
            x[4 * s] = four.x, x[4 * s + 1] = four.y, x[4 * s + 2] = four.z, x[4 * s + 3] = four.w;
        }
    }

    __device__ __forceinline__ void cut_ends(const Stretch& r) {
        const int u = 4 * (r.vector - (int)(threadIdx.x & 31));
        if (u >= r.first && u + 128 * r.steps <= r.end) return;  // all of the warp's compete
#pragma unroll
        for (int i = 0; i < 4 * V; i++)
            if (!competes(r, 4 * (r.vector + 32 * (i / 4)) + i % 4)) x[i] = __int_as_float(0x7fc00000);
    }

    // f(step), which uses x[4 * step] and the three behind it.
    template <class F>
    __device__ __forceinline__ void steps(F f) const {
#pragma unroll
        for (int s = 0; s < V; s++) {
            if (HALVES && s == V / 2 && !whole) break;
            f(s);
        }
    }

    // x[e] without memory.
    __device__ __forceinline__ float at(int e) const {
        float y[4 * V];
#pragma unroll
        for (int i = 0; i < 4 * V; i++) y[i] = x[i];
#pragma unroll
        for (int n = 2 * V; n > 0; n /= 2)
#pragma unroll
            for (int i = 0; i < 2 * V; i++)
                if (i < n) y[i] = e & n ? y[i + n] : y[i];
        return y[0];
    }

    // To shared memory, if it has room, from where each thread reads its own again.
    __device__ __forceinline__ void keep(Shared& sh, Stretch& r) const {
        const int vector0 = r.first / 4;
        if (16 * ((r.end + 3) / 4 - vector0) > (int)sizeof(sh.ring)) return;
#pragma unroll
        for (int s = 0; s < V; s++)
            if (s < r.steps && 4 * (r.vector + 32 * s) < r.end)
                ((float4*)sh.ring)[r.vector - vector0 + 32 * s] =
                    make_float4(x[4 * s], x[4 * s + 1], x[4 * s + 2], x[4 * s + 3]);
        r.base = (float*)sh.ring - 4 * vector0;
    }
};

// Scores to bins: the last bits of x * scale + bias, rounded, which keeps the order. Bin 0 has what lies below, and NaN.
struct Line {
    float scale, bias;
    bool good;

    __device__ __forceinline__ float height(float x) const { return __fmaf_rn(x, scale, bias); }

    __device__ __forceinline__ float bin(float x) const { return fminf(fmaxf(height(x), BIN_0), LAST_BIN); }
};

// By all threads. From the lowest of the groups' best, of as many scores as leave some groups wholly below the k-th
// best, almost surely; to the highest of the pairs' lesser, so that a single outlier does not stretch the line.
template <int V, bool HALVES>
__device__ __forceinline__ Line line_of(Shared& sh, const Scores<V, HALVES>& scores, const Stretch& r, int want) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x / 32, rivals = r.end - r.first;
    const float none = __int_as_float(0x7fc00000);
    int lowest = INT_MAX, highest = INT_MIN;
    if (r.steps > 0) {
        float low = none, top = none, best[V];
        if (2 * want > rivals) {
            scores.steps([&](int s) {
                const float* y = &scores.x[4 * s];
                const float a = fminf(y[0], y[1]), b = fminf(y[2], y[3]);
                top = fmaxf(top, fmaxf(a, b)), low = fminf(low, fminf(a, b));
            });
        } else {
#pragma unroll
            for (int s = 0; s < V; s++) best[s] = none;
            scores.steps([&](int s) {
                const float* y = &scores.x[4 * s];
                best[s] = fmaxf(fmaxf(y[0], y[1]), fmaxf(y[2], y[3]));
                top = fmaxf(top, fmaxf(fminf(y[0], y[1]), fminf(y[2], y[3])));
            });
#pragma unroll
            for (int o = 1; o < V; o *= 2) {
                if (4 * o * want > rivals) break;
#pragma unroll
                for (int s = 0; s < V; s += 2 * o) best[s] = fmaxf(best[s], best[s + o]), best[s + o] = none;
            }
#pragma unroll
            for (int s = 0; s < V; s++) low = fminf(low, best[s]);
        }
        lowest = __reduce_min_sync(ALL, low == low ? order_key(low) : INT_MAX);
        highest = __reduce_max_sync(ALL, order_key(top));
    }
    if (lane == 0) sh.lowest[warp] = lowest, sh.highest[warp] = highest;
    __syncthreads();
    lowest = __reduce_min_sync(ALL, lane < WARPS ? sh.lowest[lane] : INT_MAX);
    highest = __reduce_max_sync(ALL, lane < WARPS ? sh.highest[lane] : INT_MIN);
    const float low = score_of(lowest), top = score_of(highest);
    Line line;
    line.scale = __fdividef(ROW_BINS - 4, top - low);
    line.bias = __fmaf_rn(-low, line.scale, BIN_0 + 2.0f);
    line.good = low < top && line.scale > 0.0f && line.scale < __int_as_float(INF_KEY);
    return line;
}
