// attention: one new row against the live band of its cache, from the outputs of the QKV product to the mixed values.
//
// Per head: q, k = rope(rms_norm(., weight)), v = rms_norm(.) where the model has one; k and v are rounded and written to their
// page; out = softmax(scale q K^T) V over slots max(0, s - WINDOW + 1) .. s. A slot is a position, but without a WINDOW it is
// less what the sequence has dropped; RoPE turns by positions, all else goes by slots. qkv float32 [PLANES_IN][N_IN], rows
// q, then k, then v; out float32 [H E]. cache bf16 [pages][2][J][PAGE][E], or bytes [pages][2][J][PAGE E codes, PAGE bf16 scales],
// or bf16 [pages][J][PAGE][E + ROTATED]: see attention_storage.cuh.
// Approximate: tensor cores multiply keys and values, which are bf16 or codes that bf16 holds, with queries and shares that are
// split into two bf16 (16 bits in all) and sum in float32; keys of int8 with queries of 16-bit codes under one scale a head, in
// whole numbers. Softmax in float32; the running maximum starts at a finite value and is applied once a tile.
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
// this call's tag; so all blocks of a token must be on the device at once, which the host sees to. Where tokens are several there
// are fewer blocks for each, which take its runs by turns: the same runs, so the same bits, as it has alone.
//
// Tokens of one sequence, which see each other, are two launches (MODE): WRITES puts keys and values in their pages and does nothing
// else; READS has its OWNS_KV 0, and waits for all kernels before it, since any run may hold a new position.
//
// Registers: a block has to fit beside one of a product. Each quarter of a multiprocessor has 16384 registers, and five of its 18
// warps with 56 a lane leave room for two warps with 112. With more, attention begins when that product has ended.
//
// Defined by the host: STORAGE (0 bf16, 1 int8, 2 E4M3), ROTATED (lanes of keys that are kept beside values; 0: keys are kept
// whole), E, H, J, HEADS (query heads a block), WINDOW (0: none), PAGE, TILE, STAGES, TOGETHER (tiles of a round, where a run has no
// more), TOKENS (gridDim.z), QKV_STRIDE (from one token's qkv to the next), MAX_RUNS, MIN_TILES (of a run where there are several),
// PLANES_IN, N_IN, QK_NORM, V_NORM, ROPE (0 none, 1 split, 2 interleaved), OWNS_KV, V_FROM_K, SCALE, EPS, MODE (0: all of it; WRITES, READS).
#include <cuda_bf16.h>

#include "attention_storage.cuh"

constexpr int THREADS = 256, WARPS = THREADS / 32, GROUP = H / J;
constexpr int POSITION_TILES = TILE / 16, PARTS = WARPS / POSITION_TILES, K_STEPS = E / 16;
constexpr int MY_STEPS = (K_STEPS + PARTS - 1) / PARTS;  // a warp's share of E
constexpr int VALUE_TILES = (E / 16 + WARPS - 1) / WARPS;  // of 16 values, a warp
constexpr int SCORE_STRIDE = TOGETHER * TILE + 4, SCORES = HEADS * SCORE_STRIDE, SHARE_STRIDE = TOGETHER * TILE + 8;
constexpr float LOWEST = -1e30f;
constexpr int WRITES = 1, READS = 2;
static_assert(PAGE % TILE == 0, "a tile lies in one page");
static_assert(TOGETHER >= 1 && TOGETHER <= STAGES && STAGES > 1, "tiles of a round are there together");
static_assert(TILE % 16 == 0 && WARPS % POSITION_TILES == 0 && GROUP % HEADS == 0 && E % 16 == 0, "whole tensor core tiles");
static_assert(HEADS <= WARPS, "a warp a head, and a second task for those of the new key and value at most");
static_assert(!HAS_SCALES || TILE % 32 == 0, "two tensor core tiles of codes are loaded at once");

