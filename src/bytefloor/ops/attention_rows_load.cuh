// Keys and values on their way from pages to the slots of attention_rows: by four warps, each of which says of its own
// copies that they are there.
#pragma once

// A thread has chunks of the same columns in rows that are a power of two apart: place and source of all but the first
// are known before it runs. LANES_A_ROW is the largest power of two that divides a row's chunks.
constexpr int A_ROW = HAS_SCALES ? E / 16 : ROW / 8, LANES_A_ROW = A_ROW & -A_ROW, CHUNKS_A_LANE = A_ROW / LANES_A_ROW,
              ROWS_TOGETHER = LOADERS / LANES_A_ROW, ROW_STEPS = (TILE + ROWS_TOGETHER - 1) / ROWS_TOGETHER;
static_assert(PAGE % ROWS_TOGETHER == 0 || ROW_STEPS == 1, "a step of rows lies in one page");

// What follows from a thread's number is not kept from tile to tile: there are no registers for it.
__device__ __forceinline__ int kept_out(int thread) {
    asm volatile("" : "+r"(thread));
    return thread;
}

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
        return cache + (size_t)page * (BLOCKS * J * BLOCK) +
               row_in_page(is_value && BLOCKS > 1 ? j + J : j, position % PAGE);
    }

    // Of chunk (n, c) of this thread: how far its row is from the first, and what that does to its place.
    static __device__ __forceinline__ int row_step(int n) { return n * ROWS_TOGETHER; }
    static __device__ __forceinline__ u32 stepped(u32 place, int n) {
        return (place ^ (row_step(n) & 7) << 4) + row_step(n) * 128;
    }

    // Which of a tile's pages has that row.
    static __device__ __forceinline__ const Stored* page_of(const Stored* const (&from)[PAGES], int n, int first_row) {
        if (ROWS_TOGETHER <= PAGE) return from[row_step(n) / PAGE % PAGES];
        const Stored* page = from[0];
#pragma unroll
        for (int i = 1; i < PAGES; i++) page = first_row >= i * PAGE ? from[i] : page;
        return page;
    }

