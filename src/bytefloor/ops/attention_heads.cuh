// What attention does before it sees a key: the heads of q, k and v from the outputs of their product. See attention.cu, whose
// constants these are.
#pragma once

__device__ __forceinline__ float warp_sum(float v) {
    for (int d = 16; d; d >>= 1) v += __shfl_xor_sync(~0u, v, d);
    return v;
}

constexpr int FOURS = (E + 127) / 128;  // of four elements of a head, a lane
constexpr int TASKS = (HEADS + 2 + WARPS - 1) / WARPS;  // heads of q, k or v that a warp prepares

struct Head {  // as the lanes of a warp hold it: four elements from 4 (32 m + lane) on
    float4 v[FOURS];
    static __device__ __forceinline__ bool has(int m, int lane) { return (m * 32 + lane) * 4 < E; }
    __device__ __forceinline__ void load(const float* p, int lane) {
#pragma unroll
        for (int m = 0; m < FOURS; m++) v[m] = p && has(m, lane) ? ((const float4*)p)[m * 32 + lane] : make_float4(1.f, 1.f, 1.f, 1.f);
    }
};

// Heads of q, then k and v if they are this block's, into shared memory, a warp each: summed over planes once they are there,
// normed, turned, scaled. `new_row`, `page_row`: where the key goes in a tile and in its page, the value behind it; or null.
// `page_scale`: where its scale goes, if there is a page row.
__device__ __forceinline__ void prepare(const float* qkv, int first_head, int j, bool has_new, Head norm_by, const float* q_weight,
                                        const float* k_weight, const float2* turns, u32 parity, float* queries, float* fresh,
                                        Stored* new_row, Stored* page_row, Stored* page_scale, float* new_scales, int warp, int lane) {
    int n_tasks = HEADS + (has_new ? 2 : 0);
    if (warp >= n_tasks) return;
    Head found[TASKS];
    Patience patience;
    u32 late;
    do {  // all of it on its way at once
        late = 0;
#pragma unroll
        for (int n = 0; n < TASKS; n++) {
            int task = min(n * WARPS + warp, n_tasks - 1), in_group = V_FROM_K || task == HEADS ? H + j : H + J + j;
            const float* head = qkv + (task < HEADS ? first_head + task : in_group) * E;
#pragma unroll
            for (int p = 0; p < PLANES_IN; p++)
#pragma unroll
                for (int m = 0; m < FOURS; m++) {
                    float4& v = found[n].v[m];
                    if (p == 0) v = make_float4(0, 0, 0, 0);
                    if (Head::has(m, lane)) {
                        uint4 w = peek4(head + p * N_IN + (m * 32 + lane) * 4);
                        late |= w.x ^ parity, late |= w.y ^ parity, late |= w.z ^ parity, late |= w.w ^ parity;
                        v.x += unstamped(w.x), v.y += unstamped(w.y), v.z += unstamped(w.z), v.w += unstamped(w.w);
                    }
                }
        }
        if (late & 1) __nanosleep(40);
        patience.spend();
    } while (late & 1);
    __syncwarp();
    Head second_by;
    if (TASKS > 1) norm_by.load(warp < HEADS ? q_weight : k_weight, lane);
    if (TASKS > 1 || KEYS_ARE_VALUES) second_by.load(k_weight, lane);
#pragma unroll
    for (int n = 0; n < TASKS; n++) {
        int task = n * WARPS + warp;
        if (task >= n_tasks) break;
        bool is_query = task < HEADS, is_value = task == HEADS + 1;
        float* out = is_query ? queries + task * E : is_value ? fresh + E : fresh;
        float factor = is_query ? SCALE : 1.f;
        const Head& x = found[n];
        bool has_norm = is_value ? V_NORM : QK_NORM;
        if (has_norm) {
            float square = 0;
#pragma unroll
            for (int m = 0; m < FOURS; m++)
                square += x.v[m].x * x.v[m].x + x.v[m].y * x.v[m].y + x.v[m].z * x.v[m].z + x.v[m].w * x.v[m].w;
            factor *= rsqrtf(warp_sum(square) / E + EPS);
        }
#pragma unroll
        for (int m = 0; m < FOURS; m++) {
            if (!Head::has(m, lane)) continue;
            float4 v = x.v[m], by = is_value || !has_norm ? make_float4(1.f, 1.f, 1.f, 1.f) : n ? second_by.v[m] : norm_by.v[m];
            if (KEYS_ARE_VALUES && is_query && !is_rotated((m * 32 + lane) * 4)) {
                float4 key = second_by.v[m];
                by.x *= key.x, by.y *= key.y, by.z *= key.z, by.w *= key.w;
            }
            by.x *= factor, by.y *= factor, by.z *= factor, by.w *= factor;
            ((float4*)out)[m * 32 + lane] = make_float4(v.x * by.x, v.y * by.y, v.z * by.z, v.w * by.w);
        }
        __syncwarp();
        if (ROPE && !is_value)
            for (int i = lane; i < E / 2; i += 32) {
                int a = ROPE == 1 ? i : 2 * i, b = ROPE == 1 ? i + E / 2 : 2 * i + 1;
                float x = out[a], y = out[b], cosine = turns[i].x, sine = turns[i].y;
                out[a] = x * cosine - y * sine;
                out[b] = y * cosine + x * sine;
            }
        __syncwarp();
#if STORAGE == 1
        if (is_query) {
            float scale = scale_of<32512>(out, lane);
            if (lane == 0) new_scales[2 + task] = scale;
        }
#endif
        if (!is_query) {
            float scale = 0;
#if STORAGE
            scale = __bfloat162float(__float2bfloat16(scale_of<LARGEST_CODE>(out, lane)));
            if (lane == 0) {
                new_scales[is_value] = scale;
                if (page_row) *(__nv_bfloat16*)(page_scale + (is_value ? J * BLOCK : 0)) = __float2bfloat16(scale);
            }
#endif
            for (int i = lane; i < E; i += 32) {
                int at = KEYS_ARE_VALUES && !is_value ? key_lane(i) : i;
                if (KEYS_ARE_VALUES && at < 0) continue;
                Stored rounded = encode(out[i], scale);
                if (new_row) new_row[(is_value ? VALUES : 0) + at] = rounded;
                if (page_row) page_row[(is_value && !KEYS_ARE_VALUES ? J * BLOCK : 0) + at] = rounded;
            }
        }
    }
}
