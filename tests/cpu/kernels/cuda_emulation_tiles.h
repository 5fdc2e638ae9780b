// tiles.cuh on a CPU, behind cuda_emulation.h: copies, matrix operands and products as the PTX manual lays out their
// fragments among the lanes, and numbers in 16 bits. A copy comes late: when its thread waits for its group.

#include <deque>

struct float2 {
    float x, y;
};
struct uint2 {
    u32 x, y;
};
struct uint4 {
    u32 x, y, z, w;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
inline uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
inline u32 __float_as_uint(float x) {
    u32 u;
    memcpy(&u, &x, 4);
    return u;
}
inline float __uint_as_float(u32 x) {
    float f;
    memcpy(&f, &x, 4);
    return f;
}
inline u32 this_thread() { return threadIdx.x; }
inline float minus_inf() { return -INFINITY; }
inline float exp2_of(float x) { return exp2f(x); }
inline float log2_of(float x) { return log2f(x); }
inline float __shfl_xor_sync(u32 m, float x, int bits) { return __int_as_float(__shfl_xor_sync(m, __float_as_int(x), bits)); }
inline u32 __shfl_xor_sync(u32 m, u32 x, int bits) { return __shfl_xor_sync(m, (int)x, bits); }
inline bool __any_sync(u32 m, bool x) { return __ballot_sync(m, x) != 0; }

static int votes[2][THREADS], votes_asked[THREADS];
inline bool __syncthreads_or(bool x) {
    int* all = votes[votes_asked[now->thread]++ % 2];
    all[now->thread] = x;
    __syncthreads();
    return std::any_of(all, all + THREADS, [](int v) { return v; });
}

// Shared memory by numbers, which begin anywhere.
constexpr u32 FIRST_ADDRESS = 1 << 10;
inline u32 __cvta_generic_to_shared(const void* p) { return (const char*)p - shared_memory() + FIRST_ADDRESS; }
inline char* at_address(u32 at, u32 bytes) {
    if (at % bytes || at < FIRST_ADDRESS || at + bytes > FIRST_ADDRESS + SHARED_BYTES) die("shared memory address");
    return shared_memory() + (at - FIRST_ADDRESS);
}

struct Copy {
    char* to;
    const void* from;  // none: zeros
    u32 bytes;
};
static std::deque<std::vector<Copy>> copies_of[THREADS];  // groups on their way, the last one still open
static std::vector<Copy>& open_copies() {
    auto& groups = copies_of[now->thread];
    if (groups.empty()) groups.emplace_back();
    return groups.back();
}
template <int BYTES>
inline void copy_few(u32 to, const void* from, bool real) {
    if ((u64)from % BYTES) die("copy from an odd address");
    char* there = at_address(to, BYTES);
    memset(there, 0x7f, BYTES);
    open_copies().push_back({there, real ? from : nullptr, BYTES});
}
inline void copy16(u32 to, const void* from, bool real) { copy_few<16>(to, from, real); }
inline void copies_end() {
    open_copies();
    copies_of[now->thread].emplace_back();
}
template <int N>
inline void copies_wait() {
    open_copies();
    auto& groups = copies_of[now->thread];
    for (; (int)groups.size() > N + 1; groups.pop_front())
        for (const Copy& c : groups.front())
            if (c.from) memcpy(c.to, c.from, c.bytes);
            else memset(c.to, 0, c.bytes);
}

inline void loads_stay() {}

static Meeting of_pair[16];
inline void pair_sync(u32 id) { meet(of_pair[id], 64); }

inline float low_half(u32 both) { return __uint_as_float(both << 16); }
inline float high_half(u32 both) { return __uint_as_float(both & 0xffff0000u); }
inline u32 bf16_of(float x) {
    const u32 u = __float_as_uint(x);
    return x != x ? 0x7fff : (u + 0x7fff + (u >> 16 & 1)) >> 16;
}
inline u32 f16_of(float x) {
    const _Float16 h = (_Float16)x;
    unsigned short u;
    memcpy(&u, &h, 2);
    return u;
}
inline float f16_value(u32 bits) {
    const unsigned short u = bits;
    _Float16 h;
    memcpy(&h, &u, 2);
    return h;
}
inline u32 scaled(u32 both, u32 by) {
    return bf16_of(high_half(both) * high_half(by)) << 16 | bf16_of(low_half(both) * low_half(by));
}
inline u32 scaled_f16(u32 both, u32 by) {
    return f16_of(f16_value(both >> 16) * f16_value(by >> 16)) << 16 | f16_of(f16_value(both & 0xffff) * f16_value(by & 0xffff));
}
inline float f16_low(u32 both) { return f16_value(both & 0xffff); }
inline float f16_high(u32 both) { return f16_value(both >> 16); }
inline u32 larger_f16(u32 both, u32 other) {
    return f16_of(fmaxf(f16_high(both), fabsf(f16_high(other)))) << 16 | f16_of(fmaxf(f16_low(both), fabsf(f16_low(other))));
}
inline u32 larger_f16_or_nan(u32 both, u32 other) {
    auto larger = [](float x, float y) { return x != x || y != y ? NAN : fmaxf(x, fabsf(y)); };
    return f16_of(larger(f16_high(both), f16_high(other))) << 16 | f16_of(larger(f16_low(both), f16_low(other)));
}
inline void from_e4m3(u32& low, u32& high, u32 codes) {
    low = f16_of(e4m3_value(codes >> 8 & 255)) << 16 | f16_of(e4m3_value(codes & 255));
    high = f16_of(e4m3_value(codes >> 24)) << 16 | f16_of(e4m3_value(codes >> 16 & 255));
}
inline u32 pair(float x, float y) { return bf16_of(y) << 16 | bf16_of(x); }
inline u32 pair_f16(float x, float y) { return f16_of(y) << 16 | f16_of(x); }

// What each lane of the warp gives: 8 numbers.
struct Given {
    u32 x[8];
};
static Given given[WARPS_OF_ALL][2][32];
inline const Given* give(const Given& x) {
    Given* all = given[now->warp][now->exchanges++ % 2];
    all[now->thread % 32] = x;
    __syncwarp();
    return all;
}

// Four matrices of 8 x 8; lane 8 m + r has the address of row r of matrix m, lane l gets elements 2 (l % 4) and the next
// of row l / 4; turned: rows 2 (l % 4) and the next of column l / 4.
inline void load_matrices(u32 (&x)[4], u32 at, bool turned) {
    const Given* all = give({{at}});
    const int lane = now->thread % 32;
    for (int m = 0; m < 4; m++) {
        u32 both[2];
        for (int i = 0; i < 2; i++) {
            const int row = turned ? lane % 4 * 2 + i : lane / 4, column = turned ? lane / 4 : lane % 4 * 2 + i;
            unsigned short u;
            memcpy(&u, at_address(all[8 * m + row].x[0], 16) + 2 * column, 2);
            both[i] = u;
        }
        x[m] = both[1] << 16 | both[0];
    }
    __syncwarp();
}
inline void matrices(u32 (&x)[4], u32 at) { load_matrices(x, at, false); }
inline void matrices_turned(u32 (&x)[4], u32 at) { load_matrices(x, at, true); }

// m16n8k16. Lane 4 g + c has of the left operand rows g and g + 8 in turn, columns 2 c and 2 c + 8 of them, of the right
// one column g, rows likewise, and of the sums rows g and g + 8, columns 2 c and the next.
template <class Value>
inline void multiply(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, Value value) {
    const Given* all = give({{a[0], a[1], a[2], a[3], b0, b1}});
    const int g = now->thread % 32 / 4, c = now->thread % 4;
    for (int j = 0; j < 4; j++) {
        double sum = d[j];
        for (int k = 0; k < 16; k++) {
            const int owner = k % 8 / 2;
            const u32 left = all[4 * g + owner].x[j / 2 + k / 8 * 2], right = all[4 * (2 * c + j % 2) + owner].x[4 + k / 8];
            sum += (double)value(left >> k % 2 * 16 & 0xffff) * value(right >> k % 2 * 16 & 0xffff);
        }
        d[j] = sum;
    }
}
inline void product(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    multiply(d, a, b0, b1, [](u32 u) { return low_half(u); });
}
inline void product_f16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) { multiply(d, a, b0, b1, f16_value); }
