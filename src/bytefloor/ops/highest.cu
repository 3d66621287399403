// highest: the n best of many values, descending, the lower id among equals.
//
// values [R][length] and the maxima of their groups of 64 [R][N / 64], both VALUE (float or double) -> best [R][n] and ids int64
// [R][n], n <= 64 and n <= N / 64; length <= N. Exact. NaN counts as the highest. A block a row: those n lie in the n groups whose
// maxima come first, maxima in the same order, as every group before another holds only lower ids; so no more than 64 n values are
// looked at.
// Defined by the host: VALUE, N, THREADS, GROUP (64), MOST (64, of n).
constexpr int GROUPS = N / GROUP, MINE = (GROUPS + THREADS - 1) / THREADS;

// Bits that are ordered as the values are: negative ones turned over, the sign of the others set.
template <typename T> struct Ordered;
template <> struct Ordered<float> {
    using Key = u32;
    static constexpr int BITS = 32;
    static __device__ __forceinline__ Key key(float v) {
        u32 bits = __float_as_uint(v);
        return isnan(v) ? ~0u : bits >> 31 ? ~bits : bits | 1u << 31;
    }
    static __device__ __forceinline__ float value(Key key) { return __uint_as_float(key >> 31 ? key & ~(1u << 31) : ~key); }
};
template <> struct Ordered<double> {
    using Key = u64;
    static constexpr int BITS = 64;
    static __device__ __forceinline__ Key key(double v) {
        u64 bits = (u64)__double_as_longlong(v);
        return isnan(v) ? ~0ull : bits >> 63 ? ~bits : bits | 1ull << 63;
    }
    static __device__ __forceinline__ double value(Key key) { return __longlong_as_double((long long)(key >> 63 ? key & ~(1ull << 63) : ~key)); }
};
using Key = Ordered<VALUE>::Key;

struct BlockSum {  // over the block, one after another; three counters, so that one barrier each will do
    int* counters;
    int turn = 0;
    __device__ __forceinline__ int of(int mine) {
        if (threadIdx.x == 0) counters[(turn + 1) % 3] = 0;
        mine = __reduce_add_sync(~0u, mine);
        if (threadIdx.x % 32 == 0) atomicAdd(counters + turn, mine);
        __syncthreads();
        int total = counters[turn];
        turn = (turn + 1) % 3;
        return total;
    }
};

// The sum over all threads before this one.
__device__ __forceinline__ int sum_before(int mine, int* of_warps) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, sum = mine;
    for (int d = 1; d < 32; d *= 2) {
        int other = __shfl_up_sync(~0u, sum, d);
        if (lane >= d) sum += other;
    }
    if (lane == 31) of_warps[warp] = sum;
    __syncthreads();
    for (int w = 0; w < warp; w++) sum += of_warps[w];
    return sum - mine;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    highest(const VALUE* values, const VALUE* maxima, VALUE* best, long long* ids, int n, int length) {
    extern __shared__ __align__(16) u8 shared[];
    Key* keys = (Key*)shared;  // [MOST * GROUP] of those that may be among the best
    int *key_ids = (int*)(keys + MOST * GROUP), *groups = key_ids + MOST * GROUP;
    __shared__ int counters[3], of_warps[32], n_groups, n_found;
    int tid = threadIdx.x;
    values += (size_t)blockIdx.x * length, maxima += (size_t)blockIdx.x * GROUPS, best += blockIdx.x * n, ids += blockIdx.x * n;
    if (tid == 0) counters[0] = 0, n_groups = 0, n_found = 0;
    wait_for_previous();
    let_next_start();
    Key mine[MINE];
#pragma unroll
    for (int m = 0; m < MINE; m++) mine[m] = tid * MINE + m < GROUPS ? Ordered<VALUE>::key(maxima[tid * MINE + m]) : 0;
    __syncthreads();
    BlockSum sums{counters};
    // The n-th best maximum, bit by bit. No value's key is 0, so places without a group never count.
    Key border = 0;
    for (int bit = Ordered<VALUE>::BITS - 1; bit >= 0; bit--) {
        Key higher = border | (Key)1 << bit;
        int count = 0;
#pragma unroll
        for (int m = 0; m < MINE; m++) count += mine[m] >= higher;
        if (sums.of(count) >= n) border = higher;
    }
    int above = 0, equal = 0;
#pragma unroll
    for (int m = 0; m < MINE; m++) above += mine[m] > border, equal += mine[m] == border;
    int n_equal = n - sums.of(above), place = sum_before(equal, of_warps);
#pragma unroll
    for (int m = 0; m < MINE; m++)
        if (mine[m] > border || (mine[m] == border && place++ < n_equal)) groups[atomicAdd(&n_groups, 1)] = tid * MINE + m;
    __syncthreads();
    for (int i = tid; i < n * GROUP; i += THREADS) {
        int id = groups[i / GROUP] * GROUP + i % GROUP;
        if (id >= length) continue;
        Key key = Ordered<VALUE>::key(values[id] + (VALUE)0);  // -0 is 0
        if (key < border) continue;
        int at = atomicAdd(&n_found, 1);
        keys[at] = key, key_ids[at] = id;
    }
    __syncthreads();
    for (int i = tid; i < n_found; i += THREADS) {
        int rank = 0;
        for (int other = 0; other < n_found; other++)
            rank += keys[other] > keys[i] || (keys[other] == keys[i] && key_ids[other] < key_ids[i]);
        if (rank < n) best[rank] = Ordered<VALUE>::value(keys[i]), ids[rank] = key_ids[i];
    }
}
