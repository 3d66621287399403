// Stream forms of 4-bit codes that stand for values of a table. See stream.cuh, and formats/lookups.py.
#pragma once

// Sixteen values as two tables of eight magnitudes, for a byte permutation: of codes 0 to 7 (LOW) and 8 to 15 (HIGH); and which
// of the two are negative. E2M1 doubled, and the values of IQ4_NL.
struct E2M1 {
    static constexpr u32 LOW0 = 0x03020100, LOW1 = 0x0c080604, HIGH0 = 0x03020100, HIGH1 = 0x0c080604;
    static constexpr bool LOW_IS_NEGATIVE = false;
};
struct IQ4 {
    static constexpr u32 LOW0 = 0x4153687f, LOW1 = 0x0a162331, HIGH0 = 0x26190d01, HIGH1 = 0x71594535;
    static constexpr bool LOW_IS_NEGATIVE = true;
};

// Magnitudes of four codes, which are the nibbles of a word's lower half. A selector whose upper bit is set gives the sign of
// the byte, which is 0 here: so each table answers for its own codes alone.
template <typename T> __device__ __forceinline__ u32 look_up_low(u32 codes) { return permute_signed(T::LOW0, T::LOW1, codes); }
template <typename T> __device__ __forceinline__ u32 look_up_high(u32 codes) { return permute_signed(T::HIGH0, T::HIGH1, codes ^ 0x8888); }

// Eight codes, nibbles in order, as pairs of 1 / UNIT of the table's values: exact.
template <typename T> struct LookedUpPairs {
    static constexpr float UNIT = CODE_UNIT;
    static __device__ __forceinline__ void make(u32 codes, u32 (&pairs)[4]) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            // Of each code one magnitude is 0, so that no byte borrows.
            u32 low = look_up_low<T>(codes >> 16 * half), high = look_up_high<T>(codes >> 16 * half);
            u32 raised = T::LOW_IS_NEGATIVE ? (high | SIGNS) - low : (low | SIGNS) - high;
            pairs[2 * half] = code_pair<128>(raised, 0), pairs[2 * half + 1] = code_pair<128>(raised, 1);
        }
    }
};
// A code moved to a bf16 number's sign, last two bits of exponent and first of mantissa is 2^-126 of its value, which the table
// has doubled; a multiplication puts two copies of it in place.
template <> struct LookedUpPairs<E2M1> {
    static constexpr float UNIT = 2;
    static __device__ __forceinline__ void make(u32 codes, u32 (&pairs)[4]) {
        u32 even = codes & NIBBLES, odd = codes >> 4 & NIBBLES;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            u32 apart = permute_signed(even, odd, 0x8480 + i * 0x1111);  // a byte's sign is 0
            pairs[i] = multiply_pairs(apart * 0x1040 & 0x81c081c0u, 0x7e807e80u);
        }
    }
};

// The codes of a lane's two rows of a group, times their scales.
template <typename T, typename SCALES, typename LANE>
__device__ __forceinline__ void looked_up_fragments(const u8* record, const LANE& at, int step, int group, const SCALES& scales,
                                                    u32 (&a)[8]) {
    uint2 u = ((const uint2*)record)[(step * 32 + at.index) * 2 + group];
    u32 rows[2][4];
    LookedUpPairs<T>::make(u.x, rows[0]);
    LookedUpPairs<T>::make(u.y, rows[1]);
    make_fragments(a, [&](int run, int pair) { return scales.times(rows[run >> 1][2 * (run & 1) + pair], run >> 1); });
}

