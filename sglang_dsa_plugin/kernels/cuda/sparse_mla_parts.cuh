// What the sparse MLA kernels for Hopper share (sparse_mla.cu, sparse_mla_fp8.cu): synchronisation and matrix instructions,
// the ring of tiles, and what happens to the sums at a row's end. The including file defines
//
//   STAGE_BYTES                         of a tile in the ring
//   SLOTS                               places of the ring that are filled and freed each for itself
//   FULL_ARRIVALS, EMPTY_ARRIVALS       that say a place has been filled, and that it may be again
//   SCORES_REGISTERS, SUMS_REGISTERS    of a thread of those groups
//   RING_BYTES                          of the whole ring
//   PICKS_FIRST                         whether the 16 of a score's product are picks, and the 8 heads; else heads are the 16
//
// and the functions that are declared below the structures.
//
// Compile-time: CLUSTER, STAGES, HEADS, HAS_LENGTHS, HAS_SINK, SLOTS64, LANES_ARRIVE (kernels/cuda/sparse_mla.py).
// HEADS: 16, or 8 where a row of queries has no more; products have 16 all the same.

#include "warps.cuh"

typedef unsigned short u16;

#define TILE 64
#define QUERY_BYTES 1152                   // of a head's query, which is copied through the ring, too
#define GROUP 128                          // threads of a warpgroup: scores, sums, copies
#define WEIGHT_BYTES (16 * 64 * 4 + 16 * 32)  // of a tile: 16 heads, and some bytes a head that keep banks apart
#define LOG2E 1.4426950408889634f
#define LN2 0.6931471805599453f
#define O_PITCH 516                        // floats of a head's sums when a cluster joins them

#if SLOTS64
typedef long long slot_t;
#else
typedef int slot_t;
#endif

// A warp tells a barrier, or two, that all its lanes are done with what lies before; `first` is true in one of them. Its
// arrival says nothing of the other lanes' loads and stores, which __syncwarp() orders before it. compute-sanitizer's
// racecheck does not follow that, and reports as many races without it as with it. It follows lanes that arrive each for
// itself (LANES_ARRIVE), which costs prefill 1 to 2 % and clusters nothing. Barriers count WARP_ARRIVALS for a warp.
#if LANES_ARRIVE
#define WARP_ARRIVALS 32
#else
#define WARP_ARRIVALS 1
#endif

__device__ __forceinline__ void warp_arrive(u32 at, bool first) {
    __syncwarp();
    if (LANES_ARRIVE || first) barrier_arrive(at);
}

__device__ __forceinline__ void warp_arrive(u32 at, u32 other, bool first) {
    __syncwarp();
    if (LANES_ARRIVE || first) {
        barrier_arrive(at);
        barrier_arrive(other);
    }
}

// Arrivals of a copying warp at a place of the ring: with copies of 16 bytes each lane's, and its word that what comes with
// them has been written; with bulk copies, which the barrier counts by their bytes, that word alone speaks for all.
#define WARP_COPIES 33

__device__ __forceinline__ void warp_arrive_copied(u32 at, bool first) {
    __syncwarp();
    if (LANES_ARRIVE) barrier_arrive(at, first ? 2 : 1);
    else if (first) barrier_arrive(at, WARP_COPIES);
}

struct Info { u64 mask; u32 last, none; };

// Addresses in shared memory. The ring has STAGES tiles; weights, factors, maxima, ready and taken have two, so that
// what is written for one tile does not overtake the reading of the one before.
struct Shared {
    u32 ring;     // tiles; a row's queries take a turn, too
    u32 weights;  // [2][16 heads] of 64 rows, in the form of store_weights
    u32 factors;  // f32 [2][16 heads]: of what was summed so far; at a row's end of the sums
    u32 maxima;   // f32 [2][16 heads][4 warps]
    u32 stats;    // f32 [maximum, sum of weights][16 heads]
    u32 info;     // Info [SLOTS]
    u32 full, empty, ready, taken;
    char* memory;

