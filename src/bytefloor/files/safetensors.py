"""safetensors files: a bounded header parser, typed views over the mapped data, and a writer.

The library's own reader copies nothing either, but its errors are not ours, and it has no view of U32 or E8M0 data on
older versions of torch; the header is 30 lines to check.
"""

from __future__ import annotations

import itertools
import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from bytefloor.errors import FileError, UnsupportedError
from bytefloor.files.mapped import MappedFile

# As in the safetensors library: no honest header is larger.
MAX_HEADER_BYTES = 100_000_000
MAX_DIMS = 8

# Words of packed codes have no arithmetic meaning; int32 has more operations in torch than uint32.
_DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.int64,
    "U32": torch.int32,
    "U16": torch.int16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True)
class RawTensor:
    """A named array of a safetensors file, not yet interpreted as (part of) a weight."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    n_bytes: int
    file: MappedFile

    def read(self) -> Tensor:
        """The array, over the mapped file."""
        dtype = _DTYPES.get(self.dtype)
        if dtype is None:
            raise UnsupportedError(f"tensor {self.name}: type {self.dtype} cannot be decoded by this version")
        return self.file.tensor(self.offset, self.shape, dtype)

    @property
    def n_elements(self) -> int:
        count = 1
        for extent in self.shape:
            count *= extent
        return count


@dataclass(frozen=True)
class SafetensorsFile:
    """One parsed file: its free-form metadata and its arrays by name."""

    path: Path
    metadata: dict[str, str]
    tensors: dict[str, RawTensor]


def is_safetensors(head: bytes) -> bool:
    """Whether the first bytes of a file look like a safetensors header."""
    if len(head) < 9 or head[8:9] != b"{":
        return False
    return int.from_bytes(head[:8], "little") <= MAX_HEADER_BYTES


def read_safetensors(path: Path) -> SafetensorsFile:
    """Parse and check the header of one file."""
    file = MappedFile(path)
    header, data_start = _parse_header(file)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        _fail(path, "__metadata__ must map strings to strings")
    tensors = {name: _check_entry(file, name, entry, data_start) for name, entry in header.items()}
    _check_places(file, tensors)
    return SafetensorsFile(path, metadata, tensors)


def _fail(path: Path, message: str) -> NoReturn:
    raise FileError(f"{path}: {message}")


def _parse_header(file: MappedFile) -> tuple[dict[str, Any], int]:
    if file.size < 8:
        _fail(file.path, f"{file.size} bytes are too few for a safetensors header")
    (n_bytes,) = struct.unpack_from("<Q", file.memory, 0)
    if n_bytes > MAX_HEADER_BYTES:
        _fail(file.path, f"the header announces {n_bytes} bytes, more than the {MAX_HEADER_BYTES} that are allowed")
    if n_bytes > file.size - 8:
        _fail(file.path, f"the header announces {n_bytes} bytes, the file has {file.size - 8} left")
    header = parse_json(file.memory[8 : 8 + n_bytes], f"{file.path}: header")
    return header, 8 + n_bytes


def parse_json(raw: bytes, where: str) -> dict[str, Any]:
    """A JSON object from untrusted bytes: duplicate keys, other values and absurd nesting are refused."""
    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique_keys)
    except RecursionError:
        raise FileError(f"{where}: JSON is nested too deeply") from None
    except ValueError as error:
        raise FileError(f"{where}: not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise FileError(f"{where}: expected a JSON object, found {type(value).__name__}")
    return value


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"key {twice} occurs twice")
    return result


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63


def _check_entry(file: MappedFile, name: str, entry: Any, data_start: int) -> RawTensor:
    if not isinstance(entry, dict):
        _fail(file.path, f"tensor {name}: its header entry is not an object")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str):
        _fail(file.path, f"tensor {name}: dtype is {dtype!r}, expected a name")
    if not isinstance(shape, list) or len(shape) > MAX_DIMS or not all(_is_count(extent) for extent in shape):
        _fail(file.path, f"tensor {name}: shape is {str(shape)[:80]}, expected at most {MAX_DIMS} counts")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_count(offset) for offset in offsets):
        _fail(file.path, f"tensor {name}: data_offsets is {str(offsets)[:80]}, expected two offsets")
    begin, end = offsets
    if end < begin:
        _fail(file.path, f"tensor {name}: data ends at {end}, before it begins at {begin}")
    raw = RawTensor(name, dtype, tuple(shape), data_start + begin, end - begin, file)
    known = _DTYPES.get(dtype)
    if known is not None and raw.n_elements * known.itemsize != raw.n_bytes:
        _fail(
            file.path,
            f"tensor {name}: {dtype} {shape} needs {raw.n_elements * known.itemsize} bytes, "
            f"data_offsets span {raw.n_bytes}",
        )
    return raw


def _check_places(file: MappedFile, tensors: Mapping[str, RawTensor]) -> None:
    ordered = sorted((raw for raw in tensors.values() if raw.n_bytes), key=lambda raw: raw.offset)
    for before, after in itertools.pairwise(ordered):
        if before.offset + before.n_bytes > after.offset:
            _fail(file.path, f"tensors {before.name} and {after.name} overlap")
    if ordered and (n_short := ordered[-1].offset + ordered[-1].n_bytes - file.size) > 0:
        first = next(raw for raw in ordered if raw.offset + raw.n_bytes > file.size)
        found = f"has {file.size} of {file.size + n_short} (tensor {first.name})"
        _fail(file.path, f"file is {n_short} bytes short: {found}")