struct LookedUp {  // sums of codes of either table; their signs differ
    Sums low, high;
    template <typename T, typename MASK> __device__ __forceinline__ void add(u32 row0, u32 row1, uint2 x, MASK mask) {
        u32 back0 = row0 >> 16, back1 = row1 >> 16;
        multiply(low, look_up_low<T>(row0), look_up_low<T>(row1), look_up_low<T>(back0), look_up_low<T>(back1), x, mask);
        multiply(high, look_up_high<T>(row0), look_up_high<T>(row1), look_up_high<T>(back0), look_up_high<T>(back1), x, mask);
    }
    template <typename T> __device__ __forceinline__ int row0() const {
        return T::LOW_IS_NEGATIVE ? high.row0() - low.row0() : low.row0() - high.row0();
    }
    template <typename T> __device__ __forceinline__ int row1() const {
        return T::LOW_IS_NEGATIVE ? high.row1() - low.row1() : low.row1() - high.row1();
    }
};
__device__ __forceinline__ int code_to_look_up(const u8* record, Place p) {
    return record[(p.step * 32 + p.lane) * 16 + (p.group * 2 + p.row) * 4 + (p.e >> 1)] >> 4 * (p.e & 1) & 15;
}
template <typename T> __device__ __forceinline__ int looked_up(int code) {
    int low = look_up_low<T>(code) & 0xff, high = look_up_high<T>(code) & 0xff;
    return T::LOW_IS_NEGATIVE ? high - low : low - high;
}

// Scales: what a doubled or plain table value is multiplied with.
struct HalfScale {
    static constexpr int BYTES = 2;
    static __device__ __forceinline__ float load(const u8* p) { return half_as_float(p); }
    static __device__ __forceinline__ SplitScales rows(const u8* p, float unit) { return {unit * load(p), unit * load(p + 2)}; }
};
struct PowerScales {  // E8M0 of rows g and g + 8 are bf16 numbers, the code their exponent, but for 2^-127
    u32 pairs[2];
    __device__ __forceinline__ u32 times(u32 pair, int row) const { return multiply_pairs(pair, pairs[row]); }
};
struct PowerScale {  // E8M0: 2^(e - 127), halved
    static constexpr int BYTES = 1;
    static __device__ __forceinline__ float load(const u8* p) { return __uint_as_float(*p > 1 ? (u32)(*p - 1) << 23 : 0x00200000u << *p); }
    static __device__ __forceinline__ u32 pair(u32 e) {
        u32 moved = e * 0x00800080u;
        return moved > 0x00400040u ? moved : 0x00400040u;
    }
    // Whole: the unit is the 2 that halves take.
    static __device__ __forceinline__ PowerScales rows(const u8* p, float) { return {pair(p[0]), pair(p[1])}; }
};
struct FloatScale {  // halved
    static constexpr int BYTES = 4;
    static __device__ __forceinline__ float load(const u8* p) { return *(const float*)p * 0.5f; }
    static __device__ __forceinline__ SplitScales rows(const u8* p, float unit) {
        return {unit * 0.5f * ((const float*)p)[0], unit * 0.5f * ((const float*)p)[1]};
    }
};

// Of the GROUPS of a set, whose codes begin at this lane's first.
template <typename TABLE, int GROUPS, typename LANE>
__device__ __forceinline__ LookedUp looked_up_sums(const uint4* codes, uint2 x, const LANE& at) {
    LookedUp sums;
#pragma unroll
    for (int half = 0; half < GROUPS / 2; half++) {
        uint4 u = codes[half * 32];
        sums.template add<TABLE>(u.x, u.y, x, at.of_set(2 * half));
        sums.template add<TABLE>(u.z, u.w, x, at.of_set(2 * half + 1));
    }
    return sums;
}

