// Stream forms of 4-bit codes that stand for values of a table. See stream.cuh, and formats/lookups.py.
#pragma once

// Tables of sixteen signed bytes, for a byte permutation: E2M1 doubled, and that of IQ4_NL.
struct E2M1 { static constexpr u32 T0 = 0x03020100, T1 = 0x0c080604, T2 = 0xfdfeff00, T3 = 0xf4f8fafc; };
struct IQ4 { static constexpr u32 T0 = 0xbfad9881, T1 = 0xf6eaddcf, T2 = 0x26190d01, T3 = 0x71594535; };

// The values of four codes, which are the nibbles of a word's lower half.
template <typename T> __device__ __forceinline__ u32 look_up(u32 codes) {
    u32 low = __byte_perm(T::T0, T::T1, codes & 0x7777), high = __byte_perm(T::T2, T::T3, codes & 0x7777);
    u32 is_high = __byte_perm(0x0000ff00, 0, codes >> 3 & 0x1111);
    return low ^ ((low ^ high) & is_high);
}
template <typename T> __device__ __forceinline__ void multiply_looked_up(Sums& sums, u32 row0, u32 row1, uint2 x, u32 mask) {
    multiply(sums, look_up<T>(row0), look_up<T>(row1), look_up<T>(row0 >> 16), look_up<T>(row1 >> 16), x, mask);
}
__device__ __forceinline__ int code_to_look_up(const u8* record, Place p) {
    return record[(p.step * 32 + p.lane) * 16 + (p.group * 2 + p.row) * 4 + (p.e >> 1)] >> 4 * (p.e & 1) & 15;
}
template <typename T> __device__ __forceinline__ int looked_up(int code) { return (i8)look_up<T>((u32)code); }

// Scales: what a doubled or plain table value is multiplied with.
struct HalfScale {
    static constexpr int BYTES = 2;
    static __device__ __forceinline__ float load(const u8* p) { return half_as_float(p); }
};
struct PowerScale {  // E8M0: 2^(e - 127), halved
    static constexpr int BYTES = 1;
    static __device__ __forceinline__ float load(const u8* p) { return __uint_as_float(*p > 1 ? (u32)(*p - 1) << 23 : 0x00200000u << *p); }
};
struct FloatScale {  // halved
    static constexpr int BYTES = 4;
    static __device__ __forceinline__ float load(const u8* p) { return *(const float*)p * 0.5f; }
};

// Of the GROUPS of a set, whose codes begin at this lane's first.
template <typename TABLE, int GROUPS> __device__ __forceinline__ Sums looked_up_sums(const uint4* codes, uint2 x, const Lane& at) {
    Sums halves[2];
#pragma unroll
    for (int half = 0; half < GROUPS / 2; half++) {
        uint4 u = codes[half * 32];
        multiply_looked_up<TABLE>(halves[0], u.x, u.y, x, at.of_set[2 * half]);
        multiply_looked_up<TABLE>(halves[1], u.z, u.w, x, at.of_set[2 * half + 1]);
    }
    return halves[0] + halves[1];
}

template <int STEPS, typename TABLE, typename SCALE, int GROUP, bool HAS_MINUS_ZERO> struct Looked : Stepped<STEPS> {
    using Base = Stepped<STEPS>;
    static constexpr int SCALES = 512 * STEPS, GROUPS_A_ROW = Base::COLUMNS / GROUP, BYTES = SCALES + 16 * GROUPS_A_ROW * SCALE::BYTES;

    static __device__ __forceinline__ float2 dot(const u8* record, const Lane& at, Activations x, int k) {
        const uint4* codes = (const uint4*)record + at.index;
        float total0 = 0, total1 = 0;
#pragma unroll
        for (int set = 0; set < Base::SETS; set++) {
            uint2 b = x.of_set(k + set * 128, at);
            Sums sums = looked_up_sums<TABLE, Base::GROUPS>(codes + set * 64, b, at);
            if (Base::GROUPS == 4 || at.t < Base::GROUPS) {
                const u8* scale = record + SCALES + (at.g * GROUPS_A_ROW + (set * Base::GROUPS + at.t) * 32 / GROUP) * 2 * SCALE::BYTES;
                float by = x.scales[(k >> 5) + set * 4 + at.t].x;
                total0 = fmaf(SCALE::load(scale), by * (float)sums.row0(), total0);
                total1 = fmaf(SCALE::load(scale + SCALE::BYTES), by * (float)sums.row1(), total1);
            }
        }
        return make_float2(total0, total1);
    }

    static __device__ __forceinline__ float value(const u8* record, int row, int column) {
        Place p(row, column);
        int code = code_to_look_up(record, p);
        const u8* scale = record + SCALES + (((row & 7) * GROUPS_A_ROW + column / GROUP) * 2 + p.row) * SCALE::BYTES;
        float table = HAS_MINUS_ZERO && code == 8 ? -0.f : (float)looked_up<TABLE>(code);
        return __fmul_rn(SCALE::load(scale), table);
    }
};
template <int STEPS> using IQ4_NL = Looked<STEPS, IQ4, HalfScale, 32, false>;
template <int STEPS> using MXFP4 = Looked<STEPS, E2M1, PowerScale, 32, false>;
template <int STEPS> using MXFP4_pairs = Looked<STEPS, E2M1, PowerScale, 32, true>;
template <int STEPS> using FP4_g128 = Looked<STEPS, E2M1, FloatScale, 128, true>;

