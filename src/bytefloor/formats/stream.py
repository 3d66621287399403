"""Stream forms: how weights lie on a device, in the order in which a warp reads them.

Packing loses nothing: the kernel ``ops/unpack.cu`` gives back the same float32 values, bit for bit.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import torch
from torch import Tensor

from bytefloor.errors import UnsupportedError
from bytefloor.formats import lookups
from bytefloor.formats.affine import unpack_codes
from bytefloor.formats.blocks import bit_planes, crumbs, nibbles
from bytefloor.formats.lanes import (
    ROWS,
    STEP,
    StreamForm,
    bit_plane,
    blocks_of,
    by_row,
    bytes_of_lanes,
    crumb_planes,
    join,
    low_nibbles,
    per_group,
    per_half,
    per_lane,
    per_set,
    steps_a_record,
    whole_bytes,
)
from bytefloor.formats.record import Parts


def choose(format_name: str, n: int, k: int, scales: torch.dtype | None = None) -> StreamForm:
    """The stream form for a matrix of that format and shape; scales: their dtype, where the format leaves it open.

    UnsupportedError where there is none.
    """
    if n % ROWS:
        raise UnsupportedError(f"{format_name}: {n} rows are not a multiple of {ROWS}, which a stream record has")
    if format_name in _K_QUANTS:
        return _K_QUANTS[format_name]
    if format_name in _LEGACY or format_name in _PLAIN:
        return _stepped_form(format_name, k)
    if affine := re.fullmatch(r"affine-(\d)b-g(\d+)", format_name):
        return _affine_form(format_name, int(affine[1]), int(affine[2]), k, scales)
    if format_name in lookups.NAMES:
        return lookups.lookup_form(format_name, k)
    if format_name in _FP8 or format_name == "mlx-mxfp8":
        return _fp8_form(format_name, k)
    raise UnsupportedError(f"{format_name} has no stream form yet")


def _scales_4_and_5(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """6-bit scales and minimums of Q4_K and Q5_K blocks as bytes: uint8 [N, K / 32] each."""
    first = blocks[..., 4:12]
    low = first & 63
    high = first >> 2 & 48 | nibbles(blocks[..., 12:16]).flatten(-2)
    scales = torch.cat((low[..., :4], high[..., :4]), dim=-1)
    minimums = torch.cat((low[..., 4:], high[..., 4:]), dim=-1)
    return scales.flatten(1), minimums.flatten(1)


def _pack_q4_k(parts: Parts) -> Tensor:
    blocks = blocks_of(parts, 144)
    codes = nibbles(blocks[..., 16:].unflatten(-1, (4, 32))).reshape(blocks.shape[0], -1, 32)
    scales, minimums = _scales_4_and_5(blocks)
    return join(
        low_nibbles(per_lane(codes, 4)),
        bytes_of_lanes(scales),
        bytes_of_lanes(minimums),
        by_row(blocks[..., :4]),
    )


def _pack_q5_k(parts: Parts) -> Tensor:
    blocks = blocks_of(parts, 176)
    codes = nibbles(blocks[..., 48:].unflatten(-1, (4, 32))).reshape(blocks.shape[0], -1, 32)
    fifth = bit_planes(blocks[..., 16:48]).reshape(blocks.shape[0], -1, 32)
    scales, minimums = _scales_4_and_5(blocks)
    return join(
        low_nibbles(per_lane(codes, 4)),
        bit_plane(per_lane(fifth, 4)).transpose(2, 3),
        bytes_of_lanes(scales),
        bytes_of_lanes(minimums),
        by_row(blocks[..., :4]),
    )


def _pack_q6_k(parts: Parts) -> Tensor:
    """Scales stand for 16 elements: of each step lane t scales half t % 2 of group t // 2."""
    blocks = blocks_of(parts, 210)
    codes = nibbles(blocks[..., :128].unflatten(-1, (2, 64))).reshape(blocks.shape[0], -1, 32)
    upper = crumbs(blocks[..., 128:192].unflatten(-1, (2, 32))).reshape(blocks.shape[0], -1, 32)
    return join(
        low_nibbles(per_lane(codes, 4)),
        crumb_planes(per_lane(upper, 4)),
        per_half(blocks[..., 192:208].flatten(1), 4),
        by_row(blocks[..., 208:]),
    )


