// The same records times several rows of activations, four at a time (a quad): columns of the tensor core are then the high and
// the low bytes of four tokens' codes of one group, and a lane has the sums of one token. Each struct's own `dot` computes what
// lane t of four would have of one token, so that every float is added in the same order: each token gets the bits it gets alone.
#pragma once

struct KnownMask {  // what the compiler can see to be nothing it leaves out, with all that leads there
    u32 bits;
    bool is_empty;
    __device__ __forceinline__ operator u32() const { return bits; }
};
__device__ __forceinline__ constexpr bool is_none(const KnownMask& mask) { return mask.is_empty; }

// This lane in the place of lane T of its four.
template <int T> struct TokenLane {
    int index, g, place;
    u32 half;  // elements 8 t .. 8 t + 7 of a group, where they belong to the half of it that lane T answers for
    static constexpr int t = T;
    __device__ __forceinline__ explicit TokenLane(int lane)
        : index(lane), g(lane >> 2), place((lane & ~3) + T), half((lane & 3) >> 1 == (T & 1) ? ~0u : 0u) {}
    __device__ __forceinline__ KnownMask of_set(int i) const { return {~0u, i != T}; }
    __device__ __forceinline__ KnownMask of_step(int i) const { return {half, i != T >> 1}; }
};

// Codes of QUADS times four tokens: of each group of 32 [QUADS][4][high, low][32]; and scales as of one token, [QUADS * 4] a group.
template <int QUADS> struct TokenActivations {
    const u8* codes;
    const float4* scales;
    int token;  // this lane's
    __device__ __forceinline__ TokenActivations(const u8* codes, const float4* scales, int lane, int quad)
        : codes(codes + quad * 256), scales(scales), token(quad * 4 + (lane & 3)) {}
    __device__ __forceinline__ uint2 of_group(int group, int lane) const {
        return ((const uint2*)(codes + group * QUADS * 256))[lane];
    }
    template <int T> __device__ __forceinline__ uint2 of_set(int k, const TokenLane<T>& at) const {
        return of_group(k / 32 + T, at.index);
    }
    template <int T> __device__ __forceinline__ uint2 of_step(int k, const TokenLane<T>& at) const {
        return of_group(k / 32 + (T >> 1), at.index);
    }
    __device__ __forceinline__ float4 scale_of(int group) const { return scales[group * QUADS * 4 + token]; }
};

// What lane T of four would have of one token of a quad.
template <typename FORM, int QUADS, int T>
__device__ __forceinline__ float2 share_of(const u8* record, int lane, const u8* codes, const float4* scales, int k, int quad) {
    return FORM::dot(record, TokenLane<T>(lane), TokenActivations<QUADS>(codes, scales, lane, quad), k);
}

__device__ __forceinline__ float2 sum_of(float2 a, float2 b) { return make_float2(__fadd_rn(a.x, b.x), __fadd_rn(a.y, b.y)); }

// Rows g and g + 8 times columns k .. k + COLUMNS - 1 of each quad's token t: whole sums.
template <typename FORM, int QUADS>
__device__ __forceinline__ void dot_tokens(const u8* record, int lane, const u8* codes, const float4* scales, int k,
                                           float2 (&totals)[QUADS]) {
    // What is made of the weights serves all quads. Sums are named as such: nothing before them may become a fused operation,
    // which it is not where lanes are added by shuffles.
    float2 upper[QUADS];
#pragma unroll
    for (int q = 0; q < QUADS; q++) totals[q] = share_of<FORM, QUADS, 0>(record, lane, codes, scales, k, q);
#pragma unroll
    for (int q = 0; q < QUADS; q++)
        totals[q] = sum_of(totals[q], share_of<FORM, QUADS, 1>(record, lane, codes, scales, k, q));
#pragma unroll
    for (int q = 0; q < QUADS; q++) upper[q] = share_of<FORM, QUADS, 2>(record, lane, codes, scales, k, q);
#pragma unroll
    for (int q = 0; q < QUADS; q++)
        totals[q] = sum_of(totals[q], sum_of(upper[q], share_of<FORM, QUADS, 3>(record, lane, codes, scales, k, q)));
}
