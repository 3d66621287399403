// What comes before a product: residual sum, norms, and codes of a row of activations, by the first CODERS threads of a block.
//
// x: float32 [K_IN], of K columns, which are more where weights were filled up with zeros. DELTA_PLANES: x' = (residual +
// post_norm(sum of delta planes)) * scalar. NORM: x = x' / rms(x') * weight. Activations become 16-bit codes in groups of 32,
// scale max / 32512, which is the only rounding here beside that of handover.cuh: of each group [TOKENS][high, low][32] codes
// and [TOKENS] scales, of which these are one token's.
#pragma once

__device__ __forceinline__ void sync_coders() { asm volatile("bar.sync 1, %0;" ::"n"(CODERS) : "memory"); }

__device__ __forceinline__ float sum_coders(float v, float* sums, int warp, int lane) {
    for (int d = 16; d; d >>= 1) v += __shfl_xor_sync(~0u, v, d);
    if (lane == 0) sums[warp] = v;
    sync_coders();
    float total = 0;
#pragma unroll
    for (int w = 0; w < CODERS / 32; w++) total += sums[w];
    return total;
}

// A maximum that NaN wins: fmaxf would drop it, all codes of a group would be 0, and NaN logits would look like equal ones.
__device__ __forceinline__ float max_or_nan(float a, float b) {
    float larger;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(a), "f"(b));
    return larger;
}

constexpr int ROUNDS = (K / 8 + CODERS - 1) / CODERS;  // of eight values a thread

struct Values {  // eight consecutive values a thread and round; zeros past the end
    float v[ROUNDS][8];

    __device__ __forceinline__ void load(const float* p, int tid) {
#pragma unroll
        for (int r = 0; r < ROUNDS; r++) {
            const float4* at = (const float4*)(p + min((r * CODERS + tid) * 8, K_IN - 8));
            float4 a = at[0], b = at[1];
            v[r][0] = a.x, v[r][1] = a.y, v[r][2] = a.z, v[r][3] = a.w;
            v[r][4] = b.x, v[r][5] = b.y, v[r][6] = b.z, v[r][7] = b.w;
        }
    }
    __device__ __forceinline__ float sum_of_squares() const {
        float total = 0;
#pragma unroll
        for (int r = 0; r < ROUNDS; r++)
#pragma unroll
            for (int j = 0; j < 8; j++) total = fmaf(v[r][j], v[r][j], total);
        return total;
    }
};

// The sum of N planes, once all of it is there.
template <int N_PLANES> __device__ __forceinline__ void await_planes(Values& x, const float* p, u32 parity, int tid) {
    // One word a warp first, now and then, so that whoever still streams weights is not disturbed.
    if ((tid & 31) == 0) await(p + min(tid * 8, K_IN - 8) + (N_PLANES - 1) * K_IN, parity);
    __syncwarp();
    Patience patience;
    u32 late;
    do {  // no branch between the loads: as many as there are registers for are on their way at once
        late = 0;
#pragma unroll
        for (int plane = 0; plane < N_PLANES; plane++)
#pragma unroll
            for (int i = 0; i < 2 * ROUNDS; i++) {
                uint4 w = peek4(p + plane * K_IN + min((i / 2 * CODERS + tid) * 8, K_IN - 8) + i % 2 * 4);
                late |= w.x ^ parity, late |= w.y ^ parity, late |= w.z ^ parity, late |= w.w ^ parity;
                float part[4] = {unstamped(w.x), unstamped(w.y), unstamped(w.z), unstamped(w.w)};
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    float& v = x.v[i / 2][i % 2 * 4 + j];
                    v = plane == 0 ? part[j] : v + part[j];
                }
            }
        patience.spend();
    } while (late & 1);
#pragma unroll
    for (int r = 0; r < ROUNDS; r++)
        if ((r * CODERS + tid) * 8 >= K_IN)
#pragma unroll
            for (int j = 0; j < 8; j++) x.v[r][j] = 0;
}

// Byte `which` of four words.
__device__ __forceinline__ u32 gather_bytes(const float (&v)[8], int first, int which) {
    u32 select = which | (4 + which) << 4;
    u32 front = __byte_perm(__float_as_uint(v[first]), __float_as_uint(v[first + 1]), select);
    u32 back = __byte_perm(__float_as_uint(v[first + 2]), __float_as_uint(v[first + 3]), select);
    return __byte_perm(front, back, 0x5410);
}

