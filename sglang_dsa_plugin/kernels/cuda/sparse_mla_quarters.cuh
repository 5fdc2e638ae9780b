// The ring of sparse_mla.cu and the group that fills it. A place takes 16 rows, a quarter of a tile, or the queries of 16
// heads. Each is filled and freed for itself, so copies come in while the rest of a tile is still read, and a row's
// queries take no more room than they need. Places are numbered through, over all tiles and rows of queries; one of the
// four copying warps fills every fourth.

struct Place {
    u32 slot, parity;
    __device__ __forceinline__ void add(u32 n) {
        slot += n;
        if (slot >= SLOTS) { slot -= SLOTS; parity ^= 1; }
    }
    __device__ __forceinline__ Place plus(u32 n) const {
        Place p = *this;
        p.add(n);
        return p;
    }
    __device__ __forceinline__ u32 at(const Shared& s) const { return s.ring + slot * SLOT_BYTES; }
    __device__ __forceinline__ u32 full(const Shared& s) const { return s.full + 8 * slot; }
    __device__ __forceinline__ u32 empty(const Shared& s) const { return s.empty + 8 * slot; }
};

// 16 picked rows, by one warp. slot: its lane's, or -1.
__device__ __forceinline__ void copy_quarter(const Arguments& a, u32 to, int slot, const Copier& me) {
#pragma unroll
    for (int r = 0; r < 4; r++) {
        u32 local = 4 * r + me.own;
        int from_slot = __shfl_sync(~0u, slot, local);
        const char* from = a.rows + max(from_slot, 0) * a.kv_stride + me.piece;
        u32 there = to + local * ROW_BYTES + (me.piece ^ local % 8 * 16);
#pragma unroll
        for (int j = 0; j < 9; j++) copy16(there + 128 * j, from + 128 * j, from_slot >= 0);
    }
}

__device__ __forceinline__ void hand_over(const Shared& s, const Place& place, u32 lane) {
    if (lane == 0) barrier_arrive(place.full(s));
    arrive_when_copied(place.full(s));
}

// The copying group.
__device__ void copies(const Arguments& a, const Shared& s, u32 rank) {
    const Copier me;
    int i = blockIdx.x / CLUSTER, step = gridDim.x / CLUSTER;
    if (i >= a.items) return;
    u32 first = 0;  // the warp that copies the queries; the one behind it copies the first quarters, and so on
    Info* info = s.infos();
    Place place = {me.warp, 1};
    Picks picks(a, Item(a, i), rank, (me.warp - 1) % 4, me.lane);
    for (; i < a.items; i += step, first = (first + 1) % 4) {
        // The next item's first picks come while this one's rows do.
        Picks following(a, Item(a, min(i + step, a.items - 1)), rank, (me.warp - first - 2) % 4, me.lane);
        if (me.warp == first) {
            Item item(a, i);
            barrier_wait(place.empty(s), place.parity);
#pragma unroll
            for (int r = 0; r < 4; r++) copy_queries(a, item, place.at(s), 4 * r + me.own, me.piece);
            hand_over(s, place, me.lane);
            place.add(4);
        }
        for (int t = 0; t < picks.tiles; t++) {
            int slot = picks.next(a);
            u32 mask = __ballot_sync(~0u, slot >= 0) & 0xffff;
            barrier_wait(place.empty(s), place.parity);
            // What is masked has weight 0, and 0 times what lies there must be 0: it becomes zeros.
            copy_quarter(a, place.at(s), slot, me);
            if (me.lane == 0) {
                info[place.slot].mask = mask;
                info[place.slot].last = t == picks.tiles - 1;
            }
            hand_over(s, place, me.lane);
            place.add(4);
        }
        picks = following;
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
}
