// glu_rows: the gate of an E model's per-layer inputs, of many rows, as bf16 row tiles.
//
// tiles[i] = bf16(act(sum of y planes, in order) * factor), zero in columns N .. Np - 1; see row_tiles.py.
// Exact in float32 but for that one rounding. Moves the planes and a slice of the factors once, and half as much as
// either to the tiles.
//
// Arguments, in order:
//   const float* y [n_planes][..][N]; int n_planes; int plane_stride, floats from a plane to the next;
//   const float* factor; int factor_stride, factor_offset: row i's N factors begin at i * stride + offset;
//   u8* tiles; int n_rows; int pitch.
// Defined by the host: N (a multiple of 4), GLU (1 silu, 2 gelu), THREADS. Blocks: n_rows * Np / 4 lanes, of four
// values each.
#include "activation.cuh"
#include "row_tiles.cuh"

constexpr int FOURS = (N + 63) / 64 * 16;  // of a row: a multiple of 16, so no group of 32 lies in two rows
static_assert(N % 4 == 0, "a row is read four floats at a time");

extern "C" __global__ void __launch_bounds__(THREADS)
    glu_rows(const float* y, int n_planes, int plane_stride, const float* factor, int factor_stride, int factor_offset,
             u8* tiles, int n_rows, int pitch AND_STAMPS) {
    int i = blockIdx.x * THREADS + threadIdx.x, row = i / FOURS, column = i % FOURS * 4;
    STAMP(THERE, threadIdx.x == 0);
    let_next_start();
    wait_for_previous();
    STAMP(READY, threadIdx.x == 0);
    float4 gate = make_float4(0, 0, 0, 0), by = gate;
    if (row < n_rows && column < N) {
        const float* at = y + (size_t)row * N + column;
        by = __ldcs((const float4*)(factor + (size_t)row * factor_stride + factor_offset + column));
        gate = __ldcs((const float4*)at);
        for (int n = 1; n < n_planes; n++) {
            at += plane_stride;
            float4 more = __ldcs((const float4*)at);
            gate.x += more.x, gate.y += more.y, gate.z += more.z, gate.w += more.w;
        }
    }
    by.x *= activate(gate.x), by.y *= activate(gate.y), by.z *= activate(gate.z), by.w *= activate(gate.w);
    store_four(tiles, pitch, row, column, by, row < n_rows);
    STAMP(DONE, threadIdx.x % 32 == 0);
}
