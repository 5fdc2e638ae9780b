// Parts of select.cu and select_many.cu: the order of scores, and how they are read.

#include "cluster.cuh"

#define WARPS (THREADS / 32)
#define ALL 0xffffffffu
#define POSITIONS 0           // what is written: positions, slots, or positions and slots
#define SLOTS 1
#define BOTH 2
#define INT_MAX 0x7fffffff
#define INT_MIN (-0x7fffffff - 1)
#define NAN_KEY (-0x7fffffff)
#define INF_KEY 0x7f800000
#define ROW_BINS (4 * THREADS > 2048 ? 4 * THREADS : 2048)  // where one block counts: 11 bits, or four for each thread
#define FEW 32                // keys that a warp ranks at once

// What a block knows of its row. Element u of `base`, aligned to 16 bytes, is position u - shift of the window.
struct Stretch {
    const float* base;
    int shift;
    int first, end;           // elements that compete: forced picks do not
    int vector;               // this thread's first
    int steps;                // this warp's: vectors of 32 threads
};

__device__ __forceinline__ int load_int(const void* p, long long i, bool wide) {
    return wide ? (int)((const long long*)p)[i] : ((const int*)p)[i];
}

// The same, cut to -limit .. limit.
__device__ __forceinline__ int load_within(const void* p, long long i, bool wide, int limit) {
    const long long value = wide ? ((const long long*)p)[i] : (long long)((const int*)p)[i];
    return (int)(value < -limit ? -limit : value > limit ? limit : value);
}

// The length of a row's window, cut to the columns that exist; `line`, where the row begins, moves to the window's start.
// wide: lengths (1) and starts (2) are int64. width: at most 2^30.
__device__ __forceinline__ int window_of(const float*& line, const void* lengths, const void* starts, long long row,
                                         int width, int wide) {
    const int length = max(load_within(lengths, row, wide & 1, width), 0);
    if (starts == nullptr) return length;
    const int start = load_within(starts, row, wide & 2, width), first = max(start, 0);
    line += first;
    return max(min(start + length, width) - first, 0);
}

// Positions first .. end - 1 of a window compete.
__device__ __forceinline__ Stretch stretch_of(const float* line, int first, int end) {
    Stretch r;
    r.shift = (int)((u64)line / 4 % 4);
    r.base = line - r.shift;
    r.first = r.shift + first;
    r.end = r.shift + end;
    return r;
}

// Score order as integer order; -0.0 and 0.0 share a key, all NaN share the lowest.
__device__ __forceinline__ int order_key(float x) {
    const int bits = __float_as_int(x), sign = bits >> 31;
    const int key = (bits ^ (sign & 0x7fffffff)) - sign;
    return x != x ? NAN_KEY : key;
}

__device__ __forceinline__ float score_of(int key) {
    return key == NAN_KEY ? __int_as_float(0x7fc00000) : __int_as_float(key < 0 ? (key - 1) ^ 0x7fffffff : key);
}

__device__ __forceinline__ bool competes(const Stretch& r, int u) { return u >= r.first && u < r.end; }

// NaN in place of elements that do not compete.
__device__ __forceinline__ void cut(const Stretch& r, int vector, float4& x) {
    const float none = __int_as_float(0x7fc00000);
    const int u = 4 * vector;
    x.x = competes(r, u) ? x.x : none;
    x.y = competes(r, u + 1) ? x.y : none;
    x.z = competes(r, u + 2) ? x.z : none;
    x.w = competes(r, u + 3) ? x.w : none;
}

// Four scores at once. The caller says that groups of four can be read whole at both ends of a row.
__device__ __forceinline__ float4 load_scores(const Stretch& r, int vector) {
    const float none = __int_as_float(0x7fc00000);
    return 4 * vector < r.end ? ((const float4*)r.base)[vector] : make_float4(none, none, none, none);
}

// f(element, score), reading the scores again: for what is rare and has to stay out of the usual path's way.
template <class F>
__device__ __forceinline__ void reread(const Stretch& r, F f) {
#pragma unroll 1
    for (int s = 0; s < r.steps; s++) {
        const int vector = r.vector + 32 * s;
        float4 x = load_scores(r, vector);
        cut(r, vector, x);
        f(4 * vector, x.x);
        f(4 * vector + 1, x.y);
        f(4 * vector + 2, x.z);
        f(4 * vector + 3, x.w);
    }
}
