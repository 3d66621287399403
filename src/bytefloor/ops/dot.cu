// dot: a warp's shares of TIMES records in shared memory. Never launched: its machine code is counted, see tools/instructions.py.
// Defined by the host: FORM, TIMES.
extern "C" __global__ void dot(float2* out) {
    extern __shared__ __align__(128) u8 shared[];
    Lane at(threadIdx.x);
    u8* codes = shared + TIMES * FORM::BYTES;
    Activations x{codes, (const float4*)(codes + 2 * TIMES * FORM::COLUMNS)};
    float2 total = {0, 0};
#pragma unroll
    for (int i = 0; i < TIMES; i++) {
        float2 share = FORM::dot(shared + i * FORM::BYTES, at, x, i * FORM::COLUMNS);
        total.x += share.x, total.y += share.y;
    }
    out[threadIdx.x] = total;
}
