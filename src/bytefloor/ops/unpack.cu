// unpack: rows of a packed matrix back to float32, bit for bit what its format decodes to, times SCALE. out [n][K].
// Row i of the output is row rows[i], or first + step * i where there is no list: gate and up lie by turns in one matrix.
// Defined by the host: FORM, K; SCALE where it is to be anything but 1, which rounds nothing.
#ifndef SCALE
#define SCALE 1.0f
#endif

extern "C" __global__ void unpack(const u8* packed, const long long* rows, int first, int step, int n, float* out AND_STAMPS) {
    STAMP(THERE, threadIdx.x == 0);
    wait_for_previous();
    STAMP(READY, threadIdx.x == 0);
    constexpr int records = (K + FORM::COLUMNS - 1) / FORM::COLUMNS;
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < (size_t)n * K; i += (size_t)gridDim.x * blockDim.x) {
        int at = i / K, column = i % K, row = rows ? (int)rows[at] : first + step * at;
        const u8* record = packed + ((size_t)(row / 16) * records + column / FORM::COLUMNS) * FORM::BYTES;
        out[i] = SCALE * FORM::value(record, row % 16, column % FORM::COLUMNS);
    }
    STAMP(DONE, threadIdx.x % 32 == 0);
}
