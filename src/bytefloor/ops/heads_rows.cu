// heads_rows: from the outputs of the QKV product of many rows to queries, and keys and values in the pages of the
// cache.
//
// Per head: q = rope(rms_norm(., q_weight)) * SCALE * log2(e), for a softmax in powers of two; k = rope(rms_norm(.,
// k_weight)), v = rms_norm(.) where the model has one. Queries leave as bf16 [n_rows][H][E]; k and v as the cache keeps
// them, see attention_storage.cuh; with ROTATED that is v and the lanes of k that turn, and queries take k_weight in
// the others. Slot p of a sequence lies in page table[sequence][(p / PAGE) % n_table] at offset p % PAGE. Rows whose
// sequence is < 0 are left out.
// Exact but for the order of float32 sums and the rounding of what leaves. Moves q, k and v once, and half as much or
// less to queries and pages.
//
// Arguments, in order:
//   const float* q; int q_stride, floats from a row to the next; int q_planes; int q_plane_stride, floats from a plane
//   to the next; the same four of k, and of v: null and zeros where there is none of its own; const float* q_weight
//   [E], or null; const float* k_weight [E], or null; const double* frequencies [E / 2], radians a position, or null;
//   const int* positions [n_rows]; const int* slots [n_rows]; const int* sequence [n_rows]; Stored* cache, the layer's;
//   const int* table [B][n_table]; int n_table; bf16* q_out; int n_rows.
// Defined by the host: STORAGE, ROTATED, E (a multiple of 16), H, J, PAGE, OWNS_KV, V_FROM_K, QK_NORM, V_NORM, ROPE
// (0 none, 1 split, 2 interleaved), SCALE, EPS, THREADS. Blocks: n_rows by as many as share the heads of a row.
#include <cuda_bf16.h>

constexpr int TILE = 16;  // of attention_storage.cuh, which lays out shared memory too
#include "attention_storage.cuh"

// A head by a warp, or a half or quarter of one: a lane has fours of the first half and the same ones of the second, so
// that both partners of a pair that turns are in one lane.
constexpr int FOURS = E / 8, LANES = FOURS > 16 ? 32 : FOURS > 8 ? 16 : 8, TURNS = (FOURS + LANES - 1) / LANES;
constexpr int TASKS = H + (OWNS_KV ? 2 * J : 0), AT_ONCE = THREADS / LANES, ANGLES = (E / 2 + THREADS - 1) / THREADS;
constexpr float QUERY_SCALE = SCALE * 1.4426950408889634f;
static_assert(E % 16 == 0 && ROTATED % 8 == 0, "halves are read four floats at a time");

struct Source {  // of heads: planes of rows
    const float* y;
    int stride, n_planes, plane_stride;
};

struct Head {  // v[2 m]: elements of the first half from 4 (m LANES + at) on; v[2 m + 1]: those of the second
    float4 v[2 * TURNS];
    static __device__ __forceinline__ bool has(int m, int at) { return m * LANES + at < FOURS; }
    static __device__ __forceinline__ int element(int i, int at) { return i % 2 * (E / 2) + (i / 2 * LANES + at) * 4; }
    __device__ __forceinline__ void load_weight(const float* p, int at) {
#pragma unroll
        for (int i = 0; i < 2 * TURNS; i++)
            v[i] = p && has(i / 2, at) ? __ldg((const float4*)(p + element(i, at))) : make_float4(1.f, 1.f, 1.f, 1.f);
    }
    __device__ __forceinline__ void load(Source source, int row, int head, int at, bool is_there) {
        const float* p = source.y + (size_t)row * source.stride + head * E;
#pragma unroll
        for (int i = 0; i < 2 * TURNS; i++)
            v[i] = is_there && has(i / 2, at) ? __ldcs((const float4*)(p + element(i, at))) : make_float4(0, 0, 0, 0);
        if (!is_there) return;
        for (int n = 1; n < source.n_planes; n++) {
            p += source.plane_stride;
#pragma unroll
            for (int i = 0; i < 2 * TURNS; i++)
                if (has(i / 2, at)) {
                    float4 more = __ldcs((const float4*)(p + element(i, at)));
                    v[i].x += more.x, v[i].y += more.y, v[i].z += more.z, v[i].w += more.w;
                }
        }
    }
    __device__ __forceinline__ void scale(float by) {
#pragma unroll
        for (int i = 0; i < 2 * TURNS; i++) v[i].x *= by, v[i].y *= by, v[i].z *= by, v[i].w *= by;
    }
    __device__ __forceinline__ void multiply(int i, float4 by) {
        v[i].x *= by.x, v[i].y *= by.y, v[i].z *= by.z, v[i].w *= by.w;
    }
};

