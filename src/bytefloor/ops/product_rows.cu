// product_rows: y = x W^T for many rows of activations, on tensor cores. Weights come from packed stream records, become
// bf16 in registers and are multiplied with bf16 activations in shared memory; sums in float32.
//
// x: bf16 row tiles [K / 64][pitch / 8][8][64], see row_tiles.cuh. Up to three matrices in one launch, each packed as its own form says:
// w0 .. w2, n0 .. n2 rows each (0: none), side by side in y. y float32 [splits][n_rows][y_stride]: parts of the sum over K, which
// the consumer adds in order; with `adds`, where K is whole, y += instead; or with GLU, where rows of gate and up alternate, bf16 row tiles of act(gate) * up, y_stride their pitch,
// whole tiles with zeros beyond the last output and anything beyond the last row.
// Approximate: a weight is rounded to bf16 once (its last float32 bit may differ before), an activation was. For FEW rows, of which the
// unpacking is what takes the time, a form's multiples of a unit are rounded instead and the unit is applied to sums, see stream_records.cuh.
//
// A block has ROWS_W rows of W, 128 or 256, and TILE rows of x at a time. The first warp behind those that multiply fills two rings in
// shared memory: records of W, and tiles of x of 64 columns. GROUPS warpgroups have 64 rows of W each: every warp turns its own record
// into fragments, a group of 32 columns at a time, while the products of the group before are under way. So a weight is read from L2 or
// memory once for TILE rows and never written back, and unpacking costs about as many issue slots as there are to spare beside 128 rows.
//
// Items (ROWS_W rows of W, TILE rows of x, a part of K) are dealt to the blocks by turns, those that share rows of W side by side.
//
// Defined by the host: SEGMENTS, S(bits of the matrices, form) for each form; TILE (32 .. 256), GROUPS (warpgroups that multiply), BLOCKS
// (of a multiprocessor), REGISTERS and LEFT_REGISTERS (of a thread that multiplies, of the others), SLOTS_W, SLOTS_X, SLOT_BYTES (of the
// block's records of the largest form), CLUSTER (blocks that share tiles of x), FEW, GLU (0, 1 silu, 2 gelu).
#include "stream_records.cuh"
#include "warpgroup.cuh"

#if !BULK
#undef CLUSTER
#define CLUSTER 1
#endif

constexpr int WARPS = 4 * GROUPS, ROWS_W = 16 * WARPS, TILE_BYTES = TILE * 128;
// Shared memory: tiles of x, records, tiles of outputs on their way, barriers.
constexpr int STAGED = GLU ? ROWS_W / 128 * TILE_BYTES : 0, AT_W = SLOTS_X * TILE_BYTES, AT_STAGED = AT_W + SLOTS_W * SLOT_BYTES,
              AT_BARRIERS = AT_STAGED + STAGED;
static_assert(!GLU || ROWS_W % 128 == 0, "whole tiles of outputs");
static_assert(!GLU || AT_STAGED % 128 == 0, "copies begin on 16 bytes");

struct Turn {  // of a ring: which slot, and the parity of its use
    int slot = 0;
    u32 parity = 0;
    __device__ __forceinline__ void next(int n_slots) {
        if (++slot == n_slots) slot = 0, parity ^= 1;
    }
};

struct Rings {
    u8* base;
    Turn w, x;
    __device__ __forceinline__ u64* barrier(int i) const { return (u64*)(base + AT_BARRIERS) + i; }
    __device__ __forceinline__ u64* full_x(int slot) const { return barrier(slot); }
    __device__ __forceinline__ u64* empty_x(int slot) const { return barrier(SLOTS_X + slot); }
    __device__ __forceinline__ u64* full_w(int slot) const { return barrier(2 * SLOTS_X + slot); }
    __device__ __forceinline__ u64* empty_w(int slot) const { return barrier(2 * SLOTS_X + SLOTS_W + slot); }
    __device__ __forceinline__ u8* tile(int slot) const { return base + slot * TILE_BYTES; }
    __device__ __forceinline__ u8* records(int slot) const { return base + AT_W + slot * SLOT_BYTES; }
};

struct Item {
    int segment, row, n, column, first_x, first_k, end_k, split;  // first row of W, rows of W, its column in y, columns of K by 64
};