#if STORAGE == 0
    // A tile that lies in the band.
    __device__ __forceinline__ void copy_whole(const Stored* const (&from)[PAGES], u8* slot) {
        int thread = kept_out(tid), first_row = thread / LANES_A_ROW;
#pragma unroll
        for (int c = 0; c < CHUNKS_A_LANE; c++) {
            int column = thread % LANES_A_ROW + c * LANES_A_ROW;
            u32 first = place(first_row, column);
#pragma unroll
            for (int n = 0; n < ROW_STEPS; n++)
                if (ROWS_TOGETHER <= TILE || first_row < TILE)
                    copy_async(slot + stepped(first, n),
                               page_of(from, n, first_row) + (first_row * ROW + column * 8) + row_step(n) * ROW);
        }
    }
    // Values outside the band are zero, since their shares are, and what lies there times zero need not be.
    __device__ __forceinline__ void copy_band(const Stored* const (&from)[PAGES], u8* slot, int position,
                                              bool has_zeros) {
#pragma unroll 1
        for (int i = tid; i < TILE * A_ROW; i += LOADERS) {
            int row = i / A_ROW;
            const Stored* page = from[0];
#pragma unroll
            for (int n = 1; n < PAGES; n++) page = row >= n * PAGE ? from[n] : page;
            u8* to = slot + place(row, i % A_ROW);
            if (band.has(position + row))
                copy_async(to, page + i * 8);
            else if (has_zeros)
                *(uint4*)to = make_uint4(0, 0, 0, 0);
        }
    }
    __device__ __forceinline__ void fill(const int (&pages)[PAGES], int position, bool is_value) {
        const Stored* from[PAGES];
#pragma unroll
        for (int i = 0; i < PAGES; i++) from[i] = rows_of(pages[i], position + i * PAGE, is_value) - i * (PAGE * ROW);
        u8* slot = wait();
        if (position >= band.start && position + TILE <= band.end)
            copy_whole(from, slot);
        else
            copy_band(from, slot, position, is_value || KEYS_ARE_VALUES);
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
    static __device__ __forceinline__ void put_codes(u8* slot, u32 place, bool is_odd, uint4 codes) {
        u32 words[4] = {codes.x, codes.y, codes.z, codes.w}, halves[8];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            u32 even = decode_even(words[i]), odd = decode_odd(words[i]);
            halves[2 * i] = __byte_perm(even, odd, 0x5410), halves[2 * i + 1] = __byte_perm(even, odd, 0x7632);
        }
        uint4 low = make_uint4(halves[0], halves[1], halves[2], halves[3]),
              high = make_uint4(halves[4], halves[5], halves[6], halves[7]);
        *(uint4*)(slot + place) = is_odd ? high : low;
        *(uint4*)(slot + (place ^ 16)) = is_odd ? low : high;
    }
    // Codes are finite whatever they are; scales outside the band are zero.
    __device__ __forceinline__ void fill(const int (&pages)[PAGES], int position, bool is_value) {
        constexpr int ALL = CHUNKS_A_LANE * ROW_STEPS, BATCH = 4;  // loads under way, beside as many that are decoded
        int thread = kept_out(tid), first_row = thread / LANES_A_ROW, column = thread % LANES_A_ROW;
        const Stored* from[PAGES];
#pragma unroll
        for (int i = 0; i < PAGES; i++)
            from[i] = rows_of(pages[i], position + i * PAGE, is_value) - i * (PAGE * E) + first_row * E + column * 16;
        uint4 codes[2][BATCH];
        auto load = [&](int first) {
#pragma unroll
            for (int i = 0; i < BATCH; i++) {
                int n = (first + i) % ROW_STEPS, c = (first + i) / ROW_STEPS;
                if (first + i < ALL && (ROWS_TOGETHER <= TILE || first_row < TILE))
                    codes[first / BATCH % 2][i] =
                        *(const uint4*)(page_of(from, n, first_row) + row_step(n) * E + c * (LANES_A_ROW * 16));
            }
        };
        load(0);
        u8* slot = wait();
#pragma unroll
        for (int first = 0; first < ALL; first += BATCH) {
            load(first + BATCH);
#pragma unroll
            for (int i = 0; i < BATCH; i++) {
                int n = (first + i) % ROW_STEPS, at = column + (first + i) / ROW_STEPS * LANES_A_ROW;
                bool is_odd = at & 4;
                if (first + i < ALL && (ROWS_TOGETHER <= TILE || first_row < TILE))
                    put_codes(slot, stepped(place(first_row, 2 * at + is_odd), n), is_odd, codes[first / BATCH % 2][i]);
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

__device__ __forceinline__ void load_all(Ring ring, const Stored* cache, const int* table, int n_table, Band band,
                                         int j) {
    Loader loader{ring, cache, band, j, (int)threadIdx.x - MULTIPLIERS};
    int position = band.first_tile * TILE, before[PAGES], pages[PAGES], after[PAGES];
    auto look_up = [&](int (&found)[PAGES], int slot) {
#pragma unroll
        for (int i = 0; i < PAGES; i++) found[i] = table[(slot / PAGE + i) % n_table];
    };
    auto move = [](int (&to)[PAGES], const int (&from)[PAGES]) {
#pragma unroll
        for (int i = 0; i < PAGES; i++) to[i] = from[i];
    };
    look_up(after, position);
    // In the order in which they are needed: keys of a tile, values of the one before.
#pragma unroll 1
    for (int n = 0; n <= band.n_tiles; n++, position += TILE) {
        move(before, pages), move(pages, after);
        if (n + 1 < band.n_tiles) look_up(after, position + TILE);
        if (n < band.n_tiles) loader.fill(pages, position, false);
        if (FILLS > 1 && n > 0) loader.fill(before, position - TILE, true);
    }
    loader.show_all();
}
