// A round of attention, between two barriers each: scores of some tiles, their shares, the mixture of values. See attention.cu,
// whose constants these are.
#pragma once

__device__ __forceinline__ void load_matrices(u32 (&a)[4], const void* p) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
                 : "r"(shared_address(p))
                 : "memory");
}
__device__ __forceinline__ void load_transposed(u32 (&a)[4], const void* p) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
                 : "r"(shared_address(p))
                 : "memory");
}
__device__ __forceinline__ void multiply(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    multiply_halves<true>(c, a[0], a[1], a[2], a[3], b0, b1);
}

struct Split {  // two floats as two bf16 each: what the first leaves over is the second
    u32 high, low;
    __device__ __forceinline__ Split(float a, float b) {
        high = pack_halves<true>(a, b);
        low = pack_halves<true>(a - __uint_as_float(high << 16), b - __uint_as_float(high & 0xffff0000u));
    }
};

#if STORAGE == 1
// A warp's part of the queries beside keys of whole numbers: 16-bit codes, of which columns 2 h and 2 h + 1 are the high and the low
// bytes of head h, or of head 4 + h. Elements 4t .. 4t + 3 of each 16.
struct Queries {
    static constexpr int FOURS_OF_HEADS = (HEADS + 3) / 4, PAIRS = (MY_STEPS + 1) / 2;
    u32 codes[FOURS_OF_HEADS][PAIRS][2];

    __device__ __forceinline__ Queries(const float* queries, const float* scales, int warp, int lane) {
        int g = lane >> 2, t = lane & 3;
#pragma unroll
        for (int f = 0; f < FOURS_OF_HEADS; f++) {
            int head = f * 4 + (g >> 1);
            float scale = scales[min(head, HEADS - 1)], by = scale > 0 ? __fdividef(1.f, scale) : 0.f;
#pragma unroll
            for (int i = 0; i < 2 * PAIRS; i++) {
                int step = i * PARTS + warp % PARTS;
                bool is_one = step < K_STEPS && head < HEADS;
                float4 q = is_one ? *(const float4*)(queries + head * E + step * 16 + 4 * t) : make_float4(0, 0, 0, 0);
                codes[f][i / 2][i % 2] = byte_of_code(q.x * by, g) | byte_of_code(q.y * by, g) << 8 | byte_of_code(q.z * by, g) << 16 |
                                         byte_of_code(q.w * by, g) << 24;
            }
        }
    }
    // As in the products: code = 256 high + low, both signed bytes.
    static __device__ __forceinline__ u32 byte_of_code(float scaled, int g) {
        int code = __float2int_rn(scaled);
        return (g & 1 ? code : (code + 128) >> 8) & 255;
    }
};
#else
// Elements 2t, + 1, + 8, + 9 of each 16 of head g, split; beside codes, which come four a lane, elements 4t, + 2, + 1, + 3.
struct Queries {
    uint4 split[MY_STEPS];

    __device__ __forceinline__ Queries(const float* queries, const float* scales, int warp, int lane) {
        int g = lane >> 2, t = lane & 3;
#pragma unroll
        for (int i = 0; i < MY_STEPS; i++) {
            int step = i * PARTS + warp % PARTS;
            bool is_one = step < K_STEPS && g < HEADS;
            const float* at = queries + g * E + step * 16 + (HAS_SCALES ? 4 : 2) * t;
            float2 one = is_one ? *(const float2*)at : make_float2(0, 0),
                   other = is_one ? *(const float2*)(at + (HAS_SCALES ? 2 : 8)) : make_float2(0, 0);
            if (HAS_SCALES) {
                float odd = one.y;
                one.y = other.x, other.x = odd;
            }
            Split front(one.x, one.y), back(other.x, other.y);
            split[i] = make_uint4(front.high, back.high, front.low, back.low);
        }
    }
};
#endif