def _pack_legacy(format_name: str, steps: int) -> Callable[[Parts], Tensor]:
    block_bytes, n_scale_bytes, has_fifth = _LEGACY[format_name]
    groups = min(4, 2 * steps)

    def pack(parts: Parts) -> Tensor:
        blocks = blocks_of(parts, block_bytes)
        n_head = n_scale_bytes + (4 if has_fifth else 0)
        sets = per_set(blocks[..., :n_scale_bytes], groups)
        scales = sets.unflatten(1, (-1, 2 * steps // groups))
        if format_name == "Q8_0":
            return join(whole_bytes(per_lane(blocks[..., 2:], steps)), scales)
        codes = nibbles(blocks[..., n_head:]).flatten(-2)
        planes = [low_nibbles(per_lane(codes, steps))]
        if has_fifth:
            fifth = bit_planes(blocks[..., n_scale_bytes:n_head, None]).flatten(-2).flatten(-2)
            planes.append(bit_plane(per_lane(fifth, steps)))
        return join(*planes, scales)

    return pack


def _pack_q2_k(parts: Parts) -> Tensor:
    """A byte for 16 elements: scale in its low nibble, minimum in the high one."""
    blocks = blocks_of(parts, 84)
    codes = crumbs(blocks[..., 16:80].unflatten(-1, (2, 32))).reshape(blocks.shape[0], -1, 32)
    return join(crumb_planes(per_lane(codes, 4)), per_half(blocks[..., :16].flatten(1), 4), by_row(blocks[..., 80:]))


def _pack_q3_k(parts: Parts) -> Tensor:
    """Scales become signed bytes; a code is three bits less 4."""
    blocks = blocks_of(parts, 110)
    n = blocks.shape[0]
    low = crumbs(blocks[..., 32:96].unflatten(-1, (2, 32))).reshape(n, -1, 32)
    third = bit_planes(blocks[..., :32]).reshape(n, -1, 32)
    scales = nibbles(blocks[..., 96:104]).flatten(-2) | crumbs(blocks[..., 104:108]).flatten(-2) << 4
    return join(
        crumb_planes(per_lane(low, 4)),
        bit_plane(per_lane(third, 4)),
        per_half((scales.view(torch.int8) - 32).view(torch.uint8).flatten(1), 4),
        by_row(blocks[..., 108:]),
    )


_K_QUANTS = {
    "Q2_K": StreamForm("Q2_K", 256, 1024 + 256 + 64, _pack_q2_k),
    "Q3_K": StreamForm("Q3_K", 256, 1024 + 512 + 256 + 32, _pack_q3_k),
    "Q4_K": StreamForm("Q4_K", 256, 2048 + 128 + 128 + 64, _pack_q4_k),
    "Q5_K": StreamForm("Q5_K", 256, 2048 + 512 + 128 + 128 + 64, _pack_q5_k),
    "Q6_K": StreamForm("Q6_K", 256, 2048 + 1024 + 256 + 32, _pack_q6_k),
}
_LEGACY = {
    "Q4_0": (18, 2, False),
    "Q4_1": (20, 4, False),
    "Q5_0": (22, 2, True),
    "Q5_1": (24, 4, True),
    "Q8_0": (34, 2, False),
}
"""Bytes of a block, of its scales, and whether it has fifth bits."""


_PLAIN = ("BF16", "F16")


def _pack_plain(steps: int) -> Callable[[Parts], Tensor]:
    def pack(parts: Parts) -> Tensor:
        values = parts["values"].contiguous().view(torch.int16)
        values = torch.nn.functional.pad(values, (0, -values.shape[1] % STEP))
        owned = per_lane(values.unflatten(1, (-1, 32)), steps).unflatten(-1, (2, 2, 2))
        return join(owned.permute(0, 1, 2, 4, 6, 3, 7, 5, 8))

    return pack


def _stepped_form(format_name: str, k: int) -> StreamForm:
    """As many steps a record as K allows, up to four: longer records are cheaper to fetch. Of 16 bits, one."""
    if format_name in _PLAIN:
        return StreamForm(f"{format_name}<1>", STEP, 2048, _pack_plain(1))
    steps = steps_a_record(format_name, k)
    name = f"{format_name}<{steps}>"
    _, n_scale_bytes, has_fifth = _LEGACY[format_name]
    lane_bytes = (32 if format_name == "Q8_0" else 16) + (4 if has_fifth else 0) + n_scale_bytes
    return StreamForm(name, STEP * steps, 32 * steps * lane_bytes, _pack_legacy(format_name, steps))


def _affine_form(format_name: str, bits: int, group: int, k: int, scales: torch.dtype | None) -> StreamForm:
    """Scales and biases stay in the file's 16 bits."""
    if scales not in (torch.bfloat16, torch.float16):
        raise UnsupportedError(f"{format_name}: no stream form for scales of {scales}, only for bfloat16 and float16")
    steps = steps_a_record(format_name, k, group)
    name = f"Affine<{bits}, {steps}, {group}, {str(scales == torch.bfloat16).lower()}>"
    code_bytes = ROWS * STEP * steps * bits // 8
    scale_bytes = ROWS * (STEP * steps // group) * 4
    return StreamForm(name, STEP * steps, code_bytes + scale_bytes, _pack_affine(bits, group, steps))


def _pack_affine(bits: int, group: int, steps: int) -> Callable[[Parts], Tensor]:
    groups_a_row = STEP * steps // group

    def pack(parts: Parts) -> Tensor:
        stored = parts["weight"].contiguous().view(torch.uint8)
        n = stored.shape[0]
        codes = unpack_codes(stored.view(n, -1), bits).view(n, -1, 32)
        planes = []
        if bits == 8:
            planes.append(whole_bytes(per_lane(codes ^ 128, steps)))
        elif bits >= 4:
            planes.append(low_nibbles(per_lane(codes, steps)))
        if bits in (2, 3, 6):
            planes.append(crumb_planes(per_lane(codes >> 4 if bits == 6 else codes & 3, steps)))
        if bits in (3, 5):
            planes.append(bit_plane(per_lane(codes >> bits - 1, steps)))
        both = torch.stack((parts["scales"], parts["biases"]), dim=-1).contiguous().view(torch.uint8)
        return join(*planes, per_group(both.view(n, -1, 4), groups_a_row))

    return pack


_FP8 = {"FP8-E4M3-row": "weight_scale", "FP8-E4M3-tensor": "weight_scale", "FP8-E4M3-128x128": "weight_scale_inv"}
"""Names of the scales, of which a row has one or one for each 128 columns."""


def _fp8_form(format_name: str, k: int) -> StreamForm:
    """A record lies in one tile of 128 columns, so that a row of it has one scale."""
    steps = min(2, steps_a_record(format_name, k))
    is_mx = format_name == "mlx-mxfp8"
    scale_bytes = ROWS * 2 * steps if is_mx else ROWS * 4
    pack = _pack_fp8("scales" if is_mx else _FP8[format_name], steps, is_mx)
    return StreamForm(f"{'MXFP8' if is_mx else 'FP8'}<{steps}>", STEP * steps, 1024 * steps + scale_bytes, pack)


def _pack_fp8(scales_name: str, steps: int, is_mx: bool) -> Callable[[Parts], Tensor]:
    def pack(parts: Parts) -> Tensor:
        stored, scales = parts["weight"].contiguous().view(torch.uint8), parts[scales_name]
        n, k = stored.shape
        owned = whole_bytes(per_lane(stored.view(n, -1, 32), steps))
        if is_mx:
            return join(owned, per_group(scales.contiguous().view(torch.uint8)[..., None], 2 * steps))
        tiles = torch.arange(k // (STEP * steps), device=stored.device) * STEP * steps // 128
        by_tile = scales.float().reshape(n, -1)
        beside = by_tile.expand(n, len(tiles)) if by_tile.shape[1] == 1 else by_tile[:, tiles]
        return join(owned, by_row(beside[..., None].contiguous().view(torch.uint8)))

    return pack
