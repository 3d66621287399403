// attention: one new row against the live band of its cache, from the outputs of the QKV product to the mixed values.
//
// Per head: q, k = rope(rms_norm(., weight)), v = rms_norm(.) where the model has one; k and v are rounded to bf16 and written to
// their page; out = softmax(scale q K^T) V over positions max(0, p - WINDOW + 1) .. p. qkv float32 [PLANES_IN][N_IN], rows
// q, then k, then v; out float32 [H E]. cache bf16 [pages][2][J][PAGE][E].
// Approximate: tensor cores multiply keys and values, which are bf16, with queries and shares that are split into two bf16 (16
// bits in all) and sum in float32; softmax in float32; the running maximum starts at a finite value and is applied once a tile.
// The band is cut into runs of whole tiles by a rule of its length alone; runs are merged in order: two runs of a kernel
// give the same bits.
// Moves the live band of K and V once for each group of HEADS query heads. Needs cp.async and mma (sm_80).
//
// A tile's scores are S^T = K Q^T, positions by heads: up to eight heads of a KV head are the eight columns of a tensor core,
// sixteen are two of them. Warps share the work by positions and parts of E; scores meet in shared memory; then every warp does
// the softmax of all heads for itself and mixes its own part of E for all positions, O^T = V^T S, so that no sum is ever taken
// over warps. Old keys and values do not depend on this step, so the first tiles are fetched at once, and so are angles.
//
// Runs are merged by all their blocks, each a slice of the outputs, as soon as every part carries this call's tag; so all
// blocks must be on the device at once, which the host sees to.
//
// Defined by the host: E, H, J, HEADS (query heads a block), WINDOW (0: none), PAGE, TILE, STAGES, MAX_RUNS, LONE_TILES (of a
// band that is not cut), MIN_TILES (of a run, otherwise), PLANES_IN, N_IN, QK_NORM, V_NORM, ROPE (0 none, 1 split, 2 interleaved), OWNS_KV, V_FROM_K, SCALE, EPS.
#include <cuda_bf16.h>

constexpr int THREADS = 256, WARPS = THREADS / 32, GROUP = H / J, CHUNKS = E / 8, STRIDE = E + 8;
constexpr int COLUMNS = (HEADS + 7) / 8;  // of eight heads
constexpr int POSITION_TILES = TILE / 16, PARTS = WARPS / POSITION_TILES, K_STEPS = E / 16;
constexpr int MY_STEPS = (K_STEPS + PARTS - 1) / PARTS;  // a warp's share of E
constexpr int VALUE_TILES = (E / 16 + WARPS - 1) / WARPS;  // of 16 values, a warp
constexpr int SCORE_STRIDE = TILE + 4, SCORES = COLUMNS * 8 * SCORE_STRIDE;
constexpr float LOWEST = -1e30f;
static_assert(PAGE % TILE == 0, "a tile lies in one page");
static_assert(TILE % 16 == 0 && WARPS % POSITION_TILES == 0 && GROUP % HEADS == 0 && E % 16 == 0, "whole tensor core tiles");

struct Band {
    int start, end, first_tile, n_tiles, tiles_a_run, n_runs;
    __device__ __forceinline__ explicit Band(int position) {
        start = WINDOW ? max(0, position - WINDOW + 1) : 0;
        end = position + 1;
        first_tile = start / TILE;
        n_tiles = position / TILE - first_tile + 1;
        // An odd number of them: runs that begin a power of two apart would all ask the same few memory channels.
        tiles_a_run = n_tiles <= LONE_TILES ? n_tiles : max(MIN_TILES, (n_tiles + MAX_RUNS - 1) / MAX_RUNS | 1);
        n_runs = (n_tiles + tiles_a_run - 1) / tiles_a_run;
    }
};

__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> __device__ __forceinline__ void wait_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }

