"""GGUF types of 256 weights a block with scales of scales: Q2_K Q3_K Q4_K Q5_K Q6_K.

w = (d * scale) * q, and for the types with minimums - (dmin * min), each product rounded on its own. Groups are of 16
weights in Q2_K, Q3_K and Q6_K, of 32 in Q4_K and Q5_K.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from bytefloor.formats import encode_kquants
from bytefloor.formats.blocks import bit_planes, block_format, crumbs, half_at, nibbles
from bytefloor.formats.record import QuantFormat


def _unpack_q2_k(out: Tensor, blocks: Tensor) -> None:
    """16 bytes scale (low nibble) and minimum (high), 64 bytes of 2-bit codes, d, dmin."""
    scales, minimums = nibbles(blocks[:, :16]).float().unbind(1)
    scales.mul_(half_at(blocks, 80, "scale d"))
    minimums.mul_(half_at(blocks, 82, "scale dmin"))
    out.copy_(crumbs(blocks[:, 16:80].unflatten(1, (2, 32))).view(-1, 256))
    out.view(-1, 16, 16).mul_(scales[:, :, None]).sub_(minimums[:, :, None])


def _unpack_q3_k(out: Tensor, blocks: Tensor) -> None:
    """32 bytes of third bits, 64 bytes of 2-bit codes, 12 bytes of 6-bit scales, d."""
    # Scales: the low nibbles of 8 bytes, then their high nibbles; the top two bits from the last 4 bytes likewise.
    low = nibbles(blocks[:, 96:104]).view(-1, 16)
    high = crumbs(blocks[:, 104:108]).view(-1, 16)
    scales = (low | high << 4).view(torch.int8).sub_(32).float().mul_(half_at(blocks, 108, "scale d"))
    codes = crumbs(blocks[:, 32:96].unflatten(1, (2, 32))).view(-1, 256)
    third = bit_planes(blocks[:, :32]).view(-1, 256)
    # A set third bit means 0..3, a clear one -4..-1.
    codes = codes.bitwise_or_(third.bitwise_left_shift_(2)).view(torch.int8).sub_(4)
    out.copy_(codes).view(-1, 16, 16).mul_(scales[:, :, None])


def _scales_and_minimums(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """float32 [U, 8, 1] each, from d, dmin and 12 bytes that hold eight 6-bit scales and eight 6-bit minimums.

    Bytes 0..3 hold scales 0..3 and bytes 4..7 minimums 0..3 in their low six bits; their top two bits are those of
    scales and minimums 4..7, whose low nibbles are the low (scales) and high (minimums) nibbles of bytes 8..11.
    """
    first = blocks[:, 4:12]
    low = first & 63
    high = first >> 2 & 48 | nibbles(blocks[:, 12:16]).view(-1, 8)
    scales = torch.cat((low[:, :4], high[:, :4]), dim=1).float().mul_(half_at(blocks, 0, "scale d"))
    minimums = torch.cat((low[:, 4:], high[:, 4:]), dim=1).float().mul_(half_at(blocks, 2, "scale dmin"))
    return scales[:, :, None], minimums[:, :, None]


def _unpack_q4_k(out: Tensor, blocks: Tensor) -> None:
    """d, dmin, 12 bytes of scales, four 32-byte chunks: low nibbles are one group, high nibbles the next."""
    scales, minimums = _scales_and_minimums(blocks)
    out.copy_(nibbles(blocks[:, 16:].unflatten(1, (4, 32))).view(-1, 256))
    out.view(-1, 8, 32).mul_(scales).sub_(minimums)


def _unpack_q5_k(out: Tensor, blocks: Tensor) -> None:
    """As Q4_K, with 32 bytes of fifth bits before the nibbles: bit g of byte j belongs to element j of group g."""
    scales, minimums = _scales_and_minimums(blocks)
    codes = nibbles(blocks[:, 48:].unflatten(1, (4, 32))).view(-1, 256)
    fifth = bit_planes(blocks[:, 16:48]).view(-1, 256)
    out.copy_(codes.bitwise_or_(fifth.bitwise_left_shift_(4)))
    out.view(-1, 8, 32).mul_(scales).sub_(minimums)


def _unpack_q6_k(out: Tensor, blocks: Tensor) -> None:
    """128 bytes of nibbles, 64 bytes of upper 2-bit fields, 16 int8 scales, d; two halves of 128 weights."""
    scales = blocks[:, 192:208].view(torch.int8).float().mul_(half_at(blocks, 208, "scale d"))
    codes = nibbles(blocks[:, :128].unflatten(1, (2, 64))).view(-1, 256)
    upper = crumbs(blocks[:, 128:192].unflatten(1, (2, 32))).view(-1, 256)
    codes = codes.bitwise_or_(upper.bitwise_left_shift_(4)).view(torch.int8).sub_(32)
    out.copy_(codes).view(-1, 16, 16).mul_(scales[:, :, None])


def _format(name: str, block_bytes: int, unpack: Callable[[Tensor, Tensor], None]) -> QuantFormat:
    encode = partial(encode_kquants.encode, name=name)
    return block_format(name, 256, block_bytes, unpack, encode, encode)


FORMATS = (
    _format("Q2_K", 84, _unpack_q2_k),
    _format("Q3_K", 110, _unpack_q3_k),
    _format("Q4_K", 144, _unpack_q4_k),
    _format("Q5_K", 176, _unpack_q5_k),
    _format("Q6_K", 210, _unpack_q6_k),
)
