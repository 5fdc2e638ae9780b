// What a thread copies of the rows of a tile, and of the queries (sparse_mla_portable.cu).

// One thread's part of the copies: every COPIERS-th piece of 16 bytes of one row of a tile.
struct Copier {
    const slot_t* slots;
#if !ASKS
    slot_t ahead;      // of this thread's row of the tile that is copied next
#endif
    const char* from;  // of the copies at hand
    u32 to;
    bool real;

    static __device__ __forceinline__ u32 local() { return this_thread() / COPIERS; }
    static __device__ __forceinline__ u32 first() { return this_thread() % COPIERS; }

    // The slot of this thread's row of the tile that begins at pick `at`.
    __device__ __forceinline__ slot_t slot(const Item& item, int at) const {
        at += (int)local();
        return at < item.end ? slots[at] : (slot_t)-1;
    }
    // The slot that `asked` gives SLOTS_AHEAD tiles later, of the tile that begins at pick `at`.
    __device__ __forceinline__ void ask(Shared& s, const Item& item, int at, u32 number) {
#if ASKS
        at += (int)local();
        if (first() == 0)
            copy_few<sizeof(slot_t)>(address(&s.asked[number % ASKED][local()]), slots + at, at < item.end);
#else
        ahead = slot(item, at);
#endif
    }
    __device__ __forceinline__ slot_t asked(const Shared& s, const Item& item, int at, u32 number) const {
#if ASKS
        return at + (int)local() < item.end ? s.asked[number % ASKED][local()] : (slot_t)-1;
#else
        return ahead;
#endif
    }
    // number: of the tile.
    __device__ __forceinline__ void begin(const Arguments& a, Shared& s, slot_t slot, u32 stage, u32 number) {
        real = slot >= 0 && slot < a.count;
        from = a.rows + (real ? (long long)slot : 0) * a.kv_stride + first() * 16;
        if (first() == 0) s.real[number % MARKS][local()] = real;
#if FP8
        to = address(s.packed[stage][local()]) + first() * 16;
#else
        to = address(s.tiles[stage]) + local() * ROW_BYTES + first() * 16;
#endif
    }
    // The copies in COPIES parts. What is masked has weight 0, and 0 times what lies there must be 0: it becomes zeros.
    __device__ __forceinline__ void part(int j) const {
        if ((j + 1) * COPIERS <= ROW_PIECES || (int)first() + j * COPIERS < ROW_PIECES)
            copy16(to + COPIERS * 16 * j, from + COPIERS * 16 * j, real);
    }
    // Those of them that stand ahead of step `step` of `steps`.
    __device__ __forceinline__ void at_step(int step, int steps) const {
#pragma unroll
        for (int j = 0; j < COPIES; j++)
            if (j / COPIES_TOGETHER * COPIES_TOGETHER * steps / COPIES == step) part(j);
    }
    __device__ __forceinline__ void tile(const Arguments& a, Shared& s, slot_t slot, u32 stage, u32 number) {
        begin(a, s, slot, stage, number);
#pragma unroll
        for (int j = 0; j < COPIES; j++) part(j);
        copies_end();
    }
    // The queries, one after the other as rows of tiles. Heads that do not exist are zeros; nothing is written for them.
    __device__ __forceinline__ void queries(const Arguments& a, const Item& item, u32 memory) const {
        u32 row = this_thread() / 8, piece = this_thread() % 8 * 16;
#pragma unroll
        for (int i = 0; i < HEADS / 32; i++) {
            bool real = item.head0 + 32 * i + (int)row < a.heads;
            int head = real ? item.head0 + 32 * i + row : 0;
            u32 there = memory + (32 * i + row) * ROW_BYTES + piece;
            const char* from = (const char*)(a.q + item.row * a.q_row + head * a.q_head) + piece;
#pragma unroll
            for (int j = 0; j < 8; j++) copy16(there + 128 * j, from + 128 * j, real);
            from = (const char*)(a.q_rope + item.row * a.rope_row + head * a.rope_head) + piece;
            copy16(there + 1024, from, real);
        }
        copies_end();
    }
};
