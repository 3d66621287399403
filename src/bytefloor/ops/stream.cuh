// Stream forms on the device: one struct a form, with the layout that formats/stream.py packs.
//
// A record is 16 rows by COLUMNS columns. Lane l owns row l / 2 and, of every 64 columns, the group of 32 that begins at
// 32 (l % 2). Each struct has
//   dot(record, lane, x, xs, k)   this lane's share of the products of its row with columns k .. k + COLUMNS - 1,
//                                 activations as 16-bit codes 256 high + low in two planes of bytes, x.high and x.low,
//                                 with xs[group] = (scale, scale * sum of the first 16 codes, scale * sum of the last 16,
//                                 0); lanes l and l ^ 1 together have the row
//   value(record, row, column)    one weight, bit for bit the value that the format defines
// Integer dot products are exact; float accumulation runs over groups in ascending order.
#pragma once
#include <cuda_fp16.h>

typedef unsigned char u8;
typedef signed char i8;
typedef unsigned int u32;
typedef unsigned long long u64;

constexpr u32 NIBBLES = 0x0f0f0f0f;

// Byte `which` of a word as a float, without the slow conversion unit: 2^23 + b is a float whose last bits are b.
__device__ __forceinline__ float byte_as_float(u32 word, int which) {
    return __uint_as_float(__byte_perm(word, 0x4b000000u, 0x7440 | which)) - 8388608.f;
}

__device__ __forceinline__ float half_as_float(const u8* p) { return __half2float(*(const __half*)p); }

// Activation codes in shared memory. A product of bytes needs two 4-way dot products where one-byte codes need one, which
// the wait for memory hides; it costs no accuracy worth naming, and one byte does.
struct Codes {
    const i8 *high, *low;
    struct Sixteen { uint4 high, low; };
    __device__ __forceinline__ Sixteen at(int i) const {
        return {*((const uint4*)(high + i)), *((const uint4*)(low + i))};
    }
};

// Sixteen weights, as bytes in the words w0 .. w3, times sixteen activation codes.
__device__ __forceinline__ int dot16(u32 w0, u32 w1, u32 w2, u32 w3, Codes::Sixteen x) {
    int high = __dp4a((int)w0, (int)x.high.x, 0), low = __dp4a((int)w0, (int)x.low.x, 0);
    high = __dp4a((int)w1, (int)x.high.y, high), low = __dp4a((int)w1, (int)x.low.y, low);
    high = __dp4a((int)w2, (int)x.high.z, high), low = __dp4a((int)w2, (int)x.low.z, low);
    high = __dp4a((int)w3, (int)x.high.w, high), low = __dp4a((int)w3, (int)x.low.w, low);
    return high * 256 + low;
}

// Sixteen codes of 4 bits (words a and b).
__device__ __forceinline__ int dot16(u32 a, u32 b, Codes::Sixteen x) {
    return dot16(a & NIBBLES, (a >> 4) & NIBBLES, b & NIBBLES, (b >> 4) & NIBBLES, x);
}

// The same with upper bits that already stand in place (0x10 for fifth bits, 0x30 for sixth).
__device__ __forceinline__ int dot16(u32 a, u32 b, Codes::Sixteen x, u32 h0, u32 h1, u32 h2, u32 h3) {
    return dot16((a & NIBBLES) | h0, ((a >> 4) & NIBBLES) | h1, (b & NIBBLES) | h2, ((b >> 4) & NIBBLES) | h3, x);
}

constexpr u32 FIFTH = 0x10101010;
__device__ __forceinline__ u32 fifth(u32 plane, int run) {
    return (run < 4 ? plane << (4 - run) : plane >> (run - 4)) & FIFTH;
}
constexpr u32 SIXTH = 0x30303030;
__device__ __forceinline__ u32 sixth(u32 plane, int run) {
    return (run < 2 ? plane << (4 - 2 * run) : plane >> (2 * run - 4)) & SIXTH;
}

// Code of an element of a group from its 16 bytes of nibbles: run r = e / 4 stands in word r / 2, low or high.
__device__ __forceinline__ int nibble_at(const u8* codes, int e) {
    int run = e >> 2;
    return codes[(run >> 1) * 4 + (e & 3)] >> (4 * (run & 1)) & 15;
}

struct Place {  // where an element of a record stands
    int step, lane, e;
    __device__ __forceinline__ Place(int row, int column)
        : step(column >> 6), lane(2 * row + (column >> 5 & 1)), e(column & 31) {}
};

