// From codes to bf16 weights: what the forms' `fragments` are made of. See stream.cuh.
//
// A lane's sixteen weights of a group of 32 columns are 4 runs of 4: run 2 row + half is elements 4 half .. 4 half + 3 of row g
// or g + 8, mostly a word of bytes. A weight costs two or three instructions, so codes are not converted but read as what they
// are: a byte with zeros above it is the bf16 number 2^-133 byte and the float16 2^-24 byte, for all of its 256 values.
//
// Symmetric forms. One fused operation of bf16 takes a byte to (byte - offset) / 64, exact. A float32 scale is two bf16 numbers,
// high + low, and
//   bf16(code * high + bf16(code * low))
// is at most 2^-15 of the weight from code * scale before it is rounded, 2^-16 for what low rounds and as much for its product:
// less than one weight in a thousand is the neighbour of the bf16 number that is nearest to value().
// Where a minimum is added, which cancels, the sum is taken in float32 and is that of value(): code * scale is exact in all
// those forms, so a fused operation changes nothing.
//
// Integer instructions have half the rate of multiplications: what can be a multiplication is one. For few rows stream_records.cuh has
// weights that cost less.
#pragma once

// Four codes' parts in place: of a word of bytes, and out of planes of upper bits, see formats/lanes.py.
constexpr u32 NIBBLES = 0x0f0f0f0f, SIGNS = 0x80808080, FIFTH = 0x10101010, UPPER = 0x30303030;
__device__ __forceinline__ u32 fifth(u32 plane, int run) {
    return (run < 4 ? plane << (4 - run) : plane >> (run - 4)) & FIFTH;
}
__device__ __forceinline__ u32 upper(u32 plane, int run) {
    return (run < 2 ? plane << (4 - 2 * run) : plane >> (2 * run - 4)) & UPPER;
}

// a[4 half + 2 pair + row] = elements 4 half + 2 pair and the next of a row, as make(run, pair) gives them.
template <typename MAKE> __device__ __forceinline__ void make_fragments(u32 (&a)[8], MAKE make) {
#pragma unroll
    for (int i = 0; i < 8; i++) a[i] = make(2 * (i & 1) + (i >> 2), i >> 1 & 1);
}

constexpr u32 NO_PAIR = 0x80008000;  // -0 leaves a product as it is

__device__ __forceinline__ u32 multiply_pairs(u32 a, u32 b) { return fma_pairs(a, b, NO_PAIR); }

// What scales are multiplied by for codes that are bf16 pairs, and for those read as float16.
constexpr float CODE_UNIT = 64.f, HALF_UNIT = 16777216.f;

// Bytes 2 pair and 2 pair + 1 of a word, zeros above each.
__device__ __forceinline__ u32 two_bytes(u32 bytes, int pair) { return __byte_perm(bytes, 0, pair ? 0x4342 : 0x4140); }
__device__ __forceinline__ float2 two_halves(u32 word) { return __half22float2(*(const __half2*)&word); }

// (byte - OFFSET) / CODE_UNIT.
template <int OFFSET> __device__ __forceinline__ u32 code_pair(u32 bytes, int pair) {
    static_assert(OFFSET == 0 || OFFSET == 4 || OFFSET == 8 || OFFSET == 16 || OFFSET == 32 || OFFSET == 128, "known as bf16");
    constexpr u32 offset = OFFSET == 0    ? 0x8000
                           : OFFSET == 4  ? 0xbd80
                           : OFFSET == 8  ? 0xbe00
                           : OFFSET == 16 ? 0xbe80
                           : OFFSET == 32 ? 0xbf00
                                          : 0xc000;
    return fma_pairs(two_bytes(bytes, pair), 0x7f007f00u, offset * 0x10001u);
}

struct SplitScales {  // of rows g and g + 8: both highs in a word, and both lows
    u32 high, low;
    __device__ __forceinline__ SplitScales(float scale0, float scale1) : high(pack_halves<true>(scale0, scale1)) {
        low = pack_halves<true>(scale0 - __uint_as_float(high << 16), scale1 - __uint_as_float(high & 0xffff0000u));
    }
    __device__ __forceinline__ u32 times(u32 pair, int row) const {
        return fma_pairs(pair, half_twice(high, row), multiply_pairs(pair, half_twice(low, row)));
    }
};