// Scores of N tiles that follow each other in shared memory, of those that have live positions, which are before `end`.
template <int N>
__device__ __forceinline__ void score(const Queries& query, const Stored* k_tiles, float* scores, int end, int warp, int lane) {
    int g = lane >> 2, t = lane & 3, first = warp / PARTS * 16;
#pragma unroll 1
    for (int n = 0; n < N && n * TILE + first < end; n++) {
#if STORAGE == 1
        constexpr int FOURS_OF_HEADS = Queries::FOURS_OF_HEADS;
        int sums[FOURS_OF_HEADS][4] = {};  // high and low of position g, of position g + 8
#pragma unroll
        for (int i = 0; i < Queries::PAIRS; i++) {
            u32 codes[4];
            load_matrices(codes, k_tiles + n * STAGE + (first + (lane & 15)) * STRIDE + ((2 * i + (lane >> 4)) * PARTS + warp % PARTS) * 16);
#pragma unroll
            for (int f = 0; f < FOURS_OF_HEADS; f++)
                multiply_bytes(sums[f][0], sums[f][1], sums[f][2], sums[f][3], codes[0], codes[1], codes[2], codes[3], query.codes[f][i][0],
                               query.codes[f][i][1]);
        }
        // 127 * 32512 * 512 is below 2^31.
        float* at = scores + warp % PARTS * SCORES + n * TILE + first + g;
#pragma unroll
        for (int f = 0; f < FOURS_OF_HEADS; f++)
            if (f * 4 + t < HEADS) {
                at[(f * 4 + t) * SCORE_STRIDE] = (float)(sums[f][0] * 256 + sums[f][1]);
                at[(f * 4 + t) * SCORE_STRIDE + 8] = (float)(sums[f][2] * 256 + sums[f][3]);
            }
#else
        float high[4] = {0, 0, 0, 0}, low[4] = {0, 0, 0, 0};  // by the parts of the query
#if STORAGE
#pragma unroll
        for (int i = 0; i < MY_STEPS; i += 2) {  // of codes two steps are loaded at once
            u32 codes[4];
            load_matrices(codes, k_tiles + n * STAGE + (first + (lane & 15)) * STRIDE + ((i + (lane >> 4)) * PARTS + warp % PARTS) * 16);
#pragma unroll
            for (int m = 0; m < 2 && i + m < MY_STEPS; m++) {
                if (K_STEPS % PARTS && (i + m) * PARTS + warp % PARTS >= K_STEPS) break;
                u32 a[4] = {decode_even(codes[2 * m]), decode_even(codes[2 * m + 1]), decode_odd(codes[2 * m]), decode_odd(codes[2 * m + 1])};
                multiply(high, a, query.split[i + m].x, query.split[i + m].y);
                multiply(low, a, query.split[i + m].z, query.split[i + m].w);
            }
        }
#else
#pragma unroll
        for (int i = 0; i < MY_STEPS; i++) {
            int step = i * PARTS + warp % PARTS;
            if (K_STEPS % PARTS && step >= K_STEPS) break;
            u32 a[4];
            int at = KEYS_ARE_VALUES && is_rotated(step * 16) ? key_lane(step * 16) : step * 16;
            load_matrices(a, k_tiles + n * STAGE + (first + (lane & 15)) * STRIDE + at + (lane >> 4) * 8);
            multiply(high, a, query.split[i].x, query.split[i].y);
            multiply(low, a, query.split[i].z, query.split[i].w);
        }
#endif
        float* at = scores + warp % PARTS * SCORES + n * TILE + first + g;
#pragma unroll
        for (int i = 0; i < 2; i++)
            if (2 * t + i < HEADS) {
                at[(2 * t + i) * SCORE_STRIDE] = high[i] + low[i];
                at[(2 * t + i) * SCORE_STRIDE + 8] = high[i + 2] + low[i + 2];
            }
#endif
    }
}

// The scale of position p's key or value in tiles that follow each other; that of the new position is not among theirs.
__device__ __forceinline__ float scale_at(const Stored* tiles, const float* new_scales, int new_at, int p, int of_value) {
    if (OWNS_KV && p == new_at) return new_scales[of_value];
    return __bfloat162float(((const __nv_bfloat16*)(tiles + p / TILE * STAGE + AT_SCALES))[of_value * TILE + p % TILE]);
}

