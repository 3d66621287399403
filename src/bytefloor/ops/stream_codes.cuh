// Stream forms of codes of 2 to 8 bits: MLX's affine ones, Q2_K and Q3_K. See stream.cuh.
#pragma once

// Codes of 2 to 8 bits: nibbles and planes of upper bits as above, crumbs alone for two bits, bytes for eight (less 128, since
// a tensor core takes signed ones).
template <int BITS, int STEPS> struct CodePlanes {
    static constexpr bool HAS_NIBBLES = BITS >= 4 && BITS < 8, HAS_CRUMBS = BITS == 2 || BITS == 3 || BITS == 6,
                          HAS_BITS = BITS == 3 || BITS == 5;
    static constexpr int CRUMBS = (BITS == 8 ? 1024 : HAS_NIBBLES ? 512 : 0) * STEPS, SINGLE = CRUMBS + (HAS_CRUMBS ? 256 * STEPS : 0),
                         BYTES = SINGLE + (HAS_BITS ? 128 * STEPS : 0), OFFSET = BITS == 8 ? 128 : 0;

    // Register `run` = 2 row + half of a group: four bytes.
    static __device__ __forceinline__ u32 four(u32 nibbles, u32 crumbs, u32 bits, int group, int run) {
        u32 out = HAS_NIBBLES ? nibbles >> 4 * (run & 1) & NIBBLES : 0;
        if (HAS_CRUMBS) out |= BITS == 6 ? upper(crumbs, run) : crumbs >> 2 * run & 0x03030303;
        int bit = 4 * group + run;
        if (BITS == 5) out |= fifth(bits, bit);
        if (BITS == 3) out |= (bit < 2 ? bits << (2 - bit) : bits >> (bit - 2)) & 0x04040404;
        return out;
    }
    template <typename LANE, typename MASK>
    static __device__ __forceinline__ void multiply_group(Sums& sums, const u8* record, int step, int group, const LANE& at, uint2 x,
                                                          MASK mask) {
        if (BITS == 8) {
            uint4 u = ((const uint4*)record)[(step * 2 + group) * 32 + at.index];
            multiply(sums, u.x, u.y, u.z, u.w, x, mask);
            return;
        }
        int place = step * 32 + at.index;
        uint2 w = HAS_NIBBLES ? ((const uint2*)record)[place * 2 + group] : uint2{0, 0};
        u32 crumbs = HAS_CRUMBS ? ((const u32*)(record + CRUMBS))[place * 2 + group] : 0;
        u32 bits = HAS_BITS ? ((const u32*)(record + SINGLE))[place] : 0;
        multiply(sums, four(w.x, crumbs, bits, group, 0), four(w.y, crumbs, bits, group, 2), four(w.x, crumbs, bits, group, 1),
                 four(w.y, crumbs, bits, group, 3), x, mask);
    }
    // The four runs of a group as bytes.
    template <typename LANE>
    static __device__ __forceinline__ void runs_of(const u8* record, const LANE& at, int step, int group, u32 (&runs)[4]) {
        int place = step * 32 + at.index;
        if (BITS == 8) {
            uint4 u = ((const uint4*)record)[place + (step + group) * 32];
            runs[0] = u.x ^ SIGNS, runs[1] = u.z ^ SIGNS, runs[2] = u.y ^ SIGNS, runs[3] = u.w ^ SIGNS;
            return;
        }
        uint2 w = HAS_NIBBLES ? ((const uint2*)record)[place * 2 + group] : uint2{0, 0};
        u32 crumbs = HAS_CRUMBS ? ((const u32*)(record + CRUMBS))[place * 2 + group] : 0;
        u32 bits = HAS_BITS ? ((const u32*)(record + SINGLE))[place] : 0;
#pragma unroll
        for (int run = 0; run < 4; run++) runs[run] = four(run < 2 ? w.x : w.y, crumbs, bits, group, run);
    }
    static __device__ __forceinline__ int code(const u8* record, Place p) {
        int place = p.step * 32 + p.lane, run = 2 * p.row + (p.e >> 2), byte = 8 * (p.e & 3);
        if (BITS == 8) return (int)((const i8*)record)[((p.step * 2 + p.group) * 32 + p.lane) * 16 + (p.e >> 2) * 8 + p.row * 4 + (p.e & 3)] + 128;
        int out = HAS_NIBBLES ? p.nibble(record) : 0;
        if (HAS_CRUMBS) out |= (int)(((const u32*)(record + CRUMBS))[place * 2 + p.group] >> (byte + 2 * run) & 3) << (BITS == 6 ? 4 : 0);
        if (HAS_BITS) out |= p.fifth_of(((const u32*)(record + SINGLE))[place]) << (BITS == 5 ? 4 : 2);
        return out;
    }
};

