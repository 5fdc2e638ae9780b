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

__device__ __forceinline__ void hand_over(const Shared& s, const Place& place, u32 lane) {
    if (lane == 0) barrier_arrive(place.full(s));
    arrive_when_copied(place.full(s));
}

// What readers of a quarter know it by. One lane; before its word to the barrier.
__device__ __forceinline__ void tell(const Shared& s, const Place& place, u32 mask, bool last) {
    s.infos()[place.slot].mask = mask;
    s.infos()[place.slot].last = last;
}

#if TENSOR_COPIES
// 16 picked rows, by one warp, a row a lane. slot: its lane's, or -1. What is masked has weight 0, and 0 times what lies
// there must be 0: the tensor has no row -1, so zeros come.
__device__ __forceinline__ void copy_quarter(const Arguments& a, const Shared& s, const Place& place, int slot, u32 mask,
                                             bool last, const Copier& me) {
    // What lay there was read, and queries were written, by other means than bulk copies.
    fence_bulk();
    if (me.lane == 0) {
        tell(s, place, mask, last);
        barrier_expect(place.full(s), 16 * ROW_BYTES);
    }
    if (me.lane < 16) copy_row(place.at(s) + me.lane * ROW_BYTES, a.map, slot, place.full(s));
    warp_arrive_copied(place.full(s), me.lane == 0);
}
#else
// The same, 16 bytes a copy: zeros for what is masked.
__device__ __forceinline__ void copy_quarter(const Arguments& a, const Shared& s, const Place& place, int slot, u32 mask,
                                             bool last, const Copier& me) {
    u32 to = place.at(s);
#pragma unroll
    for (int r = 0; r < 4; r++) {
        u32 local = 4 * r + me.own;
        int from_slot = __shfl_sync(~0u, slot, local);
        const char* from = a.rows + max(from_slot, 0) * a.kv_stride + me.piece;
        u32 there = to + local * ROW_BYTES + (me.piece ^ local % 8 * 16);
#pragma unroll
        for (int j = 0; j < 9; j++) copy16(there + 128 * j, from + 128 * j, from_slot >= 0);
    }
    if (me.lane == 0) tell(s, place, mask, last);
    hand_over(s, place, me.lane);
}
#endif

// The copying group.
__device__ void copies(const Arguments& a, const Shared& s, u32 rank) {
    const Copier me;
    int i = blockIdx.x / CLUSTER, step = gridDim.x / CLUSTER;
    if (i >= a.items) return;
    u32 first = 0;  // the warp that copies the queries; the one behind it copies the first quarters, and so on
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
#pragma unroll 1
        for (int t = 0; t < picks.tiles; t++) {
            int slot = picks.next(a);
            u32 mask = __ballot_sync(~0u, slot >= 0) & 0xffff;
            barrier_wait(place.empty(s), place.parity);
            copy_quarter(a, s, place, slot, mask, t == picks.tiles - 1, me);
            place.add(4);
        }
        picks = following;
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
}