// Shared memory: tiles, with their scales; the new key and value; shares as two bf16, before which queries stand there as floats
// by heads if all stages are to be filled meanwhile, and otherwise in the last one; of every head what to multiply with, with
// scales also its sum, and the new scales; scores, before which the angles stand there.
constexpr int AT_SCALES = TILES, STAGE = AT_SCALES + (HAS_SCALES ? 4 * TILE : 0), STAGE_BYTES = STAGE * sizeof(Stored),
              QUERY_BYTES = HEADS * E * 4, SHARE_BYTES = 2 * HEADS * SHARE_STRIDE * 2, AT_NEW = STAGES * STAGE_BYTES,
              AT_SHARES = AT_NEW + 2 * E * 4,
              AT_FACTORS = AT_SHARES + (TOGETHER > 1 && QUERY_BYTES > SHARE_BYTES ? QUERY_BYTES : SHARE_BYTES),
              AT_SCORES = AT_FACTORS + (HAS_SCALES ? 112 : 32);
static_assert(QUERY_BYTES <= STAGE_BYTES, "room for the queries");

struct Band {
    int start, end, first_tile, n_tiles, tiles_a_run, n_runs;
    __device__ __forceinline__ explicit Band(int slot) {
        start = WINDOW ? max(0, slot - WINDOW + 1) : 0;
        end = slot + 1;
        first_tile = start / TILE;
        n_tiles = slot / TILE - first_tile + 1;
        // An odd number of them: runs that begin a power of two apart would all ask the same few memory channels.
        tiles_a_run = max(MIN_TILES, (n_tiles + MAX_RUNS - 1) / MAX_RUNS | 1);
        n_runs = (n_tiles + tiles_a_run - 1) / tiles_a_run;
    }
};

__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> __device__ __forceinline__ void wait_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }

// Keys and values of a tile's positions that are in the band and older than the new one. Values outside it are zero, since
// their shares are, and what lies there times zero need not be; codes are finite whatever they are.
__device__ __forceinline__ void fetch(int tile, Band band, const Stored* cache, int page_id, int j, Stored* k_tile) {
    int position = tile * TILE;
    const Stored *page = cache + (size_t)page_id * (BLOCKS * J * BLOCK), *k = page + row_in_page(j, position % PAGE), *v = k + J * BLOCK;
    Stored* v_tile = k_tile + TILE * STRIDE;
    if (KEYS_ARE_VALUES) {
#pragma unroll 1
        for (int i = threadIdx.x; i < TILE * (ROW / 8); i += THREADS) {
            int row = i / (ROW / 8), column = i % (ROW / 8) * 8, p = position + row;
            if (p >= band.start && p < band.end - OWNS_KV)
                copy_async(k_tile + row * STRIDE + column, k + row * ROW + column);
            else if (!OWNS_KV || p != band.end - 1)
                *(uint4*)(k_tile + row * STRIDE + column) = make_uint4(0, 0, 0, 0);
        }
        return;
    }
#pragma unroll (HAS_SCALES && (E > 256 || E % 64) ? 1 : 4)  // registers: what has been found not to spill
    for (int i = threadIdx.x; i < TILE * CHUNKS; i += THREADS) {
        int row = i / CHUNKS, column = i % CHUNKS * CHUNK, p = position + row;
        if (p >= band.start && p < band.end - OWNS_KV) {
            copy_async(k_tile + row * STRIDE + column, k + row * E + column);
            copy_async(v_tile + row * STRIDE + column, v + row * E + column);
        } else if (!HAS_SCALES && (!OWNS_KV || p != band.end - 1)) {
            *(uint4*)(v_tile + row * STRIDE + column) = make_uint4(0, 0, 0, 0);
        }
    }
    if (HAS_SCALES && threadIdx.x < TILE / 4) {  // of all positions: `soften` reads the live ones
        int of_value = threadIdx.x / (TILE / 8), i = threadIdx.x % (TILE / 8) * 16;
        const Stored* scales = page + (j + of_value * J) * BLOCK + PAGE * E + position % PAGE * 2;
        copy_async(k_tile + AT_SCALES + of_value * TILE * 2 + i, scales + i);
    }
}

#include "attention_heads.cuh"
#include "attention_round.cuh"
#include "attention_merge.cuh"

