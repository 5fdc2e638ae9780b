// CUDA C++ on a CPU, as much of it as select.cu, select_many.cu and sparse_mla_portable.cu take: in the place of
// cluster.cuh, compare.cuh, copies.cuh and (cuda_emulation_tiles.h) tiles.cuh.
//
// A thread is a fiber. It runs until it needs others of its warp, block or cluster; then it waits at a meeting point
// until all have come. Those that may run go on in a shuffled order, and shared memory begins as noise, so a barrier
// that is missing shows. Fibers are left by _longjmp: swapcontext asks the kernel for signals each time.

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <vector>

#undef INT_MAX
#undef INT_MIN

using std::max;
using std::min;

typedef unsigned int u32;
typedef unsigned long long u64;

#define __device__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __global__
#define __launch_bounds__(...)

struct float4 {
    float x, y, z, w;
};
struct int4 {
    int x, y, z, w;
};
struct int2 {
    int x, y;
};
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline int2 make_int2(int x, int y) { return {x, y}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }

#ifndef CLUSTER
#define CLUSTER 1
#endif
#ifndef SHARED
#define SHARED (48 << 10)
#endif

// Fibers and their meeting points.
constexpr int FIBERS = THREADS * CLUSTER, WARPS_OF_ALL = FIBERS / 32;
constexpr size_t STACK_BYTES = 64 << 10, SHARED_BYTES = SHARED;

struct Meeting {
    int came = 0;
    long held = 0;  // how often all have come
};

struct Fiber {
    ucontext_t start;
    jmp_buf here;
    int thread, block, warp;
    bool begun, done;
    Meeting* waits_at;
    long waits_for;
    u32 exchanges;
};

static Fiber fibers[FIBERS], *now;
static ucontext_t begin_from;
static jmp_buf scheduler;
static Meeting of_warp[WARPS_OF_ALL], of_block[CLUSTER], of_cluster;
static int exchanged[WARPS_OF_ALL][2][32];
static std::vector<char> stacks(FIBERS* STACK_BYTES);
alignas(128) static char memory_of[CLUSTER][SHARED_BYTES];
static std::function<void()> kernel;
static int row_now;

struct Pending { std::function<void()> f; const void* bar; };
static std::vector<Pending> pending; // copies and stores on their way
static int running[CLUSTER];
static bool inited_fail;
static void die(const char* m) { fprintf(stderr, "DIE: %s\n", m); fflush(stderr); abort(); }
static long spins; static int slow_for, slow_kind, slow;
static void leave() {
    if (!_setjmp(now->here)) _longjmp(scheduler, 1);
}

static void meet(Meeting& m, int all) {
    now->waits_at = &m, now->waits_for = m.held + 1;
    if (++m.came == all) m.came = 0, m.held++;
    leave();
}

static void run_fiber() {
    kernel();
    now->done = true; running[now->block]--;
    _longjmp(scheduler, 1);
}

// One cluster for each row; false where threads wait for others that never come.
static bool emulate(int rows, int seed, std::function<void()> body) {
    std::mt19937 random(seed);
    kernel = body;
    std::vector<Fiber*> order;
    for (row_now = 0; row_now < rows; row_now++) {
        for (auto& block : memory_of)
            for (char& byte : block) byte = random();
        for (auto& m : of_warp) m = Meeting();
        for (auto& m : of_block) m = Meeting();
        of_cluster = Meeting();
        pending.clear(); spins = 0;
        for (int& n : running) n = THREADS;
        order.clear();
        for (int i = 0; i < FIBERS; i++) {
            Fiber& f = fibers[i];
            f.thread = i % THREADS, f.block = i / THREADS, f.warp = i / 32;
            f.begun = f.done = false, f.waits_at = nullptr, f.exchanges = 0;
            getcontext(&f.start);
            f.start.uc_stack.ss_sp = &stacks[i * STACK_BYTES], f.start.uc_stack.ss_size = STACK_BYTES;
            makecontext(&f.start, run_fiber, 0);
            order.push_back(&f);
        }
        while (!order.empty()) {
            bool moved = false;
            if (++spins > 400000) return false;
            { std::vector<Pending> old; old.swap(pending);
              std::shuffle(old.begin(), old.end(), random);
              for (auto& q : old) if (random() % 3 == 0) q.f(); else pending.push_back(q); }
            std::shuffle(order.begin(), order.end(), random);
            if (slow_for-- <= 0) slow_for = random() % 60, slow_kind = random() % 4, slow = random() % (slow_kind == 1 ? CLUSTER : slow_kind == 2 ? WARPS_OF_ALL : FIBERS);
            if (slow_kind) moved = true;
            for (Fiber* f : order) {
                if (slow_kind == 1 && f->block == slow || slow_kind == 2 && f->warp == slow || slow_kind == 3 && f - fibers == slow) continue;
                if (f->waits_at && f->waits_at->held < f->waits_for) continue;
                moved = true, now = f;
                if (_setjmp(scheduler)) continue;
                if (now->begun) _longjmp(now->here, 1);
                now->begun = true;
                setcontext(&now->start);
            }
            if (!moved) return false;
            order.erase(std::remove_if(order.begin(), order.end(), [](Fiber* f) { return f->done; }), order.end());
        }
        if (!pending.empty()) die("copies or stores still on their way when the cluster ended");
    }
    return true;
}

