"""GGUF block formats: every row is a run of equal-sized blocks of bytes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from bytefloor.formats import checks, chunks
from bytefloor.formats.record import Parts, QuantFormat

Encode = Callable[[Tensor], dict[str, Tensor]]
EncodeWeighted = Callable[[Tensor, Tensor], dict[str, Tensor]]


def rows_of_blocks(name: str, parts: Parts, block_bytes: int) -> tuple[Tensor, int]:
    """The blocks as uint8 [N * blocks a row, block_bytes], aligned for 16-bit views, and the blocks a row."""
    stored = checks.matrix(name, parts, "blocks", (torch.uint8,))
    blocks_per_row = checks.whole(name, "blocks", "row bytes", stored.shape[1], block_bytes)
    if stored.storage_offset() % 2:
        stored = stored.clone()
    return stored.view(stored.shape[0] * blocks_per_row, block_bytes), blocks_per_row


def block_format(
    name: str,
    block: int,
    block_bytes: int,
    unpack: Callable[[Tensor, Tensor], None],
    encode: Encode | None = None,
    encode_weighted: EncodeWeighted | None = None,
) -> QuantFormat:
    """The record of a block type; ``unpack(out [U, block], blocks [U, block_bytes])`` decodes U blocks."""

    def decode(parts: Parts) -> Tensor:
        checks.require_names(name, parts, ("blocks",))
        blocks, blocks_per_row = rows_of_blocks(name, parts, block_bytes)
        out = torch.empty(parts["blocks"].shape[0], blocks_per_row * block, device=blocks.device)
        return chunks.fill(name, out, block, (blocks,), unpack)

    return QuantFormat(
        name=name,
        block=block,
        bits_per_weight=8 * block_bytes / block,
        parts=("blocks",),
        decode=decode,
        block_bytes=block_bytes,
        encode=encode,
        encode_weighted=encode_weighted,
    )


def half_at(blocks: Tensor, offset: int, label: str) -> Tensor:
    """The fp16 scale at a byte offset of every block, as float32 [U, 1]; NaN and infinity are refused."""
    column = blocks.view(torch.float16)[:, offset // 2 : offset // 2 + 1]
    return chunks.finite(column.float(), label)


def nibbles(packed: Tensor) -> Tensor:
    """Low then high nibbles of each run of bytes: uint8 [..., n] -> [..., 2, n]."""
    split = packed.new_empty(*packed.shape[:-1], 2, packed.shape[-1])
    torch.bitwise_and(packed, 15, out=split[..., 0, :])
    torch.bitwise_right_shift(packed, 4, out=split[..., 1, :])
    return split


def crumbs(packed: Tensor) -> Tensor:
    """2-bit fields of each run of bytes, lowest first: uint8 [..., n] -> [..., 4, n]."""
    split = packed.new_empty(*packed.shape[:-1], 4, packed.shape[-1])
    for i in range(4):
        torch.bitwise_right_shift(packed, 2 * i, out=split[..., i, :])
    return split.bitwise_and_(3)


def bit_planes(packed: Tensor) -> Tensor:
    """Single bits of each run of bytes, lowest first: uint8 [..., n] -> [..., 8, n]."""
    split = packed.new_empty(*packed.shape[:-1], 8, packed.shape[-1])
    for i in range(8):
        torch.bitwise_right_shift(packed, i, out=split[..., i, :])
    return split.bitwise_and_(1)


def look_up(out: Tensor, codes: Tensor, table: Tensor) -> None:
    """out = table[codes], element by element; both contiguous."""
    torch.index_select(table, 0, codes.reshape(-1).int(), out=out.view(-1))
