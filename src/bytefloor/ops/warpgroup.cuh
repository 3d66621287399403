// Products of a warpgroup: four warps, 64 rows, 16 columns of K an instruction. Operands in shared memory have 128-byte rows of 64
// 16-bit floats with their 16-byte chunks exchanged (chunk c of row r stands in the place of chunk c ^ (r % 8)), eight rows an atom of
// 1024 bytes, and begin on 1024 bytes.
//
// On sm_90a these are wgmma; elsewhere mma.sync on what ldmatrix fetches, with the same fragments in the same lanes: each warp
// has 16 of the rows, and c[i] is what multiply_halves has of columns 8 i .. 8 i + 7. wgmma runs beside what follows: neither
// the fragments nor the sums may be touched before `wait_products`, and `settle` keeps the compiler from reading them earlier.
#pragma once

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define HAS_WARPGROUPS 1
#else
#define HAS_WARPGROUPS 0
#endif

__device__ __forceinline__ void ldmatrix4(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}
__device__ __forceinline__ void ldmatrix4_transposed(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}
// Where chunk c of row r stands in a tile.
__device__ __forceinline__ u32 swizzled(int r, int c) { return (r >> 3) * 1024 + (r & 7) * 128 + ((c ^ (r & 7)) << 4); }

// Warpgroups that need few registers leave some to those that need many: both are called by whole warpgroups.
template <int N> __device__ __forceinline__ void leave_registers() {
#if HAS_WARPGROUPS
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
#endif
}
template <int N> __device__ __forceinline__ void take_registers() {
#if HAS_WARPGROUPS
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
#endif
}

