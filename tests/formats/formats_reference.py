"""Slow, obvious decoders, one weight at a time, and the test data they are compared on.

Products of a code and a scale are formed in Python's floats, where they are exact, then rounded to float32 once.
"""

from __future__ import annotations

import struct

import numpy as np
import torch

# Byte offsets of the fp16 scales in a block.
HALVES = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
    "IQ1_S": (0,),
    "IQ2_XXS": (0,),
    "IQ2_XS": (0,),
    "IQ2_S": (0,),
    "IQ3_XXS": (0,),
    "IQ3_S": (0,),
    "TQ1_0": (52,),
    "TQ2_0": (64,),
}
SPECIAL_HALVES = (0x0000, 0x8000, 0x0001, 0x83FF, 0xBC00, 0x7BFF, 0xFBFF, 0x0400)


def random_bytes(seed: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)


def random_floats(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def random_blocks(name: str, block_bytes: int, n_rows: int, blocks_per_row: int, seed: int = 0) -> torch.Tensor:
    """Random bytes with distinct finite scales, the special ones (zero, subnormal, negative, largest) first."""
    n_blocks = n_rows * blocks_per_row
    blocks = random_bytes(seed, n_blocks, block_bytes)
    for i, offset in enumerate(HALVES.get(name, ())):
        ordinary = (0x2000 + np.arange(n_blocks) * 7 + i * 3) % 0x5C00 | (np.arange(n_blocks) % 2) << 15
        ordinary[: len(SPECIAL_HALVES)] = np.roll(SPECIAL_HALVES, i)[:n_blocks]
        halves = torch.from_numpy(ordinary.astype(np.uint16)).view(torch.uint8).view(n_blocks, 2)
        blocks[:, offset : offset + 2] = halves
    if name == "MXFP4":
        blocks[:, 0] = torch.arange(n_blocks) % 255
    if name == "NVFP4":
        codes = torch.arange(n_blocks * 4) % 254
        blocks[:, :4] = (codes + (codes >= 127)).to(torch.uint8).view(n_blocks, 4)
    if name == "IQ1_M":  # the scale's four nibbles are the tops of four 16-bit words; clear one exponent bit
        blocks[:, 55] &= 0xBF
    return blocks.view(n_rows, blocks_per_row * block_bytes)


def bits_of(values: torch.Tensor | np.ndarray) -> np.ndarray:
    """float32 as integers: equal only if every bit is, the sign of zero included."""
    array = values.numpy() if isinstance(values, torch.Tensor) else values
    assert array.dtype == np.float32
    return array.view(np.uint32)


def assert_same_bits(found: torch.Tensor, expected: torch.Tensor | np.ndarray) -> None:
    assert tuple(found.shape) == tuple(expected.shape)
    np.testing.assert_array_equal(bits_of(found), bits_of(expected))


def e2m1(code: int) -> float:
    exponent, mantissa = code >> 1 & 3, code & 1
    magnitude = mantissa * 0.5 if exponent == 0 else (1 + mantissa * 0.5) * 2.0 ** (exponent - 1)
    return -magnitude if code & 8 else magnitude


def e4m3(code: int) -> float:
    exponent, mantissa = code >> 3 & 15, code & 7
    assert (exponent, mantissa) != (15, 7)
    magnitude = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -magnitude if code & 0x80 else magnitude


def e8m0(code: int) -> float:
    assert code != 255
    return 2.0 ** (code - 127)


def float32(value: float) -> float:
    try:
        return struct.unpack("f", struct.pack("f", value))[0]
    except OverflowError:
        return float("inf") if value > 0 else float("-inf")


def pairs(packed: torch.Tensor, scales: list[list[float]], group: int, multiplier: float = 1.0) -> np.ndarray:
    """E2M1 codes, the low nibble the even column; ``scales`` by row and group."""
    rows = []
    for row, row_bytes in enumerate(packed.tolist()):
        codes = [nibble for byte in row_bytes for nibble in (byte & 15, byte >> 4)]
        rows.append([float32(e2m1(c) * scales[row][i // group] * multiplier) for i, c in enumerate(codes)])
    return np.array(rows, dtype=np.float32)


def bit_stream(row_bytes: bytes, bits: int) -> list[int]:
    """Codes of ``bits`` bits from one little-endian stream, bit by bit."""
    n_codes = len(row_bytes) * 8 // bits
    stream = [row_bytes[i // 8] >> (i % 8) & 1 for i in range(len(row_bytes) * 8)]
    return [sum(stream[code * bits + i] << i for i in range(bits)) for code in range(n_codes)]
