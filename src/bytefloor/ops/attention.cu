// attention: one new row against the live band of its cache, from the outputs of the QKV product to the mixed values.
//
// Per head: q, k = rope(rms_norm(., weight)), v = rms_norm(.) where the model has one; k and v are rounded to bf16 and written to
// their page; out = softmax(scale q K^T) V over positions max(0, p - WINDOW + 1) .. p. qkv float32 [PLANES_IN][N_IN], rows
// q, then k, then v; out float32 [H E]. cache bf16 [pages][2][J][PAGE][E].
// Approximate: scores, softmax and sums in float32; the running maximum starts at a finite value and is applied once a
// tile. The band is cut into runs of whole tiles by a rule of its length alone; runs are merged in order, by whichever
// block comes last: two runs of a kernel give the same bits.
// Moves the live band of K and V once for each group of HEADS query heads. Needs cp.async (sm_80).
//
// Old keys and values do not depend on this step, so the first tiles are fetched before the previous kernel has finished.
//
// Defined by the host: E, H, J, HEADS (query heads a block), WINDOW (0: none), PAGE, TILE, STAGES, MAX_RUNS, PLANES_IN, N_IN,
// QK_NORM, V_NORM, ROPE (0 none, 1 split, 2 interleaved), OWNS_KV, V_FROM_K, SCALE, EPS.
#include <cuda_bf16.h>

constexpr int THREADS = 256, WARPS = THREADS / 32, GROUP = H / J, CHUNKS = E / 8, STRIDE = E + 8;
constexpr int LANES_OF_ROW = CHUNKS, ROW_GROUPS = THREADS / CHUNKS;
constexpr int AT_ONCE = TILE / 32, SCORE_STRIDE = HEADS == 1 ? 1 : HEADS == 2 ? 2 : HEADS <= 4 ? 4 : 8;
constexpr int Q_STRIDE = (E + 63) / 64 * 64;  // q of a head in blocks of 64, see q_index
constexpr float LOWEST = -1e30f;
static_assert(PAGE % TILE == 0, "a tile lies in one page");
static_assert(HEADS <= WARPS && GROUP % HEADS == 0, "a warp does the softmax of one head");

struct State { int token, position; };

// Where element e of a query stands: of each 64, the eight first halves of eight lanes' values, then the eight second halves,
// so that eight lanes read 128 bytes in a row.
__device__ __forceinline__ int q_index(int e) { return (e & ~63) + (e & 4) * 8 + (e >> 3 & 7) * 4 + (e & 3); }

__device__ __forceinline__ void load_shares(float (&shares)[SCORE_STRIDE], const float* p) {
    if (SCORE_STRIDE == 1) shares[0] = p[0];
    if (SCORE_STRIDE == 2) {
        float2 v = *(const float2*)p;
        shares[0] = v.x, shares[SCORE_STRIDE - 1] = v.y;
    }
#pragma unroll
    for (int i = 0; i + 3 < SCORE_STRIDE; i += 4) {
        float4 v = *(const float4*)(p + i);
        shares[i] = v.x, shares[i + 1] = v.y, shares[i + 2] = v.z, shares[i + 3] = v.w;
    }
}

struct Band {
    int start, end, first_tile, n_tiles, tiles_a_run, n_runs;
    __device__ __forceinline__ explicit Band(int position) {
        start = WINDOW ? max(0, position - WINDOW + 1) : 0;
        end = position + 1;
        first_tile = start / TILE;
        n_tiles = position / TILE - first_tile + 1;
        tiles_a_run = (n_tiles + MAX_RUNS - 1) / MAX_RUNS;
        n_runs = (n_tiles + tiles_a_run - 1) / tiles_a_run;
    }
};

__device__ __forceinline__ void copy_async(void* to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((u32)__cvta_generic_to_shared(to)), "l"(from) : "memory");
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> __device__ __forceinline__ void wait_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }

// Keys and values of a tile's positions that are in the band and older than the new one.
__device__ __forceinline__ void fetch(int tile, Band band, const __nv_bfloat16* cache, const int* table, int n_table, int j,
                                      __nv_bfloat16* k_tile, __nv_bfloat16* v_tile) {
    int position = tile * TILE;
    const __nv_bfloat16* page = cache + (size_t)table[(position / PAGE) % n_table] * (2 * J * PAGE * E);
    const __nv_bfloat16 *k = page + (j * PAGE + position % PAGE) * E, *v = k + J * PAGE * E;
    for (int i = threadIdx.x; i < TILE * CHUNKS; i += THREADS) {
        int row = i / CHUNKS, column = i % CHUNKS * 8, p = position + row;
        if (p >= band.start && p < band.end - (OWNS_KV ? 1 : 0)) {
            copy_async(k_tile + row * STRIDE + column, k + row * E + column);
            copy_async(v_tile + row * STRIDE + column, v + row * E + column);
        }
    }
}

