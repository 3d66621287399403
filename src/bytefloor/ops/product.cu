// product: a weight matrix times one row of activations, with what comes just before it as its prologue.
//
// y[p][n], p < PLANES: parts of sum_k W[n][k] x[k] that the consumer adds in order of p; float32. With GLU rows of gate and up
// alternate, and h[n / 2] = act(y[n]) * y[n + 1] leaves as codes with a scale and sums for each 32.
// x: float32 [K]. NORM: x' = (residual + post_norm(sum of delta planes)) * scalar, x = x' / rms(x') * weight; block 0 writes
// x'. Activations become 16-bit codes in groups of 32, scale max / 32512, which is the only rounding here.
// Approximate: integer sums inside a group are exact; groups are added in float32 in an order that depends on K, the format
// and the number of blocks, not on timing: two runs give the same bits.
// Moves the packed weight once. Needs cp.async.bulk (sm_90).
//
// A block streams one contiguous run of records. Its producer thread fills the ring before it waits for the previous
// kernel, so that the weights of this product arrive while the last one drains and while the prologue runs.
//
// Defined by the host: SEGMENTS as S(form, tiles) ..., COLUMNS of their records (K decides it, so they agree) and the
// RECORD_BYTES of the largest; K, N, NORM, POST_NORM, DELTA_PLANES, SCALAR, CODES (the input is such codes), GLU (0, 1 silu, 2 gelu),
// PLANES, TILES_PER_BLOCK, SLOTS, EPS.
#include "stream.cuh"
#include "ring.cuh"

constexpr int WARPS = 8, CONSUMERS = WARPS * 32, ROWS = 16;

constexpr int RECORDS = K / COLUMNS, UNITS = N / ROWS * RECORDS, SLOT = WARPS * RECORD_BYTES;
constexpr int GRANULE = GLU ? RECORDS : 1;  // a GLU output needs whole rows in one block
constexpr int GROUPS = K / 32;
constexpr int AT_X = SLOTS * SLOT, AT_XS = AT_X + 2 * K, AT_PART = AT_XS + GROUPS * 16,
              AT_BARRIERS = AT_PART + TILES_PER_BLOCK * WARPS * ROWS * 4, AT_SUMS = AT_BARRIERS + 2 * SLOTS * 8;

__device__ __forceinline__ void sync_consumers() { asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS) : "memory"); }

__device__ __forceinline__ float sum_consumers(float v, float* sums, int warp, int lane) {
    for (int d = 16; d; d >>= 1) v += __shfl_xor_sync(~0u, v, d);
    if (lane == 0) sums[warp] = v;
    sync_consumers();
    float total = 0;
#pragma unroll
    for (int w = 0; w < WARPS; w++) total += sums[w];
    return total;
}

__device__ __forceinline__ void load8(float (&v)[8], const float* p) {
    float4 a = __ldcg((const float4*)p), b = __ldcg((const float4*)p + 1);
    v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w, v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
}

struct Run {  // this block's units
    int begin, end;
    __device__ __forceinline__ Run() {
        long granules = UNITS / GRANULE;
        begin = (int)(granules * blockIdx.x / gridDim.x) * GRANULE;
        end = (int)(granules * (blockIdx.x + 1) / gridDim.x) * GRANULE;
    }
};

template <typename F>
__device__ __forceinline__ void fill(const u8* weights, int first_unit, int n_units, Run run, u8* ring, u64* full, u64* empty,
                                     int& slot) {
    int begin = max(run.begin, first_unit), end = min(run.end, first_unit + n_units);
    for (int u = begin; u < end; u += WARPS, slot++) {
        int s = slot % SLOTS;
        if (slot >= SLOTS) barrier_wait(empty + s, (slot / SLOTS & 1) ^ 1);
        u32 bytes = min(WARPS, end - u) * F::BYTES;
        barrier_expect(full + s, bytes);
        bulk_copy(ring + s * SLOT, weights + (size_t)(u - first_unit) * F::BYTES, bytes, full + s);
    }
}

struct Sum {  // a warp's running total of one row tile
    int tile = -1;
    float value = 0;
    __device__ __forceinline__ void put(float* part, int first_tile, int warp, int lane) {
        if (tile < 0) return;
        float row = value + __shfl_xor_sync(~0u, value, 1);
        if (!(lane & 1)) part[((tile - first_tile) * WARPS + warp) * ROWS + (lane >> 1)] = row;
    }
};

