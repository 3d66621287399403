"""What a decoder or encoder accepts: each check names the format, the part, what was expected and what was found."""

from __future__ import annotations

import math
from collections.abc import Collection

import torch
from torch import Tensor

from bytefloor.errors import FileError, NumericalError, ShapeError
from bytefloor.formats.record import Parts

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def require_names(name: str, parts: Parts, required: Collection[str], optional: Collection[str] = ()) -> None:
    """Exactly the parts of the format. A part that decoding would ignore is refused: it may hold a scale."""
    missing = [key for key in required if key not in parts]
    if missing:
        raise FileError(f"{name}: part {missing[0]} is missing; found {sorted(parts)}")
    unknown = [key for key in parts if key not in required and key not in optional]
    if unknown:
        raise FileError(f"{name}: unexpected part {unknown[0]}; expected {sorted({*required, *optional})}")


def require_dtype(name: str, key: str, part: Tensor, dtypes: Collection[torch.dtype]) -> None:
    """One of these dtypes."""
    if part.dtype not in dtypes:
        expected = " or ".join(str(dtype) for dtype in dtypes)
        raise ShapeError(f"{name}: part {key}: expected dtype {expected}, found {part.dtype}")


def require_shape(name: str, key: str, part: Tensor, *allowed: tuple[int, ...]) -> None:
    """One of these shapes."""
    if tuple(part.shape) not in allowed:
        expected = " or ".join(str(list(shape)) for shape in allowed)
        raise ShapeError(f"{name}: part {key}: expected shape {expected}, found {list(part.shape)}")


def matrix(name: str, parts: Parts, key: str, dtypes: Collection[torch.dtype]) -> Tensor:
    """A two-dimensional part of one of these dtypes, contiguous."""
    part = parts[key]
    require_dtype(name, key, part, dtypes)
    if part.dim() != 2:
        raise ShapeError(f"{name}: part {key}: expected 2 dimensions, found shape {list(part.shape)}")
    return part.contiguous()


def whole(name: str, key: str, what: str, n: int, multiple: int) -> int:
    """n / multiple, or ShapeError when it does not divide."""
    if n % multiple:
        raise ShapeError(f"{name}: part {key}: expected {what} to be a multiple of {multiple}, found {n}")
    return n // multiple


def scalar(name: str, parts: Parts, key: str) -> float:
    """The per-tensor scale in this part, 1.0 when the part is absent; NaN and infinity are refused."""
    if key not in parts:
        return 1.0
    part = parts[key]
    require_dtype(name, key, part, FLOATS)
    if part.numel() != 1:
        raise ShapeError(f"{name}: part {key}: expected one value, found shape {list(part.shape)}")
    value = float(part)
    if not math.isfinite(value):
        raise FileError(f"{name}: {key} is {value}, expected a finite scale")
    return value


def encodable(name: str, weights: Tensor, block: int = 1) -> Tensor:
    """A finite float32 matrix whose columns fill whole blocks, contiguous."""
    require_dtype(name, "weights", weights, (torch.float32,))
    if weights.dim() != 2:
        raise ShapeError(f"{name}: weights: expected 2 dimensions, found shape {list(weights.shape)}")
    whole(name, "weights", "columns", weights.shape[1], block)
    refuse_infinite(name, weights, "weights")
    return weights.contiguous()


def refuse_infinite(name: str, values: Tensor, what: str) -> Tensor:
    """The values [N, ...] unchanged, or NumericalError naming the first row that has NaN or infinity."""
    bad = torch.isfinite(values).logical_not()
    if bad.any():
        row = int(bad.nonzero()[0, 0])
        raise NumericalError(f"{name}: {what} cannot be stored: NaN or infinite in row {row}")
    return values


def refuse_scales(name: str, key: str, scales: Tensor) -> None:
    """FileError for the first scale [rows, groups] that is NaN or infinite."""
    bad = torch.isfinite(scales).logical_not()
    if bad.any():
        row, group = bad.nonzero()[0].tolist()
        raise FileError(f"{name}: {key} is NaN or infinite at row {row}, group {group}")