template <bool HAS_FIFTH> struct K45 {  // Q4_K and Q5_K: d sc code - dmin mn
    static constexpr int COLUMNS = 256, HIGH = 2048, SCALES = HIGH + (HAS_FIFTH ? 512 : 0), MINIMUMS = SCALES + 128,
                         SUPER = MINIMUMS + 128, BYTES = SUPER + 64;

    static __device__ __forceinline__ float dot(const u8* record, int lane, Codes x, const float4* xs, int k) {
        const uint4* codes = (const uint4*)record + lane;
        int first = k + (lane & 1) * 32;
        const float4* sp = xs + (k >> 5) + (lane & 1);
        u32 scales = ((const u32*)(record + SCALES))[lane], minimums = ((const u32*)(record + MINIMUMS))[lane];
        uint4 planes = HAS_FIFTH ? ((const uint4*)(record + HIGH))[lane] : make_uint4(0, 0, 0, 0);
        float positive = 0, negative = 0;
#pragma unroll
        for (int s = 0; s < 4; s++) {
            uint4 u = codes[s * 32];
            Codes::Sixteen xa = x.at(first + s * 64), xb = x.at(first + s * 64 + 16);
            float4 f = sp[s * 2];
            int sum;
            if (HAS_FIFTH) {
                u32 h = s == 0 ? planes.x : s == 1 ? planes.y : s == 2 ? planes.z : planes.w;
                sum = dot16(u.x, u.y, xa, fifth(h, 0), fifth(h, 1), fifth(h, 2), fifth(h, 3)) +
                      dot16(u.z, u.w, xb, fifth(h, 4), fifth(h, 5), fifth(h, 6), fifth(h, 7));
            } else {
                sum = dot16(u.x, u.y, xa) + dot16(u.z, u.w, xb);
            }
            positive = fmaf(byte_as_float(scales, s), f.x * (float)sum, positive);
            negative = fmaf(byte_as_float(minimums, s), f.y + f.z, negative);
        }
        float2 d = __half22float2(((const __half2*)(record + SUPER))[lane >> 1]);
        return d.x * positive - d.y * negative;
    }

    static __device__ __forceinline__ float value(const u8* record, int row, int column) {
        Place p(row, column);
        int code = nibble_at(record + (p.step * 32 + p.lane) * 16, p.e);
        if (HAS_FIFTH) {
            u32 plane = ((const u32*)(record + HIGH))[p.lane * 4 + p.step];
            code |= (plane >> (8 * (p.e & 3) + (p.e >> 2)) & 1) << 4;
        }
        float d = half_as_float(record + SUPER + 4 * row), dmin = half_as_float(record + SUPER + 4 * row + 2);
        float scale = __fmul_rn(d, record[SCALES + 4 * p.lane + p.step]);
        float minimum = __fmul_rn(dmin, record[MINIMUMS + 4 * p.lane + p.step]);
        return __fsub_rn(__fmul_rn(scale, (float)code), minimum);
    }
};
using Q4_K = K45<false>;
using Q5_K = K45<true>;

struct Q6_K {  // d sc (code - 32), sc an int8 for each 16
    static constexpr int COLUMNS = 256, HIGH = 2048, SCALES = HIGH + 1024, SUPER = SCALES + 256, BYTES = SUPER + 32;

    static __device__ __forceinline__ float dot(const u8* record, int lane, Codes x, const float4* xs, int k) {
        const uint4* codes = (const uint4*)record + lane;
        const uint2* high = (const uint2*)(record + HIGH) + lane;
        int first = k + (lane & 1) * 32;
        const float4* sp = xs + (k >> 5) + (lane & 1);
        const char2* scales = (const char2*)(record + SCALES) + lane * 4;
        float total = 0;
#pragma unroll
        for (int s = 0; s < 4; s++) {
            uint4 u = codes[s * 32];
            Codes::Sixteen xa = x.at(first + s * 64), xb = x.at(first + s * 64 + 16);
            uint2 h = high[s * 32];
            float4 f = sp[s * 2];
            char2 sc = scales[s];
            int front = dot16(u.x, u.y, xa, sixth(h.x, 0), sixth(h.x, 1), sixth(h.x, 2), sixth(h.x, 3));
            int back = dot16(u.z, u.w, xb, sixth(h.y, 0), sixth(h.y, 1), sixth(h.y, 2), sixth(h.y, 3));
            total = fmaf((float)sc.x, fmaf(f.x, (float)front, -32.f * f.y), total);
            total = fmaf((float)sc.y, fmaf(f.x, (float)back, -32.f * f.z), total);
        }
        return half_as_float(record + SUPER + 2 * (lane >> 1)) * total;
    }