template <typename F>
__device__ __forceinline__ void consume(int first_unit, int n_units, Run run, const u8* ring, u64* full, u64* empty, int& slot,
                                        Sum& sum, Codes x, const float4* xs, float* part, int first_tile, int warp,
                                        int lane) {
    int begin = max(run.begin, first_unit), end = min(run.end, first_unit + n_units);
    for (int u = begin; u < end; u += WARPS, slot++) {
        int s = slot % SLOTS;
        barrier_wait(full + s, slot / SLOTS & 1);
        int unit = u + warp;
        if (unit < end) {
            int tile = unit / RECORDS, k = (unit - tile * RECORDS) * COLUMNS;
            if (tile != sum.tile) {
                sum.put(part, first_tile, warp, lane);
                sum.tile = tile, sum.value = 0;
            }
            sum.value += F::dot(ring + s * SLOT + warp * F::BYTES, lane, x, xs, k);
        }
        __syncwarp();
        if (lane == 0) barrier_arrive(empty + s);
    }
}

// A maximum that NaN wins: fmaxf would drop it, all codes of a group would be 0, and NaN logits would look like equal ones.
__device__ __forceinline__ float max_or_nan(float a, float b) {
    float larger;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(a), "f"(b));
    return larger;
}

// Codes: round(v / scale) in -32512 .. 32512 as 256 high + low, both signed bytes. A NaN scale makes its group's sums NaN.
__device__ __forceinline__ float code_scale(float largest) { return __fdiv_rn(largest, 32512.f); }
__device__ __forceinline__ int to_code(float v, float scale) { return scale > 0 ? __float2int_rn(__fdiv_rn(v, scale)) : 0; }
__device__ __forceinline__ int high_byte(int code) { return (code + 128) >> 8; }

constexpr int ROUNDS = (K / 8 + CONSUMERS - 1) / CONSUMERS;  // of eight values a thread

// Eight consecutive values a thread and round; zeros past the end.
__device__ __forceinline__ void load_all(float (&v)[ROUNDS][8], const float* p, int tid) {
#pragma unroll
    for (int r = 0; r < ROUNDS; r++) {
        int i = (r * CONSUMERS + tid) * 8;
#pragma unroll
        for (int j = 0; j < 8; j++) v[r][j] = 0;
        if (i < K) load8(v[r], p + i);
    }
}

__device__ __forceinline__ float sum_of_squares(const float (&v)[ROUNDS][8]) {
    float total = 0;
#pragma unroll
    for (int r = 0; r < ROUNDS; r++)
#pragma unroll
        for (int j = 0; j < 8; j++) total = fmaf(v[r][j], v[r][j], total);
    return total;
}