// One group of 32 by four threads of eight values each: codes round(v 32512 / largest) as 256 high + low, both signed bytes.
// 2^23 + 2^22 + 128 + code is a float whose last two bytes are those of code + 128, so the upper one is `high` and the lower
// one `low` + 128. A NaN makes the scale NaN and with it all that the group takes part in; values of 1e-33 become 0.
template <typename SINK> __device__ __forceinline__ void encode(const float (&v)[8], int i, SINK sink) {
    float largest = 0, shifted[8];
#pragma unroll
    for (int j = 0; j < 8; j++) largest = max_or_nan(largest, fabsf(v[j]));
    largest = max_or_nan(largest, __shfl_xor_sync(~0u, largest, 1));
    largest = max_or_nan(largest, __shfl_xor_sync(~0u, largest, 2));
    // Both a quarter: __fdividef by more than 2^126 is 0 by definition.
    float by = largest > 1e-33f ? __fdividef(8128.f, largest * .25f) : 0.f, scale = largest * (1.f / 32512.f);
#pragma unroll
    for (int j = 0; j < 8; j++) shifted[j] = fmaf(v[j], by, 12582912.f + 128.f);
    u32 high0 = gather_bytes(shifted, 0, 1), high1 = gather_bytes(shifted, 4, 1);
    u32 low0 = gather_bytes(shifted, 0, 0) ^ 0x80808080u, low1 = gather_bytes(shifted, 4, 0) ^ 0x80808080u;
    int highs = __dp4a((int)high1, 0x01010101, __dp4a((int)high0, 0x01010101, 0));
    int half_sum = highs * 256 + __dp4a((int)low1, 0x01010101, __dp4a((int)low0, 0x01010101, 0));
    half_sum += __shfl_xor_sync(~0u, half_sum, 1);
    int other = __shfl_xor_sync(~0u, half_sum, 2);
    if (i < K) sink.take(i, make_uint2(high0, high1), make_uint2(low0, low1), scale, half_sum, other);
}

// Where codes go: to the shared memory of this block, as products read them.
struct OwnCodes {
    u8* codes;
    float4* scales;
    __device__ __forceinline__ void take(int i, uint2 high, uint2 low, float scale, int half_sum, int other) const {
        u8* at = codes + (i >> 5) * 64 + (i & 31);
        *(uint2*)at = high, *(uint2*)(at + 32) = low;
        if ((i & 31) == 0) scales[i >> 5] = make_float4(scale, scale * half_sum, scale * other, scale * (half_sum + other));
    }
};

// Reads a row of activations, applies the norms, leaves codes and group scales; the residual too where it `writes` that.
// The weights of the norms depend on nothing, so they are read before anything is waited for.
template <typename SINK>
__device__ __forceinline__ void prologue(const float* x_in, const float* delta, const float* post_weight, const float* norm_weight,
                                         const float* scalar, float* x_out, bool writes, u32 parity, SINK sink, float* sums, int tid,
                                         int warp, int lane) {
    Values x;
#if NORM
    Values weight;
    weight.load(norm_weight, tid);
#endif
#if DELTA_PLANES > 0
#if POST_NORM
    Values post;
    post.load(post_weight, tid);
#endif
    float by = SCALAR ? *scalar : 1.f;
    Values d;
    await_planes<1>(x, x_in, parity, tid);  // from two kernels ago or earlier: there already
    await_planes<DELTA_PLANES>(d, delta, parity, tid);
#if POST_NORM
    float inverse_post = rsqrtf(sum_coders(d.sum_of_squares(), sums, warp, lane) / K_IN + EPS);
#endif
#pragma unroll
    for (int r = 0; r < ROUNDS; r++) {
        int i = (r * CODERS + tid) * 8;
        float* v = x.v[r];
#pragma unroll
        for (int j = 0; j < 8; j++) {
#if POST_NORM
            v[j] += d.v[r][j] * inverse_post * post.v[r][j];
#else
            v[j] += d.v[r][j];
#endif
            if (SCALAR) v[j] *= by;
        }
        if (writes && i < K_IN) {
            hand_over4(x_out + i, make_float4(v[0], v[1], v[2], v[3]), parity);
            hand_over4(x_out + i + 4, make_float4(v[4], v[5], v[6], v[7]), parity);
        }
    }
#else
    await_planes<1>(x, x_in, parity, tid);
#endif
#if NORM
    float inverse = rsqrtf(sum_coders(x.sum_of_squares(), sums + CODERS / 32, warp, lane) / K_IN + EPS);
#pragma unroll
    for (int r = 0; r < ROUNDS; r++)
#pragma unroll
        for (int j = 0; j < 8; j++) x.v[r][j] = x.v[r][j] * inverse * weight.v[r][j];
#endif
#pragma unroll
    for (int r = 0; r < ROUNDS; r++) encode(x.v[r], (r * CODERS + tid) * 8, sink);
    sync_coders();
}