__device__ __forceinline__ void load_matrices(u32 (&a)[4], const __nv_bfloat16* p) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
                 : "r"(shared_address(p))
                 : "memory");
}
__device__ __forceinline__ void load_transposed(u32 (&a)[4], const __nv_bfloat16* p) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
                 : "r"(shared_address(p))
                 : "memory");
}
__device__ __forceinline__ void multiply(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

struct Split {  // two floats as two bf16 each: what the first leaves over is the second
    u32 high, low;
    __device__ __forceinline__ Split(float a, float b) {
        high = pack(a, b);
        low = pack(a - __uint_as_float(high << 16), b - __uint_as_float(high & 0xffff0000u));
    }
    static __device__ __forceinline__ u32 pack(float a, float b) {
        u32 both;
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(b), "f"(a));
        return both;
    }
};

// Keys and values of a tile's positions that are in the band and older than the new one; values outside it are zero, since
// their shares are, and what lies there times zero need not be.
__device__ __forceinline__ void fetch(int tile, Band band, const __nv_bfloat16* cache, int page_id, int j, __nv_bfloat16* k_tile) {
    int position = tile * TILE;
    const __nv_bfloat16 *page = cache + (size_t)page_id * (2 * J * PAGE * E), *k = page + (j * PAGE + position % PAGE) * E,
                        *v = k + J * PAGE * E;
    __nv_bfloat16* v_tile = k_tile + TILE * STRIDE;
#pragma unroll 4
    for (int i = threadIdx.x; i < TILE * CHUNKS; i += THREADS) {
        int row = i / CHUNKS, column = i % CHUNKS * 8, p = position + row;
        if (p >= band.start && p < band.end - OWNS_KV) {
            copy_async(k_tile + row * STRIDE + column, k + row * E + column);
            copy_async(v_tile + row * STRIDE + column, v + row * E + column);
        } else if (!OWNS_KV || p != band.end - 1) {
            *(uint4*)(v_tile + row * STRIDE + column) = make_uint4(0, 0, 0, 0);
        }
    }
}

__device__ __forceinline__ float warp_sum(float v) {
    for (int d = 16; d; d >>= 1) v += __shfl_xor_sync(~0u, v, d);
    return v;
}

constexpr int PER_LANE = (E + 31) / 32;

// A norm's weights as the lanes of a warp meet a head's elements.
__device__ __forceinline__ void load_weight(float (&weight)[PER_LANE], const float* p, int lane) {
#pragma unroll
    for (int m = 0; m < PER_LANE; m++) weight[m] = p && m * 32 + lane < E ? p[m * 32 + lane] : 1.f;
}

// One head of q, k or v by one warp, into shared memory: summed over planes once they are there, normed, turned, scaled.
__device__ __forceinline__ void prepare_head(const float* qkv, int row, const float (&weight)[PER_LANE], bool has_norm, bool has_rope,
                                             const float2* turns, float factor, u32 parity, float* out, int lane) {
    const float* head = qkv + row;
    float v[PER_LANE];
    Patience patience;
    u32 late;
    do {
        late = 0;
#pragma unroll
        for (int m = 0; m < PER_LANE; m++) v[m] = 0;
#pragma unroll
        for (int p = 0; p < PLANES_IN; p++)
#pragma unroll
            for (int m = 0; m < PER_LANE; m++)
                if (m * 32 + lane < E) {
                    u32 bits = peek(head + p * N_IN + m * 32 + lane);
                    late |= bits ^ parity;
                    v[m] += unstamped(bits);
                }
        if (late & 1) __nanosleep(40);
        patience.spend();
    } while (late & 1);
    __syncwarp();
    if (has_norm) {
        float square = 0;
#pragma unroll
        for (int m = 0; m < PER_LANE; m++) square = fmaf(v[m], v[m], square);
        float inverse = rsqrtf(warp_sum(square) / E + EPS);
#pragma unroll
        for (int m = 0; m < PER_LANE; m++) v[m] = v[m] * inverse * weight[m];
    }
#pragma unroll
    for (int m = 0; m < PER_LANE; m++)
        if (m * 32 + lane < E) out[m * 32 + lane] = v[m] * factor;
    __syncwarp();
    if (has_rope && ROPE)
        for (int i = lane; i < E / 2; i += 32) {
            int a = ROPE == 1 ? i : 2 * i, b = ROPE == 1 ? i + E / 2 : 2 * i + 1;
            float x = out[a], y = out[b], cosine = turns[i].x, sine = turns[i].y;
            out[a] = x * cosine - y * sine;
            out[b] = y * cosine + x * sine;
        }
    __syncwarp();
}

