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
// A tile's scores are S^T = K Q^T, positions by heads: up to eight heads of a KV head are the eight columns of a tensor core.
// Warps share the work by positions and parts of E; scores meet in shared memory, where a warp a head makes shares of them; then
// every warp mixes its own part of E for all positions, O^T = V^T S, so that no sum is ever taken over warps. Old keys and values
// do not depend on this step, so the first tiles are fetched at once. A tile's steps wait for one another, and those of three
// tiles hardly longer than those of one: a run of no more than TOGETHER tiles is one round, with all of its tiles there before
// the queries are.
//
// Runs are merged by all their blocks, and by others where outputs are many, each a slice of them, as soon as every part carries
// this call's tag; so all blocks must be on the device at once, which the host sees to.
//
// Registers: a block has to fit beside one of a product. Each quarter of a multiprocessor has 16384 registers, and five of its 18
// warps with 56 a lane leave room for two warps with 112. With more, attention begins when that product has ended.
//
// Defined by the host: E, H, J, HEADS (query heads a block), WINDOW (0: none), PAGE, TILE, STAGES, TOGETHER (tiles of a round,
// where a run has no more), MAX_RUNS, MIN_TILES (of a run where there are several), PLANES_IN, N_IN, QK_NORM, V_NORM, ROPE (0
// none, 1 split, 2 interleaved), OWNS_KV, V_FROM_K, SCALE, EPS.
#include <cuda_bf16.h>

constexpr int THREADS = 256, WARPS = THREADS / 32, GROUP = H / J, CHUNKS = E / 8, STRIDE = E + 8;
constexpr int POSITION_TILES = TILE / 16, PARTS = WARPS / POSITION_TILES, K_STEPS = E / 16;
constexpr int MY_STEPS = (K_STEPS + PARTS - 1) / PARTS;  // a warp's share of E
constexpr int VALUE_TILES = (E / 16 + WARPS - 1) / WARPS;  // of 16 values, a warp
constexpr int SCORE_STRIDE = TOGETHER * TILE + 4, SCORES = HEADS * SCORE_STRIDE, SHARE_STRIDE = TOGETHER * TILE + 8;
constexpr float LOWEST = -1e30f;
static_assert(PAGE % TILE == 0, "a tile lies in one page");
static_assert(TOGETHER >= 1 && TOGETHER <= STAGES && STAGES > 1, "tiles of a round are there together");
static_assert(TILE % 16 == 0 && WARPS % POSITION_TILES == 0 && GROUP % HEADS == 0 && E % 16 == 0, "whole tensor core tiles");
static_assert(HEADS <= WARPS, "a warp a head, and a second task for those of the new key and value at most");

// Shared memory: tiles; the new key and value; shares as two bf16, before which queries stand there as floats by heads if all
// stages are to be filled meanwhile, and otherwise in the last one; of every head what to multiply with; scores, before which
// the angles stand there.
constexpr int STAGE = 2 * TILE * STRIDE, QUERY_BYTES = HEADS * E * 4, SHARE_BYTES = 2 * HEADS * SHARE_STRIDE * 2,
              AT_NEW = STAGES * STAGE * 2, AT_SHARES = AT_NEW + 2 * E * 4,
              AT_FACTORS = AT_SHARES + (TOGETHER > 1 && QUERY_BYTES > SHARE_BYTES ? QUERY_BYTES : SHARE_BYTES), AT_SCORES = AT_FACTORS + 32;
static_assert(QUERY_BYTES <= STAGE * 2, "room for the queries");

