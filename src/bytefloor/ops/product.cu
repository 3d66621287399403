// product: a weight matrix times one row of activations, with what comes just before it as its prologue.
//
// y[p][n], p < PLANES: parts of sum_k W[n][k] x[k] that the consumer adds in order of p; float32. With GLU rows of gate and up
// alternate, and h[n / 2] = act(y[n]) * y[n + 1] leaves instead, in one plane; with FACTOR there is no up, and
// h[n] = act(y[n]) * factor[n].
// x: float32 [K_IN], of K columns, which are more where weights were filled up with zeros. DELTA_PLANES: x' = (residual +
// post_norm(sum of delta planes)) * scalar, which block 0 writes. NORM: x = x' / rms(x') * weight. Activations become 16-bit
// codes in groups of 32, scale max / 32512, which is the only rounding here beside that of handover.cuh.
// Approximate: integer sums inside a group are exact; groups are added in float32 in an order that depends on K, the format
// and the number of blocks, not on timing: two runs give the same bits.
// Moves the packed weight once. Needs mma and cp.async (sm_80); bulk copies and an early start from sm_90 on.
//
// Work comes in items: a row tile times the block's columns. Columns may be split between PARTS classes of blocks, then each part
// leaves a plane. A block's first items follow from its number, the others it draws from a counter, since multiprocessors
// read at different speeds; an item's arithmetic is the same whoever draws it. The producer thread fills a ring of slots, four
// records each, as soon as the block starts, so that weights arrive while the last product drains and while the prologue runs;
// slots go to groups of four warps in turn. One more warp adds up the records of each item, in order, and hands its rows over.
//
// Defined by the host: SEGMENTS as S(tiles, form) ..., COLUMNS of their records (the same in all) and the RECORD_BYTES of the
// largest; WARPS, K and K_IN (of one part), PARTS, N, NORM, POST_NORM, DELTA_PLANES, SCALAR, GLU (0, 1 silu, 2 gelu), FACTOR,
// SLOTS, BUFFERS (of items), BLOCKS, STATIC_ITEMS (of a block), INTERLEAVE, EPS.

constexpr int GROUP = 4, N_GROUPS = WARPS / GROUP, CONSUMERS = WARPS * 32, ROWS = 16;
constexpr int RECORDS = K / COLUMNS, TILES = N / ROWS, SLOT = GROUP * RECORD_BYTES;
constexpr int BLOCKS_A_PART = BLOCKS / PARTS, FIRST_DRAWN = STATIC_ITEMS * BLOCKS_A_PART;
constexpr u32 DRAWS = TILES - FIRST_DRAWN + BLOCKS_A_PART;  // a launch: every item that is left, and one blank a block
constexpr int AT_X = SLOTS * SLOT, AT_XS = AT_X + 2 * K, AT_SHARES = AT_XS + K / 32 * 16,
              AT_BARRIERS = AT_SHARES + BUFFERS * RECORDS * ROWS * 4, AT_SLOTS = AT_BARRIERS + 2 * (SLOTS + BUFFERS) * 8,
              AT_ITEMS = AT_SLOTS + SLOTS * 8, AT_SUMS = AT_ITEMS + BUFFERS * 4;
static_assert(K_IN % 8 == 0 && K_IN <= K && K - K_IN < COLUMNS && (K_IN == K || PARTS == 1), "columns of zeros at the end only");
static_assert(WARPS % GROUP == 0 && SLOTS >= N_GROUPS, "a slot at least for every group of warps");
static_assert(TILES % INTERLEAVE == 0, "items in rows of equal length");
static_assert(BLOCKS % PARTS == 0 && FIRST_DRAWN <= TILES && !((NORM || DELTA_PLANES) && PARTS > 1), "items of all parts are shared out");

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
    __device__ __forceinline__ float* shares(int buffer) const { return (float*)(bytes + AT_SHARES) + buffer * RECORDS * ROWS; }
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