// Shared memory: tiles, of which the last stage first holds the queries as floats by heads; scores, before which the angles
// stand there; the new key and value.
constexpr int STAGE = 2 * TILE * STRIDE, TILES_BYTES = STAGES * STAGE * 2,
              SCORE_BYTES = PARTS * SCORES * 4 > E * 4 ? PARTS * SCORES * 4 : E * 4, AT_SCORES = TILES_BYTES,
              AT_NEW = AT_SCORES + SCORE_BYTES;
static_assert(STAGES > 1 && HEADS * E * 4 <= STAGE * 2, "room for the queries");

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    attention(const float* qkv, const float* q_weight, const float* k_weight, const double* frequencies, __nv_bfloat16* cache,
              const int* table, int n_table, const State* state, u64* parts, u64* part_sums, int call, int n_calls, float* out) {
    extern __shared__ __align__(128) u8 shared[];
    __nv_bfloat16* tiles = (__nv_bfloat16*)shared;
    float *queries = (float*)(tiles + (STAGES - 1) * STAGE), *scores = (float*)(shared + AT_SCORES), *fresh = (float*)(shared + AT_NEW);
    float2* turns = (float2*)scores;
    int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31, g = lane >> 2, t = lane & 3, run = blockIdx.y,
        first_head = blockIdx.x * HEADS, j = first_head / GROUP, position = state->position;
    let_next_start();
    u32 parity = parity_of(state);
    Band band(position);
    if (run >= band.n_runs) return;
    auto page_of = [=](int tile) { return table[(tile * TILE / PAGE) % n_table]; };
    int tile = band.first_tile + run * band.tiles_a_run, tile_end = min(tile + band.tiles_a_run, band.first_tile + band.n_tiles);
    bool is_last = tile_end == band.first_tile + band.n_tiles, has_new = OWNS_KV && is_last;
    // Pages carry no parity: the new position of another layer's cache is there when the kernels before are done.
    if (!OWNS_KV && is_last) wait_for_previous();
    int new_page = page_of(position / TILE);
    // The first tiles on their way, while the last stage is still needed for queries.
#pragma unroll
    for (int stage = 0; stage < STAGES - 1; stage++) {
        if (tile + stage < tile_end) fetch(tile + stage, band, cache, page_of(tile + stage), j, tiles + stage * STAGE);
        commit_copies();
    }
    if (ROPE)
        for (int i = tid; i < E / 2; i += THREADS) {
            // In double: at position 100,000 a float angle is off by 0.004.
            double whole_turns = position * frequencies[i] * 0.15915494309189535;
            float sine, cosine;
            sincospif((float)(2 * (whole_turns - rint(whole_turns))), &sine, &cosine);
            turns[i] = make_float2(cosine, sine);
        }
    float q_by[PER_LANE], k_by[PER_LANE];
    load_weight(q_by, q_weight, lane);
    load_weight(k_by, k_weight, lane);
    __syncthreads();
    for (int task = warp; task < HEADS + (has_new ? 2 : 0); task += WARPS) {
        if (task < HEADS)
            prepare_head(qkv, (first_head + task) * E, q_by, QK_NORM, true, turns, SCALE, parity, queries + task * E, lane);
        else if (task == HEADS)
            prepare_head(qkv, (H + j) * E, k_by, QK_NORM, true, turns, 1.f, parity, fresh, lane);
        else {
            float ones[PER_LANE];
            load_weight(ones, nullptr, lane);
            prepare_head(qkv, (V_FROM_K ? H + j : H + J + j) * E, ones, V_NORM, false, turns, 1.f, parity, fresh + E, lane);
        }
    }
    __syncthreads();
    if (has_new && first_head % GROUP == 0) {
        __nv_bfloat16* page = cache + (size_t)new_page * (2 * J * PAGE * E);
        for (int i = tid; i < 2 * E; i += THREADS)
            page[((i >= E ? J : 0) + j) * PAGE * E + position % PAGE * E + i % E] = __float2bfloat16(fresh[i]);
    }
    // This warp's part of the queries as a tensor core takes them: elements 2t, + 1, + 8, + 9 of each 16 of head 8 column + g.
    uint4 query[MY_STEPS][COLUMNS];
#pragma unroll
    for (int i = 0; i < MY_STEPS * COLUMNS; i++) {
        int step = i / COLUMNS * PARTS + warp % PARTS, head = i % COLUMNS * 8 + g;
        bool is_one = step < K_STEPS && head < HEADS;
        const float* at = queries + head * E + step * 16 + 2 * t;
        Split front(is_one ? at[0] : 0.f, is_one ? at[1] : 0.f), back(is_one ? at[8] : 0.f, is_one ? at[9] : 0.f);
        query[i / COLUMNS][i % COLUMNS] = make_uint4(front.high, back.high, front.low, back.low);
    }
    float acc[VALUE_TILES][COLUMNS][4], largest[COLUMNS], sum[COLUMNS];  // largest, sum: of head 8 column + g
#pragma unroll
    for (int c = 0; c < COLUMNS; c++) {
        largest[c] = LOWEST, sum[c] = 0;
#pragma unroll
        for (int i = 0; i < VALUE_TILES * 4; i++) acc[i / 4][c][i % 4] = 0;
    }
    int next = tile + STAGES - 1, next_page = next < tile_end ? page_of(next) : 0;
    for (int n = 0; tile < tile_end; tile++, n++) {
        __nv_bfloat16 *k_tile = tiles + n % STAGES * STAGE, *v_tile = k_tile + TILE * STRIDE;
        wait_copies<STAGES - 2>();
        if (has_new && tile == position / TILE)
            for (int i = tid; i < 2 * E; i += THREADS)
                (i < E ? k_tile : v_tile)[position % TILE * STRIDE + i % E] = __float2bfloat16(fresh[i]);
        __syncthreads();  // the tile is there, and nobody reads the one before it, or the queries, any more
        if (next < tile_end) {
            fetch(next, band, cache, next_page, j, tiles + (n + STAGES - 1) % STAGES * STAGE);
            if (++next < tile_end) next_page = page_of(next);
        }
        commit_copies();
        int low = max(band.start - tile * TILE, 0), high = min(band.end - tile * TILE, TILE);
        {
            float s[COLUMNS][4];
#pragma unroll
            for (int i = 0; i < COLUMNS * 4; i++) s[i / 4][i % 4] = 0;
            int first = warp / PARTS * 16;
#pragma unroll
            for (int i = 0; i < MY_STEPS; i++) {
                int step = i * PARTS + warp % PARTS;
                if (K_STEPS % PARTS && step >= K_STEPS) break;
                u32 a[4];
                load_matrices(a, k_tile + (first + (lane & 15)) * STRIDE + step * 16 + (lane >> 4) * 8);
#pragma unroll
                for (int c = 0; c < COLUMNS; c++) {
                    multiply(s[c], a, query[i][c].x, query[i][c].y);
                    multiply(s[c], a, query[i][c].z, query[i][c].w);
                }
            }
            float* at = scores + warp % PARTS * SCORES + 2 * t * SCORE_STRIDE + first + g;
#pragma unroll
            for (int c = 0; c < COLUMNS; c++, at += 8 * SCORE_STRIDE)
                at[0] = s[c][0], at[SCORE_STRIDE] = s[c][1], at[8] = s[c][2], at[SCORE_STRIDE + 8] = s[c][3];
        }
        __syncthreads();
        u32 shares[COLUMNS][POSITION_TILES][4];
        float by0[COLUMNS], by1[COLUMNS];
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) {
            float s[POSITION_TILES][4], top = largest[c];  // positions 2t, 2t + 1, 2t + 8, 2t + 9 of each sixteen
#pragma unroll
            for (int m = 0; m < POSITION_TILES; m++) {
                const float* at = scores + (c * 8 + g) * SCORE_STRIDE + m * 16 + 2 * t;
                float2 front = *(const float2*)at, back = *(const float2*)(at + 8);
#pragma unroll
                for (int part = 1; part < PARTS; part++) {
                    float2 f = *(const float2*)(at + part * SCORES), b = *(const float2*)(at + part * SCORES + 8);
                    front.x += f.x, front.y += f.y, back.x += b.x, back.y += b.y;
                }
                s[m][0] = front.x, s[m][1] = front.y, s[m][2] = back.x, s[m][3] = back.y;
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    int p = m * 16 + 2 * t + (i & 1) + (i & 2) * 4;
                    if (p < low || p >= high) s[m][i] = LOWEST;
                    top = fmaxf(top, s[m][i]);
                }
            }
            top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
            top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
            float by = expf(largest[c] - top);
            largest[c] = top, sum[c] *= by;
#pragma unroll
            for (int m = 0; m < POSITION_TILES; m++) {
                float p[4];
#pragma unroll
                for (int i = 0; i < 4; i++) p[i] = s[m][i] == LOWEST ? 0.f : expf(s[m][i] - top), sum[c] += p[i];
                Split front(p[0], p[1]), back(p[2], p[3]);
                shares[c][m][0] = front.high, shares[c][m][1] = back.high, shares[c][m][2] = front.low, shares[c][m][3] = back.low;
            }
            // This lane's outputs are those of heads 2t and 2t + 1.
            by0[c] = __shfl_sync(~0u, by, 8 * t), by1[c] = __shfl_sync(~0u, by, 8 * t + 4);
        }
