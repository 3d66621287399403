"""GGUF types whose 4-bit codes index an uneven table: IQ4_NL (32 weights a block) and IQ4_XS (256)."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from bytefloor.formats.blocks import block_format, crumbs, half_at, look_up, nibbles
from bytefloor.formats.encode_lookups import IQ4_VALUES, encode_iq4_nl


@cache
def _table(device: torch.device) -> Tensor:
    return torch.tensor(IQ4_VALUES, dtype=torch.float32, device=device)


def _unpack_iq4_nl(out: Tensor, blocks: Tensor) -> None:
    """d, 16 bytes of nibbles in split order."""
    look_up(out, nibbles(blocks[:, 2:]), _table(out.device))
    out.mul_(half_at(blocks, 0, "scale d"))


def _unpack_iq4_xs(out: Tensor, blocks: Tensor) -> None:
    """d, 2 bytes of upper 2-bit fields and 4 bytes of nibbles (eight 6-bit scales), eight 16-byte groups of 32."""
    # Scale g: nibble g of the four bytes in order, field g of the two bytes in order.
    low = nibbles(blocks[:, 4:8, None]).view(-1, 8)
    high = crumbs(blocks[:, 2:4, None]).view(-1, 8)
    scales = (low | high << 4).view(torch.int8).sub_(32).float().mul_(half_at(blocks, 0, "scale d"))
    look_up(out, nibbles(blocks[:, 8:].unflatten(1, (8, 16))), _table(out.device))
    out.view(-1, 8, 32).mul_(scales[:, :, None])


FORMATS = (
    block_format("IQ4_NL", 32, 18, _unpack_iq4_nl, encode_iq4_nl, encode_iq4_nl),
    block_format("IQ4_XS", 256, 136, _unpack_iq4_xs),
)
