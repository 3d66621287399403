// What a gate goes through, chosen by the number GLU: 1 silu, 2 gelu in its tanh form.
#pragma once

// Its division and exponential are the exact ones: a fast form would differ from the reference in more than last bits.
__device__ __forceinline__ float activate(float gate) {
#if GLU == 2
    return 0.5f * gate * (1.f + tanhf(0.7978845608028654f * (gate + 0.044715f * gate * gate * gate)));
#else
    return gate / (1.f + expf(-gate));
#endif
}
// The same to within some 2^-20, for what becomes bf16 at once: 1 + tanh(u) is 2 / (1 + exp(-2u)), which no difference spoils.
__device__ __forceinline__ float activate_for_bf16(float gate) {
    float u = GLU == 2 ? 1.5957691216057308f * (gate + 0.044715f * gate * gate * gate) : gate;
    return gate * __fdividef(1.f, 1.f + __expf(-u));
}
