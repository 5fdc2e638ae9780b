// Comparison in PTX: a subtraction, whose sign a shift collects, where a predicate for each of 32 scores would be kept
// in registers and take four instructions.

// The bits of x - y, of which the first is set where x < y, and not where either is NaN.
__device__ __forceinline__ u32 difference(float x, float y) {
    float d;
    asm("sub.rn.f32 %0, %1, %2;" : "=f"(d) : "f"(x), "f"(y));
    return __float_as_uint(d);
}
