// How a product's blocks share out its work: items, a ring of weights, shares of sums. See product.cu.
#pragma once

#include "activation.cuh"

constexpr int N_GROUPS = WARPS / GROUP, CODERS = 512, ROWS = 16;
constexpr int RECORDS = K / COLUMNS, TILES = N / ROWS, SLOT = GROUP * RECORD_BYTES;
constexpr int BLOCKS_A_PART = BLOCKS / PARTS, FIRST_DRAWN = STATIC_ITEMS * BLOCKS_A_PART;
constexpr u32 DRAWS = TILES - FIRST_DRAWN + BLOCKS_A_PART;  // a launch: every item that is left, and one blank a block
constexpr int AT_X = SLOTS * SLOT, AT_XS = AT_X + 2 * K * TOKENS, AT_SHARES = AT_XS + K / 32 * 16 * TOKENS,
              AT_BARRIERS = AT_SHARES + BUFFERS * RECORDS * TOKENS * ROWS * 4, AT_SLOTS = AT_BARRIERS + 2 * (SLOTS + BUFFERS) * 8,
              AT_ITEMS = AT_SLOTS + SLOTS * 8, AT_SUMS = AT_ITEMS + BUFFERS * 4, AT_END = AT_SUMS + 2 * CODERS / 32 * 4;
static_assert(K_IN % 8 == 0 && K_IN <= K && K - K_IN < COLUMNS && (K_IN == K || PARTS == 1), "columns of zeros at the end only");
static_assert(WARPS % GROUP == 0 && SLOTS >= N_GROUPS, "a slot at least for every group of warps");
static_assert(TILES % INTERLEAVE == 0, "items in rows of equal length");
static_assert(BLOCKS % PARTS == 0 && FIRST_DRAWN <= TILES && !((NORM || DELTA_PLANES) && PARTS > 1), "items of all parts are shared out");

template <int PLACES> struct Turn {  // one of N places by turns, and the parity of the barrier that stands there
    int at;
    u32 phase = 0;
    __device__ __forceinline__ void step(int n = 1) {
        if ((at += n) >= PLACES) at -= PLACES, phase ^= 1;  // n is at most PLACES
    }
};

struct Shared {  // what the warps of a block tell each other
    u8* bytes;
    __device__ __forceinline__ u8* records(int slot) const { return bytes + slot * SLOT; }
    __device__ __forceinline__ u64* full(int slot) const { return (u64*)(bytes + AT_BARRIERS) + slot; }
    __device__ __forceinline__ u64* empty(int slot) const { return full(SLOTS + slot); }
    // Of a buffer: all shares are there; they have been read.
    __device__ __forceinline__ u64* done(int buffer) const { return full(2 * SLOTS + buffer); }
    __device__ __forceinline__ u64* read(int buffer) const { return full(2 * SLOTS + BUFFERS + buffer); }
    // Of a slot: the number of its use, counted over all slots, and what it then holds.
    __device__ __forceinline__ int2* contents(int slot) const { return (int2*)(bytes + AT_SLOTS) + slot; }
    __device__ __forceinline__ int* tile(int buffer) const { return (int*)(bytes + AT_ITEMS) + buffer; }  // -1 at the end
    __device__ __forceinline__ float* shares(int buffer) const {
        return (float*)(bytes + AT_SHARES) + buffer * RECORDS * TOKENS * ROWS;
    }
};

// The next of a launch's tickets, for all lanes that fill.
__device__ __forceinline__ int draw(u32* tickets, int lane) {
    u32 ticket = lane == 0 ? atomicInc(tickets, DRAWS - 1) : 0;
    return (int)(FILLERS > 1 ? __shfl_sync(~0u, ticket, 0) : ticket);
}

struct Contents {  // of a slot, in one word
    u32 word;
    __device__ __forceinline__ Contents(int first_record, int buffer, int segment) : word(first_record | buffer << 16 | segment << 24) {}
    __device__ __forceinline__ explicit Contents(int word) : word(word) {}
    __device__ __forceinline__ int first_record() const { return word & 0xffff; }
    __device__ __forceinline__ int buffer() const { return word >> 16 & 0xff; }
    __device__ __forceinline__ int segment() const { return word >> 24; }
};
constexpr int NO_SEGMENT = 3;  // the end