struct Items {
    int n0, n1, n2, n_x, splits, steps;
    // Of W: whole clusters, whose blocks share tiles of x. Where W ends before, one of them multiplies for nobody.
    static __device__ __forceinline__ int tiles(int n) { return (n + CLUSTER * ROWS_W - 1) / (CLUSTER * ROWS_W); }
    __device__ __forceinline__ int tiles() const { return tiles(n0) + tiles(n1) + tiles(n2); }
    __device__ __forceinline__ int count() const { return tiles() * n_x * splits; }
    __device__ __forceinline__ Item at(int i, int rank) const {
        Item item;
        int x_tile = i % n_x, w_tile = i / n_x % tiles();
        item.split = i / n_x / tiles();
        item.segment = (w_tile >= tiles(n0)) + (w_tile >= tiles(n0) + tiles(n1));
        item.row = (w_tile - (item.segment > 0 ? tiles(n0) : 0) - (item.segment > 1 ? tiles(n1) : 0)) * (CLUSTER * ROWS_W) + rank * ROWS_W;
        item.n = item.segment == 0 ? n0 : item.segment == 1 ? n1 : n2;
        item.column = (item.segment > 0 ? n0 : 0) + (item.segment > 1 ? n1 : 0) + item.row;
        item.first_x = x_tile * TILE;
        // Whole records of any form: four times 64 columns, or all that there are.
        int unit = steps % 4 ? steps : 4, units = steps / unit;
        item.first_k = units * item.split / splits * unit;
        item.end_k = units * (item.split + 1) / splits * unit;
        return item;
    }
};

__device__ __forceinline__ void fill(void* to, const void* from, u32 bytes, u64* full, int lane) {
#if BULK
    bulk_copy(to, from, bytes, full);
#else
    for (u32 i = lane * 16; i < bytes; i += 512) copy_async((u8*)to + i, (const u8*)from + i);
#endif
}
// A tile of x is there for all blocks of a cluster: each fetches its part for all, and may do so when all have left the slot.
__device__ __forceinline__ void fill_tile(u8* to, const u8* from, u64* full, int rank, int lane) {
#if CLUSTER > 1
    constexpr int PART_BYTES = TILE_BYTES / CLUSTER;
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], %4;" ::"r"(
            shared_address(to + rank * PART_BYTES)),
        "l"(from + rank * PART_BYTES), "r"(PART_BYTES), "r"(shared_address(full)), "h"((unsigned short)((1 << CLUSTER) - 1))
        : "memory");
#else
    fill(to, from, TILE_BYTES, full, lane);
#endif
}
__device__ __forceinline__ int rank_in_cluster() {
    u32 rank = 0;
#if CLUSTER > 1
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
    return rank;
}
__device__ __forceinline__ void synchronise_cluster() {
#if CLUSTER > 1
    asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
#endif
}
__device__ __forceinline__ void begin_fill(u64* full, u32 bytes) {
#if BULK
    barrier_expect(full, bytes);
#endif
}
__device__ __forceinline__ void end_fill(u64* full) {
#if !BULK
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(full)) : "memory");
#endif
}

template <typename FORM>
__device__ __forceinline__ void produce(Rings& rings, const Item& item, const u8* w, const u8* x, int steps, int pitch, bool& has_waited, int rank,
                                        int lane) {
    constexpr int STEPS = FORM::COLUMNS / 64;
    int n_records = steps / STEPS, last_tile = (item.n - 1) / 16;
    for (int k = item.first_k; k < item.end_k; k += STEPS) {
        barrier_wait(rings.empty_w(rings.w.slot), rings.w.parity ^ 1);
        u64* full = rings.full_w(rings.w.slot);
        begin_fill(full, WARPS * FORM::BYTES);
        for (int i = 0; i < WARPS; i++)
            fill(rings.records(rings.w.slot) + i * FORM::BYTES,
                 w + ((size_t)min(item.row / 16 + i, last_tile) * n_records + k / STEPS) * FORM::BYTES, FORM::BYTES, full, lane);
        end_fill(full);
        rings.w.next(SLOTS_W);
        if (!has_waited) wait_for_previous(), has_waited = true;  // weights are nobody's output
        for (int step = 0; step < STEPS; step++) {
            barrier_wait(rings.empty_x(rings.x.slot), rings.x.parity ^ 1);
            full = rings.full_x(rings.x.slot);
            begin_fill(full, TILE_BYTES);
            fill_tile(rings.tile(rings.x.slot), x + ((size_t)(k + step) * pitch + item.first_x) * 128, full, rank, lane);
            end_fill(full);
            rings.x.next(SLOTS_X);
        }
    }
}