// affine: code * scale + bias, both of 16 bits, for each GROUP of columns.
template <int BITS, int STEPS, int GROUP, bool IS_BF16> struct Affine : Stepped<STEPS> {
    using Base = Stepped<STEPS>;
    using Codes = CodePlanes<BITS, STEPS>;
    static constexpr int SCALES = Codes::BYTES, GROUPS_A_ROW = Base::COLUMNS / GROUP, BYTES = SCALES + 64 * GROUPS_A_ROW;
    static_assert(Base::COLUMNS % GROUP == 0, "whole groups in a record");

    static __device__ __forceinline__ float2 both(u32 word) {  // scale, bias
        if (IS_BF16) return make_float2(__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u));
        return __half22float2(*(const __half2*)&word);
    }

    template <typename LANE, typename X> static __device__ __forceinline__ float2 dot(const u8* record, const LANE& at, const X& x, int k) {
        float total0 = 0, total1 = 0;
#pragma unroll
        for (int set = 0; set < Base::SETS; set++) {
            uint2 b = x.of_set(k + set * 128, at);
            Sums halves[2];
#pragma unroll
            for (int i = 0; i < Base::GROUPS; i++)
                Codes::multiply_group(halves[i % 2], record, (set * Base::GROUPS + i) / 2, i % 2, at, b, at.of_set(i));
            Sums sums = halves[0] + halves[1];
            if (Base::GROUPS == 4 || at.t < Base::GROUPS) {
                float4 f = x.scale_of((k >> 5) + set * 4 + at.t);
                uint2 pair = ((const uint2*)(record + SCALES))[at.g * GROUPS_A_ROW + (set * Base::GROUPS + at.t) * 32 / GROUP];
                float2 row0 = both(pair.x), row1 = both(pair.y);
                total0 = fmaf(row0.x, f.x * (float)sums.row0(), fmaf(fmaf((float)Codes::OFFSET, row0.x, row0.y), f.w, total0));
                total1 = fmaf(row1.x, f.x * (float)sums.row1(), fmaf(fmaf((float)Codes::OFFSET, row1.x, row1.y), f.w, total1));
            }
        }
        return make_float2(total0, total1);
    }

    // Where scales are bf16 numbers, codes and biases are too: one operation rounds once what bf16(value()) rounds twice.
    template <typename LANE>
    static __device__ __forceinline__ void fragments(const u8* record, const LANE& at, int step, int group, u32 (&a)[8]) {
        u32 runs[4];
        Codes::runs_of(record, at, step, group, runs);
        uint2 words = ((const uint2*)(record + SCALES))[at.g * GROUPS_A_ROW + (64 * step + 32 * group) / GROUP];
        float2 row0 = both(words.x), row1 = both(words.y);
        if (BITS == 2) {
            four_value_fragments(runs, {FourValues(row0.x, row0.y), FourValues(row1.x, row1.y)}, a);
        } else if (IS_BF16) {
            u32 scales = pack_halves<true>(CODE_UNIT * row0.x, CODE_UNIT * row1.x);
            make_fragments(a, [&](int run, int pair) {
                int row = run >> 1;
                return fma_pairs(code_pair<0>(runs[run], pair), half_twice(scales, row), half_twice(row ? words.y : words.x, 1));
            });
        } else if (BITS == 4) {
            uint2 u = ((const uint2*)record)[(step * 32 + at.index) * 2 + group];
            nibble_fragments(u, {HALF_UNIT * row0.x, HALF_UNIT * row1.x}, {row0.y, row1.y}, a);
        } else {
            minimum_fragments(runs, {HALF_UNIT * row0.x, HALF_UNIT * row1.x}, {row0.y, row1.y}, a);
        }
    }

    static __device__ __forceinline__ float value(const u8* record, int row, int column) {
        Place p(row, column);
        int at = ((row & 7) * GROUPS_A_ROW + column / GROUP) * 2 + p.row;
        float2 group = both(((const u32*)(record + SCALES))[at]);
        return __fadd_rn(__fmul_rn(group.x, (float)Codes::code(record, p)), group.y);
    }
};

struct Q2_K {  // d sc code - dmin mn, scale and minimum in a byte for each 16
    using Codes = CodePlanes<2, 4>;
    static constexpr int COLUMNS = 256, SCALES = Codes::BYTES, SUPER = SCALES + 256, BYTES = SUPER + 64;