    static __device__ __forceinline__ float value(const u8* record, int row, int column) {
        Place p(row, column);
        int run = p.e >> 2;
        u32 plane = ((const u32*)(record + HIGH))[(p.step * 32 + p.lane) * 2 + (run >> 2)];
        int code = nibble_at(record + (p.step * 32 + p.lane) * 16, p.e) | (plane >> (8 * (p.e & 3) + 2 * (run & 3)) & 3) << 4;
        float d = half_as_float(record + SUPER + 2 * row);
        float scale = __fmul_rn(d, (float)((const i8*)record)[SCALES + 8 * p.lane + 2 * p.step + (p.e >> 4)]);
        return __fmul_rn(scale, (float)(code - 32));
    }
};

// Q4_0 Q4_1 Q5_0 Q5_1: d (code - OFFSET), or d code + m where HAS_MINIMUM.
template <int STEPS, bool HAS_FIFTH, bool HAS_MINIMUM> struct Legacy {
    static constexpr int COLUMNS = 64 * STEPS, HIGH = 512 * STEPS, SCALES = HIGH + (HAS_FIFTH ? 128 * STEPS : 0),
                         SCALE_BYTES = HAS_MINIMUM ? 4 : 2, BYTES = SCALES + 32 * STEPS * SCALE_BYTES,
                         OFFSET = HAS_MINIMUM ? 0 : HAS_FIFTH ? 16 : 8;

    static __device__ __forceinline__ float dot(const u8* record, int lane, Codes x, const float4* xs, int k) {
        const uint4* codes = (const uint4*)record + lane;
        int first = k + (lane & 1) * 32;
        const float4* sp = xs + (k >> 5) + (lane & 1);
        float total = 0;
#pragma unroll
        for (int s = 0; s < STEPS; s++) {
            uint4 u = codes[s * 32];
            Codes::Sixteen xa = x.at(first + s * 64), xb = x.at(first + s * 64 + 16);
            float4 f = sp[s * 2];
            int sum;
            if (HAS_FIFTH) {
                u32 h = ((const u32*)(record + HIGH))[s * 32 + lane];
                sum = dot16(u.x, u.y, xa, fifth(h, 0), fifth(h, 1), fifth(h, 2), fifth(h, 3)) +
                      dot16(u.z, u.w, xb, fifth(h, 4), fifth(h, 5), fifth(h, 6), fifth(h, 7));
            } else {
                sum = dot16(u.x, u.y, xa) + dot16(u.z, u.w, xb);
            }
            const u8* scale = record + SCALES + (s * 32 + lane) * SCALE_BYTES;
            if (HAS_MINIMUM) {
                float2 dm = __half22float2(*(const __half2*)scale);
                total = fmaf(dm.x, f.x * (float)sum, fmaf(dm.y, f.y + f.z, total));
            } else {
                total = fmaf(half_as_float(scale), fmaf(f.x, (float)sum, -(float)OFFSET * (f.y + f.z)), total);
            }
        }
        return total;
    }

    static __device__ __forceinline__ float value(const u8* record, int row, int column) {
        Place p(row, column);
        int at = p.step * 32 + p.lane, code = nibble_at(record + at * 16, p.e);
        if (HAS_FIFTH) code |= (((const u32*)(record + HIGH))[at] >> (8 * (p.e & 3) + (p.e >> 2)) & 1) << 4;
        const u8* scale = record + SCALES + at * SCALE_BYTES;
        float product = __fmul_rn(half_as_float(scale), (float)(code - OFFSET));
        return HAS_MINIMUM ? __fadd_rn(product, half_as_float(scale + 2)) : product;
    }
};
template <int STEPS> using Q4_0 = Legacy<STEPS, false, false>;
template <int STEPS> using Q4_1 = Legacy<STEPS, false, true>;
template <int STEPS> using Q5_0 = Legacy<STEPS, true, false>;
template <int STEPS> using Q5_1 = Legacy<STEPS, true, true>;