struct Filler {  // the producer: one thread, or a warp where there are no bulk copies
    Shared shared;
    int lane;
    Turn<SLOTS> slot{0};
    Turn<BUFFERS> buffer{0};
    int n_filled = 0, n_items = 0;

    __device__ __forceinline__ void next_slot(int first_record, int segment) {
        if (n_filled >= SLOTS) barrier_wait(shared.empty(slot.at), slot.phase ^ 1);
        int2 contents = make_int2(n_filled++, (int)Contents(first_record, buffer.at, segment).word);
        if (lane == 0) *shared.contents(slot.at) = contents;
    }
    __device__ __forceinline__ void next_item(int tile) {
        if (n_items++ >= BUFFERS) barrier_wait(shared.read(buffer.at), buffer.phase ^ 1);
        if (lane == 0) *shared.tile(buffer.at) = tile;
    }
    // `weights` is the segment's, and the tile counts from its first.
    template <typename F> __device__ __forceinline__ void item(const u8* weights, int tile_of_segment, int segment, int part) {
        const u8* from = weights + ((size_t)tile_of_segment * PARTS + part) * (RECORDS * F::BYTES);
#pragma unroll 1
        for (int r = 0; r < RECORDS; r += GROUP, slot.step()) {
            next_slot(r, segment);
            u32 bytes = min(GROUP, RECORDS - r) * F::BYTES;
            fill_slot(shared.records(slot.at), from + r * F::BYTES, bytes, shared.full(slot.at), lane);
        }
        buffer.step();
    }
    __device__ __forceinline__ void end() {
        for (int i = 0; i < N_GROUPS; i++, slot.step()) {
            next_slot(0, NO_SEGMENT);
            leave_slot(shared.full(slot.at), lane);
        }
        next_item(-1);
        for (int i = 0; i < RECORDS && lane == 0; i++) barrier_arrive(shared.done(buffer.at));
    }
};

__device__ __forceinline__ void set_barriers(Shared shared, int tid) {
    if (tid < SLOTS) {
        barrier_init(shared.full(tid), FILL_ARRIVALS), barrier_init(shared.empty(tid), GROUP);
        *shared.contents(tid) = make_int2(-1, 0);
    }
    if (tid < BUFFERS) barrier_init(shared.done(tid), RECORDS), barrier_init(shared.read(tid), 1);
}

// The producer warp's work.
__device__ __forceinline__ void fill_items(Shared shared, const u8* w0, const u8* w1, const u8* w2, u32* tickets, int part, int tid) {
    if (FILLERS == 1 && tid % 32) return;
    int lane = FILLERS == 1 ? 0 : tid % 32;
    const u8* weights[3] = {w0, w1, w2};
    Filler filler{shared, lane};
    int item = blockIdx.x / PARTS, n = 0;
    if (STATIC_ITEMS == 0) item = draw(tickets + part, lane);
    while (item < TILES) {
        // Drawn before this item's copies, which hide how long that takes.
        int next = ++n < STATIC_ITEMS ? item + BLOCKS_A_PART : FIRST_DRAWN + draw(tickets + part, lane);
        // A product of parts begins with whichever is there: the parts of what it takes should come together.
        int tile = item % INTERLEAVE * (TILES / INTERLEAVE) + item / INTERLEAVE, first = 0, segment = 0;
        filler.next_item(tile);
#define S(tiles, ...)                                                                                                       \
    if (tile >= first && tile < first + tiles) filler.item<__VA_ARGS__>(weights[segment], tile - first, segment, part);             \
    first += tiles, segment++;
        SEGMENTS
#undef S
        item = next;
    }
    filler.end();
}

