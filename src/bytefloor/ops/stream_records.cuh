// Weights of a record as bf16 multiples of one float a row, where a form has such a float: what products of few rows unpack, see
// product_rows.cu. A row of a record has 256 columns, over which its d stays the same; scales of groups are whole numbers of at
// most 8 bits. So
//   weight = unit * multiple,  multiple = bf16(scale * (code - OFFSET) - minimum)
// and the product scale * (code - OFFSET) is exact before it is rounded: a weight costs one or two operations of bf16 pairs, and
// d is applied in float32 to the sum over a record.
//
// Multiples<FORM> has EXIST, whether there are any. If so it is what a lane keeps of a record, made by all lanes of a warp together:
//   units                              of rows g and g + 8
//   fragments(record, at, step, group, a)   as FORM::fragments, of multiples; by all lanes together
#pragma once

template <typename FORM> struct Multiples { static constexpr bool EXIST = false; };

constexpr u32 CODES_UP = 0x7f007f00, HIGH_NIBBLES_UP = 0x7d007d00;  // 2^127 and 2^123: a byte's place to byte / 64, byte / 1024
constexpr u32 ONE_EIGHTH = 0x3e003e00, MINUS_TWO = 0xc000c000;

// Two of eight nibbles less 8, over CODE_UNIT: low ones of run 0 and high ones of run 1, whose place is 16 times as much.
__device__ __forceinline__ u32 nibble_pair(u32 word, int run, int pair) {
    u32 bytes = two_bytes(word & (run & 1 ? NIBBLES << 4 : NIBBLES), pair);
    return fma_pairs(bytes, run & 1 ? HIGH_NIBBLES_UP : CODES_UP, ONE_EIGHTH | NO_PAIR);
}

// Minimums are dmin mn: of d that is dmin / d mn, and what OFFSET has taken too much is added, OFFSET sc - dmin / d mn. Lane t of four has
// word t of the scales, two groups, and hands them to the others. Where d is 0, so that a row's groups are constant, dmin is the unit.
template <bool HAS_FIFTH> struct Multiples<K45<HAS_FIFTH>> {
    using Form = K45<HAS_FIFTH>;
    static constexpr bool EXIST = true;
    static constexpr u32 OFFSET_UP = HAS_FIFTH ? 0x7e007e00 : 0x7d807d80;  // 2^121 times 16 or 8
    float units[2];
    u32 scales[2], raised[2];  // of rows g and g + 8: sc / 64, and what is added / 4096; of groups t and t + 4

    template <typename LANE> __device__ __forceinline__ Multiples(const u8* record, const LANE& at) {
        u32 sc = ((const u32*)(record + Form::SCALES))[at.index], mn = ((const u32*)(record + Form::MINIMUMS))[at.index];
        uint2 super = ((const uint2*)(record + Form::SUPER))[at.g];
        float ratios[2];
#pragma unroll
        for (int row = 0; row < 2; row++) {
            float2 d = two_halves(row ? super.y : super.x);
            bool is_flat = d.x == 0;
            if (is_flat) sc &= row ? 0x00ff00ff : 0xff00ff00;
            units[row] = 4096.f * (is_flat ? d.y : d.x);
            ratios[row] = is_flat ? -1 / 64.f : d.y * (-1 / 64.f) * reciprocal(d.x);
        }
        SplitScales ratio(ratios[0], ratios[1]);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            u32 bytes = two_bytes(sc, i), minimums = multiply_pairs(two_bytes(mn, i), CODES_UP);
            scales[i] = multiply_pairs(bytes, CODES_UP);
            // What cancels does so in the first operation, whose product is exact.
            raised[i] = fma_pairs(minimums, ratio.low, fma_pairs(minimums, ratio.high, multiply_pairs(bytes, OFFSET_UP)));
        }
    }

    template <typename LANE>
    __device__ __forceinline__ void fragments(const u8* record, const LANE& at, int step, int group, u32 (&a)[8]) const {
        int owner = 2 * (step & 1) + group;
        u32 scale = of_four(scales[step >> 1], owner), add = of_four(raised[step >> 1], owner), runs[4];
        uint2 u = ((const uint2*)record)[(step * 32 + at.index) * 2 + group];
        if (HAS_FIFTH) nibble_runs<true>(u, ((const u32*)(record + Form::HIGH))[at.index * 4 + step], group, runs);
        make_fragments(a, [&](int run, int pair) {
            int row = run >> 1;
            u32 codes = HAS_FIFTH ? code_pair<16>(runs[run], pair) : nibble_pair(row ? u.y : u.x, run, pair);
            return fma_pairs(codes, half_twice(scale, row), half_twice(add, row));
        });
    }
};

