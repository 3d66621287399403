// How a value goes from the kernel that computes it to the next one: with the step's parity in its lowest bit.
//
// A kernel boundary costs 2 us from the end of one kernel to the first read of the next, most of it the wait until the last
// block is gone and its writes are flushed. Here nobody waits for a kernel: the next one is already there and reads until
// each value it needs carries the parity of this step. Every such buffer is written exactly once a step, so what it
// held before has the other parity. The price is the last of 24 bits of a float, cut off; NaN stays NaN.
#pragma once

// n_steps begins at 1: a buffer of zeros is not yet written. dropped: positions that layers without a window have no more; there
// what is at `position` goes to slot position - dropped.
struct State { int token, position, n_steps, dropped; };

__device__ __forceinline__ u32 parity_of(const State* state) { return state->n_steps & 1; }

__device__ __forceinline__ float stamped(float v, u32 parity) { return __uint_as_float((__float_as_uint(v) & ~1u) | parity); }
__device__ __forceinline__ float unstamped(u32 bits) { return __uint_as_float(bits & ~1u); }

__device__ __forceinline__ void hand_over(float* p, float v, u32 parity) {
    asm volatile("st.relaxed.gpu.global.f32 [%0], %1;" ::"l"(p), "f"(stamped(v, parity)) : "memory");
}
__device__ __forceinline__ void hand_over4(float* p, float4 v, u32 parity) {
    asm volatile("st.relaxed.gpu.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(p), "f"(stamped(v.x, parity)),
                 "f"(stamped(v.y, parity)), "f"(stamped(v.z, parity)), "f"(stamped(v.w, parity))
                 : "memory");
}

__device__ __forceinline__ u32 peek(const float* p) {
    u32 bits;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(bits) : "l"(p) : "memory");
    return bits;
}
__device__ __forceinline__ uint4 peek4(const float* p) {
    uint4 v;
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
    return v;
}

// Somebody who never writes must not hang a card: after some seconds the kernel ends with an error.
struct Patience {
    int left = 1 << 23;
    __device__ __forceinline__ void spend() {
        if (--left == 0) __trap();
    }
};

// Until one value is there, without flooding the memory system meanwhile.
__device__ __forceinline__ void await(const float* p, u32 parity) {
    Patience patience;
    while ((peek(p) ^ parity) & 1) __nanosleep(100), patience.spend();
}

// A value beside a whole tag, for places that not every step writes, or that several calls of a step do.
__device__ __forceinline__ void hand_over_tagged(u64* p, float v, u32 tag) {
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(p), "l"((u64)tag << 32 | __float_as_uint(v)) : "memory");
}
__device__ __forceinline__ ulonglong2 peek_two_tagged(const u64* p) {
    ulonglong2 bits;
    asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];" : "=l"(bits.x), "=l"(bits.y) : "l"(p) : "memory");
    return bits;
}

// Three words and a whole tag, which arrive together: 16 bytes are one access.
__device__ __forceinline__ void hand_over_three(uint4* p, u32 a, u32 b, u32 c, u32 tag) {
    asm volatile("{\n.reg .b128 all;\nmov.b128 all, {%1, %2};\nst.relaxed.gpu.global.b128 [%0], all;\n}" ::"l"(p), "l"((u64)b << 32 | a),
                 "l"((u64)tag << 32 | c)
                 : "memory");
}
__device__ __forceinline__ uint4 peek_three(const uint4* p) {
    u64 front, back;
    asm volatile("{\n.reg .b128 all;\nld.relaxed.gpu.global.b128 all, [%2];\nmov.b128 {%0, %1}, all;\n}"
                 : "=l"(front), "=l"(back)
                 : "l"(p)
                 : "memory");
    return make_uint4((u32)front, (u32)(front >> 32), (u32)back, (u32)(back >> 32));
}