struct IQ4_XS {  // d (sc table[code]), sc an int8 for each 32
    static constexpr int COLUMNS = 256, SCALES = 2048, SUPER = SCALES + 128, BYTES = SUPER + 32;

    static __device__ __forceinline__ float2 dot(const u8* record, const Lane& at, Activations x, int k) {
        const uint4* codes = (const uint4*)record + at.index;
        u32 scales = ((const u32*)(record + SCALES))[at.index];
        float total0 = 0, total1 = 0;
#pragma unroll
        for (int set = 0; set < 2; set++) {
            uint2 b = x.of_set(k + set * 128, at);
            Sums sums = looked_up_sums<IQ4, 4>(codes + set * 64, b, at);
            float by = x.scales[(k >> 5) + set * 4 + at.t].x;
            u32 pair = scales >> 16 * set;
            total0 = fmaf((float)(i8)pair, by * (float)sums.row0(), total0);
            total1 = fmaf((float)(i8)(pair >> 8), by * (float)sums.row1(), total1);
        }
        float2 d = __half22float2(((const __half2*)(record + SUPER))[at.g]);
        return make_float2(d.x * total0, d.y * total1);
    }

    static __device__ __forceinline__ float value(const u8* record, int row, int column) {
        Place p(row, column);
        int scale = ((const i8*)record)[SCALES + 4 * ((row & 7) * 4 + (column >> 5 & 3)) + 2 * (column >> 7) + p.row];
        float d = half_as_float(record + SUPER + 4 * (row & 7) + 2 * p.row);
        return __fmul_rn(__fmul_rn(d, (float)scale), (float)looked_up<IQ4>(code_to_look_up(record, p)));
    }
};

// E2M1 with an E4M3 scale for each 16 and one for the tensor, which stands beside every row: gate and up have their own.
template <int STEPS, bool HAS_MINUS_ZERO> struct Nvfp4 : Stepped<STEPS> {
    using Base = Stepped<STEPS>;
    static constexpr int SCALES = 512 * STEPS, WHOLE = SCALES + 64 * STEPS, BYTES = WHOLE + 64;

    static __device__ __forceinline__ float2 dot(const u8* record, const Lane& at, Activations x, int k) {
        const uint4* codes = (const uint4*)record + at.index;
        const u8* scales = record + SCALES + at.index * 2 * STEPS;
        float total0 = 0, total1 = 0;
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            uint2 b = x.of_step(k + step * 64, at);
            float by = x.scales[(k >> 5) + step * 2 + (at.t >> 1)].x;
            uint4 u = codes[step * 32];
            Sums sums;
            multiply_looked_up<E2M1>(sums, u.x, u.y, b, at.of_step[0]);
            multiply_looked_up<E2M1>(sums, u.z, u.w, b, at.of_step[1]);
            total0 = fmaf(e4m3_as_float(scales[2 * step]), by * (float)sums.row0(), total0);
            total1 = fmaf(e4m3_as_float(scales[2 * step + 1]), by * (float)sums.row1(), total1);
        }
        float2 whole = ((const float2*)(record + WHOLE))[at.g];
        return make_float2(0.5f * whole.x * total0, 0.5f * whole.y * total1);
    }

    static __device__ __forceinline__ float value(const u8* record, int row, int column) {
        Place p(row, column);
        int code = code_to_look_up(record, p), lane = (row & 7) * 4 + (column >> 4 & 3);
        float table = HAS_MINUS_ZERO && code == 8 ? -0.f : 0.5f * (float)looked_up<E2M1>(code);
        float grouped = __fmul_rn(table, e4m3_as_float(record[SCALES + lane * 2 * STEPS + 2 * p.step + p.row]));
        return __fmul_rn(grouped, ((const float*)(record + WHOLE))[(row & 7) * 2 + p.row]);
    }
};
template <int STEPS> using NVFP4 = Nvfp4<STEPS, false>;
template <int STEPS> using NVFP4_pairs = Nvfp4<STEPS, true>;
