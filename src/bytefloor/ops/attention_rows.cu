// attention_rows: softmax(q K^T) V of many rows over the live band of a paged cache, on tensor cores.
//
// q bf16 [T][H][E], normed, turned, and times scale log2(e): scores are exponents of two. items: first row, rows, slot
// of the first and sequence; the rows of an item have consecutive slots, and their own keys and values are in the
// cache. A row at slot p sees slots max(0, p - WINDOW + 1) .. p, which lie in pages table[sequence][slot / PAGE %
// n_table]; pages as in attention_storage.cuh. out: row tiles (row_tiles.py) of H E columns. Grid: items, J.
// What lies outside the union of an item's bands may be anything: such keys are masked after the product, such values
// are zero where products read them, such scales are zero.
// Approximate: keys and values are bf16 or codes that bf16 holds, sums are float32; scales of codes multiply scores
// and shares in float32. Shares are rounded to bf16 for the product with V, their sum is taken before, and the output
// is rounded to bf16. The order of all sums follows from the slots alone: two runs give the same bits.
// Moves the union band of K and V once an item. Needs cp.async and mma (sm_80); wgmma where there is sm_90a.
//
// A tile of M rows of a product is rows by heads of one KV head, m = row (H / J) + head, so that all heads share keys
// and values. Up to E = 256 each warpgroup has 64 such rows; beyond, two share 64: both have the scores, and each its
// part of the values' columns. Other warps fill a ring of slots with keys and values. Where keys are values but for
// some lanes (ROTATED), a slot has both: steps of 16 lanes take either columns of V or those lanes.
//
// Defined by the host: STORAGE, ROTATED, E, H, J, WINDOW (0: none), PAGE, TILE (positions), STAGES (slots), GROUPS
// (warpgroups that multiply), PARTS (of the columns of V).
#include <cuda_bf16.h>

#include "attention_storage.cuh"
#include "row_tiles.cuh"
#include "warpgroup.cuh"

constexpr int G = H / J, M = GROUPS * 64 / PARTS;
constexpr int MULTIPLIERS = GROUPS * 128, LOADERS = 128, THREADS = MULTIPLIERS + LOADERS;
constexpr int COLUMNS = E <= 64 ? 64 : E <= 128 ? 128 : E <= 256 ? 256 : 512, KEY_COLUMNS = (ROTATED + 63) / 64 * 64;
constexpr int MY_COLUMNS = COLUMNS / PARTS, TILE_BYTES = TILE * 128;  // of 64 columns
constexpr int FILLS = KEYS_ARE_VALUES ? 1 : 2;        // slots that a tile takes
constexpr int PAGES = TILE > PAGE ? TILE / PAGE : 1;  // of a tile
// Whether scores of the next tile come before values of this one, so that exponentials run beside products of the same
// warpgroup. Two slots that hold both have no room for that: the one would be filled while nobody has anything to do.
constexpr bool IS_AHEAD = FILLS > 1 || STAGES > 2;
constexpr int LAG = STAGES > 3 ? 2 : 1;  // fills under way behind the one that is being asked for
#define NEVER __int_as_float(0xff800000)  // the exponent of no share
constexpr float LOWEST = -1e30f;
static_assert(PAGE % TILE == 0 || TILE % PAGE == 0, "whole tiles a page, or whole pages a tile");
static_assert(E % 16 == 0 && E <= 512 && MY_COLUMNS <= 256 && TILE % 16 == 0 && STAGES > 1, "whole tensor core tiles");
static_assert(H % J == 0 && G <= M && M % 16 == 0, "a row's heads are in one tile");
static_assert(!KEYS_ARE_VALUES || E % 32 == 0, "a step of 16 lanes is of values or of lanes that turn");

// Shared memory: queries, slots, of every slot the scales of keys and values of its tile, barriers.
constexpr int QUERY_BYTES = M * COLUMNS * 2, SLOT_BYTES = TILE_BYTES / 64 * (COLUMNS + KEY_COLUMNS),
              AT_SCALES = QUERY_BYTES + STAGES * SLOT_BYTES,
              AT_BARRIERS = AT_SCALES + (HAS_SCALES ? STAGES * TILE * 8 : 0);

