// per_layer: the inputs that every layer of an E model gets of its own, all at once, of gridDim.y tokens.
//
// out[l][p] = (rms_norm(projected[l] * PROJECTED_SCALE)[p] * weight[p] + own[l P + p] * OWN_SCALE) * SCALE, own: the token's row of
// a packed table. projected float32 [PLANES][L P] and out float32 [L P], see handover.cuh. Float32 throughout; sums of squares by
// 32 lanes and a tree. Moves one row of the table, over the bus where that lies in pinned host memory; a warp a layer.
// Defined by the host: FORM, L, P, V, PLANES, EPS, PROJECTED_SCALE, OWN_SCALE, SCALE.
constexpr int PER_LANE = (P + 31) / 32;

extern "C" __global__ void per_layer(const float* projected, const float* weight, const u8* table, const State* state, float* out AND_STAMPS) {
    STAMP(THERE, threadIdx.x == 0);
    let_next_start();
    int warps = blockDim.x / 32, layer = blockIdx.x * warps + threadIdx.x / 32, lane = threadIdx.x % 32, token = state[blockIdx.y].token;
    u32 parity = parity_of(state);
    projected += blockIdx.y * (PLANES * L * P), out += blockIdx.y * (L * P);
    if (layer < L) {
        constexpr int records = (L * P + FORM::COLUMNS - 1) / FORM::COLUMNS;
        float own[PER_LANE], v[PER_LANE], by[PER_LANE];
#pragma unroll
        for (int m = 0; m < PER_LANE; m++) {
            int p = m * 32 + lane, column = layer * P + p;
            own[m] = 0, by[m] = 0;
            if (p >= P) continue;
            by[m] = weight[p];
            const u8* record = table + ((size_t)(token / 16) * records + column / FORM::COLUMNS) * FORM::BYTES;
            own[m] = token < 0 || token >= V ? __int_as_float(0x7fc00000) : FORM::value(record, token % 16, column % FORM::COLUMNS) * OWN_SCALE;
        }
        float square = 0;
#pragma unroll
        for (int m = 0; m < PER_LANE; m++) {
            int p = m * 32 + lane;
            v[m] = 0;
            if (p < P)
                for (int plane = 0; plane < PLANES; plane++) {
                    const float* at = projected + plane * (L * P) + layer * P + p;
                    await(at, parity);
                    v[m] += unstamped(peek(at));
                }
            v[m] *= PROJECTED_SCALE;
            square = fmaf(v[m], v[m], square);
        }
        STAMP(READY, threadIdx.x == 0);
        for (int d = 16; d; d >>= 1) square += __shfl_xor_sync(~0u, square, d);
        float inverse = rsqrtf(square / P + EPS);
#pragma unroll
        for (int m = 0; m < PER_LANE; m++)
            if (m * 32 + lane < P) hand_over(out + layer * P + m * 32 + lane, (v[m] * inverse * by[m] + own[m]) * SCALE, parity);
    }
    STAMP(DONE, lane == 0);
    wait_for_previous();
}
