"""Weights as products of few rows have them: bf16 multiples of a row's unit, see ops/stream_records.cuh."""

from __future__ import annotations

import torch
from torch import Tensor

from bytefloor.formats.blocks import nibbles
from bytefloor.model.weights import Weight
from bytefloor.ops.round_to import round_to

SUPER = {"Q3_K": (110, 108), "Q4_K": (144, 0), "Q5_K": (176, 0), "Q6_K": (210, 208), "IQ4_XS": (136, 0)}
"""Bytes of a block of 256 weights, and where its d lies."""
OFFSETS = {"Q4_K": 8, "Q5_K": 16}
"""Of those with minimums: what is taken off codes."""


def multiples(weight: Weight) -> Tensor:
    """Float32 values [N, K]; rounded to bf16 where the format has no multiples."""
    values, name = weight.load(), weight.stored.format_name
    if name not in SUPER:
        return round_to(values, "bf16")
    size, at = SUPER[name]
    (data,) = weight.stored.read().values()
    blocks = data.contiguous().view(torch.uint8).view(-1, size).to(values.device)
    d = _half(blocks, at)
    rows = values.double().view(-1, 256)
    if name in OFFSETS:
        return _raised(blocks, d, rows, OFFSETS[name]).float().view(values.shape)
    unit = torch.where(d == 0, 1.0, d)
    return (unit * _bf16(rows / unit)).float().view(values.shape)


def _half(blocks: Tensor, at: int) -> Tensor:
    return blocks[:, at : at + 2].contiguous().view(torch.float16).double()


def _bf16(x: Tensor) -> Tensor:
    return x.to(torch.bfloat16).double()


def _raised(blocks: Tensor, d: Tensor, rows: Tensor, offset: int) -> Tensor:
    """sc (code - offset) + bracket, the bracket offset sc - dmin / d mn rounded as the sum of its two halves is."""
    dmin, packed = _half(blocks, 2), blocks[:, 4:16]
    first, last = packed[:, :8] & 63, packed[:, :8] >> 2 & 48 | nibbles(packed[:, 8:]).view(-1, 8)
    sc = torch.cat((first[:, :4], last[:, :4]), dim=1).double()
    mn = torch.cat((first[:, 4:], last[:, 4:]), dim=1).double()
    is_flat = d == 0
    unit, sc = torch.where(is_flat, dmin, d), torch.where(is_flat, 0.0, sc)
    unit = torch.where(unit == 0, 1.0, unit)
    ratio = torch.where(is_flat, 1.0, dmin / unit)
    high = _bf16(ratio)
    bracket = _bf16(_bf16(offset * sc - high * mn) - _bf16(ratio - high) * mn)
    exact = rows / unit - (offset * sc - ratio * mn).repeat_interleave(32, dim=1)
    return unit * _bf16(exact.round() + bracket.repeat_interleave(32, dim=1))
