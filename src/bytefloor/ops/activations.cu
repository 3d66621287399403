// activations: what comes before a product of several tokens, once for all of its blocks: a block a token and part of the columns.
//
// x_in float32 [t][X_STRIDE], delta [t][DELTA_STRIDE], x_out [t][K_IN]; codes and scales as product_tokens.cu takes them, of which
// flags [t][p] say whose step they are. See prologue.cuh for what is computed: the same as in product.cu, in the same order.
// Defined by the host: TOKENS, WARPS, K and K_IN (of one part), PARTS, X_STRIDE, DELTA_STRIDE, NORM, POST_NORM, DELTA_PLANES,
// SCALAR, EPS.
constexpr int CONSUMERS = WARPS * 32;
#include "prologue.cuh"

extern "C" __global__ void __launch_bounds__(CONSUMERS)
    activations(const float* x_in, const float* delta, const float* post_weight, const float* norm_weight, const float* scalar, float* x_out,
                u8* codes, float4* scales, u32* flags, const State* state) {
    __shared__ float sums[2 * WARPS];
    int tid = threadIdx.x, token = blockIdx.x, part = blockIdx.y;
    let_next_start();
    prologue(x_in + token * X_STRIDE + part * K, delta + token * DELTA_STRIDE, post_weight, norm_weight, scalar, x_out + token * K_IN, true,
             parity_of(state), codes + (size_t)part * (2 * K * TOKENS) + token * 64, scales + (size_t)part * (K / 32 * TOKENS) + token,
             sums, tid, tid >> 5, tid & 31);
    if (tid == 0) set_flag(flags + token * PARTS + part, (u32)state->n_steps);
    wait_for_previous();
}