// Scales of 8 bits of two steps and two rows, signs flipped: rows g in the halves of a word, sc / 64, and rows g + 8.
struct SignedScales {
    u32 rows[2];
    __device__ __forceinline__ explicit SignedScales(u32 flipped) {
        rows[0] = fma_pairs(flipped & 0x00ff00ff, CODES_UP, MINUS_TWO);
        rows[1] = fma_pairs(flipped >> 8 & 0x00ff00ff, CODES_UP, MINUS_TWO);
    }
};

// Bytes less OFFSET times scales of one half of such words, in one operation: sc 2^120 times a byte's 2^-133, and - OFFSET sc 2^-13.
template <int OFFSET>
__device__ __forceinline__ void offset_fragments(const u32 (&runs)[4], u32 flipped, int half, u32 (&a)[8]) {
    static_assert(OFFSET == 4 || OFFSET == 32, "known as bf16");
    SignedScales scales(flipped);
    u32 up[2], added[2];
#pragma unroll
    for (int row = 0; row < 2; row++) {
        up[row] = multiply_pairs(scales.rows[row], 0x7e807e80);
        added[row] = multiply_pairs(scales.rows[row], OFFSET == 4 ? 0xbd00bd00 : 0xbe80be80);
    }
    make_fragments(a, [&](int run, int pair) {
        return fma_pairs(two_bytes(runs[run], pair), half_twice(up[run >> 1], half), half_twice(added[run >> 1], half));
    });
}

// d sc (code - OFFSET), sc an int8 for each 16.
template <typename FORM> struct OfSixteen {
    static constexpr bool EXIST = true;
    float units[2];
    u32 scales[2][2];  // of a group, then two steps

    template <typename LANE> __device__ __forceinline__ OfSixteen(const u8* record, const LANE& at) {
        float2 d = two_halves(((const u32*)(record + FORM::SUPER))[at.g]);
        units[0] = 8192.f * d.x, units[1] = 8192.f * d.y;
#pragma unroll
        for (int group = 0; group < 2; group++) {
            uint2 sc = *(const uint2*)(record + FORM::SCALES + 32 * at.g + 16 * group + 8 * (at.t >> 1));
            scales[group][0] = sc.x ^ SIGNS, scales[group][1] = sc.y ^ SIGNS;
        }
    }
};
template <> struct Multiples<Q6_K> : OfSixteen<Q6_K> {
    using OfSixteen::OfSixteen;
    template <typename LANE>
    __device__ __forceinline__ void fragments(const u8* record, const LANE& at, int step, int group, u32 (&a)[8]) const {
        u32 runs[4];
        Q6_K::runs_of(record, at, step, group, runs);
        offset_fragments<32>(runs, scales[group][step >> 1], step & 1, a);
    }
};
template <> struct Multiples<Q3_K> : OfSixteen<Q3_K> {
    using OfSixteen::OfSixteen;
    template <typename LANE>
    __device__ __forceinline__ void fragments(const u8* record, const LANE& at, int step, int group, u32 (&a)[8]) const {
        u32 runs[4];
        Q3_K::Codes::runs_of(record, at, step, group, runs);
        offset_fragments<4>(runs, scales[group][step >> 1], step & 1, a);
    }
};

// d (sc table[code]), sc an int8 for each 32: of two groups lane t of four has the scales, as for minimums above.
template <> struct Multiples<IQ4_XS> {
    static constexpr bool EXIST = true;
    float units[2];
    u32 scales[2];

    template <typename LANE> __device__ __forceinline__ Multiples(const u8* record, const LANE& at) {
        float2 d = two_halves(((const u32*)(record + IQ4_XS::SUPER))[at.g]);
        u32 flipped = ((const u32*)(record + IQ4_XS::SCALES))[at.index] ^ SIGNS;
        units[0] = 4096.f * d.x, units[1] = 4096.f * d.y;
        for (int i = 0; i < 2; i++) scales[i] = fma_pairs(two_bytes(flipped, i), CODES_UP, MINUS_TWO);
    }

    struct Whole {
        u32 rows;
        __device__ __forceinline__ u32 times(u32 pair, int row) const { return multiply_pairs(pair, half_twice(rows, row)); }
    };
    template <typename LANE>
    __device__ __forceinline__ void fragments(const u8* record, const LANE& at, int step, int group, u32 (&a)[8]) const {
        looked_up_fragments<IQ4>(record, at, step, group, Whole{of_four(scales[step >> 1], 2 * (step & 1) + group)}, a);
    }
};
