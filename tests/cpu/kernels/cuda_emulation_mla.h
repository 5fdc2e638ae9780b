// What sparse_mla.cu takes of a GPU beyond cuda_emulation.h, which stands before it: barriers in shared memory, copies
// that arrive when they like, matrix operands and products, numbers in 16 bits.

static int grid_now;  // clusters
#undef gridDim
#define gridDim (Index{(u32)(grid_now * CLUSTER)})
#define blockIdx (Index{(u32)(row_now * CLUSTER + now->block)})

struct float2 { float x, y; };
struct uint2 { u32 x, y; };
inline float2 make_float2(float x, float y) { return {x, y}; }
inline uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
inline float __uint_as_float(u32 x) { return __int_as_float(x); }
inline u32 __float_as_uint(float x) { return __float_as_int(x); }
inline bool __any_sync(u32 all, bool x) { return __ballot_sync(all, x) != 0; }
inline float __shfl_xor_sync(u32, float x, int bits) {
    return __int_as_float(exchange(__float_as_int(x))[now->thread % 32 ^ bits]);
}

inline float __shfl_sync(u32, float x, int lane) { return __int_as_float(exchange(__float_as_int(x))[lane % 32]); }
#define __align__(bytes) __attribute__((aligned(bytes)))

// An address is a place in the block's shared memory; that of another block has its number and one in the upper bits.
template <class T>
inline T& at_address(u32 at) {
    if (at + sizeof(T) > SHARED_BYTES || at % sizeof(T)) die("not an address of shared memory");
    return *(T*)&memory_of[now->block][at];
}
inline u32 in_block(u32 at, u32 block) { return at | (block + 1) << 20; }
inline float load_cluster(u32 at) { return *(float*)&memory_of[(at >> 20) - 1][at & 0xfffff]; }
inline float4 load_cluster4(u32 at) { return *(float4*)&memory_of[(at >> 20) - 1][at & 0xfffff]; }
template <class T>
inline void store_shared(u32 at, T x) { at_address<T>(at) = x; }
inline u32 load_shared(u32 at) { return at_address<u32>(at); }

struct Counter {
    unsigned short all, left;
    int bytes : 24;  // still to come
    u32 rounds : 8;
};
inline void barrier_init(u32 at, u32 count) {
    at_address<Counter>(at) = {(unsigned short)count, (unsigned short)count, 0, 0};
}
inline void settle(Counter& b) {
    if (b.left == 0 && b.bytes == 0) b.left = b.all, b.rounds++;
}
inline void arrive(Counter& b) {
    if (b.left == 0) die("more arrivals than a barrier counts");
    --b.left, settle(b);
}
inline void barrier_arrive(u32 at, u32 times = 1) {
    while (times--) arrive(at_address<Counter>(at));
}
inline void barrier_expect(u32 at, u32 bytes) {
    Counter& b = at_address<Counter>(at);
    if (b.left == 0) die("bytes expected of a round that nobody else arrives in");
    b.bytes += bytes;
}
inline void barrier_wait(u32 at, u32 parity) {
    fenced[now - fibers] = false;
    while ((at_address<Counter>(at).rounds & 1) == parity) leave();
}

static Meeting of_group[CLUSTER][3];
inline void group_sync(u32 id) { meet(of_group[now->block][id], 128); }
inline void cluster_sync() { meet(of_cluster, FIBERS); }

// Copies: what was in their place is gone at once, what comes is there when the barrier is told.
struct Piece {
    char* to;
    const void* from;
    bool real;
};
static std::vector<Piece> pieces[FIBERS];
static int flying[FIBERS];
inline void copy16(u32 to, const void* from, bool real) {
    if (to % 16 || (u64)from % 16) die("a copy off its bounds");
    char* there = &at_address<char>(to);
    memset(there, 0x7e, 16);
    pieces[now - fibers].push_back({there, from, real});
}
inline void arrive_when_copied(u32 at) {
    const int me = now - fibers;
    Counter* b = &at_address<Counter>(at);
    std::vector<Piece> mine;
    mine.swap(pieces[me]);
    flying[me]++;
    pending.push_back({[=] {
        for (auto& p : mine) p.real ? memcpy(p.to, p.from, 16) : memset(p.to, 0, 16);
        arrive(*b), flying[me]--;
    }, b});
}
inline void wait_for_copies() {
    while (flying[now - fibers]) leave();
}

inline void copy_bulk(u32 to, const void* from, u32 bytes, u32 at) {
    if (to % 16 || (u64)from % 16 || bytes % 16) die("a copy off its bounds");
    if (!fenced[now - fibers]) die("a bulk copy without a fence behind the wait for its place");
    Counter* b = &at_address<Counter>(at);
    char* there = &at_address<char>(to);
    at_address<char>(to + bytes - 1);
    memset(there, 0x7e, bytes);
    pending.push_back({[=] { memcpy(there, from, bytes), b->bytes -= bytes, settle(*b); }, b});
}