// An item's shares of one token added up, record by record, odd and even ones apart: the row lane % 16 in every lane.
__device__ __forceinline__ float sum_shares(const float* shares, int lane) {
    float total = 0;
#pragma unroll
    for (int r = 0; r < RECORDS; r += 2)
        if (r + (lane >> 4) < RECORDS) total += shares[(r + (lane >> 4)) * (TOKENS * ROWS) + (lane & 15)];
    return total + __shfl_xor_sync(~0u, total, 16);
}

// Hands the rows of one token over.
__device__ __forceinline__ void finish_item(float* y, const float* shares, const float* factor, int tile, int part, u32 parity,
                                            int lane) {
    float total = sum_shares(shares, lane);
#if FACTOR
    if (lane < ROWS) {
        await(factor + tile * ROWS + lane, parity);
        hand_over(y + tile * ROWS + lane, activate(total) * unstamped(peek(factor + tile * ROWS + lane)), parity);
    }
#elif GLU
    float up = __shfl_down_sync(~0u, total, 1);
    if (lane < ROWS && (lane & 1) == 0) hand_over(y + tile * (ROWS / 2) + lane / 2, activate(total) * up, parity);
#else
    if (lane < ROWS) hand_over(y + part * N + tile * ROWS + lane, total, parity);
#endif
}

#if GLU && !FACTOR
// The eight outputs of each of four tokens, one a lane: a lane activates once.
__device__ __forceinline__ void finish_four(float* y, const float* shares, int tile, u32 parity, int lane) {
    float gate = 0, up = 0;
#pragma unroll
    for (int token = 0; token < 4; token++) {
        float total = sum_shares(shares + token * ROWS, lane);
        float of_gate = __shfl_sync(~0u, total, lane % 8 * 2), of_up = __shfl_sync(~0u, total, lane % 8 * 2 + 1);
        if (lane / 8 == token) gate = of_gate, up = of_up;
    }
    hand_over(y + lane / 8 * Y_STRIDE + tile * (ROWS / 2) + lane % 8, activate(gate) * up, parity);
}
#endif

// The last warp's work: items as they are done.
__device__ __forceinline__ void finish_items(Shared shared, float* y, const float* factor, int part, u32 parity, int lane) {
    for (Turn<BUFFERS> buffer{0};; buffer.step()) {
        barrier_wait(shared.done(buffer.at), buffer.phase);
        int tile = *shared.tile(buffer.at);
        if (tile < 0) break;
        const float* shares = shared.shares(buffer.at);
#if TOKENS > 1 && GLU && !FACTOR
#pragma unroll 1
        for (int token = 0; token < TOKENS; token += 4) finish_four(y + token * Y_STRIDE, shares + token * ROWS, tile, parity, lane);
#else
#pragma unroll 4
        for (int token = 0; token < TOKENS; token++)
            finish_item(y + token * Y_STRIDE, shares + token * ROWS, factor + token * FACTOR_STRIDE, tile, part, parity, lane);
#endif
        __syncwarp();
        if (lane == 0) barrier_arrive(shared.read(buffer.at));
    }
}

// A consumer warp's work: multiply(segment, weights, record, shares) for each of its records, where they are.
template <typename MULTIPLY> __device__ __forceinline__ void take_records(Shared shared, int warp, int lane, MULTIPLY multiply) {
    int use = warp / GROUP;
    for (Turn<SLOTS> slot{use};; slot.step(N_GROUPS), use += N_GROUPS) {
        // A barrier knows one phase from the next only: first see that this use of the slot has begun.
        volatile int2* found = shared.contents(slot.at);
        while (found->x != use) barrier_wait(shared.full(slot.at), slot.phase);
        barrier_wait(shared.full(slot.at), slot.phase);
        Contents contents(found->y);
        if (contents.segment() == NO_SEGMENT) break;
        int record = contents.first_record() + warp % GROUP;
        if (record < RECORDS) multiply(contents.segment(), shared.records(slot.at), record, shared.shares(contents.buffer()));
        __syncwarp();
        if (lane == 0) {
            barrier_arrive(shared.empty(slot.at));
            if (record < RECORDS) barrier_arrive(shared.done(contents.buffer()));
        }
    }
}
