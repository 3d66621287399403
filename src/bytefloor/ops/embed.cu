// embed: rows of a packed table times a constant, one for each of gridDim.y tokens. out float32 [tokens][D], see handover.cuh;
// exact but for that one multiplication.
// The first kernel of a step, so the one that waits for the step before. Defined by the host: FORM, D, V, SCALE.
extern "C" __global__ void embed(const u8* table, const State* state, float* out AND_STAMPS) {
    STAMP(THERE, threadIdx.x == 0);
    wait_for_previous();
    STAMP(READY, threadIdx.x == 0);
    let_next_start();
    int column = blockIdx.x * blockDim.x + threadIdx.x, token = state[blockIdx.y].token;
    if (column >= D) return;
    constexpr int records = (D + FORM::COLUMNS - 1) / FORM::COLUMNS;
    const u8* record = table + ((size_t)(token / 16) * records + column / FORM::COLUMNS) * FORM::BYTES;
    // The host refuses ids outside the table; -1 follows logits that were NaN, and stays that.
    float v = token < 0 || token >= V ? __int_as_float(0x7fc00000) : FORM::value(record, token % 16, column % FORM::COLUMNS) * SCALE;
    hand_over(out + blockIdx.y * D + column, v, parity_of(state));
    STAMP(DONE, threadIdx.x % 32 == 0);
}
