// A grid on a CPU, block after block: the threads of a block take turns and meet at every shuffle and barrier. Runs the
// very text of a kernel whose threads all come to the same shuffles and barriers, in the same order; where they do not,
// run says so. It sees no race: between two meetings threads run one after another.
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <vector>

using std::max;
using std::min;
typedef unsigned char u8;
typedef unsigned int u32;
#define __CUDA_ARCH__ 900
#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static
#define __align__(n) __attribute__((aligned(n)))
#define asm(...)  // of functions that no kernel here calls
struct uint2 { u32 x, y; };
struct float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
inline uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
template <typename To, typename From> To as(From from) {
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}
inline u32 __float_as_uint(float v) { return as<u32>(v); }
inline float __uint_as_float(u32 v) { return as<float>(v); }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline int __float2int_rn(float v) { return (int)nearbyintf(v); }
inline float rsqrtf(float v) { return 1.f / sqrtf(v); }
inline float __fdividef(float a, float b) { return a / b; }
#define __expf expf  // a name of the C library
inline void sincospif(float v, float* sine, float* cosine) { *sine = sin(M_PI * v), *cosine = cos(M_PI * v); }
template <typename T> T __ldg(const T* p) { return *p; }
template <typename T> T __ldcs(const T* p) { return *p; }
struct __nv_bfloat16 { uint16_t bits; };
inline __nv_bfloat16 __float2bfloat16(float v) {
    u32 bits = as<u32>(v);
    return {(uint16_t)(v != v ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}
inline float __bfloat162float(__nv_bfloat16 v) { return as<float>((u32)v.bits << 16); }
template <bool IS_BF16> u32 pack_halves(float a, float b) {
    static_assert(IS_BF16, "what row tiles hold");
    return __float2bfloat16(a).bits | (u32)__float2bfloat16(b).bits << 16;
}
inline void let_next_start() {}
inline void wait_for_previous() {}

constexpr int MOST_THREADS = 1024, STACK_BYTES = 1 << 16, ENDED = -1, BARRIER = 0;
struct Place { int x = 0, y = 0; } threadIdx, blockIdx, gridDim;
alignas(128) u8 shared[228 * 1024];

namespace block {
ucontext_t threads[MOST_THREADS], outside;
int meeting[MOST_THREADS], current;  // where each thread stands
u32 left[MOST_THREADS];
void meet(int where) {
    meeting[current] = where;
    swapcontext(&threads[current], &outside);
}
}  // namespace block

inline void __syncthreads() { block::meet(BARRIER); }
template <typename T> T __shfl_xor_sync(u32, T v, int distance) {
    int mine = block::current;
    block::left[mine] = as<u32>(v);
    block::meet(distance);
    T found = as<T>(block::left[mine ^ distance]);
    block::meet(distance);  // nobody leaves a new value before all have read these
    return found;
}
inline u32 __reduce_max_sync(u32, u32) { abort(); }

#include "kernel.inc"  // constants, the kernel's text, and call_kernel(void** arguments)

namespace block {
void** arguments;
void enter() {
    call_kernel(arguments);
    meet(ENDED);
}
// 0; or 1 where threads of a block stood at different meetings.
extern "C" int run(int n_columns, int n_rows, int n_threads, void** given) {
    static std::vector<u8> stacks(MOST_THREADS * STACK_BYTES);
    arguments = given, gridDim.x = n_columns, gridDim.y = n_rows;
    for (int i = 0; i < n_columns * n_rows; i++) {
        blockIdx.x = i % n_columns, blockIdx.y = i / n_columns;
        memset(shared, 0xff, sizeof shared);
        for (int t = 0; t < n_threads; t++) {
            getcontext(&threads[t]);
            threads[t].uc_stack.ss_sp = &stacks[t * STACK_BYTES], threads[t].uc_stack.ss_size = STACK_BYTES;
            makecontext(&threads[t], enter, 0);
        }
        do {
            for (int t = 0; t < n_threads; t++) {
                current = threadIdx.x = t;
                swapcontext(&outside, &threads[t]);
                if (meeting[t] != meeting[0]) return 1;
            }
        } while (meeting[0] != ENDED);
    }
    return 0;
}
}  // namespace block
