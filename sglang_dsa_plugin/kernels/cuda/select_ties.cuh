// Part of select.cu and select_many.cu: picks written from the scores themselves, where equal ones are many. Their
// Shared has room for counts by warp, and put() writes a pick.

// Picks are the scores above `edge` and the first `room` equal to it. next, equals: of either, how many come before
// this block's. init: picks before the first.
__device__ __noinline__ void write_with_ties(Shared& sh, Stretch r, Target to, int edge, int room, int next, int equals,
                                             int init) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
    const u32 below = (1u << lane) - 1;
    int more = 0, same = 0;
    reread(r, [&](int u, float x) {
        const int key = order_key(x);
        more += key > edge;
        same += key == edge && competes(r, u);
    });
    more = __reduce_add_sync(ALL, more), same = __reduce_add_sync(ALL, same);
    if (lane == 0) sh.above[warp] = more, sh.equal[warp] = same;
    __syncthreads();
    next += __reduce_add_sync(ALL, lane < warp ? sh.above[lane] : 0);
    equals += __reduce_add_sync(ALL, lane < warp ? sh.equal[lane] : 0);
#pragma unroll 1
    for (int s = 0; s < r.steps; s++) {
        const int vector = r.vector + 32 * s;
        float4 x = load_scores(r, vector);
        cut(r, vector, x);
        const float score[4] = {x.x, x.y, x.z, x.w};
        u32 over = 0, tied = 0;
        int i = next, e = equals;
#pragma unroll
        for (int c = 0; c < 4; c++) {
            const int key = order_key(score[c]);
            const bool o = key > edge, t = key == edge && competes(r, 4 * vector + c);
            const u32 overs = __ballot_sync(ALL, o), ties = __ballot_sync(ALL, t);
            over |= o << c, tied |= t << c;
            i += __popc(overs & below), e += __popc(ties & below);
            next += __popc(overs), equals += __popc(ties);
        }
#pragma unroll 1
        for (int c = 0; c < 4; c++) {
            const bool o = over >> c & 1, t = tied >> c & 1;
            if (o || (t && e < room)) put(sh, to, init + i + min(e, room), 4 * vector + c - r.shift);
            i += o, e += t;
        }
    }
}