// A tile of outputs to memory, by the first thread, which is to wait before their place is written again (IS_READ), and at the end.
__device__ __forceinline__ void show_to_copies() {
#if BULK
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}
template <bool IS_READ> __device__ __forceinline__ void wait_stores() {
#if BULK
    if (IS_READ)
        asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
    else
        asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
#endif
}
__device__ __forceinline__ void store_tile(u8* to, const u8* from) {
#if BULK
    if (threadIdx.x == 0)
        asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\ncp.async.bulk.commit_group;" ::"l"(to),
                     "r"(shared_address(from)), "n"(TILE_BYTES)
                     : "memory");
#else
    for (int i = threadIdx.x * 16; i < TILE_BYTES; i += WARPS * 512) *(uint4*)(to + i) = *(const uint4*)(from + i);
#endif
}

__device__ __forceinline__ void leave(u64* empty, int lane) {
    __syncwarp();
    if (lane == 0) barrier_arrive(empty);
}

__device__ __forceinline__ void leave_tile(u64* empty, int lane) {
#if CLUSTER > 1
    __syncwarp();
    if (lane < CLUSTER)
        asm volatile("{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\nmbarrier.arrive.shared::cluster.b64 _, [there];\n}" ::"r"(
                         shared_address(empty)),
                     "r"(lane)
                     : "memory");
#else
    leave(empty, lane);
#endif
}

// Weights of a record: multiples of a row's unit, where a form has them and rows are few. Chips that have no warpgroups give all threads
// the same registers, and there sums of both kinds would spill.
template <typename FORM, bool = FEW && HAS_WARPGROUPS && Multiples<FORM>::EXIST> struct Record : Multiples<FORM> {
    static constexpr bool HAS_UNITS = true;
    using Multiples<FORM>::Multiples;
};
template <typename FORM> struct Record<FORM, false> {
    static constexpr bool HAS_UNITS = false;
    __device__ __forceinline__ Record(const u8*, const Lane&) {}
    __device__ __forceinline__ void fragments(const u8* record, const Lane& at, int step, int group, u32 (&a)[8]) const {
        FORM::fragments(record, at, step, group, a);
    }
};

__device__ __forceinline__ void add_multiples(float (&c)[TILE / 8][4], const float (&sums)[TILE / 8][4], const float (&units)[2]) {
#pragma unroll
    for (int i = 0; i < TILE / 8; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) c[i][j] = fmaf(units[j >> 1], sums[i][j], c[i][j]);
}

