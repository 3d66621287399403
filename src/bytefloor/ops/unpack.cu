// unpack: rows of a packed matrix back to float32, bit for bit what its format decodes to, times SCALE; or that as bf16. out [n][K].
// Row i of the output is row rows[i], or first + step * i where there is no list: gate and up lie by turns in one matrix.
// Defined by the host: FORM, K; SCALE and OUT_BF16 where they are to be anything but 1 (nothing is rounded) and 0 (float32).
#include <cuda_bf16.h>

#ifndef SCALE
#define SCALE 1.0f
#endif
#if defined(OUT_BF16) && OUT_BF16
typedef __nv_bfloat16 Out;
__device__ __forceinline__ Out stored(float value) { return __float2bfloat16_rn(value); }
#else
typedef float Out;
__device__ __forceinline__ Out stored(float value) { return value; }
#endif

extern "C" __global__ void unpack(const u8* packed, const long long* rows, int first, int step, int n, Out* out) {
    wait_for_previous();
    constexpr int records = (K + FORM::COLUMNS - 1) / FORM::COLUMNS;
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < (size_t)n * K; i += (size_t)gridDim.x * blockDim.x) {
        int at = i / K, column = i % K, row = rows ? (int)rows[at] : first + step * at;
        const u8* record = packed + ((size_t)(row / 16) * records + column / FORM::COLUMNS) * FORM::BYTES;
        out[i] = stored(SCALE * FORM::value(record, row % 16, column % FORM::COLUMNS));
    }
}