__device__ __forceinline__ void turn(float& a, float& b, float2 angle) {
    float x = a, y = b;
    a = x * angle.x - y * angle.y;
    b = y * angle.x + x * angle.y;
}

// Cosine and sine of pair i are turns[i].
__device__ __forceinline__ void turn_pairs(Head& x, const float2* turns, int at) {
#pragma unroll
    for (int m = 0; m < TURNS; m++) {
        if (!Head::has(m, at)) continue;
        float4 &a = x.v[2 * m], &b = x.v[2 * m + 1];
        const float2* own = turns + (m * LANES + at) * (ROPE == 1 ? 4 : 2);
        if (ROPE == 1) {
            turn(a.x, b.x, own[0]), turn(a.y, b.y, own[1]), turn(a.z, b.z, own[2]), turn(a.w, b.w, own[3]);
        } else {
            const float2* upper = own + E / 4;
            turn(a.x, a.y, own[0]), turn(a.z, a.w, own[1]), turn(b.x, b.y, upper[0]), turn(b.z, b.w, upper[1]);
        }
    }
}

__device__ __forceinline__ void store_bf16(void* to, float4 v) {
    *(uint2*)to = make_uint2(pack_halves<true>(v.x, v.y), pack_halves<true>(v.z, v.w));
}

// A key or a value to its place in the page; `page` is that of the slot, for a value where values begin.
__device__ __forceinline__ void keep(const Head& x, Stored* page, int j, int offset, bool is_value, int at,
                                     bool is_there) {
    Stored* to = page + row_in_page(j, offset);
#if STORAGE
    u32 largest = 0;
#pragma unroll
    for (int i = 0; i < 2 * TURNS; i++) {
        const float4& v = x.v[i];
        u32 front = max(__float_as_uint(v.x) & 0x7fffffff, __float_as_uint(v.y) & 0x7fffffff);
        u32 back = max(__float_as_uint(v.z) & 0x7fffffff, __float_as_uint(v.w) & 0x7fffffff);
        largest = max(largest, max(front, back));
    }
    for (int d = LANES / 2; d; d >>= 1) largest = max(largest, __shfl_xor_sync(~0u, largest, d));
    __nv_bfloat16 stored = __float2bfloat16(scale_under<LARGEST_CODE>(largest));
    float scale = __bfloat162float(stored);
    if (!is_there) return;
    if (at == 0) *(__nv_bfloat16*)(page + j * BLOCK + PAGE * E + offset * 2) = stored;
#pragma unroll
    for (int i = 0; i < 2 * TURNS; i++)
        if (Head::has(i / 2, at)) {
            const float4& v = x.v[i];
            u32 front = encode(v.x, scale) | encode(v.y, scale) << 8;
            u32 back = encode(v.z, scale) | encode(v.w, scale) << 8;
            *(u32*)(to + Head::element(i, at)) = front | back << 16;
        }
#else
    if (!is_there) return;
#pragma unroll
    for (int i = 0; i < 2 * TURNS; i++) {
        int element = Head::element(i, at), lane = KEYS_ARE_VALUES && !is_value ? key_lane(element) : element;
        if (Head::has(i / 2, at) && lane >= 0) store_bf16(to + lane, x.v[i]);
    }
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS)
    heads_rows(const float* q, int q_stride, int q_planes, int q_plane_stride,
               const float* k, int k_stride, int k_planes, int k_plane_stride,
               const float* v, int v_stride, int v_planes, int v_plane_stride,
               const float* q_weight, const float* k_weight, const double* frequencies, const int* positions,
               const int* slots, const int* sequence, Stored* cache, const int* table, int n_table,
               __nv_bfloat16* q_out, int n_rows AND_STAMPS) {
    __shared__ __align__(16) float2 turns[E / 2];
    int tid = threadIdx.x, at = tid % LANES, row = blockIdx.x;
    STAMP(THERE, tid == 0);
    let_next_start();
    // Norms and frequencies depend on no kernel.
    Head q_by, k_by;
    q_by.load_weight(QK_NORM ? q_weight : nullptr, at);
    k_by.load_weight(QK_NORM || KEYS_ARE_VALUES ? k_weight : nullptr, at);
    double frequency[ANGLES];
#pragma unroll
    for (int n = 0; n < ANGLES; n++)
        frequency[n] = ROPE && n * THREADS + tid < E / 2 ? frequencies[n * THREADS + tid] : 0;
    wait_for_previous();
    STAMP(READY, tid == 0);
    if (row >= n_rows) return;
    int sequence_row = sequence[row], position = ROPE ? positions[row] : 0, slot = OWNS_KV ? slots[row] : 0;
    if (sequence_row < 0) return;

    auto load = [&](Head& x, int task) {
        bool is_query = task < H, is_value = task >= H + J;
        Source source = is_query ? Source{q, q_stride, q_planes, q_plane_stride}
                        : is_value && !V_FROM_K ? Source{v, v_stride, v_planes, v_plane_stride}
                                                : Source{k, k_stride, k_planes, k_plane_stride};
        x.load(source, row, is_query ? task : (task - H) % J, at, task < TASKS);
    };
    Head next;
    int first = blockIdx.y * AT_ONCE, step = gridDim.y * AT_ONCE, group = tid / LANES;
    load(next, first + group);
#pragma unroll
    for (int n = 0; n < ANGLES; n++)
        if (ROPE && n * THREADS + tid < E / 2) {
            // In double: at position 100,000 a float angle is off by 0.004.
            double whole_turns = position * frequency[n] * 0.15915494309189535;
            float sine, cosine;
            sincospif((float)(2 * (whole_turns - rint(whole_turns))), &sine, &cosine);
            turns[n * THREADS + tid] = make_float2(cosine, sine);
        }
    __syncthreads();
    int offset = slot % PAGE;
    Stored* page = cache;
    if (OWNS_KV) page += (size_t)table[(size_t)sequence_row * n_table + slot / PAGE % n_table] * (BLOCKS * J * BLOCK);

#pragma unroll 1
    for (; first < TASKS; first += step) {
        int task = first + group;
        bool is_there = task < TASKS, is_query = task < H, is_value = task >= H + J;
        Head x = next;
        load(next, task + step);  // on its way meanwhile
        float square = 0, factor = is_query ? QUERY_SCALE : 1.f;
#pragma unroll
        for (int i = 0; i < 2 * TURNS; i++)
            square += x.v[i].x * x.v[i].x + x.v[i].y * x.v[i].y + x.v[i].z * x.v[i].z + x.v[i].w * x.v[i].w;
        for (int d = LANES / 2; d; d >>= 1) square += __shfl_xor_sync(~0u, square, d);
        if (is_value ? V_NORM : QK_NORM) factor *= rsqrtf(square / E + EPS);
        x.scale(factor);
#pragma unroll
        for (int i = 0; i < 2 * TURNS; i++) {
            if (!is_value && QK_NORM) x.multiply(i, is_query ? q_by.v[i] : k_by.v[i]);
            if (KEYS_ARE_VALUES && is_query && !is_rotated(Head::element(i, at))) x.multiply(i, k_by.v[i]);
        }
        if (ROPE && !is_value) turn_pairs(x, turns, at);
        if (is_query)
#pragma unroll
            for (int i = 0; i < 2 * TURNS; i++)
                if (Head::has(i / 2, at))
                    store_bf16(q_out + ((size_t)row * H + task) * E + Head::element(i, at), x.v[i]);
        if (OWNS_KV)
            keep(x, page + (is_value && !KEYS_ARE_VALUES ? J * BLOCK : 0), is_query ? 0 : (task - H) % J, offset,
                 is_value, at, is_there && !is_query);
    }
    STAMP(DONE, tid % 32 == 0);
}