// Before products read registers that were written since the last ones.
__device__ __forceinline__ void begin_products() {
#if HAS_WARPGROUPS
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void commit_products() {
#if HAS_WARPGROUPS
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}
// Until no more than the last LEFT groups are under way.
template <int LEFT> __device__ __forceinline__ void wait_products() {
#if HAS_WARPGROUPS
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
#endif
}
template <int TILES> __device__ __forceinline__ void settle(float (&c)[TILES][4]) {
#if HAS_WARPGROUPS
#pragma unroll
    for (int i = 0; i < TILES; i++) asm volatile("" : "+f"(c[i][0]), "+f"(c[i][1]), "+f"(c[i][2]), "+f"(c[i][3])::"memory");
#endif
}
// What threads wrote to shared memory, before wgmma reads it.
__device__ __forceinline__ void show_to_products() {
#if HAS_WARPGROUPS
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

#if HAS_WARPGROUPS
// Rows of K: 8 rows further is 1024 bytes further. `leading` counts only where rows are columns of K: bytes from 64 columns to the next.
// 16 bytes further is 1 more.
__device__ __forceinline__ u64 operand_at(u32 address, u32 leading) {
    u64 operand;
    asm("mov.b64 %0, {%1, %2};" : "=l"(operand) : "r"((leading >> 4) << 16 | address >> 4), "r"(1u << 30 | 1024 >> 4));
    return operand;
}
#define SUMS8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define SUMS16 SUMS8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define SUMS32 SUMS16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define SUMS64 SUMS32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, " \
    "%50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define SUMS128 SUMS64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, " \
    "%82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, " \
    "%100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, " \
    "%115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define PLACE4(i) "+f"(c[i][0]), "+f"(c[i][1]), "+f"(c[i][2]), "+f"(c[i][3])
#define PLACES8 PLACE4(0), PLACE4(1)
#define PLACES16 PLACES8, PLACE4(2), PLACE4(3)
#define PLACES32 PLACES16, PLACE4(4), PLACE4(5), PLACE4(6), PLACE4(7)
#define PLACES64 PLACES32, PLACE4(8), PLACE4(9), PLACE4(10), PLACE4(11), PLACE4(12), PLACE4(13), PLACE4(14), PLACE4(15)
#define PLACES128 \
    PLACES64, PLACE4(16), PLACE4(17), PLACE4(18), PLACE4(19), PLACE4(20), PLACE4(21), PLACE4(22), PLACE4(23), PLACE4(24), PLACE4(25), \
        PLACE4(26), PLACE4(27), PLACE4(28), PLACE4(29), PLACE4(30), PLACE4(31)
#define WGMMA(N, SUMS, A, B, ADDS, TRANSPOSED) \
    "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" SUMS "}, " A ", " B ", " ADDS ", 1, 1" TRANSPOSED ";"
#define FROM_REGISTERS(N, SUMS, PLACES, A, B) \
    if (IS_TRANSPOSED) \
        asm volatile(WGMMA(N, SUMS, A, B, "1", ", 1") : PLACES : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)); \
    else if (is_new) \
        asm volatile(WGMMA(N, SUMS, A, B, "0", ", 0") : PLACES : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)); \
    else \
        asm volatile(WGMMA(N, SUMS, A, B, "1", ", 0") : PLACES : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
#define FROM_SHARED(N, SUMS, PLACES, A, B) asm volatile(WGMMA(N, SUMS, A, B, "1", ", 0, 0") : PLACES : "l"(a), "l"(b));

template <int N, bool IS_TRANSPOSED>
__device__ __forceinline__ void wgmma(float (&c)[N / 8][4], const u32* a, u64 b, bool is_new = false) {
    if constexpr (N == 16) { FROM_REGISTERS(16, SUMS8, PLACES8, "{%8, %9, %10, %11}", "%12") }
    if constexpr (N == 32) { FROM_REGISTERS(32, SUMS16, PLACES16, "{%16, %17, %18, %19}", "%20") }
    if constexpr (N == 64) { FROM_REGISTERS(64, SUMS32, PLACES32, "{%32, %33, %34, %35}", "%36") }
    if constexpr (N == 128) { FROM_REGISTERS(128, SUMS64, PLACES64, "{%64, %65, %66, %67}", "%68") }
    if constexpr (N == 256) { FROM_REGISTERS(256, SUMS128, PLACES128, "{%128, %129, %130, %131}", "%132") }
}
template <int N> __device__ __forceinline__ void wgmma(float (&c)[N / 8][4], u64 a, u64 b) {
    if constexpr (N == 16) { FROM_SHARED(16, SUMS8, PLACES8, "%8", "%9") }
    if constexpr (N == 32) { FROM_SHARED(32, SUMS16, PLACES16, "%16", "%17") }
    if constexpr (N == 64) { FROM_SHARED(64, SUMS32, PLACES32, "%32", "%33") }
    if constexpr (N == 128) { FROM_SHARED(128, SUMS64, PLACES64, "%64", "%65") }
    if constexpr (N == 256) { FROM_SHARED(256, SUMS128, PLACES128, "%128", "%129") }
}
#endif

// c[64][N] += a[64][16] b[N][16]^T: fragments of this warp's 16 rows, and columns 16 step .. 16 step + 15 of one of the tiles of N rows that
// begin at b. is_new, which is to be known before a kernel runs: c = that, whatever it was.
template <int N>
__device__ __forceinline__ void multiply_fragments(float (&c)[N / 8][4], const u32* a, const u8* b, int step, int tile = 0, bool is_new = false) {
#if HAS_WARPGROUPS
    wgmma<N, false>(c, a, operand_at(shared_address(b), 16) + (tile * N * 8 + step * 2), is_new);
#else
    int lane = threadIdx.x & 31;
#pragma unroll
    for (int i = 0; i < N / 8; i += 2) {
        if (is_new) c[i][0] = c[i][1] = c[i][2] = c[i][3] = c[i + 1][0] = c[i + 1][1] = c[i + 1][2] = c[i + 1][3] = 0;
        u32 r[4];
        ldmatrix4(r, shared_address(b) + tile * N * 128 + swizzled(i * 8 + (lane >> 4) * 8 + (lane & 7), 2 * step + (lane >> 3 & 1)));
        multiply_halves<true>(c[i], a[0], a[1], a[2], a[3], r[0], r[1]);
        multiply_halves<true>(c[i + 1], a[0], a[1], a[2], a[3], r[2], r[3]);
    }
#endif
}

// c[64][N] += a[64][16] b[16][N]: b's rows are positions 16 step .. 16 step + 15 of tiles of 64 columns, `leading` bytes apart.
template <int N>
__device__ __forceinline__ void multiply_values(float (&c)[N / 8][4], const u32* a, const u8* b, int step, u32 leading) {
#if HAS_WARPGROUPS
    wgmma<N, true>(c, a, operand_at(shared_address(b), leading) + step * 128);
#else
    int lane = threadIdx.x & 31;
#pragma unroll
    for (int i = 0; i < N / 8; i += 2) {
        int chunk = i + (lane >> 4);
        u32 r[4];
        ldmatrix4_transposed(r, shared_address(b) + chunk / 8 * leading + swizzled(step * 16 + (lane & 15), chunk % 8));
        multiply_halves<true>(c[i], a[0], a[1], a[2], a[3], r[0], r[1]);
        multiply_halves<true>(c[i + 1], a[0], a[1], a[2], a[3], r[2], r[3]);
    }
#endif
}