// What a kernel asks for.
struct Index {
    u32 x;
};
#define threadIdx (Index{(u32)now->thread})
#define gridDim (Index{CLUSTER})  // of one row
#define blockIdx (Index{(u32)row_now})  // where a block has a row

inline char* shared_memory() { return memory_of[now->block]; }
inline void __syncwarp() { meet(of_warp[now->warp], 32); }
inline void __syncthreads() { meet(of_block[now->block], THREADS); }
inline void wait_for_earlier() {}  // launches follow one another here
inline void let_next_start() {}
inline void cluster_arrive() {
    if (++of_cluster.came == FIBERS) of_cluster.came = 0, of_cluster.held++;
}
inline void cluster_wait() {
    while (of_cluster.held < 1) leave();  // there is one a row
}
inline u32 cluster_rank() { return now->block; }
inline u32 cluster_id() { return row_now; }

template <class T>
inline T& in_block(const T* p, u32 block) {
    const size_t at = (const char*)p - shared_memory();
    if (at + sizeof(T) > SHARED_BYTES || at % sizeof(T) || block >= CLUSTER) abort();
    return *(T*)&memory_of[block][at];
}

// The values of all lanes. Two places in turn: a slow lane may still read the last ones.
inline const int* exchange(int x) {
    int* all = exchanged[now->warp][now->exchanges++ % 2];
    all[now->thread % 32] = x;
    __syncwarp();
    return all;
}
inline int __shfl_sync(u32, int x, int lane) { return exchange(x)[lane % 32]; }
inline int __shfl_xor_sync(u32, int x, int bits) { return exchange(x)[now->thread % 32 ^ bits]; }
inline int __shfl_down_sync(u32, int x, int by, int width = 32) {
    const int lane = now->thread % 32, *all = exchange(x);
    return lane % width + by < width ? all[lane + by] : x;
}
inline int __shfl_up_sync(u32, int x, int by) {
    const int lane = now->thread % 32, *all = exchange(x);
    return lane >= by ? all[lane - by] : x;
}
inline u32 __ballot_sync(u32, bool x) {
    const int* all = exchange(x);
    u32 votes = 0;
    for (int i = 0; i < 32; i++) votes |= (u32)all[i] << i;
    return votes;
}
inline int __reduce_add_sync(u32, int x) {
    const int* all = exchange(x);
    u32 sum = 0;
    for (int i = 0; i < 32; i++) sum += all[i];
    return sum;
}
inline int __reduce_min_sync(u32, int x) {
    const int* all = exchange(x);
    return *std::min_element(all, all + 32);
}
inline int __reduce_max_sync(u32, int x) {
    const int* all = exchange(x);
    return *std::max_element(all, all + 32);
}

