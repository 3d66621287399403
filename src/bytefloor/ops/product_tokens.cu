// product_tokens: a weight matrix times several rows of activations, all in one pass over the weights; each token gets, bit for
// bit, what product.cu gives it alone.
//
// x_in float32 [t][X_STRIDE], delta [t][DELTA_STRIDE], x_out [t][K_IN]; y[t][p][n], t < TOKENS, p < PARTS, Y_STRIDE floats a token;
// factor [t][FACTOR_STRIDE]: of each token as in product.cu. Work comes in items as there. The prologue is shared out: a block
// prepares one token of its part, or a few, for all blocks. They meet in `places`, 32 bytes for eight values of a token, each half
// with the number of the step, [p][t][K / 8]; every block reads those of its part until all of them are there.
// Approximate as product.cu. Moves the packed weight once, whatever TOKENS. Needs mma and cp.async (sm_80).
//
// Defined by the host: what product.cu needs, TOKENS (a multiple of 4), GROUP (records of a slot), THREADS, RESIDENT (blocks that
// share a multiprocessor), X_STRIDE, DELTA_STRIDE, FACTOR_STRIDE, Y_STRIDE.
#include "product_items.cuh"
#include "prologue.cuh"

constexpr int QUADS = TOKENS / 4, EIGHTS = K / 8, ALL_EIGHTS = EIGHTS * TOKENS;
constexpr int PRODUCER = THREADS / 32 - 2, READERS = PRODUCER * 32;  // a warp, behind it the last; threads before it
static_assert(TOKENS % 4 == 0, "tokens by fours");
static_assert(PRODUCER >= WARPS && READERS >= CODERS, "warps for the records and for the prologue");

// Where codes go: to all blocks. One of the four threads of a group has the scale, one its sum of the first half, and so on.
struct SharedCodes {
    uint4* places;
    u32 step;
    __device__ __forceinline__ void take(int i, uint2 high, uint2 low, float scale, int half_sum, int other) const {
        int j = i >> 3 & 3;
        float own = j == 0 ? scale : j == 3 ? scale * (half_sum + other) : scale * half_sum;
        uint4* at = places + i / 8 * 2;
        hand_over_three(at, high.x, high.y, low.x, step);
        hand_over_three(at + 1, low.y, __float_as_uint(own), 0, step);
    }
};

// All tokens' codes and scales of this part, into shared memory.
__device__ __forceinline__ void read_codes(u8* bytes, const uint4* places, u32 step, int tid) {
    constexpr int AT_ONCE = 2;
    // One place a warp first, now and then, so that whoever still streams weights is not disturbed.
    if (tid % 32 == 0) {
        Patience patience;
        while (peek_three(places + min(tid, ALL_EIGHTS - 1) * 2).w != step) __nanosleep(100), patience.spend();
    }
    __syncwarp();
#pragma unroll 1
    for (int first = tid; first < ALL_EIGHTS; first += AT_ONCE * READERS) {
        uint4 front[AT_ONCE], back[AT_ONCE];
        Patience patience;
        bool is_late;
        do {
            is_late = false;
#pragma unroll
            for (int n = 0; n < AT_ONCE; n++) {
                const uint4* at = places + min(first + n * READERS, ALL_EIGHTS - 1) * 2;
                front[n] = peek_three(at), back[n] = peek_three(at + 1);
                is_late |= front[n].w != step || back[n].w != step;
            }
            patience.spend();
        } while (is_late);
#pragma unroll
        for (int n = 0; n < AT_ONCE; n++) {
            int at = first + n * READERS, token = at / EIGHTS, eight = at % EIGHTS;
            if (at >= ALL_EIGHTS) break;
            u8* codes = bytes + AT_X + (eight / 4 * TOKENS + token) * 64 + eight % 4 * 8;
            *(uint2*)codes = make_uint2(front[n].x, front[n].y), *(uint2*)(codes + 32) = make_uint2(front[n].z, back[n].x);
            ((u32*)(bytes + AT_XS))[(eight / 4 * TOKENS + token) * 4 + eight % 4] = back[n].y;
        }
    }
    asm volatile("bar.sync 2, %0;" ::"n"(READERS) : "memory");
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    product_tokens(const u8* w0, const u8* w1, const u8* w2, const float* x_in, const float* delta, const float* post_weight,
                   const float* norm_weight, const float* scalar, float* x_out, float* y, u32* tickets, const State* state,
                   const float* factor, uint4* places AND_STAMPS) {
    extern __shared__ __align__(128) u8 bytes[];
    Shared shared{bytes};
    int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31, part = blockIdx.x % PARTS;
    STAMP(THERE, tid == 0);
    set_barriers(shared, tid);
    barriers_are_set();
    __syncthreads();
    let_next_start();
    if (warp == PRODUCER) return fill_items(shared, w0, w1, w2, tickets, part, tid);
    u32 step = (u32)state->n_steps, parity = step & 1;
    if (warp > PRODUCER) {
        finish_items(shared, y, factor, part, parity, lane);
        STAMP(DONE, lane == 0);
        return wait_for_previous();  // kernels end in their order, so that the end of the last one is the end of the step
    }
    uint4* of_part = places + (size_t)part * (2 * ALL_EIGHTS);
    if (tid < CODERS)
#pragma unroll 1
        for (int token = blockIdx.x / PARTS; token < TOKENS; token += BLOCKS_A_PART)
            prologue(x_in + token * X_STRIDE + part * K, delta + token * DELTA_STRIDE, post_weight, norm_weight, scalar,
                     x_out + token * K_IN, true, parity, SharedCodes{of_part + token * (2 * EIGHTS), step}, (float*)(bytes + AT_SUMS), tid,
                     warp, lane);
    read_codes(bytes, of_part, step, tid);
    STAMP(READY, tid == 0);
    if (warp >= WARPS) return;
    int g = lane >> 2, t = lane & 3;
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
