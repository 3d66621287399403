// product_tokens: a weight matrix times several rows of activations, all in one pass over the weights; each token gets, bit for
// bit, what product.cu gives it alone.
//
// x_in float32 [t][X_STRIDE], delta [t][DELTA_STRIDE], x_out [t][K_IN]; y[t][p][n], t < TOKENS, p < PARTS, Y_STRIDE floats a token;
// factor [t][FACTOR_STRIDE]: of each token as in product.cu. Work comes in items as there. The prologue is shared out: a block
// prepares one token of its part, or a few, for all blocks. codes, of each part and group of 32 [TOKENS][high, low][32], and scales,
// float4 [TOKENS] a group, are where they meet; flags [t][p] say with the number of the step that they are there, and the last warp
// of every block copies those of its part into shared memory.
// Approximate as product.cu. Moves the packed weight once, whatever TOKENS. Needs mma and cp.async (sm_80).
//
// Defined by the host: what product.cu needs, TOKENS (a multiple of 4), GROUP (records of a slot), THREADS, RESIDENT (blocks that
// share a multiprocessor), X_STRIDE, DELTA_STRIDE, FACTOR_STRIDE, Y_STRIDE.
#include "product_items.cuh"
#include "prologue.cuh"

constexpr int QUADS = TOKENS / 4, CODE_BYTES = 2 * K * TOKENS, SCALE_BYTES = K / 32 * 16 * TOKENS, AT_THERE = (AT_END + 7) / 8 * 8;
constexpr int PRODUCER = THREADS / 32 - 2;  // a warp; behind it the last
static_assert(TOKENS % 4 == 0, "tokens by fours");
static_assert(PRODUCER >= WARPS && PRODUCER * 32 >= CODERS, "warps for the records and for the prologue");

// Once all tokens' codes are there: the copies of this part's, which arrive at `there`.
__device__ __forceinline__ void fetch_activations(u8* bytes, const u8* codes, const float4* scales, const u32* flags, u32 step, int part,
                                                  int lane) {
    Patience patience;
    if (lane < TOKENS)
        while (flag_of(flags + lane * PARTS + part) != step) patience.spend();
    __syncwarp();
    if (lane >= FILLERS) return;
    codes_are_there();
    u64* there = (u64*)(bytes + AT_THERE);
    fill_shared(bytes + AT_X, codes + (size_t)part * CODE_BYTES, CODE_BYTES, there, lane);
    fill_shared(bytes + AT_XS, (const u8*)scales + (size_t)part * SCALE_BYTES, SCALE_BYTES, there, lane);
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    product_tokens(const u8* w0, const u8* w1, const u8* w2, const float* x_in, const float* delta, const float* post_weight,
                   const float* norm_weight, const float* scalar, float* x_out, float* y, u32* tickets, const State* state,
                   const float* factor, u8* codes, float4* scales, u32* flags) {
    extern __shared__ __align__(128) u8 bytes[];
    Shared shared{bytes};
    u64* there = (u64*)(bytes + AT_THERE);
    int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31, part = blockIdx.x % PARTS;
    set_barriers(shared, tid);
    if (tid == 0) barrier_init(there, 2 * FILL_ARRIVALS);
    barriers_are_set();
    __syncthreads();
    let_next_start();
    if (warp == PRODUCER) return fill_items(shared, w0, w1, w2, tickets, part, tid);
    u32 step = (u32)state->n_steps, parity = step & 1;
    if (warp > PRODUCER) {
        fetch_activations(bytes, codes, scales, flags, step, part, lane);
        __syncwarp();
        return finish_items(shared, y, factor, part, parity, lane);
    }
    if (tid < CODERS)
#pragma unroll 1
        for (int token = blockIdx.x / PARTS; token < TOKENS; token += BLOCKS_A_PART) {
            prologue(x_in + token * X_STRIDE + part * K, delta + token * DELTA_STRIDE, post_weight, norm_weight, scalar,
                     x_out + token * K_IN, true, parity, codes + (size_t)part * CODE_BYTES + token * 64,
                     scales + (size_t)part * (K / 32 * TOKENS) + token, (float*)(bytes + AT_SUMS), tid, warp, lane);
            if (tid == 0) set_flag(flags + token * PARTS + part, step);
        }
    if (warp >= WARPS) return;
    int g = lane >> 2, t = lane & 3;
    barrier_wait(there, 0);
    take_records(shared, warp, lane, [&](int chosen, const u8* weights, int record, float* shares) {
        float2 totals[QUADS];
        int segment = 0;
#define S(tiles, ...)                                                                                                       \
    if (chosen == segment++)                                                                                                 \
        dot_tokens<__VA_ARGS__, QUADS>(weights + warp % GROUP * __VA_ARGS__::BYTES, lane, bytes + AT_X,                        \
                                       (const float4*)(bytes + AT_XS), record * COLUMNS, totals);
        SEGMENTS
#undef S
#pragma unroll
        for (int q = 0; q < QUADS; q++) {
            float* at = shares + (record * TOKENS + q * 4 + t) * ROWS + g;
            at[0] = totals[q].x, at[8] = totals[q].y;
        }
    });
}
