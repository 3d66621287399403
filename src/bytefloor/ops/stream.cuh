// Stream forms on the device: one struct a form, with the layout that formats/stream.py packs.
//
// A record is 16 rows by COLUMNS columns. Lane 4 g + t owns rows g and g + 8 and, of every group of 32 columns, elements
// 8t .. 8t + 7. Each struct has
//   dot(record, at, x, k)         this lane's share of the products of rows g and g + 8 with columns k .. k + COLUMNS - 1;
//                                 the four lanes of one g together have both rows
//   fragments(record, at, step, group, a)   this lane's sixteen weights of columns 64 step + 32 group and on as bf16, see
//                                 fragments.cuh: a[4 s + i] is operand a_i of mma.m16n8k16 for elements 8t + 4s .. 8t + 4s + 3
//   value(record, row, column)    one weight, bit for bit the value that the format defines
// Integer dot products are exact; float accumulation runs over sets of groups in ascending order.
//
// Why tensor cores for one row of activations: an activation is a 16-bit code, 256 high + low, so there are two rows of bytes, and
// the matrix's other columns keep up to four groups apart, each of which has a scale of its own: column 2 j is `high` and 2 j + 1
// `low` of group j of a set, zero where another group is multiplied. So one lane ends up with the whole sum of one group of
// two rows, and nothing is added up by shuffles until the tile is done.
#pragma once
#include <cuda_fp16.h>

typedef unsigned char u8;
typedef signed char i8;
typedef unsigned int u32;
typedef unsigned long long u64;

#include "tensor_core.cuh"
#include "fragments.cuh"

// Byte `which` of a word as a float, without the slow conversion unit: 2^23 + b is a float whose last bits are b.
__device__ __forceinline__ float byte_as_float(u32 word, int which) {
    return __uint_as_float(__byte_perm(word, 0x4b000000u, 0x7440 | which)) - 8388608.f;
}

__device__ __forceinline__ int byte_of(u32 word, int which) { return (int)__byte_perm(word, 0, 0x4440 | which); }

__device__ __forceinline__ float half_as_float(const u8* p) { return __half2float(*(const __half*)p); }

// Moved into a half, an E4M3 code is 2^-8 of its value.
__device__ __forceinline__ float e4m3_as_float(u32 code) {
    unsigned short bits = (code & 0x7f) << 7 | (code & 0x80) << 8;
    return __half2float(*(const __half*)&bits) * 256.f;
}

struct Lane {  // who this lane is, and which groups its column of activations belongs to
    int index, g, t;
    int place;  // 4 g + t: where the scales of rows g and g + 8 stand for the group that this lane has the sums of
    u32 set_masks[4], step_masks[2];
    __device__ __forceinline__ explicit Lane(int lane) : index(lane), g(lane >> 2), t(lane & 3), place(lane) {
        for (int i = 0; i < 4; i++) set_masks[i] = g >> 1 == i ? ~0u : 0u;
        for (int i = 0; i < 2; i++) step_masks[i] = g >> 2 == i && (g >> 1 & 1) == t >> 1 ? ~0u : 0u;
    }
    // All ones for the group of a set that column g stands for; the same where columns stand for halves of 16 elements of a
    // step's two groups.
    __device__ __forceinline__ u32 of_set(int i) const { return set_masks[i]; }
    __device__ __forceinline__ u32 of_step(int i) const { return step_masks[i]; }
};
// Whether a mask leaves nothing, where that is known before a kernel runs.
__device__ __forceinline__ constexpr bool is_none(u32) { return false; }

// Activation codes in shared memory: of each group of 32 first all high bytes, then all low ones; and of each group its scale,
// and the scale times the sums of the first 16 codes, of the last 16, and of all.
struct Activations {
    const u8* codes;
    const float4* scales;
    // Column g of the set, or step, that begins at column k.
    __device__ __forceinline__ uint2 of_set(int k, const Lane& at) const { return ((const uint2*)codes)[k / 4 + at.index]; }
    __device__ __forceinline__ uint2 of_step(int k, const Lane& at) const {
        return ((const uint2*)codes)[k / 4 + (at.g >> 2) * 8 + (at.g & 1) * 4 + at.t];
    }
    __device__ __forceinline__ float4 scale_of(int group) const { return scales[group]; }
};

