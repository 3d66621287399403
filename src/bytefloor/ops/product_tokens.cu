// product_tokens: a weight matrix times several rows of activations, all in one pass over the weights; each token gets, bit for
// bit, what product.cu gives it alone.
//
// y[t][p][n], t < TOKENS, p < PARTS, Y_STRIDE floats a token: as product.cu leaves them of one; factor [t][FACTOR_STRIDE].
// codes: of each part and group of 32 [TOKENS][high, low][32], scales float4 [TOKENS] a group: what activations.cu leaves, which
// says with flags [t][p] that they are those of this step. Work comes in items as there; a block keeps the codes of its part in
// shared memory, into which the last warp copies them.
// Approximate as product.cu. Moves the packed weight once, whatever TOKENS. Needs mma and cp.async (sm_80).
//
// Defined by the host: what product.cu needs, TOKENS (a multiple of 4), GROUP (records of a slot), RESIDENT (blocks that share a multiprocessor), FACTOR_STRIDE, Y_STRIDE.
#include "product_items.cuh"

constexpr int QUADS = TOKENS / 4, CODE_BYTES = 2 * K * TOKENS, SCALE_BYTES = K / 32 * 16 * TOKENS, AT_THERE = (AT_END + 7) / 8 * 8;
static_assert(TOKENS % 4 == 0, "tokens by fours");

// Once all tokens' codes are there: the copies of this part's, which arrive at `there`.
__device__ __forceinline__ void fetch_activations(u8* bytes, const u8* codes, const float4* scales, const u32* flags, u32 step, int part,
                                                  int lane) {
    Patience patience;
    if (lane < TOKENS)
        while (flag_of(flags + lane * PARTS + part) != step) __nanosleep(40), patience.spend();
    __syncwarp();
    if (lane >= FILLERS) return;
    codes_are_there();
    u64* there = (u64*)(bytes + AT_THERE);
    fill_shared(bytes + AT_X, codes + (size_t)part * CODE_BYTES, CODE_BYTES, there, lane);
    fill_shared(bytes + AT_XS, (const u8*)scales + (size_t)part * SCALE_BYTES, SCALE_BYTES, there, lane);
}

extern "C" __global__ void __launch_bounds__(CONSUMERS + 64, RESIDENT)
    product_tokens(const u8* w0, const u8* w1, const u8* w2, const u8* codes, const float4* scales, const u32* flags, float* y, u32* tickets,
                   const State* state, const float* factor) {
    extern __shared__ __align__(128) u8 bytes[];
    Shared shared{bytes};
    u64* there = (u64*)(bytes + AT_THERE);
    int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31, part = blockIdx.x % PARTS;
    set_barriers(shared, tid);
    if (tid == 0) barrier_init(there, 2 * FILL_ARRIVALS);
    barriers_are_set();
    __syncthreads();
    let_next_start();
    if (warp == WARPS) return fill_items(shared, w0, w1, w2, tickets, part, tid);
    if (warp > WARPS) {
        fetch_activations(bytes, codes, scales, flags, (u32)state->n_steps, part, lane);
        __syncwarp();
        return finish_items(shared, y, factor, part, parity_of(state), lane);
    }
    int g = lane >> 2, t = lane & 3;
    barrier_wait(there, 0);
    take_records(shared, warp, lane, [&](int chosen, const u8* weights, int record, float* shares) {
        float2 totals[QUADS];
        int segment = 0;
#define S(tiles, ...)                                                                                                       \
    if (chosen == segment++)                                                                                                 \
        dot_tokens<__VA_ARGS__, QUADS>(weights + warp % GROUP * __VA_ARGS__::BYTES, lane, bytes + AT_X,               \
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
