"""A tensor as it lies in a file, and the set of them that makes a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from bytefloor.errors import FileError, ShapeError, UnsupportedError
from bytefloor.formats import FORMATS, QuantFormat

# Parts whose rows each serve this many rows of the weight; every other part has one row per row, or one value in all.
ROWS_PER_SCALE_ROW = {"weight_scale_inv": 128}


def find_format(name: str) -> QuantFormat | None:
    """The record of a format by its name outside; None when this version cannot decode it."""
    return FORMATS.get(name)


@dataclass(frozen=True)
class StoredTensor:
    """One weight: where its bytes are and what they mean.

    shape: logical, outermost first: a matrix is (N produced, K reduced), whatever order the file uses.
    format: None when the type is unknown to us; listing still works, reading refuses and names it.
    n_bytes: bytes of all parts in the file.
    read: returns the parts as torch tensors over the mapped file, no copy where the file allows it.
    """

    name: str
    shape: tuple[int, ...]
    format_name: str
    format: QuantFormat | None
    n_bytes: int
    read: Callable[[], dict[str, Tensor]] = field(repr=False)

    @property
    def n_rows(self) -> int:
        """N: rows of the stored matrix, leading dimensions flattened."""
        count = 1
        for extent in self.shape[:-1]:
            count *= extent
        return count

    def require_format(self) -> QuantFormat:
        """The format, or UnsupportedError naming tensor and type."""
        if self.format is None:
            raise UnsupportedError(
                f"tensor {self.name}: {self.format_name} cannot be decoded by this version; it needs a newer one"
            )
        return self.format

    def decode(self) -> Tensor:
        """The exact float32 values, shaped as ``shape``."""
        return self._decode(self.read()).reshape(self.shape)

    def rows(self, ids: Tensor) -> Tensor:
        """Float32 [n, K]: the rows ``ids`` (int64 [n]) alone, equal to ``decode()[ids]``, without decoding the rest."""
        n_rows = self.n_rows
        if not ids.numel():
            return torch.empty((0, self.shape[-1] if self.shape else 1))
        for row in (int(ids.min()), int(ids.max())):
            if not 0 <= row < n_rows:
                raise ShapeError(f"tensor {self.name}: row {row} asked for, it has rows 0 to {n_rows - 1}")
        parts = self.read()
        if n_rows == 1:
            # A scale a row and a scale a tensor look alike here, and there is nothing to save.
            return self._decode(parts)[ids]
        shared = [ROWS_PER_SCALE_ROW[name] for name in parts if name in ROWS_PER_SCALE_ROW]
        if shared:
            return self._rows_by_band(parts, ids, shared[0])
        return self._decode({name: _pick_rows(self.name, name, part, ids, n_rows) for name, part in parts.items()})

    def row_slice(self, name: str, start: int, stop: int) -> StoredTensor:
        """Rows start..stop as a tensor of its own: how row-concatenated projections come apart, without a copy."""
        n_rows = self.n_rows
        if not 0 <= start < stop <= n_rows:
            raise ShapeError(f"tensor {self.name}: rows {start}..{stop} asked for, it has {n_rows}")

        def read() -> dict[str, Tensor]:
            return {part: _cut_rows(name, part, value, (start, stop), n_rows) for part, value in self.read().items()}

        n_bytes = self.n_bytes * (stop - start) // n_rows
        return StoredTensor(name, (stop - start, *self.shape[1:]), self.format_name, self.format, n_bytes, read)

    def _decode(self, parts: dict[str, Tensor]) -> Tensor:
        record = self.require_format()
        if 0 in self.shape:
            raise FileError(f"tensor {self.name}: shape {list(self.shape)} has no elements to read")
        try:
            return record.decode(parts)
        except (FileError, ShapeError) as error:
            raise type(error)(f"tensor {self.name}: {error}") from None

    def _rows_by_band(self, parts: dict[str, Tensor], ids: Tensor, band: int) -> Tensor:
        """A scale that spans ``band`` rows keeps its meaning only beside all of them: decode whole bands, then pick."""
        out = torch.empty((ids.numel(), self.shape[-1]))
        for number in torch.unique(ids // band).tolist():
            rows = slice(number * band, (number + 1) * band)
            chosen = ids // band == number
            cut = {
                name: part[number : number + 1] if name in ROWS_PER_SCALE_ROW else part[rows]
                for name, part in parts.items()
            }
            out[chosen] = self._decode(cut)[ids[chosen] - number * band]
        return out


def _pick_rows(tensor: str, name: str, part: Tensor, ids: Tensor, n_rows: int) -> Tensor:
    if not _is_by_row(tensor, name, part, n_rows):
        return part
    # Float types of 8 bits cannot be indexed everywhere; their bytes can.
    return part.view(torch.uint8)[ids].view(part.dtype) if part.dtype.itemsize == 1 else part[ids]


def _cut_rows(tensor: str, name: str, part: Tensor, rows: tuple[int, int], n_rows: int) -> Tensor:
    return part[slice(*rows)] if _is_by_row(tensor, name, part, n_rows) else part


def _is_by_row(tensor: str, name: str, part: Tensor, n_rows: int) -> bool:
    """Whether a part has a row for each row of the weight; the alternative is one value for all."""
    if part.dim() and part.shape[0] == n_rows:
        return True
    if part.numel() == 1:
        return False
    raise ShapeError(f"tensor {tensor}: part {name} has shape {list(part.shape)}, expected {n_rows} rows or one value")


@dataclass(frozen=True)
class Checkpoint:
    """A model on disk: named tensors plus what the container says about the model.

    metadata: a GGUF's key-value pairs, or the parsed config.json of a directory.
    tensors: by name as the container spells it; for safetensors the model prefix (``model.``,
        ``language_model.model.``, ``model.language_model.``) is stripped, so ``layers.0.self_attn.q_proj.weight``,
        ``embed_tokens.weight``, ``norm.weight`` and ``lm_head.weight`` are found under one spelling.
    notices: what a user should be told: skipped vision towers, ignored extras.
    directory: where tokenizer and generation settings lie beside safetensors; None for GGUF, which holds its own.
    """

    path: Path
    container: Literal["gguf", "safetensors"]
    metadata: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]
    notices: tuple[str, ...] = ()
    directory: Path | None = None


@dataclass(frozen=True)
class FormatCount:
    """What one format has of a checkpoint."""

    name: str
    n_tensors: int
    n_weights: int
    n_bytes: int

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.n_bytes / self.n_weights if self.n_weights else 0.0


def count_formats(checkpoint: Checkpoint) -> tuple[FormatCount, ...]:
    """Tensors, weights and bytes by format, the most bytes first."""
    counts: dict[str, tuple[int, int, int]] = {}
    for tensor in checkpoint.tensors.values():
        n_weights = 1
        for axis in tensor.shape:
            n_weights *= axis
        n, weights, n_bytes = counts.get(tensor.format_name, (0, 0, 0))
        counts[tensor.format_name] = (n + 1, weights + n_weights, n_bytes + tensor.n_bytes)
    rows = (FormatCount(name, *values) for name, values in counts.items())
    return tuple(sorted(rows, key=lambda row: -row.n_bytes))