// Reads activations, applies the norms, leaves codes and group scales in shared memory.
// The residual was written two kernels ago or earlier, so it is read, like the weights of the norms, before the wait.
__device__ __forceinline__ void prologue(const float* x_in, const float* delta, const float* post_weight,
                                         const float* norm_weight, const float* scalar, float* x_out, i8* high, i8* low, float4* xs,
                                         float* sums, int tid, int warp, int lane) {
    float v[ROUNDS][8];
#if NORM
    float weight[ROUNDS][8];
    load_all(weight, norm_weight, tid);
#if DELTA_PLANES > 0
    load_all(v, x_in, tid);
#if POST_NORM
    float post[ROUNDS][8];
    load_all(post, post_weight, tid);
#endif
    float by = SCALAR ? *scalar : 1.f, d[ROUNDS][8];
    wait_for_previous();
    let_next_start();
    load_all(d, delta, tid);
#pragma unroll
    for (int p = 1; p < DELTA_PLANES; p++) {
        float plane[ROUNDS][8];
        load_all(plane, delta + p * K, tid);
#pragma unroll
        for (int r = 0; r < ROUNDS; r++)
#pragma unroll
            for (int j = 0; j < 8; j++) d[r][j] += plane[r][j];
    }
#if POST_NORM
    float inverse_post = rsqrtf(sum_consumers(sum_of_squares(d), sums, warp, lane) / K + EPS);
#endif
#pragma unroll
    for (int r = 0; r < ROUNDS; r++) {
        int i = (r * CONSUMERS + tid) * 8;
#pragma unroll
        for (int j = 0; j < 8; j++) {
#if POST_NORM
            v[r][j] += d[r][j] * inverse_post * post[r][j];
#else
            v[r][j] += d[r][j];
#endif
            if (SCALAR) v[r][j] *= by;
        }
        if (blockIdx.x == 0 && i < K) {
            *(float4*)(x_out + i) = make_float4(v[r][0], v[r][1], v[r][2], v[r][3]);
            *(float4*)(x_out + i + 4) = make_float4(v[r][4], v[r][5], v[r][6], v[r][7]);
        }
    }
#else
    wait_for_previous();
    let_next_start();
    load_all(v, x_in, tid);
#endif
    float inverse = rsqrtf(sum_consumers(sum_of_squares(v), sums + WARPS, warp, lane) / K + EPS);
#pragma unroll
    for (int r = 0; r < ROUNDS; r++)
#pragma unroll
        for (int j = 0; j < 8; j++) v[r][j] = v[r][j] * inverse * weight[r][j];
#else
    wait_for_previous();
    let_next_start();
    load_all(v, x_in, tid);
#endif
#pragma unroll
    for (int r = 0; r < ROUNDS; r++) {  // four threads share a group of 32
        int i = (r * CONSUMERS + tid) * 8, half_sum = 0;
        float largest = 0;
#pragma unroll
        for (int j = 0; j < 8; j++) largest = max_or_nan(largest, fabsf(v[r][j]));
        largest = max_or_nan(largest, __shfl_xor_sync(~0u, largest, 1));
        largest = max_or_nan(largest, __shfl_xor_sync(~0u, largest, 2));
        float scale = code_scale(largest);
        u64 highs = 0, lows = 0;
#pragma unroll
        for (int j = 0; j < 8; j++) {
            int code = to_code(v[r][j], scale);
            highs |= (u64)(u8)high_byte(code) << 8 * j, lows |= (u64)(u8)code << 8 * j;
            half_sum += code;
        }
        half_sum += __shfl_xor_sync(~0u, half_sum, 1);
        int other = __shfl_xor_sync(~0u, half_sum, 2);
        if (i < K) {
            *(u64*)(high + i) = highs;
            *(u64*)(low + i) = lows;
            if ((tid & 3) == 0) xs[i >> 5] = make_float4(scale, scale * half_sum, scale * other, 0.f);
        }
    }
    sync_consumers();
}

// Its division and exponential are the exact ones: a fast form would differ from the reference in more than last bits.
__device__ __forceinline__ float activate(float gate) {
#if GLU == 2
    return 0.5f * gate * (1.f + tanhf(0.7978845608028654f * (gate + 0.044715f * gate * gate * gate)));
#else
    return gate / (1.f + expf(-gate));
#endif
}

// Adds the warps' shares of a row, in order.
__device__ __forceinline__ float row_total(const float* part, int i) {
    float total = 0;
#pragma unroll
    for (int w = 0; w < WARPS; w++) total += part[(i / ROWS * WARPS + w) * ROWS + i % ROWS];
    return total;
}

#if GLU
// One group of 32 by one warp: codes (all high bytes of the row, then all low ones), scale and the sums of its halves.
__device__ __forceinline__ void write_group(float v, int group, i8* codes, float4* code_scales, int lane) {
    float largest = fabsf(v);
    for (int d = 16; d; d >>= 1) largest = max_or_nan(largest, __shfl_xor_sync(~0u, largest, d));
    float scale = code_scale(largest);
    int code = to_code(v, scale), half_sum = code;
    for (int d = 8; d; d >>= 1) half_sum += __shfl_xor_sync(~0u, half_sum, d);
    int other = __shfl_xor_sync(~0u, half_sum, 16);
    codes[group * 32 + lane] = (i8)high_byte(code);
    codes[N / 2 + group * 32 + lane] = (i8)code;
    if (lane == 0) code_scales[group] = make_float4(scale, scale * half_sum, scale * other, 0.f);
}