// A maximum that NaN wins: fmaxf would drop it, all codes of a group would be 0, and NaN logits would look like equal ones.
__device__ __forceinline__ float max_or_nan(float a, float b) {
    float larger;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(a), "f"(b));
    return larger;
}

constexpr int ROUNDS = (K / 8 + CONSUMERS - 1) / CONSUMERS;  // of eight values a thread

struct Values {  // eight consecutive values a thread and round; zeros past the end
    float v[ROUNDS][8];

    __device__ __forceinline__ void load(const float* p, int tid) {
#pragma unroll
        for (int r = 0; r < ROUNDS; r++) {
            const float4* at = (const float4*)(p + min((r * CONSUMERS + tid) * 8, K_IN - 8));
            float4 a = at[0], b = at[1];
            v[r][0] = a.x, v[r][1] = a.y, v[r][2] = a.z, v[r][3] = a.w;
            v[r][4] = b.x, v[r][5] = b.y, v[r][6] = b.z, v[r][7] = b.w;
        }
    }
    __device__ __forceinline__ float sum_of_squares() const {
        float total = 0;
#pragma unroll
        for (int r = 0; r < ROUNDS; r++)
#pragma unroll
            for (int j = 0; j < 8; j++) total = fmaf(v[r][j], v[r][j], total);
        return total;
    }
};

// The sum of N planes, once all of it is there.
template <int N_PLANES> __device__ __forceinline__ void await_planes(Values& x, const float* p, u32 parity, int tid) {
    // One word a warp first, now and then, so that whoever still streams weights is not disturbed.
    if ((tid & 31) == 0) await(p + min(tid * 8, K_IN - 8) + (N_PLANES - 1) * K_IN, parity);
    __syncwarp();
    Patience patience;
    u32 late;
    do {  // no branch between the loads: as many as there are registers for are on their way at once
        late = 0;
#pragma unroll
        for (int plane = 0; plane < N_PLANES; plane++)
#pragma unroll
            for (int i = 0; i < 2 * ROUNDS; i++) {
                uint4 w = peek4(p + plane * K_IN + min((i / 2 * CONSUMERS + tid) * 8, K_IN - 8) + i % 2 * 4);
                late |= w.x ^ parity, late |= w.y ^ parity, late |= w.z ^ parity, late |= w.w ^ parity;
                float part[4] = {unstamped(w.x), unstamped(w.y), unstamped(w.z), unstamped(w.w)};
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    float& v = x.v[i / 2][i % 2 * 4 + j];
                    v = plane == 0 ? part[j] : v + part[j];
                }
            }
        patience.spend();
    } while (late & 1);
#pragma unroll
    for (int r = 0; r < ROUNDS; r++)
        if ((r * CONSUMERS + tid) * 8 >= K_IN)
#pragma unroll
            for (int j = 0; j < 8; j++) x.v[r][j] = 0;
}

// Byte `which` of four words.
__device__ __forceinline__ u32 gather_bytes(const float (&v)[8], int first, int which) {
    u32 select = which | (4 + which) << 4;
    u32 front = __byte_perm(__float_as_uint(v[first]), __float_as_uint(v[first + 1]), select);
    u32 back = __byte_perm(__float_as_uint(v[first + 2]), __float_as_uint(v[first + 3]), select);
    return __byte_perm(front, back, 0x5410);
}

