// What the cache keeps of a key or a value: bf16, or codes of eight bits (int8, E4M3) under one bf16 scale for each head and
// position. See attention.cu, whose constants these are.
//
// Any byte is a finite number here (E4M3's two NaN read as 480): codes outside the live band cannot do harm where their
// shares are zero. Only scales can be NaN, so those are read for live positions alone; a key or value that is not finite has
// a scale of NaN, which reaches the output.
#pragma once

__device__ __forceinline__ u32 fma_pair(u32 a, u32 b, u32 c) {  // of bf16, with subnormals
    u32 d;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}

#if STORAGE == 0
typedef __nv_bfloat16 Stored;
__device__ __forceinline__ Stored encode(float x, float scale) { return __float2bfloat16(x); }
#else
typedef u8 Stored;
#if STORAGE == 1
constexpr int LARGEST_CODE = 127;
__device__ __forceinline__ u8 encode_scaled(float x) { return (u8)__float2int_rn(x); }
// Bytes 0 and 2 of a word as two bf16: 128 and seven bits, less 128, or 256 where the eighth is set.
__device__ __forceinline__ u32 decode_even(u32 codes) {
    return fma_pair(codes & 0x007f007fu | 0x43004300u, 0x3f803f80u, codes & 0x00800080u | 0xc300c300u);
}
__device__ __forceinline__ u32 decode_odd(u32 codes) { return decode_even(codes >> 8); }
#else
constexpr int LARGEST_CODE = 448;
// E4M3, to nearest even: below 2^-6 in steps of 2^-9, above with four bits.
__device__ __forceinline__ u8 encode_scaled(float x) {
    u32 bits = __float_as_uint(x) & 0x7fffffff, code = (bits + 0x7ffff + (bits >> 20 & 1)) >> 20;
    code = __uint_as_float(bits) < 0x1p-6f ? (u32)__float2int_rn(__uint_as_float(bits) * 512.f) : code - (120 << 3);
    return (u8)(code | (__float_as_uint(x) >> 24 & 0x80));
}
// Bytes 1 and 3 of a word as two bf16: exponent and mantissa in their places make a number that is 2^120 times too small.
__device__ __forceinline__ u32 decode_odd(u32 codes) {
    return fma_pair(codes & 0x80008000u | codes >> 4 & 0x07f007f0u, 0x7b807b80u, 0x80008000u);
}
__device__ __forceinline__ u32 decode_even(u32 codes) { return decode_odd(codes << 8); }
#endif
__device__ __forceinline__ Stored encode(float x, float scale) {
    float scaled = scale > 0 ? __fdiv_rn(x, scale) : 0.f;
    return encode_scaled(fminf(fmaxf(scaled, (float)-LARGEST_CODE), (float)LARGEST_CODE));
}
// Under which a largest value, as bits without its sign, becomes the largest code. As bits NaN is the largest.
template <int LARGEST> __device__ __forceinline__ float scale_under(u32 largest) {
    return largest < 0x7f800000 ? __fdiv_rn(__uint_as_float(largest), LARGEST) : __uint_as_float(0x7fc00000);
}
// Of E values; the same in every lane.
template <int LARGEST> __device__ __forceinline__ float scale_of(const float* values, int lane) {
    u32 largest = 0;
    for (int i = lane; i < E; i += 32) largest = max(largest, __float_as_uint(values[i]) & 0x7fffffff);
    return scale_under<LARGEST>(__reduce_max_sync(~0u, largest));
}
#endif

constexpr bool HAS_SCALES = STORAGE != 0, KEYS_ARE_VALUES = ROTATED != 0;
constexpr int CHUNK = 16 / sizeof(Stored), CHUNKS = E / CHUNK;  // of 16 bytes
// Of a row in shared memory: an odd number of chunks, so that eight rows lie in different banks.
constexpr int STRIDE = HAS_SCALES ? E + (E % 32 ? 0 : CHUNK) : E + ROTATED + 8;
// Keys and values of a head in a page: scales stand behind codes. Or, where all but some lanes of a key are its value times a
// weight, rows of a value and those lanes: the first ROTATED / 2 of each half. Queries take the weight in the other lanes.
constexpr int ROW = E + ROTATED, BLOCK = HAS_SCALES ? PAGE * (E + 2) : PAGE * ROW, BLOCKS = KEYS_ARE_VALUES ? 1 : 2;
constexpr int VALUES = KEYS_ARE_VALUES ? 0 : TILE * STRIDE, TILES = BLOCKS * TILE * STRIDE;  // in a stage: values of a tile; the end
static_assert(!(HAS_SCALES && KEYS_ARE_VALUES) && ROTATED % 32 == 0, "lanes of bf16, whole tensor core tiles of each half");
__device__ __forceinline__ int row_in_page(int head, int offset) {
    return HAS_SCALES ? head * BLOCK + offset * E : (head * PAGE + offset) * ROW;
}
// Where lane i of a key stands in such a row, -1 if it does not.
__device__ __forceinline__ bool is_rotated(int i) { return i % (E / 2) < ROTATED / 2; }
__device__ __forceinline__ int key_lane(int i) { return !is_rotated(i) ? -1 : E + i - (i < E / 2 ? 0 : (E - ROTATED) / 2); }