// Outputs of whole tiles, eight a tile. A group of 32 spans four tiles: those that lie in this block are written at once;
// of a group shared with a neighbour each block leaves its floats, and whoever comes last writes the codes.
__device__ __forceinline__ void write_glu(float* h, i8* codes, float4* code_scales, int* counters, float* part, int first_tile,
                                          int n_tiles, int warp, int lane, int tid) {
    float outputs[(TILES_PER_BLOCK * ROWS / 2 + CONSUMERS - 1) / CONSUMERS];
    int n = 0;
    for (int i = tid; i < n_tiles * 8; i += CONSUMERS)
        outputs[n++] = activate(row_total(part, 2 * i)) * row_total(part, 2 * i + 1);
    sync_consumers();
    n = 0;
    for (int i = tid; i < n_tiles * 8; i += CONSUMERS) part[i] = outputs[n++];
    sync_consumers();
    int last_tile = first_tile + n_tiles;
    for (int group = first_tile / 4 + warp; group * 4 < last_tile; group += WARPS) {
        int tile = group * 4 + lane / 8;
        bool is_mine = tile >= first_tile && tile < last_tile;
        float v = is_mine ? part[(tile - first_tile) * 8 + lane % 8] : 0.f;
        int n_mine = min(last_tile, group * 4 + 4) - max(first_tile, group * 4);
        if (n_mine < 4) {
            if (is_mine) h[group * 32 + lane] = v;
            __threadfence();
            __syncwarp();
            int before = lane == 0 ? atomicAdd(counters + group, n_mine) : 0;
            before = __shfl_sync(~0u, before, 0);
            if (before + n_mine < 4) continue;
            if (lane == 0) counters[group] = 0;
            __threadfence();
            v = __ldcg(h + group * 32 + lane);
        }
        write_group(v, group, codes, code_scales, lane);
    }
}
#else
// The block with a tile's last unit clears the planes nobody writes.
__device__ __forceinline__ void write_rows(float* y, const float* part, Run run, int first_tile, int n_tiles, int tid) {
    for (int i = tid; i < n_tiles * ROWS; i += CONSUMERS) {
        int row = first_tile * ROWS + i;
        long first_unit = (long)(row / ROWS) * RECORDS;
        int plane = (int)(blockIdx.x - ((first_unit + 1) * gridDim.x - 1) / UNITS);
        y[plane * N + row] = row_total(part, i);
        if (run.end >= first_unit + RECORDS)
            for (int p = plane + 1; p < PLANES; p++) y[p * N + row] = 0;
    }
}
#endif

extern "C" __global__ void __launch_bounds__(CONSUMERS + 32, 2)
    product(const u8* w0, const u8* w1, const u8* w2, const float* x_in, const float* delta, const float* post_weight, const float* norm_weight,
            const float* scalar, float* x_out, float* y, i8* codes, float4* code_scales, int* counters) {
    extern __shared__ __align__(128) u8 shared[];
    u8* ring = shared;
    i8 *high = (i8*)(shared + AT_X), *low = high + K;
    Codes x{high, low};
    float4* xs = (float4*)(shared + AT_XS);
    float* part = (float*)(shared + AT_PART);
    u64 *full = (u64*)(shared + AT_BARRIERS), *empty = full + SLOTS;
    float* sums = (float*)(shared + AT_SUMS);
    int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31;
    Run run;
    if (tid == 0) {
        for (int i = 0; i < SLOTS; i++) barrier_init(full + i, 1), barrier_init(empty + i, WARPS);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    if (warp == WARPS) {
        if (lane == 0) {
            const u8* weights[3] = {w0, w1, w2};
            int slot = 0, unit = 0, segment = 0;
#define S(form, tiles)                                                                                              \
    fill<form>(weights[segment++], unit, tiles * RECORDS, run, ring, full, empty, slot), unit += tiles * RECORDS;
            SEGMENTS
#undef S
        }
        return;
    }
    for (int i = tid; i < TILES_PER_BLOCK * WARPS * ROWS; i += CONSUMERS) part[i] = 0;
#if CODES
    wait_for_previous();
    let_next_start();
    for (int i = tid; i < 2 * K / 16; i += CONSUMERS) ((uint4*)high)[i] = __ldcg((const uint4*)codes + i);
    for (int i = tid; i < GROUPS; i += CONSUMERS) xs[i] = __ldcg(code_scales + i);
    sync_consumers();
#else
    prologue(x_in, delta, post_weight, norm_weight, scalar, x_out, high, low, xs, sums, tid, warp, lane);
#endif
    int first_tile = run.begin / RECORDS, n_tiles = run.end > run.begin ? (run.end - 1) / RECORDS - first_tile + 1 : 0;
    int slot = 0, unit = 0;
    Sum sum;
#define S(form, tiles)                                                                                                 \
    consume<form>(unit, tiles * RECORDS, run, ring, full, empty, slot, sum, x, xs, part, first_tile, warp, lane),      \
        unit += tiles * RECORDS;
    SEGMENTS
#undef S
    sum.put(part, first_tile, warp, lane);
    sync_consumers();
#if GLU
    write_glu(y, codes, code_scales, counters, part, first_tile, n_tiles, warp, lane, tid);
#else
    write_rows(y, part, run, first_tile, n_tiles, tid);
#endif
}