__device__ __forceinline__ float warp_sum(float v) {
    for (int d = 16; d; d >>= 1) v += __shfl_xor_sync(~0u, v, d);
    return v;
}

// One head of q, k or v by one warp, into shared memory: summed over planes, normed, turned.
__device__ __forceinline__ void prepare_head(const float* qkv, int row, const float* weight, bool has_norm, bool has_rope,
                                             const double* frequencies, int position, float* out, int lane) {
    float square = 0;
    for (int e = lane; e < E; e += 32) {
        float v = 0;
#pragma unroll
        for (int p = 0; p < PLANES_IN; p++) v += __ldcg(qkv + p * N_IN + row + e);
        out[e] = v;
        square = fmaf(v, v, square);
    }
    if (has_norm) {
        float inverse = rsqrtf(warp_sum(square) / E + EPS);
        for (int e = lane; e < E; e += 32) out[e] = weight ? out[e] * inverse * weight[e] : out[e] * inverse;
    }
    __syncwarp();
    if (has_rope && ROPE)
        for (int i = lane; i < E / 2; i += 32) {
            double frequency = frequencies[i];
            if (frequency == 0) continue;
            // In double: at position 100,000 a float angle is off by 0.004.
            double angle = position * frequency, turns = rint(angle * 0.15915494309189535);
            float reduced = (float)(angle - 6.283185307179586 * turns), sine, cosine;
            sincosf(reduced, &sine, &cosine);
            int a = ROPE == 1 ? i : 2 * i, b = ROPE == 1 ? i + E / 2 : 2 * i + 1;
            float x = out[a], y = out[b];
            out[a] = x * cosine - y * sine;
            out[b] = y * cosine + x * sine;
        }
    __syncwarp();
}

// The same head in the order of q_index, times a factor.
__device__ __forceinline__ void spread_query(float* head, float factor, int lane) {
    float kept[(E + 31) / 32];
#pragma unroll
    for (int i = 0; i < (E + 31) / 32; i++) kept[i] = i * 32 + lane < E ? head[i * 32 + lane] * factor : 0.f;
    __syncwarp();
#pragma unroll
    for (int i = 0; i < (E + 31) / 32; i++)
        if (i * 32 + lane < E) head[q_index(i * 32 + lane)] = kept[i];
}

constexpr int TILE_ELEMENTS = 2 * TILE * STRIDE, TILES_BYTES = STAGES * TILE_ELEMENTS * 2,
              SUMS_BYTES = ROW_GROUPS * HEADS * E * 4, AT_Q = TILES_BYTES > SUMS_BYTES ? TILES_BYTES : SUMS_BYTES,
              AT_NEW = AT_Q + HEADS * Q_STRIDE * 4, AT_SCORES = AT_NEW + 2 * E * 4, AT_RESCALE = AT_SCORES + SCORE_STRIDE * TILE * 4;