// Scores of a head, the warp's, become shares. Positions begin <= p < end live; shares are there for all of their tiles.
// `largest`: of all scores so far; `factors`: what the mixture before has to be multiplied with. Where keys and values have scales
// these come to scores and shares here, and the sum of shares before that is kept, in `total` and behind the factors.
template <int N>
__device__ __forceinline__ void soften(float& largest, float& total, const float* scores, const Stored* tiles, const float* new_scales,
                                       int new_at, __nv_bfloat16* shares, float* factors, int begin, int end, int warp, int lane) {
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
        if (HAS_SCALES && p < end) s[m] *= scale_at(tiles, new_scales, new_at, p, 0);
        if (STORAGE == 1 && p < end) s[m] *= new_scales[2 + warp];  // that of the query
        if (p < begin || p >= end) s[m] = LOWEST;
        top = fmaxf(top, s[m]);
    }
    for (int d = 16; d; d >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
    if (lane == 0) factors[warp] = expf(largest - top);
    if (HAS_SCALES) total *= expf(largest - top);
    largest = top;
    float sum = 0;
#pragma unroll
    for (int m = 0; m < MINE; m++) {
        int p = m * 32 + lane;
        if (m * 32 / TILE * TILE >= end || (N * TILE % 32 && p >= N * TILE)) break;
        float share = s[m] == LOWEST ? 0.f : expf(s[m] - top);
        if (HAS_SCALES && s[m] != LOWEST) sum += share, share *= scale_at(tiles, new_scales, new_at, p, 1);
        __nv_bfloat16 high = __float2bfloat16(share);
        shares[warp * SHARE_STRIDE + p] = high;
        shares[(HEADS + warp) * SHARE_STRIDE + p] = __float2bfloat16(share - __bfloat162float(high));
    }
    if (HAS_SCALES) {
        total += warp_sum(sum);
        if (lane == 0) factors[8 + warp] = total;
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
    __device__ __forceinline__ void take(const Stored* v_tiles, const __nv_bfloat16* shares, const float* factors, int end, int warp, int lane) {
        int g = lane >> 2, t = lane & 3;
        // Of the low parts of shares, so that sums wait less for one another; four tiles of values do not wait.
        constexpr int LOW_TILES = VALUE_TILES < 4 ? VALUE_TILES : 1;
        float low[LOW_TILES][4], by0 = factors[min(2 * t, HEADS - 1)], by1 = factors[min(2 * t + 1, HEADS - 1)];
        sum[0] *= by0, sum[1] *= by1;
        if (HAS_SCALES) sum[0] = factors[8 + min(2 * t, HEADS - 1)], sum[1] = factors[8 + min(2 * t + 1, HEADS - 1)];
#pragma unroll
        for (int v = 0; v < VALUE_TILES; v++) {
            acc[v][0] *= by0, acc[v][1] *= by1, acc[v][2] *= by0, acc[v][3] *= by1;
            if (v < LOW_TILES) low[v][0] = low[v][1] = low[v][2] = low[v][3] = 0;
        }
#pragma unroll 1
        for (int n = 0; n < N && n * TILE < end; n++)
#if STORAGE
#pragma unroll
            for (int m = 0; m < POSITION_TILES; m += 2) {  // of codes two tiles of positions are loaded at once
                const __nv_bfloat16* of_head = shares + min(g, HEADS - 1) * SHARE_STRIDE + n * TILE + m * 16 + 2 * t;
                u32 high_shares[4], low_shares[4];
#pragma unroll
                for (int i = 0; i < 4; i++)
                    high_shares[i] = *(const u32*)(of_head + i * 8), low_shares[i] = *(const u32*)(of_head + HEADS * SHARE_STRIDE + i * 8);
#pragma unroll
                for (int v = 0; v < VALUE_TILES; v++) {
                    int e = (v * WARPS + warp) * 16;
                    if (e >= E) break;
                    u32 codes[4];  // rows g and g + 8 are elements 2g and 2g + 1
                    load_transposed(codes, v_tiles + n * STAGE + (m * 16 + lane) * STRIDE + e);
#pragma unroll
                    for (int i = 0; i < 4; i += 2) {
                        u32 a[4] = {decode_even(codes[i]), decode_odd(codes[i]), decode_even(codes[i + 1]), decode_odd(codes[i + 1])};
                        multiply(acc[v], a, high_shares[i], high_shares[i + 1]);
                        multiply(v < LOW_TILES ? low[v] : acc[v], a, low_shares[i], low_shares[i + 1]);
                    }
                }
            }
#else
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
#endif
#pragma unroll
        for (int i = 0; i < LOW_TILES * 4; i++) acc[i / 4][i % 4] += low[i / 4][i % 4];
    }
};
