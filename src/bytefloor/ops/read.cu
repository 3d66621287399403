// read: a buffer far larger than L2 through a ring in shared memory, as the products read theirs: the stream limit that every
// share is a share of. Nothing is done with what arrives but one word a lane, so that this bounds them from above.
// Defined by the host: SLOT (bytes of a copy), SLOTS.
constexpr int AT_BARRIERS = SLOTS * SLOT;

extern "C" __global__ void __launch_bounds__(32) read(const u8* from, int n_slots, u32* out) {
    extern __shared__ __align__(128) u8 bytes[];
    u64* full = (u64*)(bytes + AT_BARRIERS);
    int lane = threadIdx.x;
    wait_for_previous();
    if (lane < SLOTS) barrier_init(full + lane, FILL_ARRIVALS);
    barriers_are_set();
    __syncwarp();
    auto fill = [=](int at, int slot) {
        if (at < n_slots && lane < FILLERS) fill_slot(bytes + slot * SLOT, from + (size_t)at * SLOT, SLOT, full + slot, lane);
    };
    for (int slot = 0; slot < SLOTS; slot++) fill(blockIdx.x + slot * gridDim.x, slot);
    u32 total = 0, phase = 0;
    for (int at = blockIdx.x, slot = 0; at < n_slots; at += gridDim.x) {
        barrier_wait(full + slot, phase);
        total ^= ((const u32*)(bytes + slot * SLOT))[lane];
        __syncwarp();
        fill(at + SLOTS * gridDim.x, slot);
        if (++slot == SLOTS) slot = 0, phase ^= 1;
    }
    if (total == 0x12345678) *out = total;
}
