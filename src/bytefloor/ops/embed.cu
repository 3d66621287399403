// embed: one row of a packed table times a constant. out float32 [D]; exact but for that one multiplication.
// Defined by the host: FORM, D, V, SCALE.
struct State { int token, position; };

extern "C" __global__ void embed(const u8* table, const State* state, float* out) {
    wait_for_previous();
    let_next_start();
    int column = blockIdx.x * blockDim.x + threadIdx.x, token = state->token;
    if (column >= D || token < 0 || token >= V) return;
    constexpr int records = D / FORM::COLUMNS;
    const u8* record = table + ((size_t)(token / 16) * records + column / FORM::COLUMNS) * FORM::BYTES;
    out[column] = FORM::value(record, token % 16, column % FORM::COLUMNS) * SCALE;
}
