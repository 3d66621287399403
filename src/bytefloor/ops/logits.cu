// logits: adds the planes of the head's product, applies the soft cap, and takes the best token that is not banned.
//
// y float32 [PLANES][ROWS], ROWS >= V -> logits float32 [V] = cap tanh(y / cap). The best token (the lowest id among equals) becomes
// state->token, position and n_steps move on by one, and the token is appended to `history`. A NaN gives token -1. The
// last kernel of a step.
// Several tokens: gridDim.y of them, each with its own of all these. Exact but for tanh.
// Defined by the host: V, ROWS, PLANES, CAP (0: none), BLOCKS, HISTORY (places of a token's history).
constexpr int THREADS = 256;

struct Best {
    float value;
    int id;
    __device__ __forceinline__ void take(float v, int i) {
        // NaN compares false with everything, so it is looked for by name and beats all.
        if (isnan(v)) v = __int_as_float(0x7f800000), i = -1;
        if (v > value || (v == value && i < id)) value = v, id = i;
    }
};

__device__ __forceinline__ Best block_best(Best best) {
    __shared__ Best bests[THREADS];
    bests[threadIdx.x] = best;
    __syncthreads();
    for (int d = THREADS / 2; d; d >>= 1) {
        if (threadIdx.x < d) best.take(bests[threadIdx.x + d].value, bests[threadIdx.x + d].id), bests[threadIdx.x] = best;
        __syncthreads();
    }
    return bests[0];
}

extern "C" __global__ void __launch_bounds__(THREADS)
    logits(const float* y, const u8* banned, float* out, Best* block_bests, int* counter, State* state, int* history AND_STAMPS) {
    STAMP(THERE, threadIdx.x == 0);
    wait_for_previous();
    STAMP(READY, threadIdx.x == 0);
    let_next_start();
    int token = blockIdx.y;
    y += (size_t)token * (PLANES * ROWS), out += (size_t)token * V, block_bests += token * BLOCKS;
    state += token, history += token * HISTORY, counter += token;
    Best best = {-__int_as_float(0x7f800000), 0x7fffffff};
    for (int i = blockIdx.x * THREADS + threadIdx.x; i < V; i += BLOCKS * THREADS) {
        float v = 0;
#pragma unroll
        for (int p = 0; p < PLANES; p++) v += unstamped(__float_as_uint(__ldcg(y + (size_t)p * ROWS + i)));
        if (CAP > 0) v = CAP * tanhf(v / CAP);
        out[i] = v;
        if (!banned[i]) best.take(v, i);
    }
    best = block_best(best);
    __shared__ bool is_last;
    if (threadIdx.x == 0) {
        block_bests[blockIdx.x] = best;
        __threadfence();
        is_last = atomicAdd(counter, 1) == BLOCKS - 1;
    }
    __syncthreads();
    if (!is_last) return;
    __threadfence();
    best = {-__int_as_float(0x7f800000), 0x7fffffff};
    for (int i = threadIdx.x; i < BLOCKS; i += THREADS) best.take(__ldcg(&block_bests[i].value), __ldcg(&block_bests[i].id));
    best = block_best(best);
    if (threadIdx.x == 0) {
        *counter = 0;
        history[state->position] = best.id;
        state->token = best.id;
        state->position += 1;
        state->n_steps += 1;
    }
    STAMP(DONE, threadIdx.x == 0);
}