template <int STEPS> struct Q8_0 {  // d code, int8
    static constexpr int COLUMNS = 64 * STEPS, SCALES = 1024 * STEPS, BYTES = SCALES + 64 * STEPS;

    static __device__ __forceinline__ float dot(const u8* record, int lane, Codes x, const float4* xs, int k) {
        const uint4* codes = (const uint4*)record + lane;
        int first = k + (lane & 1) * 32;
        const float4* sp = xs + (k >> 5) + (lane & 1);
        float total = 0;
#pragma unroll
        for (int s = 0; s < STEPS; s++) {
            uint4 a = codes[s * 64], b = codes[s * 64 + 32];
            int sum = dot16(a.x, a.y, a.z, a.w, x.at(first + s * 64)) + dot16(b.x, b.y, b.z, b.w, x.at(first + s * 64 + 16));
            total = fmaf(half_as_float(record + SCALES + (s * 32 + lane) * 2), sp[s * 2].x * (float)sum, total);
        }
        return total;
    }

    static __device__ __forceinline__ float value(const u8* record, int row, int column) {
        Place p(row, column);
        i8 code = ((const i8*)record)[(p.step * 64 + (p.e >> 4) * 32 + p.lane) * 16 + (p.e & 15)];
        return __fmul_rn(half_as_float(record + SCALES + (p.step * 32 + p.lane) * 2), (float)code);
    }
};

// F16 and BF16: the value itself. Activations come as codes like everywhere; products are summed in float32.
template <int STEPS, bool IS_BF16> struct Plain16 {
    static constexpr int COLUMNS = 64 * STEPS, BYTES = 2048 * STEPS;

    static __device__ __forceinline__ float2 two(u32 word) {
        if (IS_BF16) return make_float2(__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u));
        return __half22float2(*(const __half2*)&word);
    }

    // The code of one activation: its bytes, made unsigned, side by side in the last bits of 2^23.
    static __device__ __forceinline__ float code(u32 high, u32 low, int which) {
        u32 bits = __byte_perm(__byte_perm(low, high, (4 + which) << 4 | which), 0x4b000000u, 0x7410);
        return __uint_as_float(bits) - (8388608.f + 32768.f + 128.f);
    }

    // Four products with the codes in one word of each plane.
    static __device__ __forceinline__ float four(u32 a, u32 b, u32 high, u32 low, float sum) {
        high ^= 0x80808080u, low ^= 0x80808080u;
        float2 front = two(a), back = two(b);
        sum = fmaf(front.x, code(high, low, 0), sum);
        sum = fmaf(front.y, code(high, low, 1), sum);
        sum = fmaf(back.x, code(high, low, 2), sum);
        return fmaf(back.y, code(high, low, 3), sum);
    }

    static __device__ __forceinline__ float eight(uint4 w, u32 h0, u32 l0, u32 h1, u32 l1, float sum) {
        return four(w.z, w.w, h1, l1, four(w.x, w.y, h0, l0, sum));
    }

    static __device__ __forceinline__ float dot(const u8* record, int lane, Codes x, const float4* xs, int k) {
        const uint4* weights = (const uint4*)record + lane;
        int first = k + (lane & 1) * 32;
        const float4* sp = xs + (k >> 5) + (lane & 1);
        float total = 0;
#pragma unroll
        for (int s = 0; s < STEPS; s++) {
            Codes::Sixteen xa = x.at(first + s * 64), xb = x.at(first + s * 64 + 16);
            float sum = eight(weights[s * 128], xa.high.x, xa.low.x, xa.high.y, xa.low.y, 0.f);
            sum = eight(weights[s * 128 + 32], xa.high.z, xa.low.z, xa.high.w, xa.low.w, sum);
            sum = eight(weights[s * 128 + 64], xb.high.x, xb.low.x, xb.high.y, xb.low.y, sum);
            sum = eight(weights[s * 128 + 96], xb.high.z, xb.low.z, xb.high.w, xb.low.w, sum);
            total = fmaf(sp[s * 2].x, sum, total);
        }
        return total;
    }

    static __device__ __forceinline__ float value(const u8* record, int row, int column) {
        Place p(row, column);
        u32 word = ((const u32*)record)[((p.step * 4 + (p.e >> 3)) * 32 + p.lane) * 4 + (p.e >> 1 & 3)];
        float2 pair = two(word);
        return p.e & 1 ? pair.y : pair.x;
    }
};
template <int STEPS> using BF16 = Plain16<STEPS, true>;
template <int STEPS> using F16 = Plain16<STEPS, false>;
