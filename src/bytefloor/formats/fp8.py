"""8-bit floating-point weights (E4M3) with a float scale a row, a tensor, or a tile of 128 x 128.

w = code * scale in float32, rounded once. ``weight_scale_inv`` is a multiplier in spite of its name. Tiles at the
right and lower edges may be cut: N and K need not divide by 128.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from bytefloor.formats import checks, chunks, minifloat
from bytefloor.formats.record import Parts, QuantFormat

TILE = 128


def _codes(name: str, parts: Parts) -> Tensor:
    return checks.matrix(name, parts, "weight", minifloat.E4M3_DTYPES).view(torch.uint8)


def _fill(name: str, codes: Tensor, scales: Tensor, unpack: chunks.Unpack) -> Tensor:
    """``scales`` has one entry a row of ``codes``."""
    out = torch.empty(codes.shape, device=codes.device)
    return chunks.fill(name, out, max(1, codes.shape[1]), (codes, scales), unpack)


def _unpack_rows(out: Tensor, codes: Tensor, scales: Tensor) -> None:
    minifloat.decode_e4m3(out, codes, "code")
    out.mul_(chunks.finite(scales.float(), "scale"))


def _decode_row(parts: Parts) -> Tensor:
    name = "FP8-E4M3-row"
    checks.require_names(name, parts, ("weight", "weight_scale"))
    codes, scales = _codes(name, parts), parts["weight_scale"]
    checks.require_dtype(name, "weight_scale", scales, checks.FLOATS)
    n_rows = codes.shape[0]
    checks.require_shape(name, "weight_scale", scales, (n_rows, 1), (n_rows,))
    return _fill(name, codes, scales.reshape(n_rows, 1), _unpack_rows)


def _decode_tensor(parts: Parts) -> Tensor:
    name = "FP8-E4M3-tensor"
    checks.require_names(name, parts, ("weight", "weight_scale"))
    codes, scale = _codes(name, parts), checks.scalar(name, parts, "weight_scale")
    return _fill(name, codes, codes.new_full((1, 1), scale, dtype=torch.float32).expand(len(codes), 1), _unpack_rows)


def _unpack_tiles(out: Tensor, codes: Tensor, tile_rows: Tensor, scales: Tensor) -> None:
    minifloat.decode_e4m3(out, codes, "code")
    by_row = scales[tile_rows]
    n_full = out.shape[1] // TILE
    inner, edge = out[:, : n_full * TILE], out[:, n_full * TILE :]
    inner.unflatten(1, (n_full, TILE)).mul_(by_row[:, :n_full, None])
    edge.mul_(by_row[:, n_full:])


def _decode_tiles(parts: Parts) -> Tensor:
    name = "FP8-E4M3-128x128"
    checks.require_names(name, parts, ("weight", "weight_scale_inv"))
    codes = _codes(name, parts)
    scales = checks.matrix(name, parts, "weight_scale_inv", checks.FLOATS).float()
    n_rows, n_columns = codes.shape
    checks.require_shape(name, "weight_scale_inv", scales, (-(-n_rows // TILE), -(-n_columns // TILE)))
    checks.refuse_scales(name, "weight_scale_inv", scales)
    tile_rows = torch.arange(n_rows, device=codes.device) // TILE
    return _fill(name, codes, tile_rows, partial(_unpack_tiles, scales=scales))


def _to_codes(weights: Tensor, scales: Tensor) -> Tensor:
    limit = minifloat.E4M3_MAX
    return (weights / scales).clamp_(-limit, limit).to(torch.float8_e4m3fn)  # nearest, ties to even


def _scale_for(largest: Tensor) -> Tensor:
    """absmax / 448; 1 where everything is zero."""
    scales = largest / minifloat.E4M3_MAX
    return torch.where(scales == 0, 1.0, scales)


def _encode_row(weights: Tensor) -> dict[str, Tensor]:
    weights = checks.encodable("FP8-E4M3-row", weights)
    scales = _scale_for(weights.abs().amax(dim=1, keepdim=True))
    return {"weight": _to_codes(weights, scales), "weight_scale": scales}


def _encode_tensor(weights: Tensor) -> dict[str, Tensor]:
    weights = checks.encodable("FP8-E4M3-tensor", weights)
    scale = _scale_for(weights.abs().amax())
    return {"weight": _to_codes(weights, scale), "weight_scale": scale}


FORMATS = (
    QuantFormat("FP8-E4M3-row", 1, 8.0, ("weight", "weight_scale"), _decode_row, encode=_encode_row),
    QuantFormat("FP8-E4M3-tensor", 1, 8.0, ("weight", "weight_scale"), _decode_tensor, encode=_encode_tensor),
    QuantFormat("FP8-E4M3-128x128", 1, 8.0, ("weight", "weight_scale_inv"), _decode_tiles),
)
