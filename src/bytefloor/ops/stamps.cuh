// Times that a profile reads: of each block when it was there, when its inputs were and when its last output was on its way. They cost
// nothing where nobody asks: without STAMPED there is no such parameter and no such code.
//
// STAMP(what, who): where `who` is true, the card's clock in nanoseconds to stamps[what][block]. Of several threads, and of one
// step after another, the last one stays.
#pragma once

enum { THERE, READY, DONE };

#ifdef STAMPED
#define AND_STAMPS , u64* stamps
#define STAMP(what, who) \
    if (who) stamp(stamps, what)
__device__ __forceinline__ void stamp(u64* stamps, int what) {
    u32 block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z), n_blocks = gridDim.x * gridDim.y * gridDim.z;
    u64 now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)::"memory");
    atomicMax((unsigned long long*)stamps + what * n_blocks + block, (unsigned long long)now);
}
#else
#define AND_STAMPS
#define STAMP(what, who)
#endif