template <typename FORM>
__device__ __forceinline__ void multiply_item(float (&c)[TILE / 8][4], Rings& rings, const Item& item, const Lane& at, int warp) {
    constexpr int STEPS = FORM::COLUMNS / 64;
    constexpr bool HAS_UNITS = Record<FORM>::HAS_UNITS;
    // Parts of K are whole records, so a step's slot can be known before the kernel runs.
    constexpr bool ARE_SLOTS_STEPS = SLOTS_X == STEPS;
    u32 front[8], back[8];
    // Sums of multiples are those of one record, and are added when the first fragments of the next one are there.
    float of_record[TILE / 8][4] = {}, units[2] = {0, 0};
    float(&sums)[TILE / 8][4] = HAS_UNITS ? of_record : c;
    int last = -1;  // the slot of x that products may still be reading
    for (int k = item.first_k; k < item.end_k; k += STEPS) {
        barrier_wait(rings.full_w(rings.w.slot), rings.w.parity);
        const u8* record = rings.records(rings.w.slot) + warp * FORM::BYTES;
        Record<FORM> weights(record, at);
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            weights.fragments(record, at, step, 0, front);
            if constexpr (HAS_UNITS)
                if (step == 0) {
                    wait_products<0>();
                    settle(sums);
                    add_multiples(c, sums, units);
                    units[0] = weights.units[0], units[1] = weights.units[1];
                }
            int slot = ARE_SLOTS_STEPS ? step : rings.x.slot;
            barrier_wait(rings.full_x(slot), rings.x.parity);
            begin_products();
            multiply_fragments<TILE>(sums, front, rings.tile(0), 0, slot, HAS_UNITS && step == 0);
            multiply_fragments<TILE>(sums, front + 4, rings.tile(0), 1, slot);
            commit_products();
            wait_products<1>();
            if (step || last >= 0) leave_tile(rings.empty_x(ARE_SLOTS_STEPS ? (step + STEPS - 1) % STEPS : last), at.index);
            weights.fragments(record, at, step, 1, back);
            begin_products();
            multiply_fragments<TILE>(sums, back, rings.tile(0), 2, slot);
            multiply_fragments<TILE>(sums, back + 4, rings.tile(0), 3, slot);
            commit_products();
            wait_products<1>();
            last = slot;
            if (!ARE_SLOTS_STEPS)
                rings.x.next(SLOTS_X);
            else if (step == STEPS - 1)
                rings.x.parity ^= 1;
        }
        leave(rings.empty_w(rings.w.slot), at.index);
        rings.w.next(SLOTS_W);
    }
    wait_products<0>();
    settle(sums);
    if constexpr (HAS_UNITS) add_multiples(c, sums, units);
    if (last >= 0) leave_tile(rings.empty_x(last), at.index);
}

#if GLU
#include "activation.cuh"

// Lane 4 g + t has gate (even g) or up (odd g) of rows g and g + 8 for rows 2 t and 2 t + 1 of each eight of x. Two exchanges, and it has a
// pair of outputs of one row of x: elements that are neighbours, from the first or the second eight rows. The four words of 16 bytes
// come from four warps, so they meet in shared memory, from where whole tiles go to y while the next item begins.
__device__ __forceinline__ void meet() { asm volatile("bar.sync 1, %0;" ::"n"(WARPS * 32) : "memory"); }

__device__ __forceinline__ void store(const float (&c)[TILE / 8][4], u8* y, u8* staged, const Item& item, int n_rows, int pitch, bool, const Lane& at,
                                      int warp) {
    bool is_up = at.g & 1, is_late = at.g >> 1 & 1;
    int outputs = item.n / 2, column = item.row / 2 + warp * 8, row = 2 * at.t + is_up;
    // Up to a whole tile there are zeros, which the next product reads.
    bool is_beyond = column >= outputs;
    // A warpgroup has a whole group of outputs, a warp the eight of lane t = warp % 4.
    int chunk = warp / 4 % 2 * 4 + is_late * 2 + (at.g >> 2);
    u8* atom = staged + warp / 8 * TILE_BYTES + row * 128 + ((chunk ^ row) << 4) + warp % 4 * 4;
    if (threadIdx.x == 0) wait_stores<true>();
    meet();
#pragma unroll
    for (int i = 0; i < TILE / 8; i++) {
        float out[2];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float mine = is_up ? c[i][2 * half + 1] : c[i][2 * half], other = is_up ? c[i][2 * half] : c[i][2 * half + 1];
            other = __shfl_xor_sync(~0u, other, 4);
            out[half] = is_beyond ? 0.f : is_up ? activate_for_bf16(other) * mine : activate_for_bf16(mine) * other;
        }
        float given = __shfl_xor_sync(~0u, is_late ? out[0] : out[1], 8), kept = is_late ? out[1] : out[0];
        *(u32*)(atom + i * 1024) = is_late ? pack_halves<true>(given, kept) : pack_halves<true>(kept, given);
    }
    show_to_copies();
    meet();
