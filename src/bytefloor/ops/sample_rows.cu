// sample_rows: a token for each of several rows of logits, from its best few, by the stages of docs/sampling.md that need no more.
//
// best float32 [R][MOST], descending, and their ids int64 [R][MOST]; parts as row_mass leaves them; banned u8 [V]; asked, 64-bit words
// [R][12]: seed, position, top_k (1 .. MOST), flags (GREEDY, TEMPERATURE_FIRST), and as float64 temperature, top_p, log(min_p), which is
// -inf for none, xtc_probability, xtc_threshold; three are free. -> tokens int64 [R], and records float64 [R][5 + 2 TOPS]: token, sum of
// exp(logit - shift) over the row, shift, the token's logit, the mass it was drawn from, and the TOPS best ids and their logits.
// The mass is NaN where those few do not tell: so many are banned that fewer than top_k are left.
// Float64, sums in the host's order; exp may differ from the host's in the last bit.
// Defined by the host: BLOCKS (of row_mass), MOST (64 at most), TOPS. Grid: 1, R. 64 threads, one for each candidate.
constexpr int WORDS = 12, RECORD = 5 + 2 * TOPS, GREEDY = 1, TEMPERATURE_FIRST = 2;

// Philox 4x64, 10 rounds: key (seed, 0), counter (1, position, 0, 0).
__device__ __forceinline__ void random_words(u64 seed, u64 position, u64& first, u64& second) {
    constexpr u64 M0 = 0xD2E7470EE14C6C93ull, M1 = 0xCA5A826395121157ull, W0 = 0x9E3779B97F4A7C15ull, W1 = 0xBB67AE8584CAA73Bull;
    u64 c0 = 1, c1 = position, c2 = 0, c3 = 0, k0 = seed, k1 = 0;
#pragma unroll 1
    for (int round = 0; round < 10; round++) {
        u64 high0 = __umul64hi(M0, c0), low0 = M0 * c0, high1 = __umul64hi(M1, c2), low1 = M1 * c2;
        c0 = high1 ^ c1 ^ k0, c1 = low1, c2 = high0 ^ c3 ^ k1, c3 = low0;
        k0 += W0, k1 += W1;
    }
    first = c0, second = c1;
}
__device__ __forceinline__ double uniform(u64 word) { return (double)(word >> 11) * 0x1p-53; }

extern "C" __global__ void __launch_bounds__(64)
    sample_rows(const float* best, const long long* ids, const double* parts, const u8* banned, const u64* asked, long long* tokens,
                double* records) {
    __shared__ double values[MOST], running[MOST];
    __shared__ int kept_ids[MOST], of_warps[2], chosen_id;
    __shared__ double chosen_logit, weights[BLOCKS];
    int i = threadIdx.x, row = blockIdx.y;
    wait_for_previous();
    let_next_start();
    best += row * MOST, ids += row * MOST, parts += (size_t)row * BLOCKS * 2, asked += row * WORDS, records += (size_t)row * RECORD;
    const double* numbers = (const double*)asked;
    double temperature = numbers[4], top_p = numbers[5], log_min_p = numbers[6], xtc = numbers[7], threshold = numbers[8];
    int top_k = (int)asked[2], flags = (int)asked[3];
    const double lowest = -__longlong_as_double(0x7ff0000000000000ll), nan = __longlong_as_double(0x7ff8000000000000ll);
    // Those that are not banned, in their order.
    int own_id = i < MOST ? (int)ids[i] : 0;
    float own = i < MOST ? best[i] : 0;
    bool is_kept = i < MOST && !banned[own_id];
    u32 kept = __ballot_sync(~0u, is_kept);
    if (i % 32 == 0) of_warps[i / 32] = __popc(kept);
    __syncthreads();
    if (is_kept) {
        int place = (i >= 32 ? of_warps[0] : 0) + __popc(kept & ((1u << i % 32) - 1));
        values[place] = own, kept_ids[place] = own_id;
    }
    int n_kept = of_warps[0] + of_warps[1];
    __syncthreads();
    bool is_told = n_kept >= top_k;
    int n = min(top_k, n_kept);
    auto sum_up = [&](double of) {  // running[i] = the sum of exp(values - of) up to there
        if (i < n) running[i] = exp(values[i] - of);
        __syncthreads();
        if (i == 0)
            for (int k = 1; k < n; k++) running[k] += running[k - 1];
        __syncthreads();
    };
    auto heat = [&]() {
        if (i < n) values[i] /= temperature;
        __syncthreads();
    };
    u64 word, coin;
    random_words(asked[0], asked[1], word, coin);
    int chosen = 0;
    double mass = n ? values[0] : nan;
    if (n && !(flags & GREEDY)) {
        if (flags & TEMPERATURE_FIRST) heat();
        if (top_p < 1) {
            sum_up(values[0]);
            if (i > 0 && i < n && running[i - 1] >= running[n - 1] * top_p) values[i] = lowest;
            __syncthreads();
        }
        double first = values[0];
        __syncthreads();
        if (i < n && values[i] < first + log_min_p) values[i] = lowest;
        __syncthreads();
        if (xtc > 0 && uniform(coin) < xtc) {
            sum_up(values[0]);
            double log_total = log(running[n - 1]), p = i < n ? exp((values[i] - values[0]) - log_total) : 0;
            __syncthreads();
            bool is_top = p >= threshold && p > 0;
            running[i] = is_top ? p : 2;
            __syncthreads();
            // The least probable stays, the lowest id among equals.
            int stays = 0;
            for (int k = 1; k < n; k++)
                if (running[k] < running[stays] || (running[k] == running[stays] && kept_ids[k] < kept_ids[stays])) stays = k;
            __syncthreads();
            if (is_top && i != stays) values[i] = lowest;
            __syncthreads();
        }
        if (!(flags & TEMPERATURE_FIRST)) heat();
        double top = values[0];
        if (xtc > 0)
            for (int k = 1; k < n; k++) top = fmax(top, values[k]);
        sum_up(top);
        mass = running[n - 1];
        double wanted = mass * fmax(uniform(word), 1e-300);
        for (int k = 0; k < n - 1; k++) chosen += running[k] < wanted;
    }
    if (i < TOPS) records[5 + i] = own_id, records[5 + TOPS + i] = own;
    double shift = best[0];
    if (i == 0) chosen_id = n ? kept_ids[chosen] : 0, chosen_logit = nan;
    for (int b = i; b < BLOCKS; b += 64) weights[b] = parts[2 * b] == lowest ? 0.0 : parts[2 * b + 1] * exp(parts[2 * b] - shift);
    __syncthreads();
    if (i < MOST && own_id == chosen_id) chosen_logit = own;
    __syncthreads();
    if (i) return;
    double total = 0;
    for (int b = 0; b < BLOCKS; b++) total += weights[b];
    tokens[row] = chosen_id;
    records[0] = chosen_id, records[1] = total, records[2] = shift, records[3] = chosen_logit, records[4] = is_told ? mass : nan;
}
