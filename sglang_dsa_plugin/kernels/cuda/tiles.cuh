// Instructions that every GPU from SM 8.0 on has, in PTX: copies to shared memory, matrix operands and products, and
// numbers in 16 bits.

__device__ __forceinline__ float minus_inf() { return __int_as_float(0xff800000); }

// The number of this thread, read anew: what is made of it is made where it is used, and takes no register in between.
__device__ __forceinline__ u32 this_thread() {
    u32 x;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
    return x;
}

// 16 bytes from global to shared memory, or zeros where `real` is false; nothing is read then.
__device__ __forceinline__ void copy16(u32 to, const void* from, bool real) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(real ? 16 : 0) : "memory");
}

// The same for BYTES bytes, 4 or 8.
template <int BYTES>
__device__ __forceinline__ void copy_few(u32 to, const void* from, bool real) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(from), "n"(BYTES), "r"(real ? BYTES : 0)
                 : "memory");
}

// This thread's copies since the last call are a group.
__device__ __forceinline__ void copies_end() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Until all but the last N groups of this thread have come.
template <int N>
__device__ __forceinline__ void copies_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

// Loads from shared memory that stand ahead of this stay there. Where registers are few the compiler moves them down to
// what needs them, which then waits; past a wait for copies it does not. There are never as many groups of copies.
__device__ __forceinline__ void loads_stay() { copies_wait<16>(); }

// A barrier of two warps; id 1 to 15.
__device__ __forceinline__ void pair_sync(u32 id) { asm volatile("bar.sync %0, 64;" ::"r"(id) : "memory"); }

__device__ __forceinline__ void matrices(u32 (&x)[4], u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(at) : "memory");
}

__device__ __forceinline__ void matrices_turned(u32 (&x)[4], u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(at) : "memory");
}

__device__ __forceinline__ void product(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ float exp2_of(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float log2_of(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Two floats as bf16, x in the lower half.
__device__ __forceinline__ u32 pair(float x, float y) {
    u32 both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(y), "f"(x));
    return both;
}

__device__ __forceinline__ float low_half(u32 both) { return __uint_as_float(both << 16); }
__device__ __forceinline__ float high_half(u32 both) { return __uint_as_float(both & 0xffff0000u); }

// Two bf16 numbers times two others, rounded once; small ones stay as they are.
__device__ __forceinline__ u32 scaled(u32 both, u32 by) {
    u32 x;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(x) : "r"(both), "r"(by), "r"(0x80008000u));
    return x;
}

// Two f16 numbers times two others.
__device__ __forceinline__ u32 scaled_f16(u32 both, u32 by) {
    u32 x;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(x) : "r"(both), "r"(by));
    return x;
}

__device__ __forceinline__ void product_f16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Two floats as f16, x in the lower half.
__device__ __forceinline__ u32 pair_f16(float x, float y) {
    u32 both;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(y), "f"(x));
    return both;
}

__device__ __forceinline__ float f16_low(u32 both) {
    float x;
    asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\ncvt.f32.f16 %0, low;\n}" : "=f"(x) : "r"(both));
    return x;
}
__device__ __forceinline__ float f16_high(u32 both) {
    float x;
    asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\ncvt.f32.f16 %0, high;\n}" : "=f"(x) : "r"(both));
    return x;
}

// Of two f16 numbers and two others the larger absolute ones.
__device__ __forceinline__ u32 larger_f16(u32 both, u32 other) {
    u32 x;
    asm("{\n.reg .b32 size;\nabs.f16x2 size, %2;\nmax.f16x2 %0, %1, size;\n}" : "=r"(x) : "r"(both), "r"(other));
    return x;
}

// Likewise, but NaN where one of them is.
__device__ __forceinline__ u32 larger_f16_or_nan(u32 both, u32 other) {
    u32 x;
    asm("{\n.reg .b32 size;\nabs.f16x2 size, %2;\nmax.NaN.f16x2 %0, %1, size;\n}" : "=r"(x) : "r"(both), "r"(other));
    return x;
}

#if __CUDA_ARCH__ >= 890
// Four e4m3 codes as two f16 numbers each, the first code lowest.
__device__ __forceinline__ void from_e4m3(u32& low, u32& high, u32 codes) {
    asm("{\n.reg .b16 a, b;\nmov.b32 {a, b}, %2;\ncvt.rn.f16x2.e4m3x2 %0, a;\ncvt.rn.f16x2.e4m3x2 %1, b;\n}"
        : "=r"(low), "=r"(high) : "r"(codes));
}
#endif