// One group of 32 by four threads of eight values each: codes round(v 32512 / largest) as 256 high + low, both signed bytes.
// 2^23 + 2^22 + 128 + code is a float whose last two bytes are those of code + 128, so the upper one is `high` and the lower
// one `low` + 128. A NaN makes the scale NaN and with it all that the group takes part in; values of 1e-33 become 0.
__device__ __forceinline__ void encode(const float (&v)[8], int i, u8* codes, float4* scales) {
    float largest = 0, shifted[8];
#pragma unroll
    for (int j = 0; j < 8; j++) largest = max_or_nan(largest, fabsf(v[j]));
    largest = max_or_nan(largest, __shfl_xor_sync(~0u, largest, 1));
    largest = max_or_nan(largest, __shfl_xor_sync(~0u, largest, 2));
    // Both a quarter: __fdividef by more than 2^126 is 0 by definition.
    float by = largest > 1e-33f ? __fdividef(8128.f, largest * .25f) : 0.f, scale = largest * (1.f / 32512.f);
#pragma unroll
    for (int j = 0; j < 8; j++) shifted[j] = fmaf(v[j], by, 12582912.f + 128.f);
    u32 high0 = gather_bytes(shifted, 0, 1), high1 = gather_bytes(shifted, 4, 1);
    u32 low0 = gather_bytes(shifted, 0, 0) ^ 0x80808080u, low1 = gather_bytes(shifted, 4, 0) ^ 0x80808080u;
    int highs = __dp4a((int)high1, 0x01010101, __dp4a((int)high0, 0x01010101, 0));
    int half_sum = highs * 256 + __dp4a((int)low1, 0x01010101, __dp4a((int)low0, 0x01010101, 0));
    half_sum += __shfl_xor_sync(~0u, half_sum, 1);
    int other = __shfl_xor_sync(~0u, half_sum, 2);
    if (i < K) {
        u8* at = codes + (i >> 5) * 64 + (i & 31);
        *(uint2*)at = make_uint2(high0, high1), *(uint2*)(at + 32) = make_uint2(low0, low1);
        if ((i & 31) == 0) scales[i >> 5] = make_float4(scale, scale * half_sum, scale * other, scale * (half_sum + other));
    }
}

