// The instructions that products are made of, by themselves: a test runs stream.cuh on a CPU with other ones in their place.
//
// Of the tensor core lane 4 g + t holds of a 16 by k matrix a0 (row g), a1 (row g + 8), a2, a3 (the same rows, second half of k), of a k by 8
// matrix b0, b1 (column g, the halves of k), and of the sum columns 2t and 2t + 1 of row g, then of row g + 8.
#pragma once

// A byte of (b, a) for each of four selectors, whose fourth bit asks for that byte's sign instead. __byte_perm masks it away.
__device__ __forceinline__ u32 permute_signed(u32 a, u32 b, u32 select) {
    u32 out;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(select));
    return out;
}

// k = 32 signed bytes; four consecutive ones a register.
__device__ __forceinline__ void multiply_bytes(int& c0, int& c1, int& c2, int& c3, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+r"(c0), "+r"(c1), "+r"(c2), "+r"(c3)
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// k = 16 floats of 16 bits; two consecutive ones a register.
template <bool IS_BF16>
__device__ __forceinline__ void multiply_halves(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    if (IS_BF16)
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%0, %1, %2, %3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    else
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%0, %1, %2, %3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Two floats of 16 bits in a word, the first in its lower half.
template <bool IS_BF16> __device__ __forceinline__ u32 pack_halves(float a, float b) {
    u32 packed;
    if (IS_BF16)
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(b), "f"(a));
    else
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(b), "f"(a));
    return packed;
}

// A word with one half of `word` in both its halves: an operand of fma_pairs, which costs nothing there.
__device__ __forceinline__ u32 half_twice(u32 word, int which) {
    u32 out;
    if (which)
        asm("{ .reg .b16 low, high; mov.b32 {low, high}, %1; mov.b32 %0, {high, high}; }" : "=r"(out) : "r"(word));
    else
        asm("{ .reg .b16 low, high; mov.b32 {low, high}, %1; mov.b32 %0, {low, low}; }" : "=r"(out) : "r"(word));
    return out;
}

// a * b + c of two bf16 numbers a word, rounded once.
__device__ __forceinline__ u32 fma_pairs(u32 a, u32 b, u32 c) {
    u32 out;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(c));
    return out;
}

// 1 / v to the last bit but one.
__device__ __forceinline__ float reciprocal(float v) {
    float out;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(v));
    return out;
}

// What lane t of each four has.
__device__ __forceinline__ u32 of_four(u32 word, int t) { return __shfl_sync(~0u, word, t, 4); }

// Codes `first` and `first` + 1 of four E4M3 ones as float16: exact.
__device__ __forceinline__ u32 e4m3_as_halves(u32 codes, int first) {
#if __CUDA_ARCH__ >= 890
    u32 out;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(out) : "h"((unsigned short)(codes >> 8 * first)));
    return out;
#else
    // Moved to a half's place a code is 2^-8 of its value.
    u32 spread = __byte_perm(codes, 0, first ? 0x3424 : 0x1404);
    u32 small = (spread & 0x80008000u) | (spread & 0x7f007f00u) >> 1;
    __half2 value = __hmul2(*(const __half2*)&small, __floats2half2_rn(256.f, 256.f));
    return *(const u32*)&value;
#endif
}