extern "C" __global__ void __launch_bounds__(THREADS)
    attention(const float* qkv, const float* q_weight, const float* k_weight, const double* frequencies, __nv_bfloat16* cache,
              const int* table, int n_table, const State* state, float* parts, float* part_sums, int* counters, float* out) {
    extern __shared__ __align__(128) u8 shared[];
    __nv_bfloat16* tiles = (__nv_bfloat16*)shared;
    float *q = (float*)(shared + AT_Q), *fresh = (float*)(shared + AT_NEW), *scores = (float*)(shared + AT_SCORES),
          *rescale = (float*)(shared + AT_RESCALE);
    int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31, run = blockIdx.x, first_head = blockIdx.y * HEADS,
        j = first_head / GROUP, position = state->position;
    Band band(position);
    if (run >= band.n_runs) return;
    int tile = band.first_tile + run * band.tiles_a_run, tile_end = min(tile + band.tiles_a_run, band.first_tile + band.n_tiles);
    bool has_new = OWNS_KV && tile_end == band.first_tile + band.n_tiles;
    fetch(tile, band, cache, table, n_table, j, tiles, tiles + TILE * STRIDE);
    commit_copies();
    wait_for_previous();
    let_next_start();
    for (int task = warp; task < HEADS + (has_new ? 2 : 0); task += WARPS) {
        if (task < HEADS) {
            float* head = q + task * Q_STRIDE;
            prepare_head(qkv, (first_head + task) * E, q_weight, QK_NORM, true, frequencies, position, head, lane);
            spread_query(head, SCALE, lane);
        } else if (task == HEADS)
            prepare_head(qkv, (H + j) * E, k_weight, QK_NORM, true, frequencies, position, fresh, lane);
        else
            prepare_head(qkv, (V_FROM_K ? H + j : H + J + j) * E, nullptr, V_NORM, false, frequencies, position, fresh + E, lane);
    }
    __syncthreads();
    if (has_new && first_head % GROUP == 0) {
        __nv_bfloat16* page = cache + (size_t)table[(position / PAGE) % n_table] * (2 * J * PAGE * E);
        for (int i = tid; i < 2 * E; i += THREADS)
            page[((i >= E ? J : 0) + j) * PAGE * E + position % PAGE * E + i % E] = __float2bfloat16(fresh[i]);
    }
    constexpr int N_ACC = HEADS * 8;
    float acc[N_ACC], largest = LOWEST, sum = 0;  // largest, sum: of head `warp`
#pragma unroll
    for (int i = 0; i < N_ACC; i++) acc[i] = 0;
    int my_chunk = tid % CHUNKS, my_group = tid / CHUNKS;
    for (int n = 0; tile < tile_end; tile++, n++) {
        __nv_bfloat16 *k_tile = tiles + (n % STAGES) * TILE_ELEMENTS, *v_tile = k_tile + TILE * STRIDE;
        if (STAGES > 1 && tile + 1 < tile_end) {
            __nv_bfloat16* next = tiles + ((n + 1) % STAGES) * TILE_ELEMENTS;
            fetch(tile + 1, band, cache, table, n_table, j, next, next + TILE * STRIDE);
        }
        commit_copies();
        wait_copies<(STAGES > 1 ? 1 : 0)>();
        if (has_new && tile == position / TILE)
            for (int i = tid; i < 2 * E; i += THREADS)
                (i < E ? k_tile : v_tile)[position % TILE * STRIDE + i % E] = __float2bfloat16(fresh[i]);
        __syncthreads();
        int low = max(band.start - tile * TILE, 0), high = min(band.end - tile * TILE, TILE);
        float dot[AT_ONCE][HEADS];  // eight lanes a position; all of the tile's positions at once, so that q is read once
#pragma unroll
        for (int i = 0; i < AT_ONCE * HEADS; i++) dot[i / HEADS][i % HEADS] = 0;
        int row = warp * 4 + (lane >> 3);
        for (int c = (lane & 7) * 8; c < E; c += 64) {
            uint4 packed[AT_ONCE];
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) {
                int r = row + 32 * i;
                packed[i] = r >= low && r < high ? *(const uint4*)(k_tile + r * STRIDE + c) : make_uint4(0, 0, 0, 0);
            }
#pragma unroll
            for (int g = 0; g < HEADS; g++) {
                const float4* at = (const float4*)(q + g * Q_STRIDE + (c & ~63)) + (lane & 7);
                float4 a = at[0], b = at[8];
                float qs[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
                for (int i = 0; i < AT_ONCE; i++) {
                    u32 words[4] = {packed[i].x, packed[i].y, packed[i].z, packed[i].w};
#pragma unroll
                    for (int w = 0; w < 4; w++) {
                        dot[i][g] = fmaf(__uint_as_float(words[w] << 16), qs[2 * w], dot[i][g]);
                        dot[i][g] = fmaf(__uint_as_float(words[w] & 0xffff0000u), qs[2 * w + 1], dot[i][g]);
                    }
                }
            }
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++)
#pragma unroll
            for (int g = 0; g < HEADS; g++) {
                float total = dot[i][g];
                total += __shfl_xor_sync(~0u, total, 1);
                total += __shfl_xor_sync(~0u, total, 2);
                total += __shfl_xor_sync(~0u, total, 4);
                int r = row + 32 * i;
                if ((lane & 7) == 0) scores[r * SCORE_STRIDE + g] = r >= low && r < high ? total : LOWEST;
            }
        __syncthreads();
        if (warp < HEADS) {
            float s[TILE / 32], top = largest;
#pragma unroll
            for (int i = 0; i < TILE / 32; i++) s[i] = scores[(i * 32 + lane) * SCORE_STRIDE + warp], top = fmaxf(top, s[i]);
            for (int d = 16; d; d >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
            float by = expf(largest - top), total = 0;
#pragma unroll
            for (int i = 0; i < TILE / 32; i++) {
                float p = s[i] == LOWEST ? 0.f : expf(s[i] - top);
                scores[(i * 32 + lane) * SCORE_STRIDE + warp] = p;
                total += p;
            }
            sum = sum * by + warp_sum(total);
            largest = top;
            if (lane == 0) rescale[warp] = by;
        }
        __syncthreads();
        if (my_group < ROW_GROUPS) {
#pragma unroll
            for (int i = 0; i < N_ACC; i++) acc[i] *= rescale[i / 8];
            for (int row = low + my_group; row < high; row += ROW_GROUPS) {
                uint4 packed = *(const uint4*)(v_tile + row * STRIDE + my_chunk * 8);
                u32 words[4] = {packed.x, packed.y, packed.z, packed.w};
                float shares[SCORE_STRIDE];
                load_shares(shares, scores + row * SCORE_STRIDE);
#pragma unroll
                for (int g = 0; g < HEADS; g++) {
                    float p = shares[g];
#pragma unroll
                    for (int w = 0; w < 4; w++) {
                        acc[g * 8 + 2 * w] = fmaf(p, __uint_as_float(words[w] << 16), acc[g * 8 + 2 * w]);
                        acc[g * 8 + 2 * w + 1] = fmaf(p, __uint_as_float(words[w] & 0xffff0000u), acc[g * 8 + 2 * w + 1]);
                    }
                }
            }
        }
        __syncthreads();
        if (STAGES == 1 && tile + 1 < tile_end) fetch(tile + 1, band, cache, table, n_table, j, k_tile, v_tile);
    }
    // Groups of threads that took different rows add up, in order.
    wait_copies<0>();
    float* sums = (float*)shared;
    if (my_group < ROW_GROUPS)
#pragma unroll
        for (int i = 0; i < N_ACC; i++) sums[(my_group * HEADS + i / 8) * E + my_chunk * 8 + i % 8] = acc[i];
    __shared__ float run_sum[HEADS], run_largest[HEADS];
    __shared__ bool is_last;
    if (warp < HEADS && lane == 0) run_sum[warp] = sum, run_largest[warp] = largest;
    __syncthreads();
    float* my_parts = parts + ((size_t)blockIdx.y * MAX_RUNS + run) * HEADS * E;
    for (int i = tid; i < HEADS * E; i += THREADS) {
        float total = 0;
        for (int r = 0; r < ROW_GROUPS; r++) total += sums[r * HEADS * E + i];
        if (band.n_runs == 1)
            out[first_head * E + i] = total / run_sum[i / E];
        else
            my_parts[i] = total;
    }
    if (band.n_runs == 1) return;
    float* my_sums = part_sums + (blockIdx.y * MAX_RUNS + run) * HEADS * 2;
    if (tid < HEADS) my_sums[2 * tid] = run_largest[tid], my_sums[2 * tid + 1] = run_sum[tid];
    __threadfence();
    __syncthreads();
    if (tid == 0) {
        is_last = atomicAdd(counters + blockIdx.y, 1) == band.n_runs - 1;
        if (is_last) counters[blockIdx.y] = 0;
    }
    __syncthreads();
    if (!is_last) return;
    __threadfence();
    const float* all_sums = part_sums + blockIdx.y * MAX_RUNS * HEADS * 2;
    float* weights = (float*)shared;  // [runs][HEADS]: what each run's share is multiplied with
    if (warp < HEADS) {
        float top = LOWEST, total = 0;
        for (int r = lane; r < band.n_runs; r += 32) top = fmaxf(top, __ldcg(all_sums + (r * HEADS + warp) * 2));
        for (int d = 16; d; d >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
        for (int r = lane; r < band.n_runs; r += 32) {
            float w = expf(__ldcg(all_sums + (r * HEADS + warp) * 2) - top);
            weights[r * HEADS + warp] = w;
            total += w * __ldcg(all_sums + (r * HEADS + warp) * 2 + 1);
        }
        total = warp_sum(total);
        __syncwarp();
        for (int r = lane; r < band.n_runs; r += 32) weights[r * HEADS + warp] /= total;
    }
    __syncthreads();
    const float* all = parts + (size_t)blockIdx.y * MAX_RUNS * HEADS * E;
    for (int i = tid; i < HEADS * E; i += THREADS) {
        float total = 0;
#pragma unroll 4
        for (int r = 0; r < band.n_runs; r++) total = fmaf(weights[r * HEADS + i / E], __ldcg(all + (size_t)r * HEADS * E + i), total);
        out[first_head * E + i] = total;
    }
}