    __device__ __forceinline__ Shared(char* at) : memory(at) {
        ring = shared_address(at);
        weights = ring + RING_BYTES;
        factors = weights + 2 * WEIGHT_BYTES;
        maxima = factors + 2 * 64;
        stats = maxima + 2 * 16 * 16;
        info = stats + 32 * 4;
        full = info + SLOTS * 16;
        empty = full + SLOTS * 8;
        ready = empty + SLOTS * 8;
        taken = ready + 16;
    }
    __device__ __forceinline__ float* floats(u32 address) const { return (float*)(memory + (address - ring)); }
    __device__ __forceinline__ Info* infos() const { return (Info*)(memory + (info - ring)); }

    // One thread, before all others go on.
    __device__ __forceinline__ void init() const {
        for (int i = 0; i < SLOTS; i++) {
            barrier_init(full + 8 * i, FULL_ARRIVALS);
            barrier_init(empty + 8 * i, EMPTY_ARRIVALS);
        }
        for (int i = 0; i < 2; i++) {
            barrier_init(ready + 8 * i, 4 * WARP_ARRIVALS);
            barrier_init(taken + 8 * i, 4 * WARP_ARRIVALS);
        }
    }
};

struct Arguments {
    const u16* q;
    const u16* q_rope;
    const char* rows;
    const slot_t* slots;
    const int* lengths;
    const float* sink;
    u16* out;
    float* lse;
    long long q_row, q_head, rope_row, rope_head, kv_stride, slots_row, out_row, out_head;
    int count, heads, picks, items;
    float scale_log2;
};

// A thread of the copying group. A warp copies 16 of the 64 rows of a tile, eight lanes 128 consecutive bytes of a row.
struct Copier {
    u32 lane, warp, piece, own;  // piece: its 16 of the 128 bytes; own: its row of four
    __device__ __forceinline__ Copier() {
        lane = threadIdx.x % 32;
        warp = threadIdx.x % GROUP / 32;
        piece = lane % 8 * 16;
        own = lane / 8;
    }
};

// What the including file adds: how two of a tile's weights are left for the group of sums, those of a row and the next or,
// with PICKS_FIRST, of a head and the next; and the groups.
__device__ __forceinline__ void store_weights(u32 weights, u32 head, u32 row, float p0, float p1);
__device__ void copies(const Arguments& a, const Shared& s, u32 rank);
__device__ void scores(const Arguments& a, const Shared& s);
__device__ void sums(const Arguments& a, const Shared& s);

// A ring position: stage and the parity of its next completed phase.
template <u32 N>
struct Turn {
    u32 stage, parity;
    __device__ __forceinline__ void next() {
        if (++stage == N) { stage = 0; parity ^= 1; }
    }
};

// What a block, or a block of a cluster, works on: heads head0 .. head0 + 15 of a row.
struct Item {
    long long row;
    int head0;
    __device__ __forceinline__ Item(const Arguments& a, int item) {
        int tiles = (a.heads + 15) / 16;
        row = item / tiles;
        head0 = item % tiles * 16;
    }
};

// The barrier counts this thread once all its copies so far are there.
__device__ __forceinline__ void arrive_when_copied(u32 at) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(at) : "memory");
}

// What the group of copies walks along for one row: the row's picks from `at` on, a tile's 16 for each warp: those of
// its quarter of the tile.
struct Picks {
    const slot_t* slots;
    int at, limit, tiles;
    slot_t ahead;

    __device__ __forceinline__ Picks(const Arguments& a, const Item& item, u32 rank, u32 quarter, u32 lane) {
        slots = a.slots + item.row * a.slots_row;
        int picks = a.picks;
        tiles = tiles_of(picks);
        at = rank * tiles * TILE + 16 * quarter + lane % 16;
        ahead = at < picks ? slots[at] : (slot_t)-1;
#if HAS_LENGTHS
        // Of a full row the first slots are on their way while the length is.
        picks = max(0, min(picks, a.lengths[item.row]));
        if (tiles_of(picks) != tiles) {
            tiles = tiles_of(picks);
            at = rank * tiles * TILE + 16 * quarter + lane % 16;
            ahead = at < picks ? slots[at] : (slot_t)-1;
        }
#endif
        int first = rank * tiles * TILE;
        limit = min(picks, first + tiles * TILE);
        tiles = max(1, min(tiles, (limit - first + TILE - 1) / TILE));
        if (at >= limit) ahead = -1;
    }

