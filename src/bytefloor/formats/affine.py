"""MLX's formats: codes packed into 32-bit words, low bits first.

affine: w = code * scale + bias, in float32, rounded twice (multiply, then add), for 2 3 4 5 6 8 bits and groups
of 32, 64 or 128. A row is one stream of bits: 3, 5 and 6-bit codes straddle words, so there are K * bits / 32 words a
row and no padding. mxfp4, mxfp8 and nvfp4: floating-point codes with scales as codes, no biases.
"""

from __future__ import annotations

from functools import partial
from math import gcd

import torch
from torch import Tensor

from bytefloor.formats import checks, chunks, minifloat
from bytefloor.formats.fp4 import Table, fill_pairs
from bytefloor.formats.record import Parts, QuantFormat

BITS = (2, 3, 4, 5, 6, 8)
GROUPS = (32, 64, 128)
WORDS = (torch.uint32, torch.int32)


def _period(bits: int) -> tuple[int, int]:
    """The shortest run of codes that fills whole bytes: codes and bytes."""
    return 8 // gcd(bits, 8), bits // gcd(bits, 8)


def unpack_codes(packed: Tensor, bits: int) -> Tensor:
    """uint8 [U, n * 8 / bits] from bytes [U, n]."""
    n_codes, n_bytes = _period(bits)
    runs = packed.view(-1, n_bytes)
    codes = packed.new_empty(runs.shape[0], n_codes)
    for i in range(n_codes):
        byte, shift = divmod(i * bits, 8)
        lane = codes[:, i]
        torch.bitwise_right_shift(runs[:, byte], shift, out=lane)
        if shift + bits > 8:
            lane.bitwise_or_(runs[:, byte + 1] << (8 - shift))
    return codes.bitwise_and_((1 << bits) - 1).view(packed.shape[0], -1)


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Bytes [N, K * bits / 8] from uint8 codes [N, K]: the inverse of unpack_codes."""
    n_codes, n_bytes = _period(bits)
    runs = codes.view(-1, n_codes)
    packed = codes.new_zeros(runs.shape[0], n_bytes)
    for i in range(n_codes):
        byte, shift = divmod(i * bits, 8)
        packed[:, byte] |= runs[:, i] << shift
        if shift + bits > 8:
            packed[:, byte + 1] |= runs[:, i] >> (8 - shift)
    return packed.view(codes.shape[0], -1)


def _unpack_affine(out: Tensor, packed: Tensor, scales: Tensor, biases: Tensor, bits: int) -> None:
    out.copy_(unpack_codes(packed, bits))
    out.mul_(chunks.finite(scales.float(), "scale")).add_(chunks.finite(biases.float(), "bias"))


def _weight_bytes(name: str, parts: Parts, bits: int, group: int) -> tuple[Tensor, int]:
    """The packed weight as bytes [N, K * bits / 8], and K."""
    words = checks.matrix(name, parts, "weight", WORDS)
    n_group_words = group * bits // 32  # whole for every width, since groups are multiples of 32
    n_groups = checks.whole(name, "weight", "words a row", words.shape[1], n_group_words)
    return words.view(torch.uint8), n_groups * group


def _decode_affine(parts: Parts, name: str, bits: int, group: int) -> Tensor:
    checks.require_names(name, parts, ("weight", "scales", "biases"))
    packed, n_columns = _weight_bytes(name, parts, bits, group)
    n_rows, n_groups = packed.shape[0], n_columns // group
    scales = checks.matrix(name, parts, "scales", checks.FLOATS)
    biases = checks.matrix(name, parts, "biases", checks.FLOATS)
    checks.require_shape(name, "scales", scales, (n_rows, n_groups))
    checks.require_shape(name, "biases", biases, (n_rows, n_groups))
    operands = packed.view(n_rows * n_groups, group * bits // 8), scales.view(-1, 1), biases.view(-1, 1)
    out = torch.empty(n_rows, n_columns, device=packed.device)
    return chunks.fill(name, out, group, operands, partial(_unpack_affine, bits=bits))


def _encode_affine(weights: Tensor, name: str, bits: int, group: int) -> dict[str, Tensor]:
    """Codes are chosen against the scale and bias as stored, after their rounding to bf16."""
    n_steps = (1 << bits) - 1
    groups = checks.encodable(name, weights, group).view(-1, group)
    minimum, maximum = groups.aminmax(dim=1, keepdim=True)
    scales, biases = ((maximum - minimum) / n_steps).bfloat16(), minimum.bfloat16()
    scales = torch.where(scales > 0, scales, torch.ones_like(scales))
    stored = {"scales": scales, "biases": biases}
    stored = {key: part.view(weights.shape[0], weights.shape[1] // group) for key, part in stored.items()}
    for key, part in stored.items():
        checks.refuse_infinite(name, part, f"{key} as bfloat16")
    codes = ((groups - biases.float()) / scales.float()).round_().clamp_(0, n_steps).to(torch.uint8)
    return {"weight": pack_codes(codes.view(weights.shape), bits).view(torch.uint32), **stored}


def _affine(bits: int, group: int) -> QuantFormat:
    name = f"affine-{bits}b-g{group}"
    facts = {"name": name, "bits": bits, "group": group}
    return QuantFormat(
        name=name,
        block=group,
        bits_per_weight=bits + 32 / group,
        parts=("weight", "scales", "biases"),
        decode=partial(_decode_affine, **facts),  # type: ignore[arg-type]
        encode=partial(_encode_affine, **facts),  # type: ignore[arg-type]
    )


def _fp4_mode(name: str, group: int, dtypes: tuple[torch.dtype, ...], table: Table) -> QuantFormat:
    def decode(parts: Parts) -> Tensor:
        checks.require_names(name, parts, ("weight", "scales"))
        packed, _ = _weight_bytes(name, parts, 4, group)
        scales = checks.matrix(name, parts, "scales", dtypes)
        return fill_pairs(name, "weight", packed, "scales", scales, group, table)

    return QuantFormat(name=name, block=group, bits_per_weight=4 + 8 / group, parts=("weight", "scales"), decode=decode)


def _unpack_mxfp8(out: Tensor, codes: Tensor, scales: Tensor) -> None:
    decoded = minifloat.decode_codes(scales, minifloat.e8m0_table(out.device))
    minifloat.decode_e4m3(out, codes, "code")
    out.mul_(chunks.finite(decoded, "scale"))


def _decode_mxfp8(parts: Parts) -> Tensor:
    name = "mlx-mxfp8"
    checks.require_names(name, parts, ("weight", "scales"))
    codes, n_columns = _weight_bytes(name, parts, 8, 32)
    scales = checks.matrix(name, parts, "scales", minifloat.E8M0_DTYPES)
    checks.require_shape(name, "scales", scales, (codes.shape[0], n_columns // 32))
    operands = codes.view(-1, 32), scales.view(torch.uint8).view(-1, 1)
    out = torch.empty(codes.shape, device=codes.device)
    return chunks.fill(name, out, 32, operands, _unpack_mxfp8)


FORMATS = (
    *(_affine(bits, group) for bits in BITS for group in GROUPS),
    _fp4_mode("mlx-mxfp4", 32, minifloat.E8M0_DTYPES, minifloat.e8m0_table),
    _fp4_mode("mlx-nvfp4", 16, minifloat.E4M3_DTYPES, minifloat.e4m3_table),
    QuantFormat(
        name="mlx-mxfp8",
        block=32,
        bits_per_weight=8.25,
        parts=("weight", "scales"),
        decode=_decode_mxfp8,
    ),
)
