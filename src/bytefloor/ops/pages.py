"""What a page of the cache holds, as values: the one place that knows the layout of codes.

Pages of floats are [..., 2, J, PAGE, E], K then V. Where K is V times a weight in all lanes but the first
``rotated`` / 2 of each half (``decoder.py: rotated_lanes``), [..., 1, J, PAGE, E + rotated]: V, then those lanes of K.
Pages of codes (int8, fp8) are bytes [..., 2, J, PAGE * (E + 2)]: of each head the codes of its positions, then a bf16
scale for each position. ``round_to.code_row`` chooses them. Pages that are coded as a whole (k4v2): see
``page_codes.py``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bytefloor.ops.page_codes import CODED, decode, encode, n_page_bytes
from bytefloor.ops.round_to import code_row

PAGE_SIZE = 64
"""Positions of a page."""
SCALE_BYTES = 2
CODE_TYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


def page_shape(
    storage: str, n_kv_heads: int, page_size: int, head_size: int, rotated: int = 0
) -> tuple[tuple[int, ...], torch.dtype]:
    """(shape of a page, dtype) where the cache keeps bf16, int8, fp8 or k4v2; float32 has the shape of bf16."""
    if storage == CODED:
        return (1, n_kv_heads, n_page_bytes(page_size, head_size)), torch.uint8
    if storage in CODE_TYPES:
        return (2, n_kv_heads, page_size * (head_size + SCALE_BYTES)), torch.uint8
    if rotated:
        return (1, n_kv_heads, page_size, head_size + rotated), torch.bfloat16
    return (2, n_kv_heads, page_size, head_size), torch.bfloat16


def turning_lanes(x: Tensor, rotated: int) -> Tensor:
    """The first ``rotated`` / 2 lanes of each half, as a copy."""
    n, half = rotated // 2, x.shape[-1] // 2
    return torch.cat((x[..., :n], x[..., half : half + n]), dim=-1)


def keys_of(kept: Tensor, k_norm: Tensor, rotated: int) -> Tensor:
    """All of K [..., E], of V and its turning lanes [..., E + rotated]."""
    head_size = kept.shape[-1] - rotated
    n, half = rotated // 2, head_size // 2
    k = kept[..., :head_size] * k_norm
    k[..., :n], k[..., half : half + n] = kept[..., head_size:].split(n, dim=-1)
    return k


def holds_codes(cache: Tensor) -> bool:
    return cache.dtype == torch.uint8


def page_size_of(cache: Tensor, head_size: int) -> int:
    """Positions of a page; cache [n_pages, 2, J, ...]."""
    return cache.shape[3] // (head_size + SCALE_BYTES) if holds_codes(cache) else cache.shape[3]


def codes_and_scales(cache: Tensor, head_size: int) -> tuple[Tensor, Tensor]:
    """Views of pages of codes: bytes [..., PAGE, E] and bf16 [..., PAGE]."""
    page_size = cache.shape[-1] // (head_size + SCALE_BYTES)
    codes, scales = cache.split([page_size * head_size, page_size * SCALE_BYTES], dim=-1)
    return codes.unflatten(-1, (page_size, head_size)), scales.view(torch.bfloat16)


def values_of(pages: Tensor, head_size: int, storage: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values [..., PAGE, E] of pages; those of floats as they are."""
    if not holds_codes(pages):
        return pages
    if storage == CODED:
        return decode(pages, head_size, dtype)
    codes, scales = codes_and_scales(pages, head_size)
    return codes.view(CODE_TYPES[storage]).to(dtype).mul_(scales.to(dtype)[..., None])


def write_rows(cache: Tensor, half: int, pages: Tensor, offsets: Tensor, x: Tensor, storage: str) -> None:
    """Rows x [T, J, E] as codes, to their pages and offsets: K where half is 0, V where it is 1."""
    codes, scales = codes_and_scales(cache, x.shape[-1])
    row_codes, row_scales = code_row(x, storage)
    codes[pages, half, :, offsets] = row_codes.to(CODE_TYPES[storage]).view(torch.uint8)
    scales[pages, half, :, offsets] = row_scales.to(torch.bfloat16)


def randomise(cache: Tensor, head_size: int, storage: str, generator: torch.Generator) -> None:
    """Fill all pages with finite values, none of which matters."""
    if not holds_codes(cache):
        cache.normal_(generator=generator)
        return
    if storage == CODED:
        zeros = torch.zeros_like(decode(cache[0, 0], head_size))
        cache.copy_(encode(zeros.normal_(generator=generator)))
        return
    codes, scales = codes_and_scales(cache, head_size)
    codes.random_(0, 127, generator=generator)  # 127 is NaN in E4M3
    scales.fill_(2**-6)
