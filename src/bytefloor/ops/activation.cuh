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
