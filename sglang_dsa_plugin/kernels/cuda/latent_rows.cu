// Latent rows of bf16 stored as they are, SM 9.0 and later: a warp a row, WARPS rows a block.
//
//     rows[slots[r]] = latent[r] (512 values), rope[r] (64 values), where 0 <= slots[r] < count
//
// Strides of latent and rope are in units of 16 bytes, eight values: 64 of latent and 8 of rope make a row. The next
// kernel is let start between loads and stores: earlier its blocks, which wait, are in the way of the loads, later it
// waits for the stores to be sent. WIDE_SLOTS: slots are of 64 bits.

#include "cluster.cuh"

#if WIDE_SLOTS
typedef long long Slot;
#else
typedef int Slot;
#endif

constexpr int LATENT = 64, ROPE = 8, LANES = 32;

extern "C" __global__ void __launch_bounds__(LANES * WARPS)
store_rows(const uint4* latent, const uint4* rope, const Slot* slots, char* rows, int latent_stride, int rope_stride,
           int row_bytes, int tokens, int count) {
    wait_for_earlier();
    const int lane = threadIdx.x % LANES, r = blockIdx.x * WARPS + threadIdx.x / LANES;
    if (r >= tokens) return;
    const long long slot = slots[r];
    const uint4 low = latent[(long long)r * latent_stride + lane];
    const uint4 high = latent[(long long)r * latent_stride + LANES + lane];
    uint4 turned = {0, 0, 0, 0};  // and not what was just read: everything behind would wait for that
    if (lane < ROPE) turned = rope[(long long)r * rope_stride + lane];
    let_next_start();
    if (slot < 0 || slot >= count) return;
    uint4* row = (uint4*)(rows + slot * row_bytes);
    row[lane] = low;
    row[LANES + lane] = high;
    if (lane < ROPE) row[LATENT + lane] = turned;
}
