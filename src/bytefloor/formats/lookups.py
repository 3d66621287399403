"""Stream forms of 4-bit codes that stand for values of a table: E2M1 in its containers, IQ4_NL and IQ4_XS.

A byte permutation turns four codes into four signed bytes, so a word keeps its codes in the order in which they are
selected. E2M1 values are doubled there, which makes them whole numbers.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from bytefloor.formats.blocks import nibbles
from bytefloor.formats.lanes import (
    ROWS,
    STEP,
    StreamForm,
    blocks_of,
    by_row,
    bytes_of_lanes,
    join,
    per_group,
    per_half,
    per_lane,
    selectors,
    steps_a_record,
)
from bytefloor.formats.record import Parts

_PAIRS = {
    "FP4-E2M1-g128": ("weight", "weight_scale", 128, 4),
    "MXFP4-modelopt": ("weight", "weight_scale", 32, 1),
    "MXFP4-compressed-tensors": ("weight_packed", "weight_scale", 32, 1),
    "mlx-mxfp4": ("weight", "scales", 32, 1),
}
"""Containers of neighbouring columns: names of codes and scales, columns and bytes of a scale."""
_NVFP4 = {
    "NVFP4-modelopt": ("weight", "weight_scale", "weight_scale_2"),
    "NVFP4-compressed-tensors": ("weight_packed", "weight_scale", "weight_global_scale"),
    "mlx-nvfp4": ("weight", "scales", ""),
}
"""Names of codes, scales and the scale of the tensor."""
NAMES = ("IQ4_NL", "IQ4_XS", "MXFP4", "NVFP4", *_PAIRS, *_NVFP4)


def lookup_form(format_name: str, k: int) -> StreamForm:
    """The form of one of NAMES for K columns."""
    if format_name == "IQ4_XS":
        return StreamForm("IQ4_XS", 256, 2048 + 128 + 32, _pack_iq4_xs)
    _, _, group, scale_bytes = _PAIRS.get(format_name, ("", "", 32, 2 if format_name == "IQ4_NL" else 1))
    steps = steps_a_record(format_name, k, group)
    columns = STEP * steps
    code_bytes = ROWS * columns // 2
    if format_name == "NVFP4" or format_name in _NVFP4:
        name, pack = f"NVFP4{_kind(format_name)}<{steps}>", _pack_nvfp4(format_name, steps)
        return StreamForm(name, columns, code_bytes + ROWS * columns // 16 + ROWS * 4, pack)
    name = {"IQ4_NL": "IQ4_NL", "FP4-E2M1-g128": "FP4_g128"}.get(format_name, f"MXFP4{_kind(format_name)}")
    n_bytes = code_bytes + ROWS * (columns // group) * scale_bytes
    return StreamForm(f"{name}<{steps}>", columns, n_bytes, _pack_looked_up(format_name, steps, columns // group))


def _kind(format_name: str) -> str:
    """GGUF has no -0, the others have."""
    return "" if format_name in ("MXFP4", "NVFP4") else "_pairs"


def _neighbours(packed: Tensor) -> Tensor:
    """Codes [N, K / 32, 32] of bytes that hold neighbouring columns, the even one in the low nibble."""
    stored = packed.contiguous().view(torch.uint8)
    return torch.stack((stored & 15, stored >> 4), dim=-1).view(stored.shape[0], -1, 32)


def _pack_looked_up(format_name: str, steps: int, groups_a_row: int) -> Callable[[Parts], Tensor]:
    def pack(parts: Parts) -> Tensor:
        if format_name in _PAIRS:
            codes_name, scales_name, _, n_bytes = _PAIRS[format_name]
            codes = _neighbours(parts[codes_name])
            scales = parts[scales_name].contiguous().view(torch.uint8).view(codes.shape[0], -1, n_bytes)
        else:
            n_bytes = 2 if format_name == "IQ4_NL" else 1
            blocks = blocks_of(parts, 16 + n_bytes)
            codes, scales = nibbles(blocks[..., n_bytes:]).flatten(-2), blocks[..., :n_bytes]
        return join(selectors(per_lane(codes, steps)), per_group(scales, groups_a_row))

    return pack


def _pack_nvfp4(format_name: str, steps: int) -> Callable[[Parts], Tensor]:
    """The tensor's scale, one number or one a row, stands beside every row of a record.

    A divisor becomes a multiplier as decoding makes it one.
    """

    def pack(parts: Parts) -> Tensor:
        if format_name == "NVFP4":
            blocks = blocks_of(parts, 36)
            n = blocks.shape[0]
            codes = nibbles(blocks[..., 4:].unflatten(-1, (4, 8))).reshape(n, -1, 32)
            scales, whole = blocks[..., :4].reshape(n, -1) & 0x7F, parts.get("scale")
        else:
            codes_name, scales_name, whole_name = _NVFP4[format_name]
            codes = _neighbours(parts[codes_name])
            n = codes.shape[0]
            scales, whole = parts[scales_name].contiguous().view(torch.uint8), parts.get(whole_name)
        multiplier = torch.ones(1, device=codes.device) if whole is None else whole.float().reshape(-1)
        if format_name == "NVFP4-compressed-tensors" and whole is not None:
            # 0 is a row that pads: a file with such a divisor has been refused.
            multiplier = torch.where(multiplier == 0, multiplier, multiplier.reciprocal())
        beside = multiplier.view(-1, 1, 1).expand(n, codes.shape[1] // (2 * steps), 1).contiguous().view(torch.uint8)
        return join(selectors(per_lane(codes, steps)), per_half(scales, steps), by_row(beside))

    return pack


def _pack_iq4_xs(parts: Parts) -> Tensor:
    """fp16 d, two bytes of upper and four of lower scale bits, 128 bytes of nibbles."""
    blocks = blocks_of(parts, 136)
    codes = nibbles(blocks[..., 8:].unflatten(-1, (8, 16))).reshape(blocks.shape[0], -1, 32)
    low = torch.stack((blocks[..., 4:8] & 15, blocks[..., 4:8] >> 4), dim=-1).flatten(-2)
    shifts = 2 * torch.arange(4, dtype=torch.uint8, device=blocks.device)
    high = (blocks[..., 2:4, None] >> shifts & 3).flatten(-2)
    scales = (low | high << 4).view(torch.int8) - 32
    return join(
        selectors(per_lane(codes, 4)), bytes_of_lanes(scales.flatten(1).view(torch.uint8)), by_row(blocks[..., :2])
    )
