"""4-bit floating-point formats: E2M1 codes with a scale a group, in six containers.

GGUF keeps element j in the low nibble and j + group / 2 in the high one of byte j, and has no -0 (code 8 is +0); every
other container pairs neighbouring columns, the even one in the low nibble, and code 8 is -0.

A per-tensor scale is applied to code * group scale, which is exact, so a weight is rounded once. It multiplies in GGUF
and ModelOpt files; a compressed-tensors divisor becomes a float32 multiplier first, so that the same weights stored
either way decode to the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, partial

import torch
from torch import Tensor

from bytefloor.errors import FileError
from bytefloor.formats import checks, chunks, minifloat
from bytefloor.formats.blocks import block_format, look_up, nibbles, rows_of_blocks
from bytefloor.formats.encode_lookups import encode_mxfp4
from bytefloor.formats.record import Parts, QuantFormat

Table = Callable[[torch.device], Tensor]


@cache
def _gguf_e2m1(device: torch.device) -> Tensor:
    return torch.tensor([value + 0.0 for value in minifloat.E2M1], device=device)  # -0 + 0 is +0


def _unpack_gguf_mxfp4(out: Tensor, blocks: Tensor) -> None:
    """One E8M0 byte, 16 bytes of nibbles."""
    scales = minifloat.decode_codes(blocks[:, :1], minifloat.e8m0_table(out.device))
    look_up(out, nibbles(blocks[:, 1:]), _gguf_e2m1(out.device))
    out.mul_(chunks.finite(scales, "E8M0 scale"))


def _unpack_gguf_nvfp4(out: Tensor, blocks: Tensor, multiplier: float) -> None:
    """Four E4M3 bytes whose sign bit means nothing, four 8-byte groups of 16 weights."""
    scales = minifloat.decode_codes(blocks[:, :4] & 0x7F, minifloat.e4m3_table(out.device))
    look_up(out, nibbles(blocks[:, 4:].unflatten(1, (4, 8))), _gguf_e2m1(out.device))
    out.view(-1, 4, 16).mul_(chunks.finite(scales, "E4M3 scale")[:, :, None])
    if multiplier != 1.0:
        out.mul_(multiplier)


def _decode_gguf_nvfp4(parts: Parts) -> Tensor:
    checks.require_names("NVFP4", parts, ("blocks",), ("scale",))
    blocks, blocks_per_row = rows_of_blocks("NVFP4", parts, 36)
    out = torch.empty(parts["blocks"].shape[0], blocks_per_row * 64, device=blocks.device)
    unpack = partial(_unpack_gguf_nvfp4, multiplier=checks.scalar("NVFP4", parts, "scale"))
    return chunks.fill("NVFP4", out, 64, (blocks,), unpack)


def _unpack_pairs(out: Tensor, packed: Tensor, scales: Tensor, table: Table | None, multiplier: float) -> None:
    """Groups of neighbouring columns; ``table`` decodes scale codes, None where the scales are numbers already."""
    decoded = scales.float() if table is None else minifloat.decode_codes(scales, table(out.device))
    minifloat.decode_e2m1_pairs(out, packed)
    out.mul_(chunks.finite(decoded, "scale"))
    if multiplier != 1.0:
        out.mul_(multiplier)


def fill_pairs(
    name: str,
    weight_key: str,
    packed: Tensor,
    scale_key: str,
    scales: Tensor,
    group: int,
    table: Table | None,
    multiplier: float = 1.0,
) -> Tensor:
    """Decodes E2M1 bytes [N, K / 2] with scales [N, K / group]; the keys are for messages."""
    n_rows, n_bytes = packed.shape
    n_groups = checks.whole(name, weight_key, "columns", 2 * n_bytes, group)
    checks.require_shape(name, scale_key, scales, (n_rows, n_groups))
    if scales.element_size() == 1:
        scales = scales.view(torch.uint8)
    operands = packed.view(n_rows * n_groups, group // 2), scales.reshape(-1, 1)
    out = torch.empty(n_rows, 2 * n_bytes, device=packed.device)
    return chunks.fill(name, out, group, operands, partial(_unpack_pairs, table=table, multiplier=multiplier))


def _reciprocal(name: str, key: str, divisor: float) -> float:
    """1 / divisor rounded to float32."""
    multiplier = float(torch.tensor(divisor).reciprocal())
    if not math.isfinite(multiplier):
        raise FileError(f"{name}: {key} is {divisor}, which cannot divide")
    return multiplier


def _pair_format(
    name: str,
    group: int,
    keys: tuple[str, str],
    dtypes: tuple[torch.dtype, ...],
    table: Table | None,
    global_key: str | None = None,
    is_divisor: bool = False,
) -> QuantFormat:
    optional = () if global_key is None else (global_key,)

    def decode(parts: Parts) -> Tensor:
        checks.require_names(name, parts, keys, optional)
        packed = checks.matrix(name, parts, keys[0], (torch.uint8,))
        scales = checks.matrix(name, parts, keys[1], dtypes)
        multiplier = 1.0 if global_key is None else checks.scalar(name, parts, global_key)
        if is_divisor and global_key is not None:
            multiplier = _reciprocal(name, global_key, multiplier)
        return fill_pairs(name, keys[0], packed, keys[1], scales, group, table, multiplier)

    bits = 4 + 8 * dtypes[0].itemsize / group
    return QuantFormat(
        name=name,
        block=group,
        bits_per_weight=bits,
        parts=keys,
        decode=decode,
        optional_parts=optional,
        encode=_encode_g128 if group == 128 else None,
    )


def _encode_g128(weights: Tensor) -> dict[str, Tensor]:
    """Scale absmax / 6 (1 for a group of zeros); |w| / scale to the nearest magnitude, ties to the larger."""
    n_rows, n_columns = weights.shape if weights.dim() == 2 else (0, 0)
    groups = checks.encodable("FP4-E2M1-g128", weights, 128).view(-1, 128)
    scales = groups.abs().amax(dim=1, keepdim=True) / minifloat.E2M1_MAX
    scales = torch.where(scales == 0, 1.0, scales)
    thresholds = torch.tensor(minifloat.E2M1_THRESHOLDS, device=weights.device)
    magnitudes = torch.bucketize(groups.abs() / scales, thresholds, out_int32=True, right=True).to(torch.uint8)
    codes = (magnitudes | groups.signbit().to(torch.uint8) << 3).view(n_rows, n_columns // 2, 2)
    return {
        "weight": codes[:, :, 0] | codes[:, :, 1] << 4,
        "weight_scale": scales.view(n_rows, n_columns // 128),
    }


_E4M3 = (minifloat.E4M3_DTYPES, minifloat.e4m3_table)
_E8M0 = (minifloat.E8M0_DTYPES, minifloat.e8m0_table)
_MODELOPT = ("weight", "weight_scale")
_COMPRESSED = ("weight_packed", "weight_scale")

FORMATS = (
    block_format("MXFP4", 32, 17, _unpack_gguf_mxfp4, encode_mxfp4),
    QuantFormat(
        name="NVFP4",
        block=64,
        bits_per_weight=4.5,
        parts=("blocks",),
        decode=_decode_gguf_nvfp4,
        optional_parts=("scale",),
        block_bytes=36,
    ),
    _pair_format("FP4-E2M1-g128", 128, _MODELOPT, (torch.float32,), None),
    _pair_format("NVFP4-modelopt", 16, _MODELOPT, *_E4M3, "weight_scale_2"),
    _pair_format("NVFP4-compressed-tensors", 16, _COMPRESSED, *_E4M3, "weight_global_scale", is_divisor=True),
    _pair_format("MXFP4-modelopt", 32, _MODELOPT, *_E8M0),
    _pair_format("MXFP4-compressed-tensors", 32, _COMPRESSED, *_E8M0),
)
