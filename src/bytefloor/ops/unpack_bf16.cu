// unpack_bf16: a packed matrix as bf16 [n][K], by the fragments that products of many rows multiply with: what multiplying by another
// library takes first. Exact but for that rounding, see stream.cuh. Moves the packed bytes once, and two for each weight.
// Defined by the host: FORM, K (a multiple of 32).
extern "C" __global__ void unpack_bf16(const u8* packed, int n, u8* out) {
    wait_for_previous();
    constexpr int RECORDS = (K + FORM::COLUMNS - 1) / FORM::COLUMNS;
    Lane at(threadIdx.x & 31);
    int n_records = (n + 15) / 16 * RECORDS;
    for (int i = (blockIdx.x * blockDim.x + threadIdx.x) / 32; i < n_records; i += gridDim.x * blockDim.x / 32) {
        const u8* record = packed + (size_t)i * FORM::BYTES;
        int row = i / RECORDS * 16 + at.g, first = i % RECORDS * FORM::COLUMNS;
#pragma unroll
        for (int group = 0; group < FORM::COLUMNS / 32; group++) {
            u32 a[8];
            FORM::fragments(record, at, group / 2, group % 2, a);
            int column = first + group * 32 + 8 * at.t;
            uint4* to = (uint4*)(out + ((size_t)row * K + column) * 2);
            if (column < K && row < n) to[0] = make_uint4(a[0], a[2], a[4], a[6]);
            if (column < K && row + 8 < n) to[K] = make_uint4(a[1], a[3], a[5], a[7]);
        }
    }
}
