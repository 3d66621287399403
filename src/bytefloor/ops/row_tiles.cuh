// Row tiles: activations of many rows as tensor cores take them, bf16 [Kp / 64][pitch / 8][8][64]; row_tiles.py says
// how they lie.
#pragma once

// The 16 bytes where stored columns column .. column + 7 of a row lie; column a multiple of 8.
__device__ __forceinline__ u8* row_tile_chunk(u8* tiles, int pitch, int row, int column) {
    size_t atom = (size_t)(column / 64) * (pitch / 8) + row / 8;
    return tiles + atom * 1024 + row % 8 * 128 + (((column / 8 & 7) ^ (row & 7)) << 4);
}

// Elements element .. element + 3 of a row, by a warp whose lanes have consecutive fours: a quarter of a warp has a
// group, and lanes that have words t and t + 1 of two chunks swap, so that each stores eight bytes and all of them
// together whole lines. All lanes call it, whatever is_there.
__device__ __forceinline__ void store_four(u8* tiles, int pitch, int row, int element, float4 v, bool is_there) {
    int t = element >> 3 & 3, s = element >> 2 & 1;
    bool is_odd = t & 1;
    u32 first = pack_halves<true>(v.x, v.y), second = pack_halves<true>(v.z, v.w);
    u32 kept = is_odd ? second : first, other = __shfl_xor_sync(~0u, is_odd ? first : second, 2);
    if (is_there)
        *(uint2*)(row_tile_chunk(tiles, pitch, row, element / 32 * 32 + 16 * s + 8 * is_odd) + t / 2 * 8) =
            is_odd ? make_uint2(other, kept) : make_uint2(kept, other);
}