struct Band {
    int start, end, first_tile, n_tiles, tiles_a_run, n_runs;
    __device__ __forceinline__ explicit Band(int position) {
        start = WINDOW ? max(0, position - WINDOW + 1) : 0;
        end = position + 1;
        first_tile = start / TILE;
        n_tiles = position / TILE - first_tile + 1;
        // An odd number of them: runs that begin a power of two apart would all ask the same few memory channels.
        tiles_a_run = max(MIN_TILES, (n_tiles + MAX_RUNS - 1) / MAX_RUNS | 1);
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

constexpr int FOURS = (E + 127) / 128;  // of four elements of a head, a lane
constexpr int TASKS = (HEADS + 2 + WARPS - 1) / WARPS;  // heads of q, k or v that a warp prepares

struct Head {  // as the lanes of a warp hold it: four elements from 4 (32 m + lane) on
    float4 v[FOURS];
    static __device__ __forceinline__ bool has(int m, int lane) { return (m * 32 + lane) * 4 < E; }
    __device__ __forceinline__ void load(const float* p, int lane) {
#pragma unroll
        for (int m = 0; m < FOURS; m++) v[m] = p && has(m, lane) ? ((const float4*)p)[m * 32 + lane] : make_float4(1.f, 1.f, 1.f, 1.f);
    }
};

// Heads of q, then k and v if they are this block's, into shared memory, a warp each: summed over planes once they are there,
// normed, turned, scaled. `new_row`, `page_row`: where the key goes in a tile and in its page, the value behind it; or null.
__device__ __forceinline__ void prepare(const float* qkv, int first_head, int j, bool has_new, Head norm_by, const float* q_weight,
                                        const float* k_weight, const float2* turns, u32 parity, float* queries, float* fresh,
                                        __nv_bfloat16* new_row, __nv_bfloat16* page_row, int warp, int lane) {
    int n_tasks = HEADS + (has_new ? 2 : 0);
    if (warp >= n_tasks) return;
    Head found[TASKS];
    Patience patience;
    u32 late;
    do {  // all of it on its way at once
        late = 0;
#pragma unroll
        for (int n = 0; n < TASKS; n++) {
            int task = min(n * WARPS + warp, n_tasks - 1), in_group = V_FROM_K || task == HEADS ? H + j : H + J + j;
            const float* head = qkv + (task < HEADS ? first_head + task : in_group) * E;
#pragma unroll
            for (int p = 0; p < PLANES_IN; p++)
#pragma unroll
                for (int m = 0; m < FOURS; m++) {
                    float4& v = found[n].v[m];
                    if (p == 0) v = make_float4(0, 0, 0, 0);
                    if (Head::has(m, lane)) {
                        uint4 w = peek4(head + p * N_IN + (m * 32 + lane) * 4);
                        late |= w.x ^ parity, late |= w.y ^ parity, late |= w.z ^ parity, late |= w.w ^ parity;
                        v.x += unstamped(w.x), v.y += unstamped(w.y), v.z += unstamped(w.z), v.w += unstamped(w.w);
                    }
                }
        }
        if (late & 1) __nanosleep(40);
        patience.spend();
    } while (late & 1);
    __syncwarp();
    Head second_by;
    if (TASKS > 1) norm_by.load(warp < HEADS ? q_weight : k_weight, lane), second_by.load(k_weight, lane);
#pragma unroll
    for (int n = 0; n < TASKS; n++) {
        int task = n * WARPS + warp;
        if (task >= n_tasks) break;
        bool is_query = task < HEADS, is_value = task == HEADS + 1;
        float* out = is_query ? queries + task * E : is_value ? fresh + E : fresh;
        float factor = is_query ? SCALE : 1.f;
        const Head& x = found[n];
        bool has_norm = is_value ? V_NORM : QK_NORM;
        if (has_norm) {
            float square = 0;
#pragma unroll
            for (int m = 0; m < FOURS; m++)
                square += x.v[m].x * x.v[m].x + x.v[m].y * x.v[m].y + x.v[m].z * x.v[m].z + x.v[m].w * x.v[m].w;
            factor *= rsqrtf(warp_sum(square) / E + EPS);
        }
#pragma unroll
        for (int m = 0; m < FOURS; m++) {
            if (!Head::has(m, lane)) continue;
            float4 v = x.v[m], by = is_value || !has_norm ? make_float4(1.f, 1.f, 1.f, 1.f) : n ? second_by.v[m] : norm_by.v[m];
            by.x *= factor, by.y *= factor, by.z *= factor, by.w *= factor;
            ((float4*)out)[m * 32 + lane] = make_float4(v.x * by.x, v.y * by.y, v.z * by.z, v.w * by.w);
        }
        __syncwarp();
        if (ROPE && !is_value)
            for (int i = lane; i < E / 2; i += 32) {
                int a = ROPE == 1 ? i : 2 * i, b = ROPE == 1 ? i + E / 2 : 2 * i + 1;
                float x = out[a], y = out[b], cosine = turns[i].x, sine = turns[i].y;
                out[a] = x * cosine - y * sine;
                out[b] = y * cosine + x * sine;
            }
        __syncwarp();
        if (!is_query)
            for (int i = lane; i < E; i += 32) {
                __nv_bfloat16 rounded = __float2bfloat16(out[i]);
                if (new_row) new_row[(is_value ? TILE * STRIDE : 0) + i] = rounded;
                if (page_row) page_row[(is_value ? J * PAGE * E : 0) + i] = rounded;
            }
    }
}

// Scores of N tiles that follow each other in shared memory, of those that have live positions, which are before `end`.
template <int N>
__device__ __forceinline__ void score(const uint4 (&query)[MY_STEPS], const __nv_bfloat16* k_tiles, float* scores, int end, int warp,
                                      int lane) {
    int g = lane >> 2, t = lane & 3, first = warp / PARTS * 16;
#pragma unroll 1
    for (int n = 0; n < N && n * TILE + first < end; n++) {
        float high[4] = {0, 0, 0, 0}, low[4] = {0, 0, 0, 0};  // by the parts of the query
#pragma unroll
        for (int i = 0; i < MY_STEPS; i++) {
            int step = i * PARTS + warp % PARTS;
            if (K_STEPS % PARTS && step >= K_STEPS) break;
            u32 a[4];
            load_matrices(a, k_tiles + n * STAGE + (first + (lane & 15)) * STRIDE + step * 16 + (lane >> 4) * 8);
            multiply(high, a, query[i].x, query[i].y);
            multiply(low, a, query[i].z, query[i].w);
        }
        float* at = scores + warp % PARTS * SCORES + n * TILE + first + g;
#pragma unroll
        for (int i = 0; i < 2; i++)
            if (2 * t + i < HEADS) {
                at[(2 * t + i) * SCORE_STRIDE] = high[i] + low[i];
                at[(2 * t + i) * SCORE_STRIDE + 8] = high[i + 2] + low[i + 2];
            }
    }
}

// Scores of a head, the warp's, become shares. Positions begin <= p < end live; shares are there for all of their tiles.
// `largest`: of all scores so far; `factors`: what the mixture before has to be multiplied with.
template <int N>
__device__ __forceinline__ void soften(float& largest, const float* scores, __nv_bfloat16* shares, float* factors, int begin, int end,
                                       int warp, int lane) {
    if (warp >= HEADS) return;
    constexpr int MINE = (N * TILE + 31) / 32;
    float s[MINE], top = largest;
#pragma unroll
    for (int m = 0; m < MINE; m++) {
        int p = m * 32 + lane;
        s[m] = 0;
        if (p < end)
#pragma unroll
            for (int part = 0; part < PARTS; part++) s[m] += scores[part * SCORES + warp * SCORE_STRIDE + p];
        if (p < begin || p >= end) s[m] = LOWEST;
        top = fmaxf(top, s[m]);
    }
    for (int d = 16; d; d >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
    if (lane == 0) factors[warp] = expf(largest - top);
    largest = top;
#pragma unroll
    for (int m = 0; m < MINE; m++) {
        int p = m * 32 + lane;
        if (m * 32 / TILE * TILE >= end || (N * TILE % 32 && p >= N * TILE)) break;
        float share = s[m] == LOWEST ? 0.f : expf(s[m] - top);
        __nv_bfloat16 high = __float2bfloat16(share);
        shares[warp * SHARE_STRIDE + p] = high;
        shares[(HEADS + warp) * SHARE_STRIDE + p] = __float2bfloat16(share - __bfloat162float(high));
    }
}

struct Mixture {  // of a warp's own part of E; and the sums of shares. Of heads 2t and 2t + 1 of a lane, sums twice each
    float acc[VALUE_TILES][4], sum[4];

    __device__ __forceinline__ Mixture() {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            sum[i] = 0;
#pragma unroll
            for (int v = 0; v < VALUE_TILES; v++) acc[v][i] = 0;
        }
    }

    // Values of N tiles by their shares, of those tiles that have live positions, which are before `end`.
    template <int N>
    __device__ __forceinline__ void take(const __nv_bfloat16* v_tiles, const __nv_bfloat16* shares, const float* factors, int end, int warp,
                                         int lane) {
        int g = lane >> 2, t = lane & 3;
        // Of the low parts of shares, so that sums wait less for one another; four tiles of values do not wait.
        constexpr int LOW_TILES = VALUE_TILES < 4 ? VALUE_TILES : 1;
        float low[LOW_TILES][4], by0 = factors[min(2 * t, HEADS - 1)], by1 = factors[min(2 * t + 1, HEADS - 1)];
        sum[0] *= by0, sum[1] *= by1;
#pragma unroll
        for (int v = 0; v < VALUE_TILES; v++) {
            acc[v][0] *= by0, acc[v][1] *= by1, acc[v][2] *= by0, acc[v][3] *= by1;
            if (v < LOW_TILES) low[v][0] = low[v][1] = low[v][2] = low[v][3] = 0;
        }
#pragma unroll 1
        for (int n = 0; n < N && n * TILE < end; n++)
#pragma unroll
            for (int m = 0; m < POSITION_TILES; m++) {
                constexpr u32 ONES[4] = {0x3f803f80, 0x3f803f80, 0x3f803f80, 0x3f803f80};
                const __nv_bfloat16* of_head = shares + min(g, HEADS - 1) * SHARE_STRIDE + n * TILE + m * 16 + 2 * t;
                u32 high_shares[2] = {*(const u32*)of_head, *(const u32*)(of_head + 8)};
                of_head += HEADS * SHARE_STRIDE;
                u32 low_shares[2] = {*(const u32*)of_head, *(const u32*)(of_head + 8)};
                multiply(sum, ONES, high_shares[0], high_shares[1]);
                multiply(sum, ONES, low_shares[0], low_shares[1]);
#pragma unroll
                for (int v = 0; v < VALUE_TILES; v++) {
                    int e = (v * WARPS + warp) * 16;
                    if (e >= E) break;
                    u32 a[4];
                    load_transposed(a, v_tiles + n * STAGE + (m * 16 + (lane & 7) + (lane >> 4) * 8) * STRIDE + e + (lane >> 3 & 1) * 8);
                    multiply(acc[v], a, high_shares[0], high_shares[1]);
                    multiply(v < LOW_TILES ? low[v] : acc[v], a, low_shares[0], low_shares[1]);
                }
            }
#pragma unroll
        for (int i = 0; i < LOW_TILES * 4; i++) acc[i / 4][i % 4] += low[i / 4][i % 4];
    }
};

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

extern "C" __global__ void __maxnreg__(112)
    attention(const float* qkv, const float* q_weight, const float* k_weight, const double* frequencies, __nv_bfloat16* cache,
              const int* table, int n_table, const State* state, u64* all_parts, u64* part_sums, int call, int n_calls, float* out) {
    extern __shared__ __align__(128) u8 shared[];
    __nv_bfloat16 *tiles = (__nv_bfloat16*)shared, *shares = (__nv_bfloat16*)(shared + AT_SHARES);
    float *fresh = (float*)(shared + AT_NEW), *factors = (float*)(shared + AT_FACTORS), *scores = (float*)(shared + AT_SCORES),
          *queries = (float*)(TOGETHER > 1 ? shared + AT_SHARES : shared + (STAGES - 1) * STAGE * 2);
    float2* turns = (float2*)scores;
    int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31, g = lane >> 2, t = lane & 3, run = blockIdx.y,
        first_head = blockIdx.x * HEADS, j = first_head / GROUP;
    let_next_start();
    // All that depends on nothing is asked for before the tiles are, behind which it would stand in line.
    int position = state->position, n_steps = state->n_steps;
    double frequency = ROPE && tid < E / 2 ? frequencies[tid] : 0;
    Head norm_by;  // where a warp has two heads to prepare, there are no registers for it yet
    if (TASKS == 1) norm_by.load(warp < HEADS ? q_weight : k_weight, lane);
    u32 parity = n_steps & 1;
    Band band(position);
    size_t at_group = (size_t)blockIdx.x * MAX_RUNS * HEADS;
    Parts parts{all_parts + at_group * E, part_sums + at_group * 2, (u32)n_steps * n_calls + call};
    int width = band.n_runs >= 8 ? 8 : band.n_runs >= 4 ? 4 : 2;
    int n_mergers = max(band.n_runs, min(MAX_RUNS, HEADS * E * width / (WARPS * 64)));
    if (run >= band.n_runs) {
        if (band.n_runs > 1 && run < n_mergers)
            merge(parts, band.n_runs, run, n_mergers, width, (float4*)shared, out + first_head * E, parity, warp, lane);
        return;
    }
    auto page_of = [=](int tile) { return table[(tile * TILE / PAGE) % n_table]; };
    int tile = band.first_tile + run * band.tiles_a_run, tile_end = min(tile + band.tiles_a_run, band.first_tile + band.n_tiles);
    bool is_last = tile_end == band.first_tile + band.n_tiles, has_new = OWNS_KV && is_last;
    // Pages carry no parity: the new position of another layer's cache is there when the kernels before are done.
    if (!OWNS_KV && is_last) wait_for_previous();
    bool is_one_round = TOGETHER > 1 && tile_end - tile <= TOGETHER;
    int new_page = page_of(position / TILE), pages[STAGES];
#pragma unroll
    for (int stage = 0; stage < STAGES; stage++) pages[stage] = page_of(min(tile + stage, tile_end - 1));
    // The first tiles on their way; otherwise the last stage is still needed, for queries or to be the next that is filled.
#pragma unroll 1
    for (int stage = 0; stage < STAGES; stage++) {
        if (stage == STAGES - 1 && (TOGETHER < STAGES || !is_one_round)) break;
        int page = pages[0];
#pragma unroll
        for (int i = 1; i < STAGES; i++) page = stage == i ? pages[i] : page;
        if (tile + stage < tile_end) fetch(tile + stage, band, cache, page, j, tiles + stage * STAGE);
        commit_copies();
    }
    if (ROPE && tid < E / 2) {
        // In double: at position 100,000 a float angle is off by 0.004.
        double whole_turns = position * frequency * 0.15915494309189535;
        float sine, cosine;
        sincospif((float)(2 * (whole_turns - rint(whole_turns))), &sine, &cosine);
        turns[tid] = make_float2(cosine, sine);
    }
    __syncthreads();
    __nv_bfloat16* page_row = cache + (size_t)new_page * (2 * J * PAGE * E) + (j * PAGE + position % PAGE) * E;
    __nv_bfloat16* new_row = tiles + (position / TILE - tile) * STAGE + position % TILE * STRIDE;
    prepare(qkv, first_head, j, has_new, norm_by, q_weight, k_weight, turns, parity, queries, fresh, is_one_round ? new_row : nullptr,
            first_head % GROUP == 0 ? page_row : nullptr, warp, lane);
    if (is_one_round) wait_copies<0>();
    __syncthreads();
    // This warp's part of the queries as a tensor core takes them: elements 2t, + 1, + 8, + 9 of each 16 of head g.
    uint4 query[MY_STEPS];
#pragma unroll
    for (int i = 0; i < MY_STEPS; i++) {
        int step = i * PARTS + warp % PARTS;
        bool is_one = step < K_STEPS && g < HEADS;
        const float* at = queries + g * E + step * 16 + 2 * t;
        float2 one = is_one ? *(const float2*)at : make_float2(0, 0), other = is_one ? *(const float2*)(at + 8) : make_float2(0, 0);
        Split front(one.x, one.y), back(other.x, other.y);
        query[i] = make_uint4(front.high, back.high, front.low, back.low);
    }
    float largest = LOWEST;  // of the warp's head
    Mixture mixture;
    if (is_one_round) {
        int begin = band.start - tile * TILE, end = min(band.end, tile_end * TILE) - tile * TILE;
        score<TOGETHER>(query, tiles, scores, end, warp, lane);
        __syncthreads();
        soften<TOGETHER>(largest, scores, shares, factors, begin, end, warp, lane);
        __syncthreads();
        mixture.take<TOGETHER>(tiles + TILE * STRIDE, shares, factors, end, warp, lane);
    } else {
        int next = tile + STAGES - 1, next_page = pages[STAGES - 1];
        for (int n = 0; tile < tile_end; tile++, n++) {
            __nv_bfloat16* k_tile = tiles + n % STAGES * STAGE;
            wait_copies<STAGES - 2>();
            if (has_new && tile == position / TILE)
                for (int i = tid; i < 2 * E; i += THREADS)
                    k_tile[(i < E ? 0 : TILE * STRIDE) + position % TILE * STRIDE + i % E] = __float2bfloat16(fresh[i]);
            __syncthreads();  // the tile is there, and nobody reads the one before it, or the queries, any more
            if (next < tile_end) {
                fetch(next, band, cache, next_page, j, tiles + (n + STAGES - 1) % STAGES * STAGE);
                if (++next < tile_end) next_page = page_of(next);
            }
            commit_copies();
            int begin = band.start - tile * TILE, end = min(band.end - tile * TILE, TILE);
            score<1>(query, k_tile, scores, end, warp, lane);
            __syncthreads();
            soften<1>(largest, scores, shares, factors, begin, end, warp, lane);
            __syncthreads();
            mixture.take<1>(k_tile + TILE * STRIDE, shares, factors, end, warp, lane);
        }
        wait_copies<0>();
    }
    // NaN scores leave no maximum behind: the sums are NaN then, and so is what leaves here.
    float whole0 = __fdividef(1.f, mixture.sum[0]), whole1 = __fdividef(1.f, mixture.sum[1]);
#pragma unroll
    for (int v = 0; v < VALUE_TILES; v++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int head = 2 * t + (i & 1), e = (v * WARPS + warp) * 16 + g + (i & 2) * 4;
            if (head >= HEADS || e >= E) continue;
            if (band.n_runs == 1)
                hand_over(out + (first_head + head) * E + e, mixture.acc[v][i] * (i & 1 ? whole1 : whole0), parity);
            else
                hand_over_tagged(parts.value(run, head) + e, mixture.acc[v][i], parts.tag);
        }
    if (band.n_runs > 1) {
        if (lane == 0 && warp < HEADS) hand_over_tagged(parts.sum(run, warp), largest, parts.tag);
#pragma unroll
        for (int i = 0; i < 2; i++)
            if (warp == 0 && g == 0 && 2 * t + i < HEADS) hand_over_tagged(parts.sum(run, 2 * t + i) + 1, mixture.sum[i], parts.tag);
        merge(parts, band.n_runs, run, n_mergers, width, (float4*)shared, out + first_head * E, parity, warp, lane);
    }
    wait_for_previous();
}