// Reads activations, applies the norms, leaves codes and group scales in shared memory.
// The weights of the norms depend on nothing, so they are read before anything is waited for.
__device__ __forceinline__ void prologue(const float* x_in, const float* delta, const float* post_weight, const float* norm_weight,
                                         const float* scalar, float* x_out, u32 parity, u8* codes, float4* scales, float* sums, int tid,
                                         int warp, int lane) {
    Values x;
#if NORM
    Values weight;
    weight.load(norm_weight, tid);
#endif
#if DELTA_PLANES > 0
#if POST_NORM
    Values post;
    post.load(post_weight, tid);
#endif
    float by = SCALAR ? *scalar : 1.f;
    Values d;
    await_planes<1>(x, x_in, parity, tid);  // from two kernels ago or earlier: there already
    await_planes<DELTA_PLANES>(d, delta, parity, tid);
#if POST_NORM
    float inverse_post = rsqrtf(sum_consumers(d.sum_of_squares(), sums, warp, lane) / K_IN + EPS);
#endif
#pragma unroll
    for (int r = 0; r < ROUNDS; r++) {
        int i = (r * CONSUMERS + tid) * 8;
        float* v = x.v[r];
#pragma unroll
        for (int j = 0; j < 8; j++) {
#if POST_NORM
            v[j] += d.v[r][j] * inverse_post * post.v[r][j];
#else
            v[j] += d.v[r][j];
#endif
            if (SCALAR) v[j] *= by;
        }
        if (blockIdx.x == 0 && i < K_IN) {
            hand_over4(x_out + i, make_float4(v[0], v[1], v[2], v[3]), parity);
            hand_over4(x_out + i + 4, make_float4(v[4], v[5], v[6], v[7]), parity);
        }
    }
#else
    await_planes<1>(x, x_in, parity, tid);
#endif
#if NORM
    float inverse = rsqrtf(sum_consumers(x.sum_of_squares(), sums + WARPS, warp, lane) / K_IN + EPS);
#pragma unroll
    for (int r = 0; r < ROUNDS; r++)
#pragma unroll
        for (int j = 0; j < 8; j++) x.v[r][j] = x.v[r][j] * inverse * weight.v[r][j];
#endif
#pragma unroll
    for (int r = 0; r < ROUNDS; r++) encode(x.v[r], (r * CONSUMERS + tid) * 8, codes, scales);
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

// Adds an item's shares, record by record, odd and even ones apart, and hands its rows over.
__device__ __forceinline__ void finish_item(float* y, const float* shares, const float* factor, int tile, int part, u32 parity,
                                            int lane) {
    float total = 0;
#pragma unroll
    for (int r = 0; r < RECORDS; r += 2)
        if (r + (lane >> 4) < RECORDS) total += shares[(r + (lane >> 4)) * ROWS + (lane & 15)];
    total += __shfl_xor_sync(~0u, total, 16);
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

extern "C" __global__ void __launch_bounds__(CONSUMERS + 64, 2)
    product(const u8* w0, const u8* w1, const u8* w2, const float* x_in, const float* delta, const float* post_weight, const float* norm_weight,
            const float* scalar, float* x_out, float* y, u32* tickets, const State* state, const float* factor) {
    extern __shared__ __align__(128) u8 bytes[];
    Shared shared{bytes};
    int tid = threadIdx.x, warp = tid >> 5, part = blockIdx.x % PARTS;
    if (tid < SLOTS) {
        barrier_init(shared.full(tid), FILL_ARRIVALS), barrier_init(shared.empty(tid), GROUP);
        *shared.contents(tid) = make_int2(-1, 0);
    }
    if (tid < BUFFERS) barrier_init(shared.done(tid), RECORDS), barrier_init(shared.read(tid), 1);
    barriers_are_set();
    __syncthreads();
    let_next_start();
    if (warp == WARPS) {
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
        return;
    }
    u32 parity = parity_of(state);
    if (warp > WARPS) {
        for (Turn<BUFFERS> buffer{0};; buffer.step()) {
            barrier_wait(shared.done(buffer.at), buffer.phase);
            int tile = *shared.tile(buffer.at);
            if (tile < 0) break;
            finish_item(y, shared.shares(buffer.at), factor, tile, part, parity, tid % 32);
            __syncwarp();
            if (tid % 32 == 0) barrier_arrive(shared.read(buffer.at));
        }
        wait_for_previous();  // kernels end in their order, so that the end of the last one is the end of the step
        return;
    }
    Lane at(tid & 31);
    Activations x{bytes + AT_X, (float4*)(bytes + AT_XS)};
    prologue(x_in + part * K, delta, post_weight, norm_weight, scalar, x_out, parity, bytes + AT_X, (float4*)(bytes + AT_XS),
             (float*)(bytes + AT_SUMS), tid, warp, at.index);
    int use = warp / GROUP;
    for (Turn<SLOTS> slot{use};; slot.step(N_GROUPS), use += N_GROUPS) {
        // A barrier knows one phase from the next only: first see that this use of the slot has begun.
        volatile int2* found = shared.contents(slot.at);
        while (found->x != use) barrier_wait(shared.full(slot.at), slot.phase);
        barrier_wait(shared.full(slot.at), slot.phase);
        Contents contents(found->y);
        if (contents.segment() == NO_SEGMENT) break;
        int record = contents.first_record() + warp % GROUP;
        if (record < RECORDS) {
            const u8* weights = shared.records(slot.at);
            float2 share;
            int segment = 0;
#define S(tiles, ...)                                                                                                       \
    if (contents.segment() == segment++)                                                                                     \
        share = __VA_ARGS__::dot(weights + warp % GROUP * __VA_ARGS__::BYTES, at, x, record * COLUMNS);
            SEGMENTS
#undef S
            // Even lanes go on with the row g, odd ones with g + 8.
            bool is_odd = at.t & 1;
            float row = (is_odd ? share.y : share.x) + __shfl_xor_sync(~0u, is_odd ? share.x : share.y, 1);
            row += __shfl_xor_sync(~0u, row, 2);
            if (at.t < 2) shared.shares(contents.buffer())[record * ROWS + at.g + 8 * at.t] = row;
        }
        __syncwarp();
        if (at.index == 0) {
            barrier_arrive(shared.empty(slot.at));
            if (record < RECORDS) barrier_arrive(shared.done(contents.buffer()));
        }
    }
}