    template <typename LANE, typename X> static __device__ __forceinline__ float2 dot(const u8* record, const LANE& at, const X& x, int k) {
        uint2 scales = ((const uint2*)(record + SCALES))[at.place];
        float positive0 = 0, negative0 = 0, positive1 = 0, negative1 = 0;
#pragma unroll
        for (int step = 0; step < 4; step++) {
            uint2 b = x.of_step(k + step * 64, at);
            float4 f = x.scale_of((k >> 5) + step * 2 + (at.t >> 1));
            float all = at.t & 1 ? f.z : f.y;
            Sums sums;
            Codes::multiply_group(sums, record, step, 0, at, b, at.of_step(0));
            Codes::multiply_group(sums, record, step, 1, at, b, at.of_step(1));
            u32 pair = (step < 2 ? scales.x : scales.y) >> 16 * (step & 1);
            positive0 = fmaf(f.x, (float)((int)(pair & 15) * sums.row0()), positive0);
            positive1 = fmaf(f.x, (float)((int)(pair >> 8 & 15) * sums.row1()), positive1);
            negative0 = fmaf(all, (float)(pair >> 4 & 15), negative0);
            negative1 = fmaf(all, (float)(pair >> 12 & 15), negative1);
        }
        uint2 super = ((const uint2*)(record + SUPER))[at.g];
        float2 d0 = __half22float2(*(const __half2*)&super.x), d1 = __half22float2(*(const __half2*)&super.y);
        return make_float2(d0.x * positive0 - d0.y * negative0, d1.x * positive1 - d1.y * negative1);
    }

    template <typename LANE>
    static __device__ __forceinline__ void fragments(const u8* record, const LANE& at, int step, int group, u32 (&a)[8]) {
        u32 runs[4];
        Codes::runs_of(record, at, step, group, runs);
        u32 pair = *(const unsigned short*)(record + SCALES + 32 * at.g + 16 * group + 8 * (at.t >> 1) + 2 * step);
        u32 sc = pair & 0x0f0f, mn = pair >> 4 & 0x0f0f;
        uint2 super = ((const uint2*)(record + SUPER))[at.g];
        float2 d0 = two_halves(super.x), d1 = two_halves(super.y);
        float2 s = times_bytes(d0.x, d1.x, sc), m = times_bytes(-d0.y, -d1.y, mn);
        four_value_fragments(runs, {FourValues(s.x, m.x), FourValues(s.y, m.y)}, a);
    }

    static __device__ __forceinline__ float value(const u8* record, int row, int column) {
        Place p(row, column);
        const u8* super = record + SUPER + 8 * (row & 7) + 4 * p.row;
        int byte = record[SCALES + 8 * ((row & 7) * 4 + (column >> 4 & 3)) + 2 * p.step + p.row];
        float scale = __fmul_rn(half_as_float(super), (float)(byte & 15)), minimum = __fmul_rn(half_as_float(super + 2), (float)(byte >> 4));
        return __fsub_rn(__fmul_rn(scale, (float)Codes::code(record, p)), minimum);
    }
};

struct Q3_K {  // d sc (code - 4), sc an int8 for each 16
    using Codes = CodePlanes<3, 4>;
    static constexpr int COLUMNS = 256, SCALES = Codes::BYTES, SUPER = SCALES + 256, BYTES = SUPER + 32;

    template <typename LANE, typename X> static __device__ __forceinline__ float2 dot(const u8* record, const LANE& at, const X& x, int k) {
        uint2 scales = ((const uint2*)(record + SCALES))[at.place];
        float total0 = 0, total1 = 0;
#pragma unroll
        for (int step = 0; step < 4; step++) {
            uint2 b = x.of_step(k + step * 64, at);
            float4 f = x.scale_of((k >> 5) + step * 2 + (at.t >> 1));
            Sums sums;
            Codes::multiply_group(sums, record, step, 0, at, b, at.of_step(0));
            Codes::multiply_group(sums, record, step, 1, at, b, at.of_step(1));
            u32 pair = (step < 2 ? scales.x : scales.y) >> 16 * (step & 1);
            float offset = -4.f * (at.t & 1 ? f.z : f.y);
            total0 = fmaf((float)(i8)pair, fmaf(f.x, (float)sums.row0(), offset), total0);
            total1 = fmaf((float)(i8)(pair >> 8), fmaf(f.x, (float)sums.row1(), offset), total1);
        }
        float2 d = __half22float2(((const __half2*)(record + SUPER))[at.g]);
        return make_float2(d.x * total0, d.y * total1);
    }

    template <typename LANE>
    static __device__ __forceinline__ void fragments(const u8* record, const LANE& at, int step, int group, u32 (&a)[8]) {
        u32 runs[4];
        Codes::runs_of(record, at, step, group, runs);
        u32 sc = *(const unsigned short*)(record + SCALES + 32 * at.g + 16 * group + 8 * (at.t >> 1) + 2 * step) ^ 0x8080;
        float2 d = __half22float2(((const __half2*)(record + SUPER))[at.g]);
        scaled_fragments<4>(runs, times_flipped(CODE_UNIT * d.x, sc, 0), times_flipped(CODE_UNIT * d.y, sc, 1), a);
    }

