// Exact top-k of many rows (SM 9.0 and later): one block a row, several on a processor, so that one block's arithmetic
// hides behind what the others read. See ops/select.py for the order.
//
//   1. A row not longer than k: the identity, written without looking at a score.
//   2. A sample of the row gives a threshold that somewhat more than k scores reach.
//   3. The row is read once, through shared memory, from which each warp takes a chunk at a time. What reaches the
//      threshold goes to a list: a chunk's candidates lie together and in ascending position, wherever in the list.
//   4. The k-th best of the list is found by counting digits of the keys.
//   5. The picks leave in ascending position, chunk after chunk, each warp's after those of the warps before it.
//
// Steps 2 and 3 decide only how long the list is. Where it is shorter than k or longer than its room, the sample
// misjudged the row: a second threshold follows from the list's length. Where that does not help either, as with
// thousands of equal scores, the row is read digit by digit.
//
// A row that the block's registers hold goes another way (select_short.cuh).
//
// Compile-time: THREADS (128 .. 512), BLOCKS (on a processor), BATCH (vectors of four scores of a chunk that a thread
// looks at, 4 or 8), STRATA (vectors of the sample), LISTED (candidates), CHUNKS (of a row at most), ONCE (what is read
// may leave the L2 cache), VECTORS (as in select.cu), SHARED (bytes), PAGE (positions of a page), WRITE.

#include "select_many_parts.cuh"
#include "select_ties.cuh"
#include "select_many_list.cuh"
#include "select_registers.cuh"
#include "select_short.cuh"

// The way without a list. plateau: the key that many scores may share, or INT_MIN.
__device__ __noinline__ void select_by_rereading(Shared& sh, Stretch r, Target to, int want, int init, int plateau) {
    const int thread = threadIdx.x, lane = thread & 31, warp = thread / 32;
    const int vector0 = r.first / 4, vectors = (r.end + 3) / 4 - vector0, steps = (vectors + THREADS - 1) / THREADS;
    r.vector = vector0 + warp * 32 * steps;
    r.steps = max(0, min(steps, (vector0 + vectors - r.vector + 31) / 32));
    r.vector += lane;

    int more = 0, same = 0;
    reread(r, [&](int u, float x) {
        const int key = order_key(x);
        more += key > plateau && competes(r, u);
        same += key == plateau && competes(r, u);
    });
    more = __reduce_add_sync(ALL, more), same = __reduce_add_sync(ALL, same);
    if (lane == 0) sh.above[warp] = more, sh.equal[warp] = same;
    __syncthreads();
    more = __reduce_add_sync(ALL, lane < WARPS ? sh.above[lane] : 0);
    same = __reduce_add_sync(ALL, lane < WARPS ? sh.equal[lane] : 0);
    __syncthreads();
    int room = want - more;
    if (more >= want || more + same < want) {
        u32 least = 0;
        room = want;
#pragma unroll 1
        for (int digit = 21; digit >= -1; digit -= 11) {
            const int low = max(digit, 0), top = digit < 0 ? 10 : low + 11;  // the last digit has ten bits
            reread(r, [&](int u, float x) {
                const u32 key = (u32)order_key(x) ^ 0x80000000u;
                const bool here = top == 32 || key >> top == least >> top;
                if (here && competes(r, u)) atomicAdd(&sh.bins[(key >> low) & (digit < 0 ? 1023 : ROW_BINS - 1)], 1);
            });
            __syncthreads();
            find_bin(sh, room);
            least |= (u32)sh.found[0] << low;
            room -= sh.found[1];
        }
        plateau = (int)(least ^ 0x80000000u);
    }
    write_with_ties(sh, r, to, plateau, room, 0, 0, init);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) select_many_rows(
    const float* scores, long long stride, const void* lengths, const void* starts, int* out,
    int* slots_out, const void* table, long long table_stride, const void* requests, const void* offsets, int width,
    int k, int init, int local, int wide  // bits: lengths, starts, table, requests, offsets are int64
) {
    extern __shared__ __align__(128) char shared[];
    Shared& sh = *(Shared*)shared;
    const int thread = threadIdx.x, lane = thread & 31, warp = thread / 32;
    const long long row = cluster_id();
    for (int i = thread; i < BINS / 4; i += THREADS) ((int4*)sh.bins)[i] = make_int4(0, 0, 0, 0);
    if (thread == 0) sh.count = sh.few_count = 0;
    warp_barrier_init(sh.arrived[warp], lane);
    __syncwarp();
    wait_for_earlier();

    const Target to = target_of(out, slots_out, table, table_stride, requests, offsets, row, k, wide);
    const float* line = scores + row * stride;
    const int length = window_of(line, lengths, starts, row, width, wide);
    if (length <= k) let_next_start();

    put_undecided(to, length, k, init, local, thread, THREADS);
    const int want = k - init - local;
    if (length <= k || want == 0) return;

    Stretch r = stretch_of(line, init, length - local);
    if (is_short(r, want)) {
        select_alone(sh, r, to, want, init);
        return;
    }
    const int rivals = r.end - r.first;
    const int vector0 = r.first / 4, vector_end = (r.end + 3) / 4;
    Chunks chunks = {vector0, vector_end, (vector_end - vector0 + CHUNK - 1) / CHUNK, 0};
    chunks.begin(sh, r);  // they come while the sample is looked at
    __syncthreads();

    // A rank in the sample that somewhat more than `want` scores reach, almost surely.
    const float expected = (float)want * (4 * STRATA) / rivals;
    int rank = min((int)(expected + 4.0f * sqrtf(expected) + 2.0f), 4 * STRATA), count;
    Threshold from = {LEAST_NUMBER + 1, INF_KEY, false};
#pragma unroll 1
    for (int tries = 0;; tries++) {
        if (rivals > LISTED) from = sample_threshold(sh, r, rank);
        collect(sh, r, chunks, score_of(from.least - 1));
        __syncthreads();
        count = sh.count;
        if (count >= want && count <= LISTED) break;
        // Once more, at a rank to which as many scores should belong as the list has room for; or without a list.
        const bool lowest = from.least == LEAST_NUMBER + 1;
        if (tries > 0 || from.plateau || (lowest && count < want) || rivals <= LISTED) {
            select_by_rereading(sh, r, to, want, init, from.plateau || lowest ? from.least - 1 : INT_MIN);
            return;
        }
        rank = max(1, min((int)((float)rank * ((want + LISTED) / 2) / max(count, 1)), 4 * STRATA));
        __syncthreads();
        if (thread == 0) sh.count = 0;
        chunks.begin(sh, r);
    }
    const Range range = range_of_edge(sh, from, count, want);
    int* picks = (int*)sh.ring;
    pick(sh, r, chunks, range, picks);
    __syncthreads();
#pragma unroll 4
    for (int i = thread; i < want; i += THREADS) put(sh, to, init + i, picks[i]);
}
