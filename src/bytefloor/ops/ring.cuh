// A ring in shared memory that one warp fills and the others empty, and how kernels of a chain overlap.
//
// From sm_90 on a slot is one bulk copy by one thread, and kernels are let in while the one before still runs. Older chips,
// and BULK 0 where a newer one is to run what they run, copy by the lanes of the warp, and a kernel begins when the last has ended.
#pragma once

#ifndef BULK
#define BULK (__CUDA_ARCH__ >= 900)
#endif

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void barrier_init(u64* b, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(b)), "r"(count));
}
// After barriers were initialised, before a block is synchronised.
__device__ __forceinline__ void barriers_are_set() {
#if BULK
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}
__device__ __forceinline__ void barrier_arrive(u64* b) {
#if BULK
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(b)) : "memory");
#else
    asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared::cta.b64 state, [%0];\n}" ::"r"(shared_address(b)) : "memory");
#endif
}
// A waiter must never be more than one phase behind: a barrier knows one phase from the next only.
__device__ __forceinline__ void barrier_wait(u64* b, u32 parity) {
#if BULK
    asm volatile(
        "{\n.reg .pred done;\nAGAIN: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra AGAIN;\n}" ::"r"(
            shared_address(b)),
        "r"(parity)
        : "memory");
#else
    asm volatile(
        "{\n.reg .pred done;\nAGAIN: mbarrier.test_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra AGAIN;\n}" ::"r"(
            shared_address(b)),
        "r"(parity)
        : "memory");
#endif
}

__device__ __forceinline__ void copy_async(void* to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");
}

#if BULK
constexpr int FILLERS = 1, FILL_ARRIVALS = 1;  // lanes that fill; arrivals that a slot takes beside its bytes
__device__ __forceinline__ void barrier_expect(u64* b, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(b)), "r"(bytes) : "memory");
}
// Weights are read once a token: they are the first to be evicted from L2.
__device__ __forceinline__ void bulk_copy(void* to, const void* from, u32 bytes, u64* b) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(
            shared_address(to)),
        "l"(from), "r"(bytes), "r"(shared_address(b)), "l"(0x12F0000000000000ull)
        : "memory");
}
__device__ __forceinline__ void fill_slot(void* to, const void* from, u32 bytes, u64* full, int lane) {
    barrier_expect(full, bytes);
    bulk_copy(to, from, bytes, full);
}
#else
constexpr int FILLERS = 32, FILL_ARRIVALS = 33;  // every lane's copies, and what the first lane wrote beside them
__device__ __forceinline__ void fill_slot(void* to, const void* from, u32 bytes, u64* full, int lane) {
    for (u32 i = lane * 16; i < bytes; i += 512) copy_async((u8*)to + i, (const u8*)from + i);
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(full)) : "memory");
    if (lane == 0) barrier_arrive(full);
}
#endif
// A slot with nothing in it.
__device__ __forceinline__ void leave_slot(u64* full, int lane) {
    barrier_arrive(full);
    if (FILLERS > 1 && lane == 0) barrier_arrive(full);
}

// Programmatic dependent launch: what stands before wait_for_previous may run while the previous kernel still does.
__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// At once: the next kernel comes as soon as there is room, fills its ring and waits for values, not for kernels. Where grids
// are smaller than the card, several of a chain may be there at a time: what one reads of another has to carry a parity or a
// tag, or to be read behind wait_for_previous, which also waits for all kernels before that one.
__device__ __forceinline__ void let_next_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
