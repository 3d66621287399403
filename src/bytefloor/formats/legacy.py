"""GGUF types with one scale a block of 32: Q4_0 Q4_1 Q5_0 Q5_1 Q8_0.

``_0`` types: w = d * (q - offset); ``_1`` types: w = d * q + m, rounded twice. Nibbles are in split order: the low
ones are elements 0..15, the high ones 16..31. The fifth bits are a little-endian word, bit j for element j.
"""

from __future__ import annotations

from functools import cache, partial

import torch
from torch import Tensor

from bytefloor.formats import checks, encode_legacy
from bytefloor.formats.blocks import EncodeWeighted, block_format, half_at, nibbles


def _unpack_q4_0(out: Tensor, blocks: Tensor) -> None:
    codes = nibbles(blocks[:, 2:]).view(torch.int8).sub_(8)
    out.copy_(codes.view(-1, 32)).mul_(half_at(blocks, 0, "scale d"))


def _unpack_q4_1(out: Tensor, blocks: Tensor) -> None:
    codes = nibbles(blocks[:, 4:]).view(-1, 32)
    out.copy_(codes).mul_(half_at(blocks, 0, "scale d")).add_(half_at(blocks, 2, "minimum m"))


@cache
def _spread_bits(device: torch.device) -> Tensor:
    """int64 [256]: the 8 bits of a byte, each moved to bit 4 of a byte of its own, lowest first."""
    table = [[(byte >> i & 1) << 4 for i in range(8)] for byte in range(256)]
    return torch.tensor(table, dtype=torch.uint8, device=device).view(torch.int64).view(256)


def _five_bit_codes(high: Tensor, packed: Tensor) -> Tensor:
    """uint8 [U, 32] from the fifth bits [U, 4] and the nibbles [U, 16]."""
    fifth = torch.index_select(_spread_bits(high.device), 0, high.reshape(-1).int())
    return nibbles(packed).view(-1, 32).bitwise_or_(fifth.view(torch.uint8).view(-1, 32))


def _unpack_q5_0(out: Tensor, blocks: Tensor) -> None:
    codes = _five_bit_codes(blocks[:, 2:6], blocks[:, 6:]).view(torch.int8).sub_(16)
    out.copy_(codes).mul_(half_at(blocks, 0, "scale d"))


def _unpack_q5_1(out: Tensor, blocks: Tensor) -> None:
    codes = _five_bit_codes(blocks[:, 4:8], blocks[:, 8:])
    out.copy_(codes).mul_(half_at(blocks, 0, "scale d")).add_(half_at(blocks, 2, "minimum m"))


def _unpack_q8_0(out: Tensor, blocks: Tensor) -> None:
    out.copy_(blocks.view(torch.int8)[:, 2:]).mul_(half_at(blocks, 0, "scale d"))


def _reciprocal(scale: Tensor) -> Tensor:
    """1 / scale, 0 where the scale is 0 or so small that its reciprocal is infinite: fp16 stores 0 for it."""
    inverse = scale.reciprocal()
    return torch.where(torch.isfinite(inverse), inverse, 0.0)


def _halves(name: str, weights: Tensor, *columns: Tensor) -> Tensor:
    """fp16 bytes [blocks, 2 * columns]; a scale beyond fp16 is refused, naming the row of the weights."""
    halves = torch.cat(columns, dim=1).half()
    by_row = halves.view(weights.shape[0], -1) if halves.numel() else halves
    checks.refuse_infinite(name, by_row, "a scale as fp16")
    return halves.view(torch.uint8)


def _signed_codes(groups: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    """Codes 0 .. 2 * levels - 1 and scale: the value of largest magnitude becomes code 0, whatever its sign."""
    magnitude = groups.abs()
    is_largest = magnitude == magnitude.amax(dim=1, keepdim=True)
    columns = torch.arange(32, device=groups.device)
    first = torch.where(is_largest, columns, 32).amin(
        dim=1, keepdim=True
    )  # argmax leaves open which of equals it takes
    scale = groups.gather(1, first) / -levels
    codes = (groups * _reciprocal(scale) + (levels + 0.5)).trunc().clamp_(0, 2 * levels - 1)
    return codes.to(torch.uint8), scale


def _ranged_codes(groups: Tensor, n_steps: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes 0 .. n_steps, scale and minimum."""
    minimum, maximum = groups.aminmax(dim=1, keepdim=True)
    scale = (maximum - minimum) / n_steps
    codes = ((groups - minimum) * _reciprocal(scale) + 0.5).trunc().clamp_(0, n_steps)
    return codes.to(torch.uint8), scale, minimum


def _stored(weights: Tensor, *columns: Tensor) -> dict[str, Tensor]:
    blocks = torch.cat(columns, dim=1)
    return {"blocks": blocks.view(weights.shape[0], weights.shape[1] // 32 * blocks.shape[1])}


def _encode_q4_0(weights: Tensor) -> dict[str, Tensor]:
    codes, scale = _signed_codes(checks.encodable("Q4_0", weights, 32).view(-1, 32), 8)
    return _stored(weights, _halves("Q4_0", weights, scale), *encode_legacy.pack_codes(codes, False))


def _encode_q4_1(weights: Tensor) -> dict[str, Tensor]:
    codes, scale, minimum = _ranged_codes(checks.encodable("Q4_1", weights, 32).view(-1, 32), 15)
    return _stored(weights, _halves("Q4_1", weights, scale, minimum), *encode_legacy.pack_codes(codes, False))


def _encode_q5_0(weights: Tensor) -> dict[str, Tensor]:
    codes, scale = _signed_codes(checks.encodable("Q5_0", weights, 32).view(-1, 32), 16)
    return _stored(weights, _halves("Q5_0", weights, scale), *encode_legacy.pack_codes(codes, True))


def _encode_q5_1(weights: Tensor) -> dict[str, Tensor]:
    codes, scale, minimum = _ranged_codes(checks.encodable("Q5_1", weights, 32).view(-1, 32), 31)
    halves = _halves("Q5_1", weights, scale, minimum)
    return _stored(weights, halves, *encode_legacy.pack_codes(codes, True))


def _encode_q8_0(weights: Tensor) -> dict[str, Tensor]:
    groups = checks.encodable("Q8_0", weights, 32).view(-1, 32)
    scale = groups.abs().amax(dim=1, keepdim=True) / 127
    scaled = groups * _reciprocal(scale)
    magnitude = scaled.abs()
    whole = magnitude.floor()
    rounded = whole + (2 * (magnitude - whole)).floor()  # halves away from zero, where torch.round takes the even one
    codes = (rounded * scaled.sign()).to(torch.int8).view(torch.uint8)
    return _stored(weights, _halves("Q8_0", weights, scale), codes)


def _weighted(name: str) -> EncodeWeighted:
    return partial(encode_legacy.encode_weighted, name=name)


FORMATS = (
    block_format("Q4_0", 32, 18, _unpack_q4_0, _encode_q4_0, _weighted("Q4_0")),
    block_format("Q4_1", 32, 20, _unpack_q4_1, _encode_q4_1, _weighted("Q4_1")),
    block_format("Q5_0", 32, 22, _unpack_q5_0, _encode_q5_0, _weighted("Q5_0")),
    block_format("Q5_1", 32, 24, _unpack_q5_1, _encode_q5_1, _weighted("Q5_1")),
    block_format("Q8_0", 32, 34, _unpack_q8_0, _encode_q8_0),
)
