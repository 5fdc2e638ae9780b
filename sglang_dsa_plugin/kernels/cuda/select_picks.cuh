// Part of select.cu and select_many.cu: where a row's picks go, and those that no score decides.

struct Target {
    int* out;
    int* slots_out;               // where slots go while positions go to out
    int offset;
    const void* table;            // the page table, and where the row's entries begin
    long long table_row;
    bool wide;                    // it is int64
    int first_page;               // where a block has entries of the table in its memory: the first of them
};

// wide: requests (8), offsets (16) and the table (4) are int64.
__device__ __forceinline__ Target target_of(int* out, int* slots_out, const void* table, long long table_stride,
                                            const void* requests, const void* offsets, long long row, int k, int wide) {
    Target to;
    to.out = out + row * k;
    to.slots_out = slots_out + row * k;
    to.offset = offsets == nullptr ? 0 : load_int(offsets, row, wide & 16);
    to.table = table;
    to.table_row = WRITE != POSITIONS ? load_int(requests, row, wide & 8) * table_stride : 0;
    to.wide = wide & 4;
    return to;
}

__device__ __forceinline__ int page_of(const Target& to, int i) { return load_int(to.table, to.table_row + i, to.wide); }

__device__ __forceinline__ int slot_of(const Target& to, u32 p) { return page_of(to, p / PAGE) * PAGE + p % PAGE; }

__device__ __forceinline__ void put(const Target& to, int i, int position, int slot) {
    to.out[i] = WRITE == SLOTS ? slot : position;
    if (WRITE == BOTH) to.slots_out[i] = slot;
}

// All of a row not longer than k, else the forced ones. first, step: the places of this thread.
__device__ __forceinline__ void put_undecided(const Target& to, int length, int k, int init, int local, int first,
                                              int step) {
    if (length > k) {
#pragma unroll 1
        for (int i = first; i < init + local; i += step) {
            const int p = i < init ? i : length - local + i - init;
            put(to, i < init ? i : k - local + i - init, p + to.offset, WRITE != POSITIONS ? slot_of(to, p) : -1);
        }
        return;
    }
    // A few places at a time: their pages are on the way together.
#pragma unroll 1
    for (; first < k; first += 4 * step) {
        int slot[4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const int p = first + j * step;
            slot[j] = WRITE != POSITIONS && p < length ? slot_of(to, p) : -1;
        }
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const int p = first + j * step;
            if (p < k) put(to, p, p < length ? p + to.offset : -1, slot[j]);
        }
    }
}