extern "C" __global__ void __maxnreg__(112)
    attention(const float* qkv, const float* q_weight, const float* k_weight, const double* frequencies, Stored* cache,
              const int* table, int n_table, const State* state, u64* all_parts, u64* part_sums, int call, int n_calls, float* out AND_STAMPS) {
    extern __shared__ __align__(128) u8 shared[];
    Stored* tiles = (Stored*)shared;
    __nv_bfloat16* shares = (__nv_bfloat16*)(shared + AT_SHARES);
    float *fresh = (float*)(shared + AT_NEW), *factors = (float*)(shared + AT_FACTORS), *scores = (float*)(shared + AT_SCORES),
          *queries = (float*)(TOGETHER > 1 ? shared + AT_SHARES : shared + (STAGES - 1) * STAGE_BYTES), *new_scales = factors + 16;
    float2* turns = (float2*)scores;
    int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31, g = lane >> 2, t = lane & 3, run = blockIdx.y,
        first_head = blockIdx.x * HEADS, j = first_head / GROUP;
    if (TOKENS > 1) {
        int token = blockIdx.z;
        qkv += token * QKV_STRIDE, table += token * n_table, state += token, out += token * (H * E);
        all_parts += (size_t)token * (MAX_RUNS * H * E), part_sums += token * (MAX_RUNS * H * 2);
    }
    STAMP(THERE, tid == 0);
    let_next_start();
    // All that depends on nothing is asked for before the tiles are, behind which it would stand in line.
    int position = state->position, slot = WINDOW ? position : position - state->dropped, n_steps = state->n_steps;
    double frequency = ROPE && tid < E / 2 ? frequencies[tid] : 0;
    Head norm_by;  // where a warp has two heads to prepare, there are no registers for it yet
    if (TASKS == 1) norm_by.load(warp < HEADS ? q_weight : k_weight, lane);
    u32 parity = n_steps & 1;
    Band band(slot);
    size_t at_group = (size_t)blockIdx.x * MAX_RUNS * HEADS;
    Parts parts{all_parts + at_group * E, part_sums + at_group * 2, (u32)n_steps * n_calls + call};
    int width = band.n_runs >= 8 ? 8 : band.n_runs >= 4 ? 4 : 2;
    int n_mergers = max(band.n_runs, min(MAX_RUNS, HEADS * E * width / (WARPS * 64)));
    if (TOKENS > 1) n_mergers = min(n_mergers, (int)gridDim.y);
    if (MODE == WRITES) run = band.n_runs - 1;
    if (run >= band.n_runs) {
        if (band.n_runs > 1 && run < n_mergers)
            merge(parts, band.n_runs, run, n_mergers, width, (float4*)shared, out + first_head * E, parity, warp, lane);
        STAMP(DONE, lane == 0);
        return;
    }
    auto page_of = [=](int tile) { return table[(tile * TILE / PAGE) % n_table]; };
    do {  // one token alone has a block for each of its runs
        int tile = band.first_tile + run * band.tiles_a_run, tile_end = min(tile + band.tiles_a_run, band.first_tile + band.n_tiles);
        bool is_last = tile_end == band.first_tile + band.n_tiles, has_new = OWNS_KV && is_last;
        // Pages carry no parity: the new position of another layer's cache is there when the kernels before are done.
        if (!OWNS_KV && (is_last || MODE == READS)) wait_for_previous();
        bool is_one_round = TOGETHER > 1 && tile_end - tile <= TOGETHER;
        int new_page = page_of(slot / TILE), pages[STAGES];
#pragma unroll
        for (int stage = 0; stage < STAGES; stage++) pages[stage] = page_of(min(tile + stage, tile_end - 1));
        // The first tiles on their way; otherwise the last stage is still needed, for queries or to be the next that is filled.
#pragma unroll 1
        for (int stage = 0; stage < STAGES; stage++) {
            if (MODE == WRITES || (stage == STAGES - 1 && (TOGETHER < STAGES || !is_one_round))) break;
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
        Stored* page_row = cache + (size_t)new_page * (BLOCKS * J * BLOCK) + row_in_page(j, slot % PAGE);
        Stored* page_scale = page_row + (PAGE - slot % PAGE) * E + slot % PAGE * 2;
        Stored* new_row = tiles + (slot / TILE - tile) * STAGE + slot % TILE * STRIDE;
        prepare(qkv, first_head, j, has_new, norm_by, q_weight, k_weight, turns, parity, queries, fresh, is_one_round ? new_row : nullptr,
                first_head % GROUP == 0 ? page_row : nullptr, page_scale, new_scales, warp, lane);
        STAMP(READY, tid == 0);
        if (MODE == WRITES) break;
        if (is_one_round) wait_copies<0>();
        __syncthreads();
        Queries query(queries, new_scales + 2, warp, lane);  // this warp's part, as a tensor core takes them
        float largest = LOWEST, total = 0;  // of the warp's head; the sum of shares is the mixture's where there are no scales
        Mixture mixture;
        if (is_one_round) {
            int begin = band.start - tile * TILE, end = min(band.end, tile_end * TILE) - tile * TILE;
            score<TOGETHER>(query, tiles, scores, end, warp, lane);
            __syncthreads();
            soften<TOGETHER>(largest, total, scores, tiles, new_scales, slot - tile * TILE, shares, factors, begin, end, warp, lane);
            __syncthreads();
            mixture.take<TOGETHER>(tiles + VALUES, shares, factors, end, warp, lane);
        } else {
            int next = tile + STAGES - 1, next_page = pages[STAGES - 1];
            for (int n = 0; tile < tile_end; tile++, n++) {
                Stored* k_tile = tiles + n % STAGES * STAGE;
                wait_copies<STAGES - 2>();
                if (has_new && tile == slot / TILE)
#if STORAGE  // registers: unrolled, divisions spill
#pragma unroll 1
#endif
                    for (int i = tid; i < 2 * E; i += THREADS) {
                        if (KEYS_ARE_VALUES && i < E && !is_rotated(i)) continue;
                        k_tile[(i < E ? 0 : VALUES) + slot % TILE * STRIDE + (KEYS_ARE_VALUES && i < E ? key_lane(i) : i % E)] =
                            encode(fresh[i], new_scales[i >= E]);
                    }
                __syncthreads();  // the tile is there, and nobody reads the one before it, or the queries, any more
                if (next < tile_end) {
                    fetch(next, band, cache, next_page, j, tiles + (n + STAGES - 1) % STAGES * STAGE);
                    if (++next < tile_end) next_page = page_of(next);
                }
                commit_copies();
                int begin = band.start - tile * TILE, end = min(band.end - tile * TILE, TILE);
                score<1>(query, k_tile, scores, end, warp, lane);
                __syncthreads();
                soften<1>(largest, total, scores, k_tile, new_scales, slot - tile * TILE, shares, factors, begin, end, warp, lane);
                __syncthreads();
                mixture.take<1>(k_tile + VALUES, shares, factors, end, warp, lane);
            }
            wait_copies<0>();
        }
        // NaN scores leave no maximum behind: the sums are NaN then, and so is what leaves here.
        float whole0 = __fdividef(1.f, mixture.sum[0]), whole1 = __fdividef(1.f, mixture.sum[1]);
#pragma unroll
        for (int v = 0; v < VALUE_TILES; v++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                int head = 2 * t + (i & 1), e = (v * WARPS + warp) * 16 + (HAS_SCALES ? 2 : 1) * g + (HAS_SCALES ? i >> 1 : (i & 2) * 4);
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
        }
        if (TOKENS > 1) __syncthreads();  // tiles and shares are free again
        run += gridDim.y;
    } while (TOKENS > 1 && run < band.n_runs);
    if (MODE != WRITES && band.n_runs > 1)
        merge(parts, band.n_runs, blockIdx.y, n_mergers, width, (float4*)shared, out + first_head * E, parity, warp, lane);
    STAMP(DONE, lane == 0);
    wait_for_previous();
}
