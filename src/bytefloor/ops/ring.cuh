// A ring in shared memory that one thread fills with bulk copies and the warps of a block empty.
#pragma once

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void barrier_init(u64* b, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(b)), "r"(count));
}
__device__ __forceinline__ void barrier_expect(u64* b, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(b)), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_arrive(u64* b) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(b)) : "memory");
}
// A waiter must never be more than one phase behind: each slot is therefore consumed by every warp, every round.
__device__ __forceinline__ void barrier_wait(u64* b, u32 parity) {
    asm volatile(
        "{\n.reg .pred done;\nAGAIN: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra AGAIN;\n}" ::"r"(
            shared_address(b)),
        "r"(parity)
        : "memory");
}
// Weights are read once a token: they are the first to be evicted from L2.
__device__ __forceinline__ void bulk_copy(void* to, const void* from, u32 bytes, u64* b) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(
            shared_address(to)),
        "l"(from), "r"(bytes), "r"(shared_address(b)), "l"(0x12F0000000000000ull)
        : "memory");
}
// Programmatic dependent launch: what stands before wait_for_previous may run while the previous kernel still does.
__device__ __forceinline__ void wait_for_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
// At once: the next kernel comes as soon as there is room, fills its ring and waits for values, not for kernels. Shared memory
// has room for two blocks, so no more than two kernels of a chain are on a multiprocessor.
__device__ __forceinline__ void let_next_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