#pragma unroll
    for (int i = 0; i < STAGED / TILE_BYTES; i++) {
        int tile = item.row / 128 + i;
        if (tile * 64 < outputs) store_tile(y + ((size_t)tile * pitch + item.first_x) * 128, staged + i * TILE_BYTES);
    }
}
#else
// Nobody else adds to it, so the sum is that of a load and a store, which would wait for the load; but for subnormal
// numbers, which become zero.
__device__ __forceinline__ void put(float* to, float value, bool adds) {
    if (adds)
        asm volatile("red.global.add.f32 [%0], %1;" ::"l"(to), "f"(value) : "memory");
    else
        *to = value;
}
__device__ __forceinline__ void store(const float (&c)[TILE / 8][4], u8* y, u8*, const Item& item, int n_rows, int y_stride, bool adds, const Lane& at,
                                      int warp) {
    float* out = (float*)y + ((size_t)item.split * n_rows + item.first_x + 2 * at.t) * y_stride + item.column + warp * 16 + at.g;
    int left = n_rows - item.first_x - 2 * at.t, row = item.row + warp * 16 + at.g;
#pragma unroll
    for (int i = 0; i < TILE / 8; i++)
#pragma unroll
        for (int j = 0; j < 2; j++)
            if (i * 8 + j < left) {
                float* to = out + (size_t)(i * 8 + j) * y_stride;
                if (row < item.n) put(to, c[i][j], adds);
                if (row + 8 < item.n) put(to + 8, c[i][2 + j], adds);
            }
}
#endif

#if CLUSTER > 1
#define OF_CLUSTERS __cluster_dims__(CLUSTER, 1, 1)
#else
#define OF_CLUSTERS
#endif
extern "C" __global__ void OF_CLUSTERS __launch_bounds__(WARPS * 32 + 128, BLOCKS)
    product_rows(const u8* x, const u8* w0, const u8* w1, const u8* w2, int n0, int n1, int n2, u8* y, int n_rows, int pitch, int y_stride,
                 int steps, int splits, int adds AND_STAMPS) {
    extern __shared__ u8 shared[];
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, rank = rank_in_cluster();
    Rings rings;
    rings.base = shared + (-shared_address(shared) & 1023);
    STAMP(THERE, threadIdx.x == 0);
    if (threadIdx.x == 0) {
        for (int i = 0; i < 2 * SLOTS_X + 2 * SLOTS_W; i++) {
            bool is_full = i < SLOTS_X || (i >= 2 * SLOTS_X && i < 2 * SLOTS_X + SLOTS_W), is_tile = i < 2 * SLOTS_X;
            barrier_init(rings.barrier(i), is_full ? FILLERS : is_tile ? CLUSTER * WARPS : WARPS);
        }
        barriers_are_set();
    }
    __syncthreads();
    synchronise_cluster();
    let_next_start();
    Items items{n0, n1, n2, (n_rows + TILE - 1) / TILE, splits, steps};
    int n_items = items.count();
    if (warp >= WARPS) {
        leave_registers<LEFT_REGISTERS>();
        if (warp > WARPS || lane >= FILLERS) return;
        bool has_waited = false;
        for (int i = blockIdx.x / CLUSTER; i < n_items; i += gridDim.x / CLUSTER) {
            Item item = items.at(i, rank);
            const u8* w = item.segment == 0 ? w0 : item.segment == 1 ? w1 : w2;
#define S(segments, ...) \
    if (segments >> item.segment & 1) produce<__VA_ARGS__>(rings, item, w, x, steps, pitch, has_waited, rank, lane);
            SEGMENTS
#undef S
        }
        synchronise_cluster();
        return;
    }
    take_registers<REGISTERS>();
    Lane at(lane);
    wait_for_previous();
    STAMP(READY, threadIdx.x == 0);
    for (int i = blockIdx.x / CLUSTER; i < n_items; i += gridDim.x / CLUSTER) {
        Item item = items.at(i, rank);
        float c[TILE / 8][4];
#pragma unroll
        for (int m = 0; m < TILE / 8; m++) c[m][0] = c[m][1] = c[m][2] = c[m][3] = 0;
#define S(segments, ...) \
    if (segments >> item.segment & 1) multiply_item<__VA_ARGS__>(c, rings, item, at, warp);
        SEGMENTS
#undef S
        store(c, y, rings.base + AT_STAGED, item, n_rows, y_stride, adds, at, warp);
    }
    if (GLU && threadIdx.x == 0) wait_stores<false>();
    STAMP(DONE, lane == 0);
    synchronise_cluster();  // nobody ends while another may still write to its shared memory
}