template <int STEPS, typename TABLE, typename SCALE, int GROUP, bool HAS_MINUS_ZERO> struct Looked : Stepped<STEPS> {
    using Base = Stepped<STEPS>;
    static constexpr int SCALES = 512 * STEPS, GROUPS_A_ROW = Base::COLUMNS / GROUP, BYTES = SCALES + 16 * GROUPS_A_ROW * SCALE::BYTES;

    template <typename LANE, typename X> static __device__ __forceinline__ float2 dot(const u8* record, const LANE& at, const X& x, int k) {
        const uint4* codes = (const uint4*)record + at.index;
        float total0 = 0, total1 = 0;
#pragma unroll
        for (int set = 0; set < Base::SETS; set++) {
            uint2 b = x.of_set(k + set * 128, at);
            LookedUp sums = looked_up_sums<TABLE, Base::GROUPS>(codes + set * 64, b, at);
            if (Base::GROUPS == 4 || at.t < Base::GROUPS) {
                const u8* scale = record + SCALES + (at.g * GROUPS_A_ROW + (set * Base::GROUPS + at.t) * 32 / GROUP) * 2 * SCALE::BYTES;
                float by = x.scale_of((k >> 5) + set * 4 + at.t).x;
                total0 = fmaf(SCALE::load(scale), by * (float)sums.template row0<TABLE>(), total0);
                total1 = fmaf(SCALE::load(scale + SCALE::BYTES), by * (float)sums.template row1<TABLE>(), total1);
            }
        }
        return make_float2(total0, total1);
    }

    template <typename LANE>
    static __device__ __forceinline__ void fragments(const u8* record, const LANE& at, int step, int group, u32 (&a)[8]) {
        const u8* scale = record + SCALES + (at.g * GROUPS_A_ROW + (64 * step + 32 * group) / GROUP) * 2 * SCALE::BYTES;
        looked_up_fragments<TABLE>(record, at, step, group, SCALE::rows(scale, LookedUpPairs<TABLE>::UNIT), a);
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

    template <typename LANE, typename X> static __device__ __forceinline__ float2 dot(const u8* record, const LANE& at, const X& x, int k) {
        const uint4* codes = (const uint4*)record + at.index;
        u32 scales = ((const u32*)(record + SCALES))[at.place];
        float total0 = 0, total1 = 0;
#pragma unroll
        for (int set = 0; set < 2; set++) {
            uint2 b = x.of_set(k + set * 128, at);
            LookedUp sums = looked_up_sums<IQ4, 4>(codes + set * 64, b, at);
            float by = x.scale_of((k >> 5) + set * 4 + at.t).x;
            u32 pair = scales >> 16 * set;
            total0 = fmaf((float)(i8)pair, by * (float)sums.row0<IQ4>(), total0);
            total1 = fmaf((float)(i8)(pair >> 8), by * (float)sums.row1<IQ4>(), total1);
        }
        float2 d = __half22float2(((const __half2*)(record + SUPER))[at.g]);
        return make_float2(d.x * total0, d.y * total1);
    }

    template <typename LANE>
    static __device__ __forceinline__ void fragments(const u8* record, const LANE& at, int step, int group, u32 (&a)[8]) {
        const u8* place = record + SCALES + 16 * at.g + 8 * (step & 1) + 4 * group + 2 * (step >> 1);
        u32 sc = *(const unsigned short*)place ^ 0x8080;
        float2 d = __half22float2(((const __half2*)(record + SUPER))[at.g]);
        SplitScales scales(times_flipped(CODE_UNIT * d.x, sc, 0), times_flipped(CODE_UNIT * d.y, sc, 1));
        looked_up_fragments<IQ4>(record, at, step, group, scales, a);
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

    template <typename LANE, typename X> static __device__ __forceinline__ float2 dot(const u8* record, const LANE& at, const X& x, int k) {
        const uint4* codes = (const uint4*)record + at.index;
        const u8* scales = record + SCALES + at.place * 2 * STEPS;
        float total0 = 0, total1 = 0;
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            uint2 b = x.of_step(k + step * 64, at);
            float by = x.scale_of((k >> 5) + step * 2 + (at.t >> 1)).x;
            uint4 u = codes[step * 32];
            LookedUp sums;
            sums.add<E2M1>(u.x, u.y, b, at.of_step(0));
            sums.add<E2M1>(u.z, u.w, b, at.of_step(1));
            total0 = fmaf(e4m3_as_float(scales[2 * step]), by * (float)sums.row0<E2M1>(), total0);
            total1 = fmaf(e4m3_as_float(scales[2 * step + 1]), by * (float)sums.row1<E2M1>(), total1);
        }
        float2 whole = ((const float2*)(record + WHOLE))[at.g];
        return make_float2(0.5f * whole.x * total0, 0.5f * whole.y * total1);
    }

    // The scale of 16 times that of the row is rounded, where value() rounds the weight.
    template <typename LANE>
    static __device__ __forceinline__ void fragments(const u8* record, const LANE& at, int step, int group, u32 (&a)[8]) {
        u32 codes = *(const unsigned short*)(record + SCALES + (4 * at.g + 2 * group + (at.t >> 1)) * 2 * STEPS + 2 * step);
        float2 own = two_halves(e4m3_as_halves(codes, 0)), whole = ((const float2*)(record + WHOLE))[at.g];
        looked_up_fragments<E2M1>(record, at, step, group, SplitScales(own.x * whole.x, own.y * whole.y), a);
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