    // Whole tiles, as many to each block of the cluster; a block without any takes one that is empty.
    __device__ __forceinline__ static int tiles_of(int picks) {
        return max(1, (picks + TILE * CLUSTER - 1) / (TILE * CLUSTER));
    }

    // The slot of this lane's pick, or -1; the next tile's is on its way then.
    __device__ __forceinline__ int next(const Arguments& a) {
        slot_t slot = ahead;
        at += TILE;
        ahead = at < limit ? slots[at] : (slot_t)-1;
        return slot >= 0 && slot < a.count ? (int)slot : -1;
    }
};

// Four of 16 heads' queries as rows of the ring, heads `local` by this lane; their 16-byte pieces are swapped as those of
// a tile. Heads that do not exist are zeros; nothing is written for them.
__device__ __forceinline__ void copy_queries(const Arguments& a, const Item& item, u32 to, u32 local, u32 piece) {
    bool real = item.head0 + local < a.heads;
    int head = real ? item.head0 + local : 0;
    to += local * QUERY_BYTES + (piece ^ local % 8 * 16);
    const char* from = (const char*)(a.q + item.row * a.q_row + head * a.q_head) + piece;
#pragma unroll
    for (int j = 0; j < 8; j++) copy16(to + 128 * j, from + 128 * j, real);
    from = (const char*)(a.q_rope + item.row * a.rope_row + head * a.rope_head) + piece;
    copy16(to + 1024, from, real);
}

// Lane 4 g + c of a warp has, of a tile's scores of the warp's 16 rows, those of heads g and g + 8 and of rows 8 n + 2 c and
// the next; with PICKS_FIRST those of heads 2 c and the next and of rows g and g + 8.
#if PICKS_FIRST
#define LANE_HEADS 2
#define LANE_TILES 1  // of 8 columns of products: of n
#define LANE_STEP 4   // from a lane of a head to the next
#else
#define LANE_HEADS (HEADS / 8)
#define LANE_TILES 2
#define LANE_STEP 1
#endif

__device__ __forceinline__ u32 lane_head(u32 g, u32 c, int h) { return PICKS_FIRST ? 2 * c + h : g + 8 * h; }

// The row of d[0][0], and how far behind it that of d[n][j] is.
__device__ __forceinline__ u32 lane_row(u32 g, u32 c) { return PICKS_FIRST ? g : 2 * c; }
__device__ __forceinline__ int further_row(int n, int j) { return PICKS_FIRST ? j / 2 * 8 : 8 * n + j % 2; }

// The lane that speaks for its heads.
__device__ __forceinline__ bool speaks(u32 g, u32 c) { return (PICKS_FIRST ? g : c) == 0; }

// Over the lanes of a head.
__device__ __forceinline__ float lanes_sum(float x) {
#pragma unroll
    for (int i = LANE_STEP; i < (PICKS_FIRST ? 32 : 4); i *= 2) x += __shfl_xor_sync(~0u, x, i);
    return x;
}

// What the group of scores keeps of a row of queries between tiles.
struct Softmax {
    float m[2], total[2];    // running maximum, and the sum of this lane's weights, of each of its heads
    float d[LANE_TILES][4];  // scores of the last tile

    __device__ __forceinline__ float most(int h) const {
        if constexpr (PICKS_FIRST) return fmaxf(d[0][h], d[0][2 + h]);
        return fmaxf(fmaxf(d[0][2 * h], d[0][2 * h + 1]), fmaxf(d[LANE_TILES - 1][2 * h], d[LANE_TILES - 1][2 * h + 1]));
    }
};

