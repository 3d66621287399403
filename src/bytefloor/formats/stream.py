"""Stream forms: how weights lie on a device, in the order in which a warp reads them.

The unit is a *record* of 16 rows by ``columns`` columns, a multiple of 16 bytes long, that one warp eats at once.
Records of a row tile are contiguous along K, tiles follow each other, so any run of records is one run of bytes and one
bulk copy fetches it. Nothing depends on the number of multiprocessors.

Tensor cores multiply 16 rows by 32 columns. Of each group of 32 columns, lane 4 g + t of the warp owns elements 8t to
8t + 7 of rows g and g + 8. A *step* is two groups, 64 columns: sixteen bytes of 4-bit codes a lane. A *set* is the up
to four groups of which lane t of each four scales the t-th.

A word holds eight 4-bit codes: its low nibbles are elements 0 to 3, its high nibbles 4 to 7, so that a mask and a shift
give the bytes that a tensor core takes. Wider codes keep their upper bits in planes of their own.

Packing loses nothing: the kernel ``ops/unpack.cu`` gives back the same float32 values, bit for bit.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from bytefloor.errors import UnsupportedError
from bytefloor.formats.affine import unpack_codes
from bytefloor.formats.blocks import bit_planes, crumbs, nibbles
from bytefloor.formats.record import Parts

ROWS = 16
STEP = 64
"""Columns a warp covers with one 16-byte load of 4-bit codes a lane."""


@dataclass(frozen=True)
class StreamForm:
    """One layout. Its CUDA side is the struct of the same name in ``ops/stream.cuh``.

    columns: K of a record. record_bytes: its size. pack: parts of the stored tensor -> uint8 [tiles, K / columns,
    record_bytes]; N must be a multiple of 16 and K of ``columns``.
    """

    name: str
    columns: int
    record_bytes: int
    pack: Callable[[Parts], Tensor]

    def n_bytes(self, n: int, k: int) -> int:
        """Bytes of an N x K matrix on the device."""
        return n // ROWS * (k // self.columns) * self.record_bytes


def choose(format_name: str, n: int, k: int, scales: torch.dtype | None = None) -> StreamForm:
    """The stream form for a matrix of that format and shape; scales: their dtype, where the format leaves it open.

    UnsupportedError where there is none.
    """
    if n % ROWS:
        raise UnsupportedError(f"{format_name}: {n} rows are not a multiple of {ROWS}, which a stream record has")
    if format_name in _K_QUANTS:
        return _K_QUANTS[format_name]
    if format_name in _LEGACY or format_name in _PLAIN:
        if k % STEP:
            raise UnsupportedError(
                f"{format_name}: {k} columns are not a multiple of {STEP}, which a stream record has"
            )
        return _stepped_form(format_name, k)
    if affine := re.fullmatch(r"affine-(\d)b-g(\d+)", format_name):
        return _affine_form(format_name, int(affine[1]), int(affine[2]), k, scales)
    raise UnsupportedError(f"{format_name} has no stream form yet")


def _per_lane(codes: Tensor, steps: int) -> Tensor:
    """[N, K / 32, 32] -> [tiles, records, steps, 32 lanes, 2 groups, 2 rows, 8]: what each lane owns of every step."""
    n, per_row, _ = codes.shape
    split = codes.reshape(n // ROWS, 2, 8, per_row // (2 * steps), steps, 2, 4, 8)
    return split.permute(0, 3, 4, 2, 6, 5, 1, 7).flatten(3, 4)


def _per_set(scales: Tensor, groups: int) -> Tensor:
    """uint8 [N, K / 32, bytes] -> [tiles, sets, 8 g, groups, 2 rows, bytes]: lane 4 g + t scales group t of a set."""
    n, per_row, n_bytes = scales.shape
    split = scales.reshape(n // ROWS, 2, 8, per_row // groups, groups, n_bytes)
    return split.permute(0, 3, 2, 4, 1, 5)


def _low_nibbles(owned: Tensor) -> Tensor:
    """uint8 [..., 8] codes -> uint8 [..., 4]: their low four bits in the word order above."""
    low = (owned & 15).unflatten(-1, (2, 4))
    return low[..., 0, :] | low[..., 1, :] << 4


def _bit_plane(bits: Tensor) -> Tensor:
    """Single bits as lanes own them, [..., 2 groups, 2 rows, 8] -> uint8 [..., 4]: a word for each step and lane.

    Bit b of byte j is that of element 4 h + j, b = 4 group + 2 row + h: shifted right by b and masked with 0x01010101
    the word gives, in byte order, the bits of the four elements that are one register of a tensor core.
    """
    runs = bits.unflatten(-1, (2, 4)).flatten(-4, -2)
    weights = 1 << torch.arange(8, dtype=torch.uint8, device=bits.device)
    return (runs * weights[:, None]).sum(dim=-2, dtype=torch.uint8)


def _crumb_planes(upper: Tensor) -> Tensor:
    """The same for 2-bit values: uint8 [..., 2 groups, 4], a word for each group, two bits at 2 b, b = 2 row + h."""
    runs = upper.unflatten(-1, (2, 4)).flatten(-3, -2)
    weights = 1 << 2 * torch.arange(4, dtype=torch.uint8, device=upper.device)
    return (runs * weights[:, None]).sum(dim=-2, dtype=torch.uint8)


def _join(*planes: Tensor) -> Tensor:
    """Byte planes [tiles, records, ...] side by side in a record."""
    return torch.cat([plane.contiguous().view(torch.uint8).flatten(2) for plane in planes], dim=2)


def _blocks(parts: Parts, block_bytes: int) -> Tensor:
    stored = parts["blocks"].contiguous()
    return stored.view(stored.shape[0], -1, block_bytes)


def _scales_4_and_5(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """6-bit scales and minimums of Q4_K and Q5_K blocks as bytes: uint8 [N, K / 32] each."""
    first = blocks[..., 4:12]
    low = first & 63
    high = first >> 2 & 48 | nibbles(blocks[..., 12:16]).flatten(-2)
    scales = torch.cat((low[..., :4], high[..., :4]), dim=-1)
    minimums = torch.cat((low[..., 4:], high[..., 4:]), dim=-1)
    return scales.flatten(1), minimums.flatten(1)


def _by_row(super_scales: Tensor) -> Tensor:
    """uint8 [N, K / 256, bytes] -> [tiles, K / 256, 8 g, 2 rows, bytes]."""
    split = super_scales.unflatten(0, (-1, 2, 8))
    return split.permute(0, 3, 2, 1, 4)


def _bytes_of_lanes(scales: Tensor) -> Tensor:
    """uint8 [N, K / 32] -> [tiles, K / 256, 32 lanes, 2 sets, 2 rows]."""
    sets = _per_set(scales[..., None], 4).squeeze(-1).flatten(2, 3)
    return sets.unflatten(1, (-1, 2)).transpose(2, 3)


def _pack_q4_k(parts: Parts) -> Tensor:
    blocks = _blocks(parts, 144)
    codes = nibbles(blocks[..., 16:].unflatten(-1, (4, 32))).reshape(blocks.shape[0], -1, 32)
    scales, minimums = _scales_4_and_5(blocks)
    return _join(
        _low_nibbles(_per_lane(codes, 4)),
        _bytes_of_lanes(scales),
        _bytes_of_lanes(minimums),
        _by_row(blocks[..., :4]),
    )


def _pack_q5_k(parts: Parts) -> Tensor:
    blocks = _blocks(parts, 176)
    codes = nibbles(blocks[..., 48:].unflatten(-1, (4, 32))).reshape(blocks.shape[0], -1, 32)
    fifth = bit_planes(blocks[..., 16:48]).reshape(blocks.shape[0], -1, 32)
    scales, minimums = _scales_4_and_5(blocks)
    return _join(
        _low_nibbles(_per_lane(codes, 4)),
        _bit_plane(_per_lane(fifth, 4)).transpose(2, 3),
        _bytes_of_lanes(scales),
        _bytes_of_lanes(minimums),
        _by_row(blocks[..., :4]),
    )


def _pack_q6_k(parts: Parts) -> Tensor:
    """Scales stand for 16 elements: of each step lane t scales half t % 2 of group t // 2."""
    blocks = _blocks(parts, 210)
    codes = nibbles(blocks[..., :128].unflatten(-1, (2, 64))).reshape(blocks.shape[0], -1, 32)
    upper = crumbs(blocks[..., 128:192].unflatten(-1, (2, 32))).reshape(blocks.shape[0], -1, 32)
    scales = blocks[..., 192:208].reshape(blocks.shape[0] // ROWS, 2, 8, -1, 4, 4)
    return _join(
        _low_nibbles(_per_lane(codes, 4)),
        _crumb_planes(_per_lane(upper, 4)),
        scales.permute(0, 3, 2, 5, 4, 1),
        _by_row(blocks[..., 208:]),
    )


def _pack_legacy(format_name: str, steps: int) -> Callable[[Parts], Tensor]:
    block_bytes, n_scale_bytes, has_fifth = _LEGACY[format_name]
    groups = min(4, 2 * steps)

    def pack(parts: Parts) -> Tensor:
        blocks = _blocks(parts, block_bytes)
        n_head = n_scale_bytes + (4 if has_fifth else 0)
        sets = _per_set(blocks[..., :n_scale_bytes], groups)
        scales = sets.unflatten(1, (-1, 2 * steps // groups))
        if format_name == "Q8_0":
            owned = _per_lane(blocks[..., 2:], steps).unflatten(-1, (2, 4))
            return _join(owned.permute(0, 1, 2, 4, 3, 6, 5, 7), scales)
        codes = nibbles(blocks[..., n_head:]).flatten(-2)
        planes = [_low_nibbles(_per_lane(codes, steps))]
        if has_fifth:
            fifth = bit_planes(blocks[..., n_scale_bytes:n_head, None]).flatten(-2).flatten(-2)
            planes.append(_bit_plane(_per_lane(fifth, steps)))
        return _join(*planes, scales)

    return pack


_K_QUANTS = {
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
        owned = _per_lane(values.unflatten(1, (-1, 32)), steps).unflatten(-1, (2, 2, 2))
        return _join(owned.permute(0, 1, 2, 4, 6, 3, 7, 5, 8))

    return pack


def _stepped_form(format_name: str, k: int) -> StreamForm:
    """As many steps a record as K allows, up to four: longer records are cheaper to fetch. Of 16 bits, one."""
    if format_name in _PLAIN:
        return StreamForm(f"{format_name}<1>", STEP, 2048, _pack_plain(1))
    steps = next(steps for steps in (4, 2, 1) if k % (STEP * steps) == 0)
    name = f"{format_name}<{steps}>"
    _, n_scale_bytes, has_fifth = _LEGACY[format_name]
    per_lane = (32 if format_name == "Q8_0" else 16) + (4 if has_fifth else 0) + n_scale_bytes
    return StreamForm(name, STEP * steps, 32 * steps * per_lane, _pack_legacy(format_name, steps))


def _affine_form(format_name: str, bits: int, group: int, k: int, scales: torch.dtype | None) -> StreamForm:
    """Scales and biases stay in the file's 16 bits."""
    if scales not in (torch.bfloat16, torch.float16):
        raise UnsupportedError(f"{format_name}: no stream form for scales of {scales}, only for bfloat16 and float16")
    steps = next((n for n in (4, 2, 1) if k % (STEP * n) == 0 and STEP * n % group == 0), None)
    if steps is None:
        raise UnsupportedError(f"{format_name}: {k} columns are not a multiple of {STEP}, which a stream record has")
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
            owned = _per_lane(codes ^ 128, steps).unflatten(-1, (2, 4))
            planes.append(owned.permute(0, 1, 2, 4, 3, 6, 5, 7))
        elif bits >= 4:
            planes.append(_low_nibbles(_per_lane(codes, steps)))
        if bits in (2, 3, 6):
            planes.append(_crumb_planes(_per_lane(codes >> 4 if bits == 6 else codes & 3, steps)))
        if bits in (3, 5):
            planes.append(_bit_plane(_per_lane(codes >> bits - 1, steps)))
        both = torch.stack((parts["scales"], parts["biases"]), dim=-1).contiguous().view(torch.uint8)
        split = both.view(n // ROWS, 2, 8, -1, groups_a_row, 4)
        return _join(*planes, split.permute(0, 3, 2, 4, 1, 5))

    return pack
