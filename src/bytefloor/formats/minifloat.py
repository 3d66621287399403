"""Floating-point numbers of 8 and 4 bits, as exact float32.

E2M1 (FP4): sign, 2 exponent bits, 1 mantissa bit: 0 .5 1 1.5 2 3 4 6 and their negatives; code 8 is -0.
E4M3 (FP8): bias 7, no infinity, 0x7F and 0xFF are NaN. E8M0 (a scale): 2^(code - 127), 255 is NaN, no zero.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from bytefloor.formats import chunks

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
# |x| / scale at and above which an encoder takes the next magnitude: a tie goes to the larger one.
E2M1_THRESHOLDS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
E2M1_MAX = 6.0
E4M3_MAX = 448.0
E4M3_DTYPES = (torch.float8_e4m3fn, torch.uint8)
E8M0_DTYPES = (torch.float8_e8m0fnu, torch.uint8)


def _e4m3(code: int) -> float:
    exponent, mantissa = code >> 3 & 15, code & 7
    if code & 0x7F == 0x7F:
        return float("nan")
    magnitude = mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)
    return -magnitude if code & 0x80 else magnitude


@cache
def e4m3_table(device: torch.device) -> Tensor:
    """float32 [256]."""
    return torch.tensor([_e4m3(code) for code in range(256)], device=device)


@cache
def e8m0_table(device: torch.device) -> Tensor:
    """float32 [256]; code 0 is the subnormal 2^-127."""
    return torch.tensor([2.0 ** (code - 127) for code in range(255)] + [float("nan")], device=device)


@cache
def _e2m1_pairs(device: torch.device) -> Tensor:
    """Both values of a byte, low nibble first, as one 8-byte entry: float32 pairs seen as int64 [256]."""
    pairs = torch.tensor([[E2M1[byte & 15], E2M1[byte >> 4]] for byte in range(256)], device=device)
    return pairs.view(torch.int64).view(256)


def decode_codes(codes: Tensor, table: Tensor) -> Tensor:
    """table[codes] for uint8 codes of any shape."""
    return torch.index_select(table, 0, codes.reshape(-1).int()).view(codes.shape)


def decode_e2m1_pairs(out: Tensor, packed: Tensor) -> None:
    """out [U, 2n] from bytes [U, n] that hold neighbouring columns, the low nibble the even one."""
    # One look-up a byte: both values travel as an opaque 8-byte integer, which no conversion touches.
    torch.index_select(_e2m1_pairs(out.device), 0, packed.reshape(-1).int(), out=out.view(torch.int64).view(-1))


def decode_e4m3(out: Tensor, codes: Tensor, label: str) -> None:
    """out [U, n] from E4M3 codes uint8 [U, n]; a code that means NaN is refused."""
    not_a_number = codes.bitwise_and(0x7F).eq_(0x7F)
    if not_a_number.any():
        index = int(not_a_number.flatten().nonzero()[0])
        raise chunks.NotFiniteError(label, index, codes.shape[1], "column")
    # The 7 low bits moved to the top of fp16's exponent and mantissa are the value times 2^-8, subnormals included:
    # several times faster than a conversion from float8 on the CPU, and exact.
    bits = codes.view(torch.int8).to(torch.int16).bitwise_left_shift_(7).bitwise_and_(~0x4000)
    out.copy_(bits.view(torch.float16)).mul_(256.0)