__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> __device__ __forceinline__ void wait_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}
__device__ __forceinline__ bool is_past(u64* b, u32 parity) {
    u32 done;
    asm volatile("{\n.reg .pred p;\nmbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
                 : "=r"(done)
                 : "r"(shared_address(b)), "r"(parity)
                 : "memory");
    return done;
}
__device__ __forceinline__ float exp2_of(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
struct Band {  // the union of what an item's rows see
    int start, end, first_tile, n_tiles;
    __device__ __forceinline__ Band(int first_slot, int n_rows) {
        start = WINDOW ? max(0, first_slot - WINDOW + 1) : 0;
        end = first_slot + n_rows;
        first_tile = start / TILE;
        n_tiles = (end - 1) / TILE - first_tile + 1;
    }
    __device__ __forceinline__ bool has(int slot) const { return slot >= start && slot < end; }
};

struct Turn {  // in the ring: a slot, and the parity of its use
    int slot = 0;
    u32 parity = 0;
    __device__ __forceinline__ void advance(int n) {
        slot += n;
        if (slot >= STAGES) slot -= STAGES, parity ^= 1;
    }
};

struct Ring {
    u8* shared;
    __device__ __forceinline__ u8* slot(int i) const { return shared + QUERY_BYTES + i * SLOT_BYTES; }
    __device__ __forceinline__ float* scales(int i) const { return (float*)(shared + AT_SCALES) + i * TILE * 2; }
    __device__ __forceinline__ u64* full(int i) const { return (u64*)(shared + AT_BARRIERS) + i; }
    __device__ __forceinline__ u64* empty(int i) const { return full(STAGES + i); }
    __device__ __forceinline__ void wait(Turn at) const { barrier_wait(full(at.slot), at.parity); }
    __device__ __forceinline__ void release(Turn at) const {
        __syncwarp();
        if (threadIdx.x % 32 == 0) barrier_arrive(empty(at.slot));
    }
};

#include "attention_rows_load.cuh"

struct Row {  // of products: where it is among the item's, and the last slot that it sees
    int row, head, slot;
    __device__ __forceinline__ Row(int m, int4 item) {
        row = m / G, head = m % G;
        slot = item.z + min(row, item.y - 1);
    }
};

// Rows of queries by heads, zero where there are none.
__device__ __forceinline__ void put_queries(const __nv_bfloat16* q, u8* queries, int4 item, int j) {
#pragma unroll 4
    for (int i = threadIdx.x; i < M * (E / 8); i += MULTIPLIERS) {
        int m = i / (E / 8), c = i % (E / 8), row = m / G;
        const __nv_bfloat16* from = q + ((size_t)(item.x + row) * H + j * G + m % G) * E + c * 8;
        *(uint4*)(queries + c / 8 * (M * 128) + swizzled(m, c % 8)) =
            row < item.y ? *(const uint4*)from : make_uint4(0, 0, 0, 0);
    }
}

// s [64][TILE] += 16 lanes: step `of_query` of a tile of 64 lanes times step `of_key`; this warp's 16 of the 64 rows
// begin at `rows`.
__device__ __forceinline__ void multiply_lanes(float (&s)[TILE / 8][4], const u8* queries, const u8* keys, int of_query,
                                               int of_key, int rows) {
#if HAS_WARPGROUPS
    static_assert(M % 64 == 0, "whole products of a warpgroup");
    wgmma<TILE>(s, operand_at(shared_address(queries) + of_query * 32, 16),
                operand_at(shared_address(keys) + of_key * 32, 16));
#else
    u32 r[4];
    int lane = threadIdx.x % 32;
    ldmatrix4(r, shared_address(queries) + swizzled(rows + lane % 16, 2 * of_query + lane / 16));
    multiply_fragments<TILE>(s, r, keys, of_key);
#endif
}

// s [64][TILE] = queries times keys.
__device__ __forceinline__ void ask_scores(float (&s)[TILE / 8][4], const u8* queries, const u8* keys, int rows) {
#pragma unroll
    for (int i = 0; i < TILE / 8; i++) s[i][0] = s[i][1] = s[i][2] = s[i][3] = 0;
    asm volatile("" : "+l"(queries), "+l"(keys));  // operands' addresses would be kept in registers that there are not
    begin_products();
#pragma unroll
    for (int step = 0; step < E / 16; step++) {
        bool is_apart = KEYS_ARE_VALUES && is_rotated(16 * step);
        int of_key = is_apart ? (COLUMNS + key_lane(16 * step) - E) / 16 : step;
        multiply_lanes(s, queries + step / 4 * (M * 128), keys + of_key / 4 * TILE_BYTES, step % 4, of_key % 4, rows);
    }
    commit_products();
}

// o [64][MY_COLUMNS] += shares times values, of the columns that `values` begins with.
__device__ __forceinline__ void ask_values(float (&o)[MY_COLUMNS / 8][4], const u32 (&p)[TILE / 16][4],
                                           const u8* values) {
    begin_products();
#pragma unroll
    for (int step = 0; step < TILE / 16; step++) multiply_values<MY_COLUMNS>(o, p[step], values, step, TILE_BYTES);
    commit_products();
}

// Of a lane: rows g and g + 8 of its warp, and columns 2t and 2t + 1 of every eight.
struct Softmax {
    int slots[2], first, last;  // the last that its rows see; of all rows of the warp the least and the greatest
    float largest[2] = {LOWEST, LOWEST}, sum[2] = {0, 0};

    // Scores of a tile become shares, times scales of values; what there was before is to be multiplied with `factor`.
    __device__ __forceinline__ void soften(float (&s)[TILE / 8][4], float (&factor)[2], int position,
                                           const float* scales) {
        int t2 = threadIdx.x % 4 * 2;
        if (HAS_SCALES)
#pragma unroll
            for (int i = 0; i < TILE / 8; i++) {
                float2 scale = *(const float2*)(scales + i * 8 + t2);
                s[i][0] *= scale.x, s[i][1] *= scale.y, s[i][2] *= scale.x, s[i][3] *= scale.y;
            }
        if (position + TILE - 1 > first || (WINDOW && position <= last - WINDOW)) {
#pragma unroll
            for (int c = 0; c < 4; c++) {
                int end = slots[c / 2] + 1 - position - t2 - c % 2, start = end - WINDOW;
#pragma unroll
                for (int i = 0; i < TILE / 8; i++)
                    if (i * 8 >= end || (WINDOW && i * 8 < start)) s[i][c] = NEVER;
            }
        }
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float top = largest[r];
#pragma unroll
            for (int i = 0; i < TILE / 8; i++) top = fmaxf(top, fmaxf(s[i][2 * r], s[i][2 * r + 1]));
            top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
            top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
            factor[r] = exp2_of(largest[r] - top);
            largest[r] = top;
            float total = 0;
#pragma unroll
            for (int i = 0; i < TILE / 8; i++) {
                s[i][2 * r] = exp2_of(s[i][2 * r] - top), s[i][2 * r + 1] = exp2_of(s[i][2 * r + 1] - top);
                total += s[i][2 * r] + s[i][2 * r + 1];
            }
            sum[r] = sum[r] * factor[r] + total;
        }
        if (HAS_SCALES)
#pragma unroll
            for (int i = 0; i < TILE / 8; i++) {
                float2 scale = *(const float2*)(scales + TILE + i * 8 + t2);
                s[i][0] *= scale.x, s[i][1] *= scale.y, s[i][2] *= scale.x, s[i][3] *= scale.y;
            }
    }
    // NaN scores leave no maximum behind: the sums are NaN then, and so is what leaves here.
    __device__ __forceinline__ float whole(int r) {
        float total = sum[r] + __shfl_xor_sync(~0u, sum[r], 1);
        total += __shfl_xor_sync(~0u, total, 2);
        return total == 0 ? 0 : __fdividef(1.f, total);
    }
};

