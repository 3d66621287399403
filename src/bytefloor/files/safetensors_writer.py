"""Writing a safetensors file larger than memory: places are settled first, then stretches of rows come in any order."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bytefloor.errors import FileError

_NAMES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.uint8: "U8",
    torch.int32: "I32",
    torch.uint32: "U32",
}
_ALIGNMENT = 8


class NewArray(NamedTuple):
    """An array to write."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def n_bytes(self) -> int:
        count = self.dtype.itemsize
        for extent in self.shape:
            count *= extent
        return count

    @property
    def row_bytes(self) -> int:
        """Of one entry of the first axis; the whole of what has none."""
        return self.n_bytes // self.shape[0] if self.shape and self.shape[0] else self.n_bytes


def stream_safetensors(
    path: Path,
    arrays: Mapping[str, NewArray],
    stretches: Iterable[tuple[str, int, Tensor]],
    metadata: Mapping[str, str],
) -> None:
    """Write a file whole or not at all. A stretch is an array's name, the row it begins at, and rows of it.

    FileError where a stretch does not fit its array, or an array is not filled exactly once.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    offset = 0
    for name, array in arrays.items():
        header[name] = {
            "dtype": _NAMES[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [offset, offset + array.n_bytes],
        }
        offset += array.n_bytes
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % _ALIGNMENT)
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("wb") as file:
            file.write(struct.pack("<Q", len(raw)) + raw)
            file.truncate(8 + len(raw) + offset)
            left = {name: array.n_bytes for name, array in arrays.items()}
            for name, row, rows in stretches:
                array = arrays[name]
                data = _bytes_of(name, array, rows)
                start = row * array.row_bytes
                if start + len(data) > array.n_bytes or len(data) > left[name]:
                    raise FileError(f"{path}: array {name}: rows from {row} on run over its {list(array.shape)}")
                file.seek(8 + len(raw) + header[name]["data_offsets"][0] + start)
                file.write(data)
                left[name] -= len(data)
        for name, n_bytes in left.items():
            if n_bytes:
                raise FileError(f"{path}: array {name}: {n_bytes} of its {arrays[name].n_bytes} bytes were not given")
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def _bytes_of(name: str, array: NewArray, rows: Tensor) -> memoryview:
    # Words of codes are held as either 32-bit type.
    if rows.dtype.itemsize != array.dtype.itemsize:
        raise FileError(f"array {name}: given {rows.dtype}, expected {array.dtype}")
    flat = rows.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return memoryview(flat.numpy()).cast("B")  # type: ignore[arg-type]