struct Sums {  // of rows g and g + 8 with two columns of activations, high and low
    int high0 = 0, low0 = 0, high1 = 0, low1 = 0;
    __device__ __forceinline__ int row0() const { return high0 * 256 + low0; }
    __device__ __forceinline__ int row1() const { return high1 * 256 + low1; }
    // Two chains of multiplications are shorter than one.
    __device__ __forceinline__ Sums operator+(const Sums& o) const {
        return {high0 + o.high0, low0 + o.low0, high1 + o.high1, low1 + o.low1};
    }
};

// 16 rows by 32 bytes of weights (first halves of rows g and g + 8, then the others) times eight columns of codes.
template <typename MASK>
__device__ __forceinline__ void multiply(Sums& sums, u32 front0, u32 front1, u32 back0, u32 back1, uint2 x, MASK mask) {
    if (is_none(mask)) return;
    multiply_bytes(sums.high0, sums.low0, sums.high1, sums.low1, front0, front1, back0, back1, x.x & mask, x.y & mask);
}

// A group of 4-bit codes of two rows.
template <typename MASK> __device__ __forceinline__ void multiply4(Sums& sums, u32 row0, u32 row1, uint2 x, MASK mask) {
    multiply(sums, row0 & NIBBLES, row1 & NIBBLES, row0 >> 4 & NIBBLES, row1 >> 4 & NIBBLES, x, mask);
}

// The same with upper bits that already stand in place (0x10 for fifth bits, 0x30 for fifth and sixth).
template <typename MASK>
__device__ __forceinline__ void multiply_more(Sums& sums, u32 row0, u32 row1, u32 front0, u32 back0, u32 front1, u32 back1, uint2 x,
                                              MASK mask) {
    multiply(sums, (row0 & NIBBLES) | front0, (row1 & NIBBLES) | front1, (row0 >> 4 & NIBBLES) | back0,
             (row1 >> 4 & NIBBLES) | back1, x, mask);
}

// The two groups of a step, of 4-bit codes or with a fifth bit.
template <bool HAS_FIFTH, typename MASK>
__device__ __forceinline__ void multiply_step(Sums (&sums)[2], uint4 u, u32 plane, uint2 x, MASK mask0, MASK mask1) {
    if (HAS_FIFTH) {
        multiply_more(sums[0], u.x, u.y, fifth(plane, 0), fifth(plane, 1), fifth(plane, 2), fifth(plane, 3), x, mask0);
        multiply_more(sums[1], u.z, u.w, fifth(plane, 4), fifth(plane, 5), fifth(plane, 6), fifth(plane, 7), x, mask1);
    } else {
        multiply4(sums[0], u.x, u.y, x, mask0);
        multiply4(sums[1], u.z, u.w, x, mask1);
    }
}

