// product: a weight matrix times one row of activations, with what comes just before it as its prologue.
//
// y[p][n], p < PLANES: parts of sum_k W[n][k] x[k] that the consumer adds in order of p; float32. With GLU rows of gate and up
// alternate, and h[n / 2] = act(y[n]) * y[n + 1] leaves instead, in one plane; with FACTOR there is no up, and
// h[n] = act(y[n]) * factor[n].
// x: float32 [K_IN], of K columns, which are more where weights were filled up with zeros. DELTA_PLANES: x' = (residual +
// post_norm(sum of delta planes)) * scalar, which block 0 writes. NORM: x = x' / rms(x') * weight. Activations become 16-bit
// codes in groups of 32, scale max / 32512, which is the only rounding here beside that of handover.cuh.
// Approximate: integer sums inside a group are exact; groups are added in float32 in an order that depends on K, the format
// and the number of blocks, not on timing: two runs give the same bits.
// Moves the packed weight once. Needs mma and cp.async (sm_80); bulk copies and an early start from sm_90 on.
//
// Work comes in items: a row tile times the block's columns. Columns may be split between PARTS classes of blocks, then each part
// leaves a plane. A block's first items follow from its number, the others it draws from a counter, since multiprocessors
// read at different speeds; an item's arithmetic is the same whoever draws it. The producer thread fills a ring of slots, four
// records each, as soon as the block starts, so that weights arrive while the last product drains and while the prologue runs;
// slots go to groups of four warps in turn. One more warp adds up the records of each item, in order, and hands its rows over.
//
// Defined by the host: SEGMENTS as S(tiles, form) ..., COLUMNS of their records (the same in all) and the RECORD_BYTES of the
// largest; WARPS, K and K_IN (of one part), PARTS, N, NORM, POST_NORM, DELTA_PLANES, SCALAR, GLU (0, 1 silu, 2 gelu), FACTOR,
// SLOTS, BUFFERS (of items), BLOCKS, STATIC_ITEMS (of a block), INTERLEAVE, EPS.

#define TOKENS 1
constexpr int GROUP = 4, FACTOR_STRIDE = 0, Y_STRIDE = 0;
#include "product_items.cuh"
#include "prologue.cuh"
static_assert(WARPS * 32 == CODERS, "all consumers prepare the activations");

extern "C" __global__ void __launch_bounds__(CODERS + 64, 2)
    product(const u8* w0, const u8* w1, const u8* w2, const float* x_in, const float* delta, const float* post_weight, const float* norm_weight,
            const float* scalar, float* x_out, float* y, u32* tickets, const State* state, const float* factor AND_STAMPS) {
    extern __shared__ __align__(128) u8 bytes[];
    Shared shared{bytes};
    int tid = threadIdx.x, warp = tid >> 5, part = blockIdx.x % PARTS;
    STAMP(THERE, tid == 0);
    set_barriers(shared, tid);
    barriers_are_set();
    __syncthreads();
    let_next_start();
    if (warp == WARPS) return fill_items(shared, w0, w1, w2, tickets, part, tid);
    u32 parity = parity_of(state);
    if (warp > WARPS) {
        finish_items(shared, y, factor, part, parity, tid % 32);
        STAMP(DONE, tid % 32 == 0);
        return wait_for_previous();  // kernels end in their order, so that the end of the last one is the end of the step
    }
    Lane at(tid & 31);
    Activations x{bytes + AT_X, (float4*)(bytes + AT_XS)};
    prologue(x_in + part * K, delta, post_weight, norm_weight, scalar, x_out, blockIdx.x == 0, parity,
             OwnCodes{bytes + AT_X, (float4*)(bytes + AT_XS)}, (float*)(bytes + AT_SUMS), tid, warp, at.index);
    STAMP(READY, tid == 0);
    take_records(shared, warp, at.index, [&](int chosen, const u8* weights, int record, float* shares) {
        float2 share;
        int segment = 0;
#define S(tiles, ...)                                                                                                       \
    if (chosen == segment++) share = __VA_ARGS__::dot(weights + warp % GROUP * __VA_ARGS__::BYTES, at, x, record * COLUMNS);
        SEGMENTS
#undef S
        // Even lanes go on with the row g, odd ones with g + 8.
        bool is_odd = at.t & 1;
        float row = (is_odd ? share.y : share.x) + __shfl_xor_sync(~0u, is_odd ? share.x : share.y, 1);
        row += __shfl_xor_sync(~0u, row, 2);
        if (at.t < 2) shares[record * ROWS + at.g + 8 * at.t] = row;
    });
}