    static __device__ __forceinline__ float value(const u8* record, int row, int column) {
        Place p(row, column);
        int scale = ((const i8*)record)[SCALES + 8 * ((row & 7) * 4 + (column >> 4 & 3)) + 2 * p.step + p.row];
        float d = half_as_float(record + SUPER + 4 * (row & 7) + 2 * p.row);
        return __fmul_rn(__fmul_rn(d, (float)scale), (float)(Codes::code(record, p) - 4));
    }
};

// E4M3 codes, as halves times codes of activations that are halves too; exact products, float32 sums.
// A float scale for the record's columns of each row, or with IS_MX an E8M0 one for each 32.
template <int STEPS, bool IS_MX> struct Fp8 : Stepped<STEPS> {
    using Base = Stepped<STEPS>;
    static constexpr int SCALES = 1024 * STEPS, BYTES = SCALES + (IS_MX ? 32 * STEPS : 64);

    static __device__ __forceinline__ float power_of_two(u32 e) { return __uint_as_float(e ? e << 23 : 0x00400000u); }  // 2^(e - 127)
    static __device__ __forceinline__ float scale_of(const u8* record, int g, int group, int row) {
        if (IS_MX) return power_of_two(record[SCALES + (g * 2 * STEPS + group) * 2 + row]);
        return ((const float*)(record + SCALES))[g * 2 + row];
    }

    template <typename LANE, typename X> static __device__ __forceinline__ float2 dot(const u8* record, const LANE& at, const X& x, int k) {
        const uint4* codes = (const uint4*)record + at.index;
        float total0 = 0, total1 = 0;
#pragma unroll
        for (int set = 0; set < Base::SETS; set++) {
            uint2 b = x.of_set(k + set * 128, at);
            u32 pairs[4] = {Plain16<STEPS, false>::two_codes(b.x, 0), Plain16<STEPS, false>::two_codes(b.x, 2),
                            Plain16<STEPS, false>::two_codes(b.y, 0), Plain16<STEPS, false>::two_codes(b.y, 2)};
            // Two chains are shorter than one; what a group leaves in the columns of the others is zero.
            float chains[2][4] = {};
#pragma unroll
            for (int i = 0; i < Base::GROUPS; i++) {
                uint4 u = codes[(set * Base::GROUPS + i) * 32];
                auto mask = at.of_set(i);
                if (is_none(mask)) continue;
                float(&sums)[4] = chains[i % 2];
                multiply_halves<false>(sums, e4m3_as_halves(u.x, 0), e4m3_as_halves(u.y, 0), e4m3_as_halves(u.x, 2),
                                       e4m3_as_halves(u.y, 2), pairs[0] & mask, pairs[1] & mask);
                multiply_halves<false>(sums, e4m3_as_halves(u.z, 0), e4m3_as_halves(u.w, 0), e4m3_as_halves(u.z, 2),
                                       e4m3_as_halves(u.w, 2), pairs[2] & mask, pairs[3] & mask);
            }
            float sums[4];
#pragma unroll
            for (int i = 0; i < 4; i++) sums[i] = chains[0][i] + chains[1][i];
            if (Base::GROUPS == 4 || at.t < Base::GROUPS) {
                float by = x.scale_of((k >> 5) + set * 4 + at.t).x;
                int group = set * Base::GROUPS + at.t;
                total0 = fmaf(scale_of(record, at.g, group, 0), by * fmaf(256.f, sums[0], sums[1]), total0);
                total1 = fmaf(scale_of(record, at.g, group, 1), by * fmaf(256.f, sums[2], sums[3]), total1);
            }
        }
        return make_float2(total0, total1);
    }

    // Exact products, rounded once.
    template <typename LANE>
    static __device__ __forceinline__ void fragments(const u8* record, const LANE& at, int step, int group, u32 (&a)[8]) {
        uint4 u = ((const uint4*)record)[(step * 2 + group) * 32 + at.index];
        u32 runs[4] = {u.x, u.z, u.y, u.w};
        float scales[2] = {scale_of(record, at.g, 2 * step + group, 0), scale_of(record, at.g, 2 * step + group, 1)};
        make_fragments(a, [&](int run, int pair) {
            float2 codes = two_halves(e4m3_as_halves(runs[run], 2 * pair));
            return pack_halves<true>(codes.x * scales[run >> 1], codes.y * scales[run >> 1]);
        });
    }

    static __device__ __forceinline__ float value(const u8* record, int row, int column) {
        Place p(row, column);
        u32 code = record[((p.step * 2 + p.group) * 32 + p.lane) * 16 + (p.e >> 2) * 8 + p.row * 4 + (p.e & 3)];
        return __fmul_rn(e4m3_as_float(code), scale_of(record, row & 7, column >> 5, p.row));
    }
};
template <int STEPS> using FP8 = Fp8<STEPS, false>;
template <int STEPS> using MXFP8 = Fp8<STEPS, true>;
