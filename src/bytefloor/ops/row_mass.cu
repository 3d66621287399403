// row_mass: rows of logits from the planes of the head's product, and what probabilities and best tokens are found from.
//
// planes float32 [n_planes][..][V], plane_stride floats apart, are added in order -> logits float32 [R][V] = cap tanh(y / cap), y itself
// without a cap (0); they may be the one plane. maxima float32 [R][N / 64], of groups of 64 (-inf beyond V); parts float64
// [R][BLOCKS][2]: of each block's share of a row the maximum m and the sum of exp(logit - m). A NaN or +inf leaves a sum that is NaN.
// Exact but for tanh, exp and the order of sums. Moves planes and logits once.
// Defined by the host: V, N (V filled up to whole groups), BLOCKS (of a row), THREADS. Grid: BLOCKS, R.
constexpr int GROUP = 64, GROUPS = N / GROUP, SHARE = (GROUPS + BLOCKS - 1) / BLOCKS, WARPS = THREADS / 32;

__device__ __forceinline__ float largest(float a, float b) { return isnan(a) || isnan(b) ? a + b : fmaxf(a, b); }

extern "C" __global__ void __launch_bounds__(THREADS)
    row_mass(const float* planes, int n_planes, int plane_stride, float cap, float* logits, float* maxima, double* parts) {
    __shared__ float of_warps[WARPS];
    __shared__ double sums[WARPS];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    wait_for_previous();
    let_next_start();
    planes += (size_t)blockIdx.y * V, logits += (size_t)blockIdx.y * V, maxima += (size_t)blockIdx.y * GROUPS;
    int first = blockIdx.x * SHARE, end = min(first + SHARE, GROUPS);
    const float lowest = -__int_as_float(0x7f800000);
    auto at = [&](int i) {
        if (i >= V) return lowest;
        float v = planes[i];
        for (int p = 1; p < n_planes; p++) v += planes[(size_t)p * plane_stride + i];
        if (cap > 0) v = cap * tanhf(v / cap);
        logits[i] = v;
        return v + 0.f;  // -0 is 0
    };
    float best = lowest;
    for (int group = first + warp; group < end; group += WARPS) {
        float v = largest(at(group * GROUP + lane), at(group * GROUP + 32 + lane));
        for (int d = 16; d; d >>= 1) v = largest(v, __shfl_xor_sync(~0u, v, d));
        if (lane == 0) maxima[group] = v;
        best = largest(best, v);
    }
    if (lane == 0) of_warps[warp] = best;
    __syncthreads();
    for (int w = 0; w < WARPS; w++) best = largest(best, of_warps[w]);
    double sum = 0;
    if (best != lowest)
        for (int i = first * GROUP + threadIdx.x; i < min(end * GROUP, V); i += THREADS) sum += exp((double)logits[i] - (double)best);
    for (int d = 16; d; d >>= 1) sum += __shfl_xor_sync(~0u, sum, d);
    if (lane == 0) sums[warp] = sum;
    __syncthreads();
    if (threadIdx.x) return;
    for (int w = 1; w < WARPS; w++) sum += sums[w];
    double* part = parts + ((size_t)blockIdx.y * BLOCKS + blockIdx.x) * 2;
    part[0] = best, part[1] = sum;
}
