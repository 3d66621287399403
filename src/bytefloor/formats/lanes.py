"""How the codes and scales of a matrix are laid out for a warp: the records that stream forms are made of.

The unit is a *record* of 16 rows by ``columns`` columns, a multiple of 16 bytes long, that one warp eats at once.
Records of a row tile are contiguous along K, tiles follow each other, so any run of records is one run of bytes and one
bulk copy fetches it. Nothing depends on the number of multiprocessors.

Tensor cores multiply 16 rows by 32 columns. Of each group of 32 columns, lane 4 g + t of the warp owns elements 8t to
8t + 7 of rows g and g + 8. A *step* is two groups, 64 columns: sixteen bytes of 4-bit codes a lane. A *set* is the up
to four groups of which lane t of each four scales the t-th.

A word holds eight 4-bit codes: its low nibbles are elements 0 to 3, its high nibbles 4 to 7, so that a mask and a shift
give the bytes that a tensor core takes. Wider codes keep their upper bits in planes of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from bytefloor.errors import UnsupportedError
from bytefloor.formats.record import Parts

ROWS = 16
STEP = 64
"""Columns a warp covers with one 16-byte load of 4-bit codes a lane."""


@dataclass(frozen=True)
class StreamForm:
    """One layout. Its CUDA side is the struct of the same name in ``ops/stream*.cuh``.

    columns: K of a record. record_bytes: its size. pack: parts of the stored tensor -> uint8 [tiles, K / columns,
    record_bytes]; N must be a multiple of 16, and K of ``columns`` but for formats of plain values, which are filled up
    with columns of zeros.
    """

    name: str
    columns: int
    record_bytes: int
    pack: Callable[[Parts], Tensor]

    def n_bytes(self, n: int, k: int) -> int:
        """Bytes of an N x K matrix on the device."""
        return n // ROWS * self.n_records(k) * self.record_bytes

    def n_records(self, k: int) -> int:
        """Records of a row tile of K columns."""
        return -(-k // self.columns)


def per_lane(codes: Tensor, steps: int) -> Tensor:
    """[N, K / 32, 32] -> [tiles, records, steps, 32 lanes, 2 groups, 2 rows, 8]: what each lane owns of every step."""
    n, per_row, _ = codes.shape
    split = codes.reshape(n // ROWS, 2, 8, per_row // (2 * steps), steps, 2, 4, 8)
    return split.permute(0, 3, 4, 2, 6, 5, 1, 7).flatten(3, 4)


def steps_a_record(format_name: str, k: int, group: int = 1) -> int:
    """As many steps of 64 columns as K allows, up to four, that hold whole groups.

    UnsupportedError where there is none.
    """
    steps = next((n for n in (4, 2, 1) if k % (STEP * n) == 0 and STEP * n % group == 0), None)
    if steps is None:
        raise UnsupportedError(
            f"{format_name}: {k} columns are not a multiple of {max(STEP, group)}, which a stream record has"
        )
    return steps


def per_set(scales: Tensor, groups: int) -> Tensor:
    """uint8 [N, K / 32, bytes] -> [tiles, sets, 8 g, groups, 2 rows, bytes]: lane 4 g + t scales group t of a set."""
    n, per_row, n_bytes = scales.shape
    split = scales.reshape(n // ROWS, 2, 8, per_row // groups, groups, n_bytes)
    return split.permute(0, 3, 2, 4, 1, 5)


def low_nibbles(owned: Tensor) -> Tensor:
    """uint8 [..., 8] codes -> uint8 [..., 4]: their low four bits in the word order above."""
    low = (owned & 15).unflatten(-1, (2, 4))
    return low[..., 0, :] | low[..., 1, :] << 4


def whole_bytes(owned: Tensor) -> Tensor:
    """Codes of a byte as a tensor core takes them: a lane's first four of both rows of a group, then the others."""
    return owned.unflatten(-1, (2, 4)).permute(0, 1, 2, 4, 3, 6, 5, 7)


def bit_plane(bits: Tensor) -> Tensor:
    """Single bits as lanes own them, [..., 2 groups, 2 rows, 8] -> uint8 [..., 4]: a word for each step and lane.

    Bit b of byte j is that of element 4 h + j, b = 4 group + 2 row + h: shifted right by b and masked with 0x01010101
    the word gives, in byte order, the bits of the four elements that are one register of a tensor core.
    """
    runs = bits.unflatten(-1, (2, 4)).flatten(-4, -2)
    weights = 1 << torch.arange(8, dtype=torch.uint8, device=bits.device)
    return (runs * weights[:, None]).sum(dim=-2, dtype=torch.uint8)


def crumb_planes(upper: Tensor) -> Tensor:
    """The same for 2-bit values: uint8 [..., 2 groups, 4], a word for each group, two bits at 2 b, b = 2 row + h."""
    runs = upper.unflatten(-1, (2, 4)).flatten(-3, -2)
    weights = 1 << 2 * torch.arange(4, dtype=torch.uint8, device=upper.device)
    return (runs * weights[:, None]).sum(dim=-2, dtype=torch.uint8)


def join(*planes: Tensor) -> Tensor:
    """Byte planes [tiles, records, ...] side by side in a record."""
    return torch.cat([plane.contiguous().view(torch.uint8).flatten(2) for plane in planes], dim=2)


def blocks_of(parts: Parts, block_bytes: int) -> Tensor:
    stored = parts["blocks"].contiguous()
    return stored.view(stored.shape[0], -1, block_bytes)


def by_row(super_scales: Tensor) -> Tensor:
    """uint8 [N, K / 256, bytes] -> [tiles, K / 256, 8 g, 2 rows, bytes]."""
    split = super_scales.unflatten(0, (-1, 2, 8))
    return split.permute(0, 3, 2, 1, 4)


def bytes_of_lanes(scales: Tensor) -> Tensor:
    """uint8 [N, K / 32] -> [tiles, K / 256, 32 lanes, 2 sets, 2 rows]."""
    sets = per_set(scales[..., None], 4).squeeze(-1).flatten(2, 3)
    return sets.unflatten(1, (-1, 2)).transpose(2, 3)


def per_half(scales: Tensor, steps: int) -> Tensor:
    """uint8 [N, K / 16] -> [tiles, records, 8 g, 4 t, steps, 2 rows].

    Of each step lane t scales half t % 2 of group t // 2.
    """
    split = scales.reshape(scales.shape[0] // ROWS, 2, 8, -1, steps, 4)
    return split.permute(0, 3, 2, 5, 4, 1)


def per_group(scales: Tensor, groups_a_row: int) -> Tensor:
    """uint8 [N, groups, bytes] -> [tiles, records, 8 g, groups of a record, 2 rows, bytes]."""
    split = scales.reshape(scales.shape[0] // ROWS, 2, 8, -1, groups_a_row, scales.shape[-1])
    return split.permute(0, 3, 2, 4, 1, 5)


def selectors(owned: Tensor) -> Tensor:
    """uint8 [..., 8] codes -> uint8 [..., 4]: nibble i of the word is code i, as a byte permutation takes them."""
    pairs = owned.unflatten(-1, (4, 2))
    return pairs[..., 0] | pairs[..., 1] << 4
