// A warp on a CPU: 32 lanes take turns, and meet where a tensor core instruction needs all of them. Runs the very text of
// ops/stream.cuh, with the instructions of ops/tensor_core.cuh written out.
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#define __device__
#define __forceinline__ inline
struct uint2 { unsigned x, y; };
struct uint4 { unsigned x, y, z, w; };
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
struct __half { uint16_t bits; };
struct __half2 { __half x, y; };
inline float __half2float(__half h) {
    _Float16 v;
    memcpy(&v, &h, 2);
    return (float)v;
}
inline float2 __half22float2(__half2 h) { return {__half2float(h.x), __half2float(h.y)}; }
template <typename To, typename From> To as(From from) {
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}
inline float __uint_as_float(unsigned v) { return as<float>(v); }
inline unsigned __float_as_uint(float v) { return as<unsigned>(v); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned select) {
    unsigned long long both = (unsigned long long)y << 32 | x;
    unsigned out = 0;
    for (int i = 0; i < 4; i++) {
        // Three bits of each four: the compiler masks the fourth away, which the instruction itself would take for a sign.
        out |= (unsigned)(both >> 8 * (select >> 4 * i & 7) & 255) << 8 * i;
    }
    return out;
}

using std::fma;
typedef unsigned int u32;

namespace warp {
ucontext_t lanes[32], outside;
int current;
unsigned a[32][4], b[32][2];
float by_float[32][4];
bool is_over[32];

void meet() {  // every lane has left its operands when this returns
    swapcontext(&lanes[current], &outside);
}
float half(unsigned word, int which, bool is_bf16) {
    unsigned bits = word >> 16 * which & 0xffff;
    return is_bf16 ? as<float>(bits << 16) : __half2float(__half{(uint16_t)bits});
}
}  // namespace warp

inline void leave(u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    using namespace warp;
    u32 as[4] = {a0, a1, a2, a3};
    memcpy(a[current], as, 16), b[current][0] = b0, b[current][1] = b1;
    meet();
}

inline u32 permute_signed(u32 a, u32 b, u32 select) {
    unsigned long long both = (unsigned long long)b << 32 | a;
    u32 out = 0;
    for (int i = 0; i < 4; i++) {
        u32 byte = both >> 8 * (select >> 4 * i & 7) & 255;
        out |= (select >> 4 * i & 8 ? (byte & 128 ? 255 : 0) : byte) << 8 * i;
    }
    return out;
}

inline void multiply_bytes(int& c0, int& c1, int& c2, int& c3, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    using namespace warp;
    leave(a0, a1, a2, a3, b0, b1);
    int* sums[4] = {&c0, &c1, &c2, &c3};
    int g = current >> 2, t = current & 3;
    for (int i = 0; i < 4; i++) {
        int column = 2 * t + (i & 1), is_lower = i >> 1;
        for (int k = 0; k < 32; k++) {
            int from = k % 16 / 4, half = k / 16, byte = 8 * (k % 4);
            *sums[i] += (int8_t)(a[4 * g + from][2 * half + is_lower] >> byte) * (int8_t)(b[4 * column + from][half] >> byte);
        }
    }
    meet();  // nobody leaves new operands before all have read these
}

template <bool IS_BF16> inline void multiply_halves(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    using namespace warp;
    leave(a0, a1, a2, a3, b0, b1);
    int g = current >> 2, t = current & 3;
    for (int i = 0; i < 4; i++) {
        int column = 2 * t + (i & 1), is_lower = i >> 1;
        for (int k = 0; k < 16; k++) {
            int from = k % 8 / 2, half = k / 8;
            c[i] += warp::half(a[4 * g + from][2 * half + is_lower], k % 2, IS_BF16) * warp::half(b[4 * column + from][half], k % 2, IS_BF16);
        }
    }
    meet();
}

template <bool IS_BF16> inline u32 pack_halves(float x, float y) {
    auto one = [](float v) -> u32 {
        if (!IS_BF16) return as<uint16_t>((_Float16)v);
        u32 bits = as<u32>(v);
        return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    };
    return one(x) | one(y) << 16;
}

// Products of two bf16 numbers are exact in double, and the sum is rounded far below where bf16 is.
inline u32 fma_pairs(u32 a, u32 b, u32 c) {
    u32 out = 0;
    for (int i = 0; i < 2; i++) {
        double v = (double)warp::half(a, i, true) * warp::half(b, i, true) + warp::half(c, i, true);
        int last = v == 0 ? 0 : std::max(std::ilogb(v) - 7, -133);  // the exponent of the last bit that is kept
        out |= as<u32>((float)std::ldexp(std::nearbyint(std::ldexp(v, -last)), last)) >> 16 << 16 * i;
    }
    return out;
}

inline float reciprocal(float v) { return 1 / v; }

inline u32 of_four(u32 word, int t) {
    using namespace warp;
    a[current][0] = word;
    meet();
    u32 out = a[(current & ~3) + t][0];
    meet();
    return out;
}

