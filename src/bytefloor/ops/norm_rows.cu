// norm_rows: what stands before a product of many rows: residual sum, norms, and bf16 row tiles.
//
// For each of n_rows rows i, from row r = rows ? rows[i] : i of x and delta:
//   d = sum of delta planes, in order; POST_NORM: d = rms_norm(d) * post_weight
//   v = (x + d) * scalar, which goes back to x where HAS_DELTA or SCALAR, but not where `rows` are picked
//   tiles[i] = bf16(NORM ? rms_norm(v) * norm_weight : v), zero in columns K .. Kp - 1; see row_tiles.py
// Exact but for the order of float32 sums, which depends on K alone, and that one rounding. Moves a row of x to and
// fro, its planes once, and half as much to the tiles; weights of the norms stay in shared memory while a block goes
// from row to row.
//
// Arguments, in order:
//   const int* rows [n_rows], or null; float* x [..][K]; const float* delta [n_planes][..][K], or null; int n_planes;
//   int plane_stride, floats from a plane to the next; const float* post_weight [K], or null;
//   const float* norm_weight [K], or null; const float* scalar, one, or null; u8* tiles; int n_rows; int pitch.
// Defined by the host: K (a multiple of 4), WARPS (of a row), TOGETHER (rows of a block), RESIDENT (blocks of a
// multiprocessor), EPS, HAS_DELTA, POST_NORM, SCALAR, NORM. Shared memory: WEIGHT_BYTES for each of the norms. Blocks:
// any number, of 32 WARPS * TOGETHER threads.
#include "row_tiles.cuh"

constexpr int LANES = 32 * WARPS, FOURS = (K + 63) / 64 * 16, TURNS = (FOURS + LANES - 1) / LANES;
constexpr int WEIGHT_BYTES = TURNS * LANES * 16;
static_assert(K % 4 == 0, "a row is read four floats at a time");

struct Share {  // of a row, as a lane has it: four elements from 4 (m LANES + at) on, zeros past the end
    float4 v[TURNS];
    static __device__ __forceinline__ bool has(int m, int at) { return (m * LANES + at) * 4 < K; }
    template <typename LOAD> __device__ __forceinline__ void load(const float* p, int at, LOAD load) {
#pragma unroll
        for (int m = 0; m < TURNS; m++)
            v[m] = has(m, at) ? load((const float4*)p + m * LANES + at) : make_float4(0, 0, 0, 0);
    }
    __device__ __forceinline__ void add(const Share& other) {
#pragma unroll
        for (int m = 0; m < TURNS; m++)
            v[m].x += other.v[m].x, v[m].y += other.v[m].y, v[m].z += other.v[m].z, v[m].w += other.v[m].w;
    }
    __device__ __forceinline__ void scale(float by) {
#pragma unroll
        for (int m = 0; m < TURNS; m++) v[m].x *= by, v[m].y *= by, v[m].z *= by, v[m].w *= by;
    }
    __device__ __forceinline__ void scale(float by, const float4* weight, int at) {
        scale(by);
#pragma unroll
        for (int m = 0; m < TURNS; m++) {
            float4 w = weight[m * LANES + at];
            v[m].x *= w.x, v[m].y *= w.y, v[m].z *= w.z, v[m].w *= w.w;
        }
    }
    __device__ __forceinline__ float sum_of_squares() const {
        float total = 0;
#pragma unroll
        for (int m = 0; m < TURNS; m++)
            total = fmaf(v[m].x, v[m].x, fmaf(v[m].y, v[m].y, fmaf(v[m].z, v[m].z, fmaf(v[m].w, v[m].w, total))));
        return total;
    }
};

// A norm's weights into shared memory, zeros past the end.
__device__ __forceinline__ void copy_weights(float4* to, const float* weight) {
    for (int i = threadIdx.x; i < TURNS * LANES; i += LANES * TOGETHER)
        to[i] = i * 4 < K ? __ldg((const float4*)weight + i) : make_float4(0, 0, 0, 0);
}

// Over the warps of a row. Sums take turns with two places, so that one barrier each will do.
struct RowSum {
    float (*places)[WARPS * TOGETHER];
    int turn = 0;
    __device__ __forceinline__ float of(float v) {
        for (int d = 16; d; d >>= 1) v += __shfl_xor_sync(~0u, v, d);
        if (WARPS == 1) return v;
        float* sums = places[turn];
        turn ^= 1;
        int warp = threadIdx.x / 32;
        if (threadIdx.x % 32 == 0) sums[warp] = v;
        __syncthreads();
        float total = 0;
#pragma unroll
        for (int w = 0; w < WARPS; w++) total += sums[warp / WARPS * WARPS + w];
        return total;
    }
};

extern "C" __global__ void __launch_bounds__(LANES * TOGETHER, RESIDENT)
    norm_rows(const int* rows, float* x, const float* delta, int n_planes, int plane_stride, const float* post_weight,
              const float* norm_weight, const float* scalar, u8* tiles, int n_rows, int pitch AND_STAMPS) {
    extern __shared__ __align__(16) u8 shared[];
    __shared__ float places[2][WARPS * TOGETHER];
    float4 *norm = (float4*)shared, *post = (float4*)(shared + NORM * WEIGHT_BYTES);
    int at = threadIdx.x % LANES;
    auto lasting = [](const float4* p) { return *p; };
    auto passing = [](const float4* p) { return __ldcs(p); };
    STAMP(THERE, threadIdx.x == 0);
    let_next_start();
    // Weights depend on no kernel.
    if (NORM) copy_weights(norm, norm_weight);
    if (POST_NORM) copy_weights(post, post_weight);
    float by = SCALAR ? __ldg(scalar) : 1.f;
    RowSum sum{places};
    __syncthreads();
    wait_for_previous();
    STAMP(READY, threadIdx.x == 0);
    for (int first = blockIdx.x * TOGETHER; first < n_rows; first += gridDim.x * TOGETHER) {
        int row = min(first + (int)threadIdx.x / LANES, n_rows - 1), from = rows ? rows[row] : row;
        bool is_there = first + (int)threadIdx.x / LANES < n_rows;
        float* own = x + (size_t)from * K;
        Share v;
        v.load(own, at, lasting);
        if (HAS_DELTA) {
            Share d, more;
            const float* plane = delta + (size_t)from * K;
            d.load(plane, at, passing);
#pragma unroll 1
            for (int n = 1; n < n_planes; n++) {
                plane += plane_stride;
                more.load(plane, at, passing);
                d.add(more);
            }
            if (POST_NORM) d.scale(rsqrtf(sum.of(d.sum_of_squares()) / K + EPS), post, at);
            v.add(d);
        }
        if (SCALAR) v.scale(by);
        if ((HAS_DELTA || SCALAR) && !rows && is_there)
#pragma unroll
            for (int m = 0; m < TURNS; m++)
                if (Share::has(m, at)) ((float4*)own)[m * LANES + at] = v.v[m];
        if (NORM) v.scale(rsqrtf(sum.of(v.sum_of_squares()) / K + EPS), norm, at);
#pragma unroll
        for (int m = 0; m < TURNS; m++)
            store_four(tiles, pitch, row, (m * LANES + at) * 4, v.v[m], is_there && m * LANES + at < FOURS);
    }
    STAMP(DONE, threadIdx.x % 32 == 0);
}