// Of a tensor's copies what the kernel relies on: a row outside the tensor is zeros, and 16 bytes of 128 change places by
// the number of these 128 bytes in shared memory.
#define __grid_constant__
struct TensorMap {
    const char* rows;
    long long stride;
    int count;
};
inline void copy_row(u32 to, const TensorMap* map, int row, u32 at) {
    if (to % 128) die("a copy off its bounds");
    if (!fenced[now - fibers]) die("a bulk copy without a fence behind the wait for its place");
    Counter* b = &at_address<Counter>(at);
    at_address<char>(to + 1152 - 1);
    memset(&at_address<char>(to), 0x7e, 1152);
    const bool real = row >= 0 && row < map->count;
    const char* from = real ? map->rows + row * map->stride : nullptr;
    char* base = memory_of[now->block];
    pending.push_back({[=] {
        for (u32 i = 0; i < 1152; i += 16) {
            char* there = base + ((to + i) ^ (to + i) / 128 % 8 * 16);
            real ? memcpy(there, from + i, 16) : memset(there, 0, 16);
        }
        b->bytes -= 1152, settle(*b);
    }, b});
}

// What lanes give one another, two places in turn as in `exchange`.
static u32 given[WARPS_OF_ALL][2][32][6];
inline u32 (*give(std::initializer_list<u32> mine))[6] {
    u32(*all)[6] = given[now->warp][now->exchanges++ % 2];
    std::copy(mine.begin(), mine.end(), all[now->thread % 32]);
    __syncwarp();
    return all;
}
inline void matrices(u32 (&x)[4], u32 at) {
    auto all = give({at});
    const int lane = now->thread % 32;
    for (int i = 0; i < 4; i++) x[i] = at_address<u32>(all[8 * i + lane / 4][0] + 4 * (lane % 4));
}
inline void matrices_turned(u32 (&x)[4], u32 at) {
    auto all = give({at});
    const int lane = now->thread % 32;
    for (int i = 0; i < 4; i++) {
        x[i] = 0;
        for (int j = 0; j < 2; j++) {
            const u32 row = all[8 * i + 2 * (lane % 4) + j][0];
            x[i] |= (u32)at_address<unsigned short>(row + 2 * (lane / 4)) << 16 * j;
        }
    }
}
inline float half_of(u32 both, int upper) { return __uint_as_float(upper ? both & 0xffff0000u : both << 16); }
inline float f16_half_of(u32 both, int upper) {
    const unsigned short bits = upper ? both >> 16 : both;
    _Float16 x;
    memcpy(&x, &bits, 2);
    return x;
}
template <float value(u32, int)>
inline void multiply(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    auto all = give({a[0], a[1], a[2], a[3], b0, b1});
    const int lane = now->thread % 32;
    for (int j = 0; j < 4; j++) {
        const int row = lane / 4, column = 2 * (lane % 4) + j % 2;
        float sum = 0;
        for (int k = 0; k < 16; k++)
            sum += value(all[4 * row + k % 8 / 2][j / 2 + k / 8 * 2], k % 2) *
                   value(all[4 * column + k % 8 / 2][4 + k / 8], k % 2);
        d[j] += sum;
    }
}
inline void product(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) { multiply<half_of>(d, a, b0, b1); }
inline void product_f16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) { multiply<f16_half_of>(d, a, b0, b1); }

inline float minus_inf() { return -INFINITY; }
inline float exp2_of(float x) { return exp2f(x); }
inline float log2_of(float x) { return log2f(x); }
inline u32 bf16_of(float x) {
    const u32 bits = __float_as_int(x);
    return x != x ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline u32 pair(float x, float y) { return bf16_of(x) | bf16_of(y) << 16; }
inline u32 scaled(u32 both, u32 by) {
    return pair(half_of(both, 0) * half_of(by, 0), half_of(both, 1) * half_of(by, 1));
}
inline float low_half(u32 both) { return half_of(both, 0); }
inline float high_half(u32 both) { return half_of(both, 1); }
inline u32 f16_of(float x) {
    const _Float16 h = (_Float16)x;
    unsigned short bits;
    memcpy(&bits, &h, 2);
    return bits;
}
inline u32 pair_f16(float x, float y) { return f16_of(x) | f16_of(y) << 16; }
inline float f16_low(u32 both) { return f16_half_of(both, 0); }
inline float f16_high(u32 both) { return f16_half_of(both, 1); }
inline void decode(u32& low, u32& high, u32 codes) {
    low = pair_f16(e4m3_value(codes & 255), e4m3_value(codes >> 8 & 255));
    high = pair_f16(e4m3_value(codes >> 16 & 255), e4m3_value(codes >> 24));
}
