// read: sums 16-byte words of a buffer far larger than L2: the stream limit that every share is a share of.
// Defined by the host: THREADS. n_words: 16-byte words.
extern "C" __global__ void __launch_bounds__(THREADS) read(const uint4* words, int n_thousands, u32* out) {
    wait_for_previous();
    size_t n = (size_t)n_thousands * 1024, stride = (size_t)gridDim.x * THREADS;
    u32 total = 0;
#pragma unroll 8
    for (size_t i = blockIdx.x * (size_t)THREADS + threadIdx.x; i < n; i += stride) {
        uint4 v = __ldcs(words + i);
        total += v.x ^ v.y ^ v.z ^ v.w;
    }
    if (total == 0x12345678) *out = total;
}
