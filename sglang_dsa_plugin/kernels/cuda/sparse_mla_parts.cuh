// What the sparse MLA kernels for Hopper share (sparse_mla.cu, sparse_mla_fp8.cu): synchronisation and matrix instructions,
// and the ring of tiles; with sparse_mla_softmax.cuh and sparse_mla_end.cuh. The including file defines
//
//   STAGE_BYTES, RING_BYTES             of a tile in the ring, and of the whole ring
//   SLOTS                               places of the ring that are filled and freed each for itself
//   FULL_ARRIVALS, EMPTY_ARRIVALS       that say a place has been filled, and that it may be again
//   SCORES_REGISTERS, SUMS_REGISTERS    of a thread of those groups
//   PICKS_FIRST                         whether the 16 of a score's product are picks; else they are heads
//
// and the functions that are declared below the structures.
//
// Compile-time: CLUSTER, STAGES, HEADS, HAS_LENGTHS, HAS_SINK, SLOTS64, LANES_ARRIVE, READERS_FENCE, OWN_MAXIMA
// (kernels/cuda/sparse_mla.py). OWN_MAXIMA: every warp of scores has a maximum of its own (sparse_mla_streams.cuh).
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

// Before a warp gives back what bulk copies fill next: the copying group has the fence that this needs, between its wait
// and its copies. READERS_FENCE puts one here, too, behind the reads themselves (docs/racecheck.md).
__device__ __forceinline__ void done_reading() {
    if (READERS_FENCE) fence_bulk();
}

// Arrivals of a copying warp at a place of the ring: with copies of 16 bytes each lane's, and its word that what comes with
// them has been written; with bulk copies, which the barrier counts by their bytes, that word alone speaks for all.
#define WARP_COPIES 33

__device__ __forceinline__ void warp_arrive_copied(u32 at, bool first) {
    __syncwarp();
    if (LANES_ARRIVE) barrier_arrive(at, first ? 2 : 1);
    else if (first) barrier_arrive(at, WARP_COPIES);
}

#define READY_PARTS (OWN_MAXIMA ? 4 : 1)  // of a tile, whose weights are handed over each for itself

struct Info { u64 mask; u32 last, none; };

// Addresses in shared memory. The ring has STAGES tiles; weights, factors, maxima, ready and taken have two, so that
// what is written for one tile does not overtake the reading of the one before.
struct Shared {
    u32 ring;     // tiles; a row's queries take a turn, too
    u32 weights;  // [2][16 heads] of 64 rows, in the form of store_weights
    u32 factors;  // f32 [2][16 heads]: of what was summed so far; at a row's end of the sums
    u32 maxima;   // f32 [2][16 heads][4 warps], with OWN_MAXIMA [2][4 warps][16 heads]
    u32 stats;    // f32 [maximum, sum of weights][16 heads]
    u32 info;     // Info [SLOTS]
    u32 full, empty, ready, taken;
    u32 firsts;   // f32 [16 heads][4 warps], with OWN_MAXIMA: maxima of a row's first tile
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
        taken = ready + 16 * READY_PARTS;
        firsts = taken + 16;
    }
    // The barrier that tells of the weights of a turn's tile, or of its quarter that a warp made.
    __device__ __forceinline__ u32 ready_at(u32 hand, u32 warp) const {
        return ready + 8 * (READY_PARTS * hand + warp % READY_PARTS);
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
            for (u32 k = 0; k < READY_PARTS; k++) barrier_init(ready_at(i, k), 4 / READY_PARTS * WARP_ARRIVALS);
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
    const TensorMap* map;  // of the rows, where the tensor unit copies them
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

#include "sparse_mla_softmax.cuh"
#if OWN_MAXIMA
#include "sparse_mla_streams.cuh"
#endif
#include "sparse_mla_end.cuh"