// The columns of two tiles of eight are a step of 16 positions.
__device__ __forceinline__ void pack_shares(u32 (&p)[TILE / 16][4], const float (&s)[TILE / 8][4]) {
#pragma unroll
    for (int i = 0; i < TILE / 8; i++) {
        p[i / 2][i % 2 * 2] = pack_halves<true>(s[i][0], s[i][1]);
        p[i / 2][i % 2 * 2 + 1] = pack_halves<true>(s[i][2], s[i][3]);
    }
}

__device__ __forceinline__ void rescale(float (&o)[MY_COLUMNS / 8][4], const float (&factor)[2]) {
#pragma unroll
    for (int i = 0; i < MY_COLUMNS / 8; i++)
#pragma unroll
        for (int c = 0; c < 4; c++) o[i][c] *= factor[c / 2];
}

// Elements k + 2t, + 1, + 8, + 9 of a row, k a multiple of 16: eight bytes, as lane t's of 32 elements are a chunk.
__device__ __forceinline__ uint2* place_in_rows(u8* out, int pitch, int row, int k, int t) {
    return (uint2*)(row_tile_chunk(out, pitch, row, k / 32 * 32 + t * 8) + k / 16 % 2 * 8);
}

__device__ __forceinline__ void multiply_all(const __nv_bfloat16* q, u8* shared, int4 item, Band band, u8* out,
                                             int pitch) {
    Ring ring{shared};
    int j = blockIdx.y, warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32, t = lane % 4;
    int m = warp % (M / 16) * 16, first_column = warp / (M / 16) * MY_COLUMNS;
    put_queries(q, shared, item, j);
    show_to_products();
    asm volatile("bar.sync 1, %0;" ::"n"(MULTIPLIERS) : "memory");
    const u8* queries = shared + m / 64 * 8192;
    const int at_values = first_column / 64 * TILE_BYTES;
    Softmax softmax;
    softmax.slots[0] = Row(m + lane / 4, item).slot, softmax.slots[1] = Row(m + lane / 4 + 8, item).slot;
    softmax.first = Row(m, item).slot, softmax.last = Row(m + 15, item).slot;

    float o[MY_COLUMNS / 8][4], s[TILE / 8][4], factor[2];
    u32 p[TILE / 16][4];
#pragma unroll
    for (int i = 0; i < MY_COLUMNS / 8; i++) o[i][0] = o[i][1] = o[i][2] = o[i][3] = 0;
    int position = band.first_tile * TILE;
    Turn key, value, next;
    next.advance(1);
    ring.wait(key);
    ask_scores(s, queries, ring.slot(key.slot), m % 64);
    wait_products<0>();
    settle(s);
    softmax.soften(s, factor, position, ring.scales(key.slot));
    if (FILLS > 1) ring.release(key);
    pack_shares(p, s);
#pragma unroll 1
    for (int n = 1; n < band.n_tiles; n++) {
        // What is waited for is what comes next in the ring: keys, then values of the tile before.
        value = key, key = next, next.advance(1), position += TILE;
        if (FILLS > 1) value = next, next.advance(1);
        if (IS_AHEAD) {
            ring.wait(key);
            ask_scores(s, queries, ring.slot(key.slot), m % 64);
            if (FILLS > 1) ring.wait(value);
            ask_values(o, p, ring.slot(value.slot) + at_values);
            wait_products<1>();
            settle(s);
            if (FILLS > 1 && !HAS_SCALES) ring.release(key);
        } else {
            ask_values(o, p, ring.slot(value.slot) + at_values);
            ring.wait(key);
            ask_scores(s, queries, ring.slot(key.slot), m % 64);
            wait_products<1>();
            settle(o);
            ring.release(value);
            wait_products<0>();
            settle(s);
        }
        softmax.soften(s, factor, position, ring.scales(key.slot));
        if (IS_AHEAD) {
            if (FILLS > 1 && HAS_SCALES) ring.release(key);
            // Never: the assembler would put this wait before the exponentials, which are to run beside the products.
            if (softmax.sum[0] + softmax.sum[1] < 0) __trap();
            wait_products<0>();
            settle(o);
            ring.release(value);
        }
        if (__any_sync(~0u, factor[0] != 1 || factor[1] != 1)) rescale(o, factor);
        pack_shares(p, s);
    }
    value = FILLS > 1 ? next : key;
    if (FILLS > 1) ring.wait(value);
    ask_values(o, p, ring.slot(value.slot) + at_values);
    wait_products<0>();
    settle(o);

#pragma unroll
    for (int r = 0; r < 2; r++) {
        float whole = softmax.whole(r);
        Row at(m + lane / 4 + 8 * r, item);
        if (at.row >= item.y) continue;
#pragma unroll
        for (int i = 0; i < MY_COLUMNS / 8; i += 2) {
            int e = first_column + i * 8;
            if (e >= E) continue;
            *place_in_rows(out, pitch, item.x + at.row, (j * G + at.head) * E + e, t) =
                make_uint2(pack_halves<true>(o[i][2 * r] * whole, o[i][2 * r + 1] * whole),
                           pack_halves<true>(o[i + 1][2 * r] * whole, o[i + 1][2 * r + 1] * whole));
        }
    }
    constexpr int MISSING = (64 - H * E % 64) % 64 / 16;  // columns beyond the last are zero
    if (MISSING && j == J - 1)
        for (int row = threadIdx.x / 4; row < item.y; row += MULTIPLIERS / 4)
            for (int i = 0; i < MISSING; i++)
                *place_in_rows(out, pitch, item.x + row, H * E + i * 16, threadIdx.x % 4) = make_uint2(0, 0);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    attention_rows(const __nv_bfloat16* q, const Stored* cache, const int* table, int n_table, const int4* items,
                   u8* out, int pitch AND_STAMPS) {
    extern __shared__ __align__(1024) u8 shared[];
    Ring ring{shared};
    STAMP(THERE, threadIdx.x == 0);
    let_next_start();
    if (threadIdx.x < STAGES) {
        barrier_init(ring.full(threadIdx.x), LOADERS / 32);
        barrier_init(ring.empty(threadIdx.x), MULTIPLIERS / 32);
    }
    barriers_are_set();
    __syncthreads();
    wait_for_previous();
    STAMP(READY, threadIdx.x == 0);
    int4 item = items[blockIdx.x];
    if (item.y <= 0) return;
    Band band(item.z, item.y);
    if (threadIdx.x >= MULTIPLIERS) {
        leave_registers<HAS_SCALES ? 72 : 40>();
        load_all(ring, cache, table + (size_t)item.w * n_table, n_table, band, blockIdx.y);
    } else {
        take_registers<HAS_SCALES ? 216 : 232>();
        multiply_all(q, shared, item, band, out, pitch);
        STAMP(DONE, threadIdx.x % 32 == 0);
    }
}
