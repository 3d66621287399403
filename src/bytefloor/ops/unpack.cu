// unpack: a packed matrix back to float32 [N, K], bit for bit what its format decodes to. Defined by the host: FORM, N, K.
extern "C" __global__ void unpack(const u8* packed, float* out) {
    constexpr int records = K / FORM::COLUMNS;
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < (size_t)N * K; i += (size_t)gridDim.x * blockDim.x) {
        int row = i / K, column = i % K;
        const u8* record = packed + ((size_t)(row / 16) * records + column / FORM::COLUMNS) * FORM::BYTES;
        out[i] = FORM::value(record, row % 16, column % FORM::COLUMNS);
    }
}
