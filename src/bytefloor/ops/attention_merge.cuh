// The runs of a band put together. See attention.cu, whose constants these are.
#pragma once

// Where blocks of a group of heads leave what they found of their runs, each value with a tag: [MAX_RUNS][HEADS][E], and of every
// run and head its maximum and its sum.
struct Parts {
    u64 *values, *sums;
    u32 tag;
    __device__ __forceinline__ u64* value(int run, int head) const { return values + (run * HEADS + head) * E; }
    __device__ __forceinline__ u64* sum(int run, int head) const { return sums + (run * HEADS + head) * 2; }
};

// All runs together, by n_blocks blocks. 64 outputs at a time, two a lane; several warps share the runs, and what each finds is put
// together in their order.
__device__ __forceinline__ void merge(Parts parts, int n_runs, int block, int n_blocks, int width, float4* found_by, float* out, u32 parity,
                                      int warp, int lane) {
    constexpr int OUTPUTS = HEADS * E, AT_ONCE = 6;
    int places = WARPS / width;  // of `width` warps that share 64 outputs
    for (int first = block * places * 64; first < OUTPUTS; first += n_blocks * places * 64) {
        int i = min(first + warp / width * 64 + lane * 2, OUTPUTS - 2);
        float4 total = {LOWEST, 0, 0, 0};  // the maximum, the sum, and two outputs
        for (int r = warp % width; r < n_runs; r += width * AT_ONCE) {
            ulonglong2 value[AT_ONCE], sum[AT_ONCE];
            bool is_late;
            Patience patience;
            do {  // all of it on its way at once
                is_late = false;
#pragma unroll
                for (int n = 0; n < AT_ONCE; n++) {
                    int run = min(r + n * width, n_runs - 1);
                    value[n] = peek_two_tagged(parts.value(run, 0) + i), sum[n] = peek_two_tagged(parts.sum(run, i / E));
                }
#pragma unroll
                for (int n = 0; n < AT_ONCE; n++) {
                    is_late |= (u32)(value[n].x >> 32) != parts.tag || (u32)(value[n].y >> 32) != parts.tag;
                    is_late |= (u32)(sum[n].x >> 32) != parts.tag || (u32)(sum[n].y >> 32) != parts.tag;
                }
                patience.spend();
            } while (is_late);
            float highest = total.x;
#pragma unroll
            for (int n = 0; n < AT_ONCE; n++) highest = fmaxf(highest, __uint_as_float((u32)sum[n].x));
            float by = expf(total.x - highest);
            total = make_float4(highest, total.y * by, total.z * by, total.w * by);
#pragma unroll
            for (int n = 0; n < AT_ONCE; n++)
                if (r + n * width < n_runs) {
                    by = expf(__uint_as_float((u32)sum[n].x) - highest);
                    total.y = fmaf(by, __uint_as_float((u32)sum[n].y), total.y);
                    total.z = fmaf(by, __uint_as_float((u32)value[n].x), total.z);
                    total.w = fmaf(by, __uint_as_float((u32)value[n].y), total.w);
                }
        }
        __syncthreads();  // nobody reads tiles, or what was found for the outputs before, any more
        found_by[warp * 32 + lane] = total;
        __syncthreads();
        if (warp % width == 0 && first + warp / width * 64 + lane * 2 < OUTPUTS) {
            float highest = total.x, sum = 0, one = 0, other = 0;
            for (int w = 1; w < width; w++) highest = fmaxf(highest, found_by[(warp + w) * 32 + lane].x);
            for (int w = 0; w < width; w++) {
                float4 part = found_by[(warp + w) * 32 + lane];
                float by = expf(part.x - highest);
                sum = fmaf(by, part.y, sum), one = fmaf(by, part.z, one), other = fmaf(by, part.w, other);
            }
            hand_over(out + i, __fdividef(one, sum), parity);
            hand_over(out + i + 1, __fdividef(other, sum), parity);
        }
    }
}