__device__ __forceinline__ u32 word_of(uint4 v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

struct Place {  // where an element of a record stands
    int step, group, row, lane, e;  // group of the step, row 0 or 1 of the lane's two, element of its eight
    __device__ __forceinline__ Place(int row_, int column)
        : step(column >> 6), group(column >> 5 & 1), row(row_ >> 3), lane((row_ & 7) * 4 + (column >> 3 & 3)), e(column & 7) {}
    __device__ __forceinline__ int nibble(const u8* record) const {
        return record[(step * 32 + lane) * 16 + (group * 2 + row) * 4 + (e & 3)] >> (e & 4) & 15;
    }
    __device__ __forceinline__ int fifth_of(u32 plane) const {
        return plane >> (8 * (e & 3) + group * 4 + row * 2 + (e >> 2)) & 1;
    }
};

template <bool HAS_FIFTH> struct K45 {  // Q4_K and Q5_K: d sc code - dmin mn
    static constexpr int COLUMNS = 256, HIGH = 2048, SCALES = HIGH + (HAS_FIFTH ? 512 : 0), MINIMUMS = SCALES + 128,
                         SUPER = MINIMUMS + 128, BYTES = SUPER + 64;

    template <typename LANE, typename X> static __device__ __forceinline__ float2 dot(const u8* record, const LANE& at, const X& x, int k) {
        const uint4* codes = (const uint4*)record + at.index;
        u32 scales = ((const u32*)(record + SCALES))[at.place], minimums = ((const u32*)(record + MINIMUMS))[at.place];
        uint4 planes = HAS_FIFTH ? ((const uint4*)(record + HIGH))[at.index] : make_uint4(0, 0, 0, 0);
        uint2 super = ((const uint2*)(record + SUPER))[at.g];
        float positive0 = 0, negative0 = 0, positive1 = 0, negative1 = 0;
#pragma unroll
        for (int set = 0; set < 2; set++) {
            uint2 b = x.of_set(k + set * 128, at);
            float4 f = x.scale_of((k >> 5) + set * 4 + at.t);
            Sums halves[2];
#pragma unroll
            for (int half = 0; half < 2; half++) {
                int step = set * 2 + half;
                uint4 u = codes[step * 32];
                multiply_step<HAS_FIFTH>(halves, u, word_of(planes, step), b, at.of_set(2 * half), at.of_set(2 * half + 1));
            }
            Sums sums = halves[0] + halves[1];
            // Scale times sum is exact: 63 * 31 * 32 * 32512 is below 2^31.
            positive0 = fmaf(f.x, (float)(byte_of(scales, 2 * set) * sums.row0()), positive0);
            positive1 = fmaf(f.x, (float)(byte_of(scales, 2 * set + 1) * sums.row1()), positive1);
            negative0 = fmaf(f.w, (float)byte_of(minimums, 2 * set), negative0);
            negative1 = fmaf(f.w, (float)byte_of(minimums, 2 * set + 1), negative1);
        }
        float2 d0 = __half22float2(*(const __half2*)&super.x), d1 = __half22float2(*(const __half2*)&super.y);
        return make_float2(d0.x * positive0 - d0.y * negative0, d1.x * positive1 - d1.y * negative1);
    }

    // Two rows' scales, or minimums, of group 2 step + group are two bytes side by side.
    template <typename LANE>
    static __device__ __forceinline__ void fragments(const u8* record, const LANE& at, int step, int group, u32 (&a)[8]) {
        const u8* place = record + SCALES + 16 * at.g + 8 * (step & 1) + 4 * group + 2 * (step >> 1);
        u32 sc = *(const unsigned short*)place, mn = *(const unsigned short*)(place + MINIMUMS - SCALES);
        uint2 u = ((const uint2*)record)[(step * 32 + at.index) * 2 + group], super = ((const uint2*)(record + SUPER))[at.g];
        float2 d0 = two_halves(super.x), d1 = two_halves(super.y);
        float2 s = times_bytes(HALF_UNIT * d0.x, HALF_UNIT * d1.x, sc), m = times_bytes(-d0.y, -d1.y, mn);
        u32 plane = HAS_FIFTH ? ((const u32*)(record + HIGH))[at.index * 4 + step] : 0;
        raised_fragments<HAS_FIFTH>(u, plane, group, {s.x, s.y}, {m.x, m.y}, a);
    }

    static __device__ __forceinline__ float value(const u8* record, int row, int column) {
        Place p(row, column);
        int code = p.nibble(record);
        if (HAS_FIFTH) code |= p.fifth_of(((const u32*)(record + HIGH))[p.lane * 4 + p.step]) << 4;
        const u8* super = record + SUPER + 8 * (p.lane >> 2) + 4 * p.row;
        int lane = (row & 7) * 4 + (column >> 5 & 3), at = 4 * lane + 2 * (column >> 7) + p.row;
        float scale = __fmul_rn(half_as_float(super), record[SCALES + at]);
        float minimum = __fmul_rn(half_as_float(super + 2), record[MINIMUMS + at]);
        return __fsub_rn(__fmul_rn(scale, (float)code), minimum);
    }
};
using Q4_K = K45<false>;
using Q5_K = K45<true>;

struct Q6_K {  // d sc (code - 32), sc an int8 for each 16: columns of activations stand for halves of groups
    static constexpr int COLUMNS = 256, HIGH = 2048, SCALES = HIGH + 1024, SUPER = SCALES + 256, BYTES = SUPER + 32;

    template <typename LANE, typename X> static __device__ __forceinline__ float2 dot(const u8* record, const LANE& at, const X& x, int k) {
        const uint4* codes = (const uint4*)record + at.index;
        const uint2* high = (const uint2*)(record + HIGH) + at.index;
        uint2 scales = ((const uint2*)(record + SCALES))[at.place];
        float total0 = 0, total1 = 0;
#pragma unroll
        for (int step = 0; step < 4; step++) {
            uint2 b = x.of_step(k + step * 64, at), h = high[step * 32];
            float4 f = x.scale_of((k >> 5) + step * 2 + (at.t >> 1));
            uint4 u = codes[step * 32];
            Sums sums;  // the chains of four steps are as many as can be under way
            multiply_more(sums, u.x, u.y, upper(h.x, 0), upper(h.x, 1), upper(h.x, 2), upper(h.x, 3), b, at.of_step(0));
            multiply_more(sums, u.z, u.w, upper(h.y, 0), upper(h.y, 1), upper(h.y, 2), upper(h.y, 3), b, at.of_step(1));
            u32 pair = (step < 2 ? scales.x : scales.y) >> 16 * (step & 1);
            float offset = -32.f * (at.t & 1 ? f.z : f.y);
            total0 = fmaf((float)(i8)pair, fmaf(f.x, (float)sums.row0(), offset), total0);
            total1 = fmaf((float)(i8)(pair >> 8), fmaf(f.x, (float)sums.row1(), offset), total1);
        }
        float2 d = __half22float2(((const __half2*)(record + SUPER))[at.g]);
        return make_float2(d.x * total0, d.y * total1);
    }

    // The four runs of a group as bytes.
    template <typename LANE>
    static __device__ __forceinline__ void runs_of(const u8* record, const LANE& at, int step, int group, u32 (&runs)[4]) {
        int place = (step * 32 + at.index) * 2 + group;
        u32 plane = ((const u32*)(record + HIGH))[place];
        nibble_runs<false>(((const uint2*)record)[place], 0, group, runs);
#pragma unroll
        for (int run = 0; run < 4; run++) runs[run] |= upper(plane, run);
    }

    template <typename LANE>
    static __device__ __forceinline__ void fragments(const u8* record, const LANE& at, int step, int group, u32 (&a)[8]) {
        u32 runs[4];
        runs_of(record, at, step, group, runs);
        u32 sc = *(const unsigned short*)(record + SCALES + 32 * at.g + 16 * group + 8 * (at.t >> 1) + 2 * step) ^ 0x8080;
        float2 d = __half22float2(((const __half2*)(record + SUPER))[at.g]);
        scaled_fragments<32>(runs, times_flipped(CODE_UNIT * d.x, sc, 0), times_flipped(CODE_UNIT * d.y, sc, 1), a);
    }

    static __device__ __forceinline__ float value(const u8* record, int row, int column) {
        Place p(row, column);
        u32 plane = ((const u32*)(record + HIGH))[(p.step * 32 + p.lane) * 2 + p.group];
        int code = p.nibble(record) | (plane >> (8 * (p.e & 3) + 4 * p.row + 2 * (p.e >> 2)) & 3) << 4;
        int lane = (row & 7) * 4 + (column >> 4 & 3);
        float d = half_as_float(record + SUPER + 4 * (row & 7) + 2 * p.row);
        float scale = __fmul_rn(d, (float)((const i8*)record)[SCALES + 8 * lane + 2 * p.step + p.row]);
        return __fmul_rn(scale, (float)(code - 32));
    }
};

// What forms with one to four steps of 64 columns a record share: a set is four groups, or the two that there are.
template <int STEPS> struct Stepped {
    static constexpr int COLUMNS = 64 * STEPS, GROUPS = STEPS == 1 ? 2 : 4, SETS = 2 * STEPS / GROUPS;
    // Where the scales of rows g and g + 8 stand for group t of a set.
    template <typename LANE> static __device__ __forceinline__ int scale_at(int set, const LANE& at) { return (set * 8 + at.g) * GROUPS + at.t; }
    static __device__ __forceinline__ int scale_at(int row, int column) {
        return ((column / (32 * GROUPS)) * 8 + (row & 7)) * GROUPS + (column >> 5) % GROUPS;
    }
};

// Q4_0 Q4_1 Q5_0 Q5_1: d (code - OFFSET), or d code + m where HAS_MINIMUM.
template <int STEPS, bool HAS_FIFTH, bool HAS_MINIMUM> struct Legacy : Stepped<STEPS> {
    using Base = Stepped<STEPS>;
    static constexpr int HIGH = 512 * STEPS, SCALES = HIGH + (HAS_FIFTH ? 128 * STEPS : 0), SCALE_BYTES = HAS_MINIMUM ? 4 : 2,
                         BYTES = SCALES + 32 * STEPS * SCALE_BYTES, OFFSET = HAS_MINIMUM ? 0 : HAS_FIFTH ? 16 : 8;

    template <typename LANE, typename X> static __device__ __forceinline__ float2 dot(const u8* record, const LANE& at, const X& x, int k) {
        const uint4* codes = (const uint4*)record + at.index;
        float total0 = 0, total1 = 0;
#pragma unroll
        for (int set = 0; set < Base::SETS; set++) {
            uint2 b = x.of_set(k + set * 128, at);
            Sums halves[2];
#pragma unroll
            for (int half = 0; half < Base::GROUPS / 2; half++) {
                int step = set * 2 + half;
                uint4 u = codes[step * 32];
                u32 plane = HAS_FIFTH ? ((const u32*)(record + HIGH))[step * 32 + at.index] : 0;
                multiply_step<HAS_FIFTH>(halves, u, plane, b, at.of_set(2 * half), at.of_set(2 * half + 1));
            }
            Sums sums = halves[0] + halves[1];
            if (Base::GROUPS == 4 || at.t < Base::GROUPS) {
                float4 f = x.scale_of((k >> 5) + set * 4 + at.t);
                if (HAS_MINIMUM) {
                    uint2 pair = ((const uint2*)(record + SCALES))[Base::scale_at(set, at)];
                    float2 d0 = __half22float2(*(const __half2*)&pair.x), d1 = __half22float2(*(const __half2*)&pair.y);
                    total0 = fmaf(d0.x, f.x * (float)sums.row0(), fmaf(d0.y, f.w, total0));
                    total1 = fmaf(d1.x, f.x * (float)sums.row1(), fmaf(d1.y, f.w, total1));
                } else {
                    float2 d = __half22float2(((const __half2*)(record + SCALES))[Base::scale_at(set, at)]);
                    total0 = fmaf(d.x, fmaf(f.x, (float)sums.row0(), -(float)OFFSET * f.w), total0);
                    total1 = fmaf(d.y, fmaf(f.x, (float)sums.row1(), -(float)OFFSET * f.w), total1);
                }
            }
        }
        return make_float2(total0, total1);
    }

    template <typename LANE>
    static __device__ __forceinline__ void fragments(const u8* record, const LANE& at, int step, int group, u32 (&a)[8]) {
        int place = step * 32 + at.index, scale = Base::scale_at(at.g, 64 * step + 32 * group);
        uint2 u = ((const uint2*)record)[place * 2 + group];
        u32 plane = HAS_FIFTH ? ((const u32*)(record + HIGH))[place] : 0, runs[4];
        if (HAS_MINIMUM) {
            uint2 pair = ((const uint2*)(record + SCALES))[scale];
            float2 d0 = two_halves(pair.x), d1 = two_halves(pair.y);
            raised_fragments<HAS_FIFTH>(u, plane, group, {HALF_UNIT * d0.x, HALF_UNIT * d1.x}, {d0.y, d1.y}, a);
        } else {
            nibble_runs<HAS_FIFTH>(u, plane, group, runs);
            float2 d = __half22float2(((const __half2*)(record + SCALES))[scale]);
            scaled_fragments<OFFSET>(runs, CODE_UNIT * d.x, CODE_UNIT * d.y, a);
        }
    }

    static __device__ __forceinline__ float value(const u8* record, int row, int column) {
        Place p(row, column);
        int code = p.nibble(record);
        if (HAS_FIFTH) code |= p.fifth_of(((const u32*)(record + HIGH))[p.step * 32 + p.lane]) << 4;
        const u8* scale = record + SCALES + (Base::scale_at(row, column) * 2 + p.row) * SCALE_BYTES;
        float product = __fmul_rn(half_as_float(scale), (float)(code - OFFSET));
        return HAS_MINIMUM ? __fadd_rn(product, half_as_float(scale + 2)) : product;
    }
};
template <int STEPS> using Q4_0 = Legacy<STEPS, false, false>;
template <int STEPS> using Q4_1 = Legacy<STEPS, false, true>;
template <int STEPS> using Q5_0 = Legacy<STEPS, true, false>;
template <int STEPS> using Q5_1 = Legacy<STEPS, true, true>;

template <int STEPS> struct Q8_0 : Stepped<STEPS> {  // d code, int8
    using Base = Stepped<STEPS>;
    static constexpr int SCALES = 1024 * STEPS, BYTES = SCALES + 64 * STEPS;

    template <typename LANE, typename X> static __device__ __forceinline__ float2 dot(const u8* record, const LANE& at, const X& x, int k) {
        const uint4* codes = (const uint4*)record + at.index;
        float total0 = 0, total1 = 0;
#pragma unroll
        for (int set = 0; set < Base::SETS; set++) {
            uint2 b = x.of_set(k + set * 128, at);
            Sums halves[2];
#pragma unroll
            for (int i = 0; i < Base::GROUPS; i++) {
                uint4 u = codes[(set * Base::GROUPS + i) * 32];
                multiply(halves[i % 2], u.x, u.y, u.z, u.w, b, at.of_set(i));
            }
            Sums sums = halves[0] + halves[1];
            if (Base::GROUPS == 4 || at.t < Base::GROUPS) {
                float scale = x.scale_of((k >> 5) + set * 4 + at.t).x;
                float2 d = __half22float2(((const __half2*)(record + SCALES))[Base::scale_at(set, at)]);
                total0 = fmaf(d.x, scale * (float)sums.row0(), total0);
                total1 = fmaf(d.y, scale * (float)sums.row1(), total1);
            }
        }
        return make_float2(total0, total1);
    }

    template <typename LANE>
    static __device__ __forceinline__ void fragments(const u8* record, const LANE& at, int step, int group, u32 (&a)[8]) {
        uint4 u = ((const uint4*)record)[(step * 2 + group) * 32 + at.index];
        float2 d = __half22float2(((const __half2*)(record + SCALES))[Base::scale_at(at.g, 64 * step + 32 * group)]);
        u32 runs[4] = {u.x ^ SIGNS, u.z ^ SIGNS, u.y ^ SIGNS, u.w ^ SIGNS};
        scaled_fragments<128>(runs, CODE_UNIT * d.x, CODE_UNIT * d.y, a);
    }

    static __device__ __forceinline__ float value(const u8* record, int row, int column) {
        Place p(row, column);
        i8 code = ((const i8*)record)[((p.step * 2 + p.group) * 32 + p.lane) * 16 + (p.e >> 2) * 8 + p.row * 4 + (p.e & 3)];
        return __fmul_rn(half_as_float(record + SCALES + (Base::scale_at(row, column) * 2 + p.row) * 2), (float)code);
    }
};

// F16 and BF16: the value itself times codes that are small whole numbers, exact in either type; summed in float32.
template <int STEPS, bool IS_BF16> struct Plain16 : Stepped<STEPS> {
    using Base = Stepped<STEPS>;
    static constexpr int BYTES = 2048 * STEPS;

    static __device__ __forceinline__ float2 two(u32 word) {
        if (IS_BF16) return make_float2(__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u));
        return __half22float2(*(const __half2*)&word);
    }

    // Signed bytes `which` and `which` + 1 of a word as two 16-bit floats.
    static __device__ __forceinline__ u32 two_codes(u32 word, int which) {
        u32 unsigned_bytes = word ^ 0x80808080u;
        float a = byte_as_float(unsigned_bytes, which) - 128.f, b = byte_as_float(unsigned_bytes, which + 1) - 128.f;
        return pack_halves<IS_BF16>(a, b);
    }

    // 16 rows by 16 weights times eight columns of codes.
    static __device__ __forceinline__ void multiply(float (&sums)[4], uint4 a, u32 b0, u32 b1) {
        multiply_halves<IS_BF16>(sums, a.x, a.y, a.z, a.w, b0, b1);
    }

    template <typename LANE, typename X> static __device__ __forceinline__ float2 dot(const u8* record, const LANE& at, const X& x, int k) {
        const uint4* weights = (const uint4*)record + at.index;
        float total0 = 0, total1 = 0;
#pragma unroll
        for (int set = 0; set < Base::SETS; set++) {
            uint2 b = x.of_set(k + set * 128, at);
            u32 codes[4] = {two_codes(b.x, 0), two_codes(b.x, 2), two_codes(b.y, 0), two_codes(b.y, 2)};
            float sums[4] = {0, 0, 0, 0};
#pragma unroll
            for (int i = 0; i < Base::GROUPS; i++) {
                const uint4* group = weights + (set * Base::GROUPS + i) * 64;
                auto mask = at.of_set(i);
                if (is_none(mask)) continue;
                multiply(sums, group[0], codes[0] & mask, codes[1] & mask);
                multiply(sums, group[32], codes[2] & mask, codes[3] & mask);
            }
            if (Base::GROUPS == 4 || at.t < Base::GROUPS) {
                float scale = x.scale_of((k >> 5) + set * 4 + at.t).x;
                total0 = fmaf(scale, fmaf(256.f, sums[0], sums[1]), total0);
                total1 = fmaf(scale, fmaf(256.f, sums[2], sums[3]), total1);
            }
        }
        return make_float2(total0, total1);
    }

    // Of BF16 the very bits; F16 rounded.
    template <typename LANE>
    static __device__ __forceinline__ void fragments(const u8* record, const LANE& at, int step, int group, u32 (&a)[8]) {
        const uint4* weights = (const uint4*)record + (step * 2 + group) * 64 + at.index;
        uint4 halves[2] = {weights[0], weights[32]};
#pragma unroll
        for (int i = 0; i < 8; i++) {
            u32 word = word_of(halves[i >> 2], i & 3);
            float2 pair = two(word);
            a[i] = IS_BF16 ? word : pack_halves<true>(pair.x, pair.y);
        }
    }

    static __device__ __forceinline__ float value(const u8* record, int row, int column) {
        Place p(row, column);
        int at = ((p.step * 2 + p.group) * 2 + (p.e >> 2)) * 32 + p.lane;
        float2 pair = two(((const u32*)record)[at * 4 + (p.e >> 1 & 1) * 2 + p.row]);
        return p.e & 1 ? pair.y : pair.x;
    }
};
template <int STEPS> using BF16 = Plain16<STEPS, true>;
template <int STEPS> using F16 = Plain16<STEPS, false>;
