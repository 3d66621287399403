// product_tokens: a weight matrix times several rows of activations, all in one pass over the weights; each token gets, bit for
// bit, what product.cu gives it alone.
//
// x_in float32 [t][X_STRIDE], delta [t][DELTA_STRIDE], x_out [t][K_IN]; y[t][p][n], t < TOKENS, p < PARTS, Y_STRIDE floats a token;
// factor [t][FACTOR_STRIDE]: of each token as in product.cu. Work comes in items as there. Blocks of a cluster share the prologue:
// each prepares some of the tokens and sends codes and scales to the others, so that no more is read than for one token.
// Approximate as product.cu. Moves the packed weight once, whatever TOKENS. Needs mma and cp.async (sm_80), clusters from sm_90 on.
//
// Defined by the host: what product.cu needs, TOKENS (a multiple of 4), CLUSTER (blocks; 1: each prepares all tokens), GROUP (records
// of a slot), THREADS, RESIDENT (blocks that share a multiprocessor), X_STRIDE, DELTA_STRIDE, FACTOR_STRIDE, Y_STRIDE.
#include "product_items.cuh"
#include "prologue.cuh"

constexpr int QUADS = TOKENS / 4, MINE = TOKENS / CLUSTER, AT_THERE = (AT_END + 7) / 8 * 8, PRODUCER = THREADS / 32 - 2;
static_assert(TOKENS % 4 == 0 && TOKENS % CLUSTER == 0, "tokens by fours, as many for each block");
static_assert(CLUSTER == 1 || BULK, "copies between blocks");
static_assert(PRODUCER >= WARPS && PRODUCER * 32 >= CODERS, "warps for the records and for the prologue");

extern "C" __global__ void
#if CLUSTER > 1
    __cluster_dims__(CLUSTER, 1, 1)
#endif
    __launch_bounds__(THREADS, RESIDENT)
    product_tokens(const u8* w0, const u8* w1, const u8* w2, const float* x_in, const float* delta, const float* post_weight,
                   const float* norm_weight, const float* scalar, float* x_out, float* y, u32* tickets, const State* state,
                   const float* factor) {
    extern __shared__ __align__(128) u8 bytes[];
    Shared shared{bytes};
    u64* there = (u64*)(bytes + AT_THERE);  // own tokens, and those that other blocks send
    int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31, rank = blockIdx.x % CLUSTER, part = blockIdx.x / CLUSTER % PARTS;
    set_barriers(shared, tid);
    if (tid == 0) barrier_init(there, CLUSTER > 1 ? 2 : 1);
    barriers_are_set();
    if (tid == 0 && CLUSTER > 1) barrier_expect(there, (TOKENS - MINE) * (CODE_ROW + SCALE_ROW));
    if (CLUSTER > 1) cluster_arrive();
    __syncthreads();
    let_next_start();
    if (warp == PRODUCER) return fill_items(shared, w0, w1, w2, tickets, part, tid);
    u32 parity = parity_of(state);
    if (warp > PRODUCER) return finish_items(shared, y, factor, part, parity, lane);
    if (tid < CODERS) {
#pragma unroll 1
        for (int token = rank * MINE; token < (rank + 1) * MINE; token++)
            prologue(x_in + token * X_STRIDE + part * K, delta + token * DELTA_STRIDE, post_weight, norm_weight, scalar,
                     x_out + token * K_IN, blockIdx.x < CLUSTER, parity, bytes + AT_X + token * CODE_ROW,
                     (float4*)(bytes + AT_XS + token * SCALE_ROW), (float*)(bytes + AT_SUMS), tid, warp, lane);
        if (CLUSTER > 1) {
            written_for_copies();
            sync_coders();
        }
    }
    if (CLUSTER > 1) cluster_wait();  // everybody's barriers are set
    if (tid == 0) {
        for (int i = 1; i < CLUSTER; i++) {
            int other = (rank + i) % CLUSTER, first = rank * MINE;
            send(bytes + AT_X + first * CODE_ROW, MINE * CODE_ROW, there, other);
            send(bytes + AT_XS + first * SCALE_ROW, MINE * SCALE_ROW, there, other);
        }
        barrier_arrive(there);
    }
    barrier_wait(there, 0);
    int g = lane >> 2, t = lane & 3;
    if (warp < WARPS)
        take_records(shared, warp, lane, [&](int chosen, const u8* weights, int record, float* shares) {
            float2 totals[QUADS];
            int segment = 0;
#define S(tiles, ...)                                                                                                       \
    if (chosen == segment++)                                                                                                 \
        dot_tokens<__VA_ARGS__, K>(weights + warp % GROUP * __VA_ARGS__::BYTES, lane, bytes + AT_X, bytes + AT_XS,                 \
                                   record * COLUMNS, totals);
            SEGMENTS
#undef S
#pragma unroll
            for (int q = 0; q < QUADS; q++) {
                float* at = shares + (record * TOKENS + q * 4 + t) * ROWS + g;
                at[0] = totals[q].x, at[8] = totals[q].y;
            }
        });
    // Nobody leaves while others may still copy from here.
    if (CLUSTER > 1) cluster_arrive(), cluster_wait();
}