#pragma unroll
        for (int v = 0; v < VALUE_TILES; v++) {
            int first = (v * WARPS + warp) * 16;
            if (first >= E) break;
#pragma unroll
            for (int c = 0; c < COLUMNS; c++) acc[v][c][0] *= by0[c], acc[v][c][1] *= by1[c], acc[v][c][2] *= by0[c], acc[v][c][3] *= by1[c];
#pragma unroll
            for (int m = 0; m < POSITION_TILES; m++) {
                u32 a[4];
                load_transposed(a, v_tile + (m * 16 + (lane & 7) + (lane >> 4) * 8) * STRIDE + first + (lane >> 3 & 1) * 8);
#pragma unroll
                for (int c = 0; c < COLUMNS; c++) {
                    multiply(acc[v][c], a, shares[c][m][0], shares[c][m][1]);
                    multiply(acc[v][c], a, shares[c][m][2], shares[c][m][3]);
                }
            }
        }
    }
    wait_copies<0>();
#pragma unroll
    for (int c = 0; c < COLUMNS; c++) {
        sum[c] += __shfl_xor_sync(~0u, sum[c], 1);
        sum[c] += __shfl_xor_sync(~0u, sum[c], 2);
    }
    // NaN scores leave no maximum behind: the sums are NaN then, and so is what leaves here.
    u32 tag = (u32)state->n_steps * n_calls + call;
    size_t at_group = (size_t)blockIdx.x * MAX_RUNS * HEADS;
    const u64 *all = parts + at_group * E, *all_sums = part_sums + at_group * 2;