// A signed byte whose sign has been flipped times a scale of 16 bits: exact. What the float made of the byte has beside
// it, 2^15, is taken off in the same operation.
__device__ __forceinline__ float times_flipped(float scale, u32 word, int which) {
    return fmaf(__uint_as_float(__byte_perm(word, 0x47000000u, 0x7404 | which << 4)), scale, -(32768.f + 128.f) * scale);
}
// Bytes 0 and 1 of a word times the scales of two rows: exact too.
__device__ __forceinline__ float2 times_bytes(float scale0, float scale1, u32 word) {
    float2 bytes = two_halves(two_bytes(word, 0));
    return make_float2(bytes.x * (HALF_UNIT * scale0), bytes.y * (HALF_UNIT * scale1));
}

// Bytes less OFFSET times scales that are multiplied by CODE_UNIT.
template <int OFFSET>
__device__ __forceinline__ void scaled_fragments(const u32 (&runs)[4], float scale0, float scale1, u32 (&a)[8]) {
    SplitScales scales(scale0, scale1);
    make_fragments(a, [&](int run, int pair) { return scales.times(code_pair<OFFSET>(runs[run], pair), run >> 1); });
}

// Bytes times scales that are multiplied by HALF_UNIT, plus minimums.
__device__ __forceinline__ void minimum_fragments(const u32 (&runs)[4], const float (&scales)[2], const float (&minimums)[2],
                                                  u32 (&a)[8]) {
    make_fragments(a, [&](int run, int pair) {
        float2 codes = two_halves(two_bytes(runs[run], pair));
        float scale = scales[run >> 1], minimum = minimums[run >> 1];
        return pack_halves<true>(fmaf(codes.x, scale, minimum), fmaf(codes.y, scale, minimum));
    });
}

// The same of nibbles, low ones of run 0 and high ones of run 1, whose place is 16 times as much: two of four bytes at once.
__device__ __forceinline__ void nibble_fragments(uint2 u, const float (&scales)[2], const float (&minimums)[2], u32 (&a)[8]) {
    make_fragments(a, [&](int run, int pair) {
        u32 row = run < 2 ? u.x : u.y, mask = run & 1 ? 0x00f000f0 : 0x000f000f;
        float2 even = two_halves(row & mask), odd = two_halves(row >> 8 & mask);
        float scale = run & 1 ? scales[run >> 1] * 0.0625f : scales[run >> 1], minimum = minimums[run >> 1];
        return pack_halves<true>(fmaf(pair ? even.y : even.x, scale, minimum), fmaf(pair ? odd.y : odd.x, scale, minimum));
    });
}

// The four runs of a group as bytes.
template <bool HAS_FIFTH> __device__ __forceinline__ void nibble_runs(uint2 u, u32 plane, int group, u32 (&runs)[4]) {
#pragma unroll
    for (int run = 0; run < 4; run++) {
        runs[run] = (run < 2 ? u.x : u.y) >> 4 * (run & 1) & NIBBLES;
        if (HAS_FIFTH) runs[run] |= fifth(plane, 4 * group + run);
    }
}

// Codes of four or five bits with minimums.
template <bool HAS_FIFTH>
__device__ __forceinline__ void raised_fragments(uint2 u, u32 plane, int group, const float (&scales)[2], const float (&minimums)[2],
                                                 u32 (&a)[8]) {
    u32 runs[4];
    nibble_runs<HAS_FIFTH>(u, plane, group, runs);
    HAS_FIFTH ? minimum_fragments(runs, scales, minimums, a) : nibble_fragments(u, scales, minimums, a);
}

struct FourValues {  // those that codes of two bits stand for, of one row: a table for a byte permutation
    u32 low, high;
    __device__ __forceinline__ FourValues(float scale, float minimum)
        : low(pack_halves<true>(minimum, scale + minimum)),
          high(pack_halves<true>(fmaf(2.f, scale, minimum), fmaf(3.f, scale, minimum))) {}
};

// Byte c of a run becomes the selectors of the two bytes of value c: 2c and 2c + 1.
__device__ __forceinline__ void four_value_fragments(const u32 (&runs)[4], const FourValues (&rows)[2], u32 (&a)[8]) {
    make_fragments(a, [&](int run, int pair) {
        u32 select = runs[run] * 0x22 + 0x10101010u;
        return permute_signed(rows[run >> 1].low, rows[run >> 1].high, pair ? select >> 16 : select);
    });
}
