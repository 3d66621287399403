// Keys and values on their way from pages to the slots of attention_rows: by four warps, each of which says of its own copies
// that they are there.
#pragma once

struct Loader {
    Ring ring;
    const Stored* cache;
    Band band;
    int j, tid, waiting = 0;  // copies of fills that are under way
    Turn next, shown;        // to be filled; the first whose copies have not been shown

    // The oldest fill that has not been, to those that multiply.
    __device__ __forceinline__ void show() {
        show_to_products();
        __syncwarp();
        if (tid % 32 == 0) barrier_arrive(ring.full(shown.slot));
        shown.advance(1);
    }
    __device__ __forceinline__ void show_all() {
        wait_copies<0>();
        for (; waiting > 0; waiting--) show();
    }
    // Until the next slot may be written. Those that multiply may need what is under way before they leave it.
    __device__ __forceinline__ u8* wait() {
        u64* empty = ring.empty(next.slot);
        if (!__all_sync(~0u, is_past(empty, next.parity ^ 1))) {
            show_all();
            barrier_wait(empty, next.parity ^ 1);
        }
        return ring.slot(next.slot);
    }
    // Where chunk c of a row of a page stands in a slot.
    static __device__ __forceinline__ u32 place(int row, int c) {
        int column = KEYS_ARE_VALUES && c >= E / 8 ? c + (COLUMNS - E) / 8 : c;
        return column / 8 * TILE_BYTES + swizzled(row, column % 8);
    }
    __device__ __forceinline__ const Stored* rows_of(int page, int position, bool is_value) const {
        return cache + (size_t)page * (BLOCKS * J * BLOCK) + row_in_page(is_value && BLOCKS > 1 ? j + J : j, position % PAGE);
    }

#if STORAGE == 0
    // Values outside the band are zero, since their shares are, and what lies there times zero need not be.
    __device__ __forceinline__ void fill(const int (&pages)[PAGES], int position, bool is_value) {
        u8* slot = wait();
        const Stored* from[PAGES];
#pragma unroll
        for (int i = 0; i < PAGES; i++) from[i] = rows_of(pages[i], position + i * PAGE, is_value) - i * (PAGE * ROW);
        constexpr int A_ROW = ROW / 8;
#pragma unroll 4
        for (int i = tid; i < TILE * A_ROW; i += LOADERS) {
            int row = i / A_ROW;
            const Stored* page = from[0];
#pragma unroll
            for (int n = 1; n < PAGES; n++) page = row >= n * PAGE ? from[n] : page;
            u8* to = slot + place(row, i % A_ROW);
            if (band.has(position + row))
                copy_async(to, page + i * 8);
            else if (is_value || KEYS_ARE_VALUES)
                *(uint4*)to = make_uint4(0, 0, 0, 0);
        }
        commit_copies();
        next.advance(1);
        if (++waiting > LAG) {
            wait_copies<LAG>();
            show();
            waiting--;
        }
    }
#else
    // 16 codes, as two chunks. Lanes of odd tiles of 64 columns write the second one first: other banks.
    static __device__ __forceinline__ void put_codes(u8* slot, int row, int c, uint4 codes) {
        u32 words[4] = {codes.x, codes.y, codes.z, codes.w}, halves[8];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            u32 even = decode_even(words[i]), odd = decode_odd(words[i]);
            halves[2 * i] = __byte_perm(even, odd, 0x5410), halves[2 * i + 1] = __byte_perm(even, odd, 0x7632);
        }
        uint4 low = make_uint4(halves[0], halves[1], halves[2], halves[3]), high = make_uint4(halves[4], halves[5], halves[6], halves[7]);
        bool is_odd = c & 4;
        *(uint4*)(slot + place(row, 2 * c + is_odd)) = is_odd ? high : low;
        *(uint4*)(slot + place(row, 2 * c + !is_odd)) = is_odd ? low : high;
    }
    // Codes are finite whatever they are; scales outside the band are zero.
    __device__ __forceinline__ void fill(const int (&pages)[PAGES], int position, bool is_value) {
        constexpr int A_ROW = E / 16, ALL = TILE * A_ROW, BATCH = 4;  // loads under way
        const Stored* from[PAGES];
#pragma unroll
        for (int i = 0; i < PAGES; i++) from[i] = rows_of(pages[i], position + i * PAGE, is_value) - i * (PAGE * E);
        uint4 codes[BATCH];
        u8* slot = nullptr;
#pragma unroll 1
        for (int first = tid; first - tid < ALL; first += BATCH * LOADERS) {
#pragma unroll
            for (int n = 0; n < BATCH; n++) {
                int i = first + n * LOADERS;
                const Stored* page = from[0];
#pragma unroll
                for (int part = 1; part < PAGES; part++) page = i >= part * (PAGE * A_ROW) ? from[part] : page;
                if (i < ALL) codes[n] = *(const uint4*)(page + i * 16);
            }
            if (slot == nullptr) slot = wait();
#pragma unroll
            for (int n = 0; n < BATCH; n++) {
                int i = first + n * LOADERS;
                if (i < ALL) put_codes(slot, i / A_ROW, i % A_ROW, codes[n]);
            }
        }
        if (!is_value) {
            float* scales = ring.scales(next.slot);
            for (int i = tid; i < 2 * TILE; i += LOADERS) {
                int row = i % TILE, slot_of_row = position + row, page = pages[0];
#pragma unroll
                for (int n = 1; n < PAGES; n++) page = row >= n * PAGE ? pages[n] : page;
                const Stored* kept = cache + ((size_t)page * (BLOCKS * J) + (i < TILE ? j : j + J)) * BLOCK + PAGE * E;
                const __nv_bfloat16* scale = (const __nv_bfloat16*)kept + slot_of_row % PAGE;
                scales[i] = band.has(slot_of_row) ? __bfloat162float(*scale) : 0.f;
            }
        }
        next.advance(1);
        show();
    }
#endif
};

__device__ __forceinline__ void load_all(Ring ring, const Stored* cache, const int* table, int n_table, Band band, int j) {
    Loader loader{ring, cache, band, j, (int)threadIdx.x - MULTIPLIERS};
    int position = band.first_tile * TILE, pages[PAGES], next_pages[PAGES];
    auto look_up = [&](int (&found)[PAGES], int slot) {
#pragma unroll
        for (int i = 0; i < PAGES; i++) found[i] = table[(slot / PAGE + i) % n_table];
    };
    look_up(next_pages, position);
#pragma unroll 1
    for (int n = 0; n < band.n_tiles; n++, position += TILE) {
#pragma unroll
        for (int i = 0; i < PAGES; i++) pages[i] = next_pages[i];
        if (n + 1 < band.n_tiles) look_up(next_pages, position + TILE);
        loader.fill(pages, position, false);
        if (FILLS > 1) loader.fill(pages, position, true);
    }
    loader.show_all();
}