#pragma unroll
    for (int c = 0; c < COLUMNS; c++) {
        float whole = 1 / sum[c], by0 = __shfl_sync(~0u, whole, 8 * t), by1 = __shfl_sync(~0u, whole, 8 * t + 4);
#pragma unroll
        for (int v = 0; v < VALUE_TILES; v++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                int head = c * 8 + 2 * t + (i & 1), e = (v * WARPS + warp) * 16 + g + (i & 2) * 4;
                if (head >= HEADS || e >= E) continue;
                if (band.n_runs == 1)
                    hand_over(out + (first_head + head) * E + e, acc[v][c][i] * (i & 1 ? by1 : by0), parity);
                else
                    hand_over_tagged(parts + (at_group + run * HEADS + head) * E + e, acc[v][c][i], tag);
            }
        if (band.n_runs > 1 && warp == 0 && t == 0 && c * 8 + g < HEADS) {
            u64* mine = part_sums + (at_group + run * HEADS + c * 8 + g) * 2;
            hand_over_tagged(mine, largest[c], tag);
            hand_over_tagged(mine + 1, sum[c], tag);
        }
    }
    if (band.n_runs > 1) {
        // What each run's share is multiplied with; then 64 outputs at a time, two a lane, the runs of which several warps share.
        constexpr int OUTPUTS = HEADS * E, AT_ONCE = 8;
        float* weights = (float*)shared;  // [HEADS][MAX_RUNS]
        float2* totals = (float2*)(weights + HEADS * MAX_RUNS + HEADS * MAX_RUNS % 2);  // [WARPS][32]
        int width = band.n_runs >= 8 ? 8 : band.n_runs >= 4 ? 4 : 2, places = WARPS / width;  // warps that share 64 outputs
        for (int first = run * places * 64; first < OUTPUTS; first += band.n_runs * places * 64) {
            __syncthreads();
            for (int head = first / E + warp; head < HEADS && head * E < first + places * 64; head += WARPS) {
                constexpr int MY_RUNS = (MAX_RUNS + 31) / 32;
                ulonglong2 found[MY_RUNS];  // of each run its maximum and its sum
                bool is_late;
                Patience patience;
                do {
                    is_late = false;
#pragma unroll
                    for (int n = 0; n < MY_RUNS; n++)
                        found[n] = peek_two_tagged(all_sums + (min(n * 32 + lane, band.n_runs - 1) * HEADS + head) * 2);
#pragma unroll
                    for (int n = 0; n < MY_RUNS; n++) is_late |= (u32)(found[n].x >> 32) != tag || (u32)(found[n].y >> 32) != tag;
                    patience.spend();
                } while (is_late);
                float highest = LOWEST, total = 0;
#pragma unroll
                for (int n = 0; n < MY_RUNS; n++) highest = fmaxf(highest, __uint_as_float((u32)found[n].x));
                for (int d = 16; d; d >>= 1) highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, d));
#pragma unroll
                for (int n = 0; n < MY_RUNS; n++)
                    if (n * 32 + lane < band.n_runs)
                        total = fmaf(__uint_as_float((u32)found[n].y), expf(__uint_as_float((u32)found[n].x) - highest), total);
                float whole = 1 / warp_sum(total);
#pragma unroll
                for (int n = 0; n < MY_RUNS; n++)
                    if (n * 32 + lane < band.n_runs)
                        weights[head * MAX_RUNS + n * 32 + lane] = expf(__uint_as_float((u32)found[n].x) - highest) * whole;
            }
            __syncthreads();
            int i = min(first + warp / width * 64 + lane * 2, OUTPUTS - 2);
            const float* by = weights + i / E * MAX_RUNS;
            float2 total = {0, 0};
            for (int r = warp % width; r < band.n_runs; r += width * AT_ONCE) {
                ulonglong2 found[AT_ONCE];
                bool is_late;
                Patience patience;
                do {
                    is_late = false;
#pragma unroll
                    for (int n = 0; n < AT_ONCE; n++)
                        found[n] = peek_two_tagged(all + (size_t)min(r + n * width, band.n_runs - 1) * OUTPUTS + i);
#pragma unroll
                    for (int n = 0; n < AT_ONCE; n++) is_late |= (u32)(found[n].x >> 32) != tag || (u32)(found[n].y >> 32) != tag;
                    patience.spend();
                } while (is_late);
#pragma unroll
                for (int n = 0; n < AT_ONCE; n++)
                    if (r + n * width < band.n_runs) {
                        total.x = fmaf(by[r + n * width], __uint_as_float((u32)found[n].x), total.x);
                        total.y = fmaf(by[r + n * width], __uint_as_float((u32)found[n].y), total.y);
                    }
            }
            totals[warp * 32 + lane] = total;
            __syncthreads();
            if (warp % width == 0 && first + warp / width * 64 + lane * 2 < OUTPUTS) {
                for (int w = 1; w < width; w++) total.x += totals[(warp + w) * 32 + lane].x, total.y += totals[(warp + w) * 32 + lane].y;
                hand_over(out + first_head * E + i, total.x, parity);
                hand_over(out + first_head * E + i + 1, total.y, parity);
            }
        }
    }
    wait_for_previous();
}
