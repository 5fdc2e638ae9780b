// Part of select.cu and select_many.cu: a search in counts that one block makes. Their Shared has `bins`, `sums`, `found`.

// By all threads, after a barrier behind the counts: the bin in which the `need`-th count from the top lies, what
// lies above it and what in it, to sh.found; bin -1 and all counts where they are fewer. Leaves the counts zero.
__device__ __forceinline__ void find_bin(Shared& sh, int need) {
    constexpr int each = ROW_BINS / THREADS;
    const int thread = threadIdx.x, lane = thread & 31, warp = thread / 32, first = ROW_BINS - each * (thread + 1);
    int number[each], own = 0;
#pragma unroll
    for (int i = 0; i < each; i += 4) {
        const int4 four = *(int4*)&sh.bins[first + i];
        *(int4*)&sh.bins[first + i] = make_int4(0, 0, 0, 0);
        number[i] = four.x, number[i + 1] = four.y, number[i + 2] = four.z, number[i + 3] = four.w;
        own += four.x + four.y + four.z + four.w;
    }
    const int upto = sum_upto(own);
    if (lane == 31) sh.sums[warp] = upto;
    __syncthreads();
    int above = upto - own + __reduce_add_sync(ALL, lane < warp ? sh.sums[lane] : 0);
    if (above < need && need <= above + own) {
        int at = each - 1, here = number[each - 1];
#pragma unroll
        for (int i = each - 1; i > 0; i--)
            if (at == i && above + here < need) above += here, at = i - 1, here = number[i - 1];
        sh.found[0] = first + at, sh.found[1] = above, sh.found[2] = here;
    }
    if (thread == THREADS - 1 && above + own < need) sh.found[0] = -1, sh.found[1] = above + own;
    __syncthreads();
}