inline int atomicAdd(int* p, int x) {
    const int before = *p;
    *p += x;
    return before;
}
inline float e4m3_value(u32 code) {
    const int exponent = code >> 3 & 15, mantissa = code & 7;
    if (exponent == 15 && mantissa == 7) return NAN;
    const float x = exponent ? ldexpf(8 + mantissa, exponent - 10) : ldexpf(mantissa, -9);
    return code & 128 ? -x : x;
}
inline u32 shared_address(const void* p) { return (const char*)p - shared_memory(); }
inline void count(u32 at) {
    if (at > SHARED_BYTES - 4 || at % 4) die("count outside shared");
    ++*(int*)(shared_memory() + at);
}
template <class T>
inline T __ldg(const T* p) {
    return *p;
}
inline int __popc(u32 x) { return __builtin_popcount(x); }
inline int __ffs(u32 x) { return __builtin_ffs(x); }
inline int __clz(u32 x) { return x ? __builtin_clz(x) : 32; }
inline u32 difference(float x, float y) { return x < y ? 0xc0000000u : 0; }
inline u32 __funnelshift_l(u32 low, u32 high, int by) { return high << by | low >> (32 - by); }
inline u32 __byte_perm(u32 x, u32 y, u32 which) {
    const u64 both = (u64)y << 32 | x;
    u32 r = 0;
    for (int i = 0; i < 4; i++) r |= (u32)(both >> 8 * (which >> 4 * i & 7) & 255) << 8 * i;
    return r;
}

// Whether a thread put its earlier accesses, and those it waited for, ahead of its bulk copies to come.
static bool fenced[FIBERS];
inline void fence_bulk() { fenced[now - fibers] = true; }

// A copy is there at once, and so is another block's store; a thread that waits for one looks again in each round.
struct Barrier {
    int bytes;  // still to come: fewer than none where a store came before it was expected
    unsigned short rounds;  // complete ones
    bool expects;
    unsigned char magic;
};
static void next_round(Barrier& b) {
    if (b.expects && b.bytes == 0) b.rounds++, b.expects = false;
}
inline void barrier_init(Barrier& b) { b = Barrier(); b.magic = 77; }
inline void warp_barrier_init(Barrier& b, int lane) {
    if (lane == 0) barrier_init(b);
}
inline void copy(void* to, const void* from, u32 bytes, bool, Barrier& b) {
    if (bytes == 0 || bytes % 16 || (u64)to % 16 || (u64)from % 16 || bytes > (1u << 20)) die("bad bulk copy");
    if (b.magic != 77) die("barrier not initialised");
    const size_t at = (char*)to - shared_memory();
    if (at + bytes > SHARED_BYTES) die("copy outside shared");
    if (b.expects) die("two copies at once");
    b.expects = true;
    for (u32 i = 0; i < bytes; i++) ((char*)to)[i] = 0x7e ^ i * 37;
    const int block = now->block;
    pending.push_back({[=, &b] { if (!running[block]) die("copy to an ended block"); memcpy(to, from, bytes), b.rounds++, b.expects = false; }, &b});
}
inline void copy16(void* to, const void* from) { memcpy(to, from, 16); }
inline void wait16() {}
inline float4 load16(const float4* from) { return *from; }
inline void wait(Barrier& b, u32 parity) {
    while ((b.rounds & 1) == parity) leave();
}
inline void expect(Barrier& b, u32 bytes) {
    if (b.expects) die("expected twice");
    if (b.magic != 77) die("expect: not initialised");
    b.expects = true, b.bytes += bytes, next_round(b);
}
template <class T>
inline void store_to(T* p, u32 block, const T& x, Barrier& b) {
    T* to = &in_block(p, block);
    Barrier& there = in_block(&b, block);
    if ((u64)to % sizeof(T)) die("st.async alignment");
    if (there.magic != 77) die("remote barrier not initialised");
    const T v = x;
    pending.push_back({[=, &there] { if (!running[block]) die("store to an ended block");
        *to = v; there.bytes -= sizeof(T), next_round(there); }, &there});
}
inline void wait_for_stores(Barrier& b, u32 parity) { wait(b, parity); }
inline float __int_as_float(int x) {
    float f;
    memcpy(&f, &x, 4);
    return f;
}
inline int __float_as_int(float x) {
    int i;
    memcpy(&i, &x, 4);
    return i;
}
inline float __fmaf_rn(float x, float y, float z) { return fmaf(x, y, z); }
inline float __fsub_rn(float x, float y) { return x - y; }
inline float __fdividef(float x, float y) { if (fabsf(y) > 0x1p126f) return 0.0f; float q = x / y;
 #ifdef PERTURB
 if (q == q && fabsf(q) < 1e38f && q != 0) { int i = __float_as_int(q); i += PERTURB; q = __int_as_float(i); }
 #endif
 return q; }