// One tile's weights, in steps that can stand between products: what one waits for comes while products run.
struct Steps {
    const Shared& s;
    Softmax& own;
    u32 hand, warp, g, c;
    float best[2], lift[2];

    __device__ __forceinline__ float* maxima() { return s.floats(s.maxima) + 64 * hand; }

    template <int STEP>
    __device__ __forceinline__ void run() {
        if constexpr (STEP == 0) {
#pragma unroll
            for (int h = 0; h < LANE_HEADS; h++) best[h] = own.most(h);
        }
        if constexpr (STEP == 1 || STEP == 2) {
#pragma unroll
            for (int h = 0; h < LANE_HEADS; h++) {
                best[h] = fmaxf(best[h], __shfl_xor_sync(~0u, best[h], LANE_STEP * STEP));
                if constexpr (PICKS_FIRST && STEP == 2) best[h] = fmaxf(best[h], __shfl_xor_sync(~0u, best[h], 16));
            }
        }
        if constexpr (STEP == 3) {
#pragma unroll
            for (int h = 0; h < LANE_HEADS; h++)
                if (speaks(g, c)) maxima()[lane_head(g, c, h) * 4 + warp] = best[h];
        }
        if constexpr (STEP == 4) group_sync(1);
        if constexpr (STEP == 5) {
#pragma unroll
            for (int h = 0; h < LANE_HEADS; h++) {
                float4 x = *(const float4*)(maxima() + lane_head(g, c, h) * 4);
                best[h] = fmaxf(own.m[h], fmaxf(fmaxf(x.x, x.y), fmaxf(x.z, x.w)));
            }
        }
        if constexpr (STEP == 6) {
#pragma unroll
            for (int h = 0; h < LANE_HEADS; h++) {
                lift[h] = best[h] == minus_inf() ? 0.f : best[h];
                float factor = exp2_of(own.m[h] - lift[h]);
                own.m[h] = best[h];
                own.total[h] *= factor;
                if (warp == 0 && speaks(g, c)) s.floats(s.factors)[16 * hand + lane_head(g, c, h)] = factor;
            }
        }
        if constexpr (STEP >= 7 && STEP < 7 + LANE_HEADS * LANE_TILES) {
            constexpr int i = STEP - 7;
            u32 to = s.weights + hand * WEIGHT_BYTES;
            if constexpr (PICKS_FIRST) {
                float p0 = exp2_of(own.d[0][2 * i] - lift[0]), p1 = exp2_of(own.d[0][2 * i + 1] - lift[1]);
                own.total[0] += p0;
                own.total[1] += p1;
                store_weights(to, 2 * c, 16 * warp + 8 * i + g, p0, p1);
            } else {
                constexpr int h = i / 2, n = i % 2;
                float p0 = exp2_of(own.d[n][2 * h] - lift[h]), p1 = exp2_of(own.d[n][2 * h + 1] - lift[h]);
                own.total[h] += p0 + p1;
                store_weights(to, g + 8 * h, 16 * warp + 8 * n + 2 * c, p0, p1);
            }
        }
        if constexpr (STEP == 11) warp_arrive(s.ready + 8 * hand, g == 0 && c == 0);
    }
    // What may stand ahead of the products of part I: a step as early as the one before allows, for the sums wait for these
    // weights, and the tile stays in the ring until then.
    template <int I>
    __device__ __forceinline__ void run_at() {
        if constexpr (I < 3) run<I>();
        if constexpr (I == 2) run<3>();
        if constexpr (I >= 3 && I < 6) run<I + 1>();
        if constexpr (I == 6 || I == 7) {
            run<2 * I - 5>();
            run<2 * I - 4>();
        }
        if constexpr (I == 8) run<11>();
    }
    template <int I = 0>
    __device__ __forceinline__ void run_all() {
        run_at<I>();
        if constexpr (I < 8) run_all<I + 1>();
    }
};

#include "sparse_mla_end.cuh"
