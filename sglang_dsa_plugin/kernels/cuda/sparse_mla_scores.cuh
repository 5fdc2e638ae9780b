// Scores of a quarter of a tile of bf16 rows in sparse_mla.cu, with the queries in registers.

// How far into 128 bytes of a row, its `block`th, the `piece`th 16 of them lie. The tensor unit swaps by the number of the
// 128 bytes in shared memory; a row has nine of them.
__device__ __forceinline__ u32 swapped(u32 piece, u32 row, u32 block) {
    return (piece ^ (row + (TENSOR_COPIES ? block : 0)) % 8) * 16;
}

// A lane's 16 bytes of columns 32 i on, of the row at `row`.
__device__ __forceinline__ u32 piece_at(u32 row, u32 lane, int i) {
    return (row + swapped(lane / 8, lane, i / 2) ^ i % 2 * 64) + i / 2 * 128;
}

// q . rows^T for 16 rows, columns 32 I to the end; fetched[]: what is already in registers.
template <int I>
__device__ __forceinline__ void products(float (&part)[2][CHAINS][4], u32 (&fetched)[AHEAD + 1][2][4],
                                         const u32 (&q)[36][4], u32 at, u32 lane) {
    if constexpr (I < 18) {
        if constexpr (I + AHEAD < 18) {
            constexpr int next = I + AHEAD;
#pragma unroll
            for (int n = 0; n < 2; n++)
                matrices(fetched[next % (AHEAD + 1)][n], piece_at(at, lane, next) + 8 * n * ROW_BYTES);
        }
#pragma unroll
        for (int k = 0; k < 2; k++)
#pragma unroll
            for (int n = 0; n < 2; n++) {
                const u32(&x)[4] = fetched[I % (AHEAD + 1)][n];
                product(part[n][(2 * I + k) % CHAINS], q[2 * I + k], x[2 * k], x[2 * k + 1]);
            }
        products<I + 1>(part, fetched, q, at, lane);
    }
}

__device__ __forceinline__ void scores_of_quarter(float (&d)[2][4], const u32 (&q)[36][4], u32 rows, u32 lane) {
    u32 at = rows + lane % 8 * ROW_BYTES;
    float part[2][CHAINS][4];
    u32 fetched[AHEAD + 1][2][4];
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
        for (int k = 0; k < CHAINS; k++)
#pragma unroll
            for (int j = 0; j < 4; j++) part[n][k][j] = 0;
#pragma unroll
    for (int i = 0; i < AHEAD; i++)
#pragma unroll
        for (int n = 0; n < 2; n++) matrices(fetched[i][n], piece_at(at, lane, i) + 8 * n * ROW_BYTES);
    products<0>(part, fetched, q, at, lane);
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
        for (int j = 0; j < 4; j++) d[n][j] = (part[n][0][j] + part[n][1][j]) + (part[n][2][j] + part[n][3][j]);
}