inline u32 half_twice(u32 word, int which) { return (word >> 16 * which & 0xffff) * 0x10001; }

inline u32 e4m3_as_halves(u32 codes, int first) {
    u32 out = 0;
    for (int i = 0; i < 2; i++) {
        u32 code = codes >> 8 * (first + i) & 255, exponent = code >> 3 & 15, mantissa = code & 7;
        float v = exponent ? ldexpf(8 + mantissa, (int)exponent - 10) : ldexpf(mantissa, -9);
        out |= (u32)as<uint16_t>((_Float16)(code & 128 ? -v : v)) << 16 * i;
    }
    return out;
}

#include "stream_text.cuh"

struct Task {
    const u8* record;
    Activations x;
    int k;
    float* out;
};
static Task task;
template <typename F> void lane_main() {
    float2 share = F::dot(task.record, Lane(warp::current), task.x, task.k);
    task.out[2 * warp::current] = share.x, task.out[2 * warp::current + 1] = share.y;
    warp::is_over[warp::current] = true;
}

// Two quads of tokens: out [lane][quad][row g, row g + 8].
template <typename F> void tokens_main() {
    float2 totals[2];
    dot_tokens<F, 2>(task.record, warp::current, task.x.codes, task.x.scales, task.k, totals);
    for (int q = 0; q < 2; q++) task.out[4 * warp::current + 2 * q] = totals[q].x, task.out[4 * warp::current + 2 * q + 1] = totals[q].y;
    warp::is_over[warp::current] = true;
}

template <typename F> int run(void (*work)(), const u8* record, const u8* codes, const float* scales, int k, float* out) {
    static char stacks[32][65536];
    task = {record, {codes, (const float4*)scales}, k, out};
    for (int i = 0; i < 32; i++) {
        getcontext(&warp::lanes[i]);
        warp::lanes[i].uc_stack.ss_sp = stacks[i], warp::lanes[i].uc_stack.ss_size = sizeof stacks[i];
        warp::lanes[i].uc_link = &warp::outside, warp::is_over[i] = false;
        makecontext(&warp::lanes[i], work, 0);
    }
    for (bool is_any = true; is_any;) {
        is_any = false;
        for (warp::current = 0; warp::current < 32; warp::current++)
            if (!warp::is_over[warp::current]) swapcontext(&warp::outside, &warp::lanes[warp::current]), is_any = true;
    }
    return F::BYTES;
}

template <typename F> int values(const u8* record, float* out) {
    for (int row = 0; row < 16; row++)
        for (int column = 0; column < F::COLUMNS; column++) out[row * F::COLUMNS + column] = F::value(record, row, column);
    return F::COLUMNS;
}

// out [step][group][lane][8]. No lane needs another, so that each may come in turn.
template <typename F> void fragments(const u8* record, u32* out) {
    for (int i = 0; i < F::COLUMNS / 32 * 32; i++) {
        u32 a[8];
        F::fragments(record, Lane(i % 32), i / 64, i / 32 % 2, a);
        memcpy(out + 8 * i, a, sizeof a);
    }
}

// units [lane][2], multiples [step][group][lane][8]; lanes hand each other what they know.
struct MultiplesTask {
    const u8* record;
    float* units;
    u32* out;
};
static MultiplesTask multiples_task;
template <typename F> void multiples_main() {
    if constexpr (Multiples<F>::EXIST) {
        Lane at(warp::current);
        const auto& task = multiples_task;
        Multiples<F> weights(task.record, at);
        memcpy(task.units + 2 * warp::current, weights.units, sizeof weights.units);
        for (int i = 0; i < F::COLUMNS / 32; i++) {
            u32 a[8];
            weights.fragments(task.record, at, i / 2, i % 2, a);
            memcpy(task.out + (32 * i + warp::current) * 8, a, sizeof a);
        }
    }
    warp::is_over[warp::current] = true;
}
template <typename F> int multiples(const u8* record, float* units, u32* out) {
    multiples_task = {record, units, out};
    run<F>(multiples_main<F>, record, nullptr, nullptr, 0, nullptr);
    return Multiples<F>::EXIST;
}

#define FORM(name, ...)                                                                                                   \
    extern "C" int dot_##name(const u8* r, const u8* c, const float* s, int k, float* o) {                \
        return run<__VA_ARGS__>(lane_main<__VA_ARGS__>, r, c, s, k, o);                                                     \
    }                                                                                                                    \
    extern "C" int tokens_##name(const u8* r, const u8* c, const float* s, int k, float* o) {                             \
        return run<__VA_ARGS__>(tokens_main<__VA_ARGS__>, r, c, s, k, o);                                                   \
    }                                                                                                                    \
    extern "C" void fragments_##name(const u8* r, u32* o) { fragments<__VA_ARGS__>(r, o); }                               \
    extern "C" int multiples_##name(const u8* r, float* u, u32* o) { return multiples<__VA_ARGS__>(r, u, o); }              \
    extern "C" int values_##name(const u8* r, float* o) { return values<__VA_ARGS__>(r, o); }
#include "forms.inc"
