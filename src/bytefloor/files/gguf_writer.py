"""Writing GGUF files: header first, then one tensor at a time, and the name only when all is written."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from bytefloor.errors import FileError, UnsupportedError
from bytefloor.files import gguf_types as numbers
from bytefloor.files.gguf_header import MAGIC

_VERSION = 3
Data = bytes | bytearray | memoryview | Tensor


class Typed(NamedTuple):
    """A metadata value with its type said outright: Typed("u64", 5), or Typed("f32", [1, 2]) for an array's items."""

    kind: str
    value: Any


class NewTensor(NamedTuple):
    """A tensor to write: shape outermost first, data as stored, or a function that makes it when its turn comes.

    The function may give an iterator of stretches of the data, which are written as they come.
    """

    name: str
    shape: tuple[int, ...]
    format_name: str
    data: Data | Callable[[], Data | Iterator[Data]]


def write_gguf(path: Path, metadata: Mapping[str, Any], tensors: Iterable[NewTensor]) -> None:
    """Write a file whole or not at all. ``general.alignment``, if among the metadata, is honoured."""
    entries = list(tensors)
    alignment = numbers.ALIGNMENT
    if "general.alignment" in metadata:
        given = metadata["general.alignment"]
        alignment = given.value if isinstance(given, Typed) else given
    header = _header(metadata, entries, alignment)
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("wb") as file:
            file.write(header)
            for entry in entries:
                _write_tensor(file, entry, alignment)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def _header(metadata: Mapping[str, Any], entries: list[NewTensor], alignment: int) -> bytes:
    out = bytearray(MAGIC + struct.pack("<IQQ", _VERSION, len(entries), len(metadata)))
    for key, value in metadata.items():
        out += _string(key) + _value(key, value)
    offset = 0
    for entry in entries:
        type_id = numbers.TENSOR_TYPE_IDS.get(entry.format_name)
        if type_id is None:
            raise UnsupportedError(f"tensor {entry.name}: GGUF has no type {entry.format_name}")
        out += _string(entry.name) + struct.pack("<I", len(entry.shape))
        out += struct.pack(f"<{len(entry.shape)}Q", *reversed(entry.shape)) + struct.pack("<IQ", type_id, offset)
        offset += _padded(_tensor_bytes(entry), alignment)
    return bytes(out) + bytes(_padded(len(out), alignment) - len(out))


def _write_tensor(file: BinaryIO, entry: NewTensor, alignment: int) -> None:
    data = entry.data() if callable(entry.data) else entry.data
    n_bytes, expected = 0, _tensor_bytes(entry)
    for stretch in data if isinstance(data, Iterator) else (data,):
        raw = _raw(stretch)
        n_bytes += len(raw)
        if n_bytes <= expected:
            file.write(raw)
    if n_bytes != expected:
        raise FileError(
            f"tensor {entry.name}: {entry.format_name} {list(entry.shape)} takes {expected} bytes, given {n_bytes}"
        )
    file.write(bytes(_padded(n_bytes, alignment) - n_bytes))


def _raw(data: Data) -> memoryview:
    if isinstance(data, Tensor):
        data = memoryview(data.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
    return memoryview(data).cast("B")


def _tensor_bytes(entry: NewTensor) -> int:
    kind = numbers.TENSOR_TYPES[numbers.TENSOR_TYPE_IDS[entry.format_name]]
    row = entry.shape[-1] if entry.shape else 1
    if row % kind.block:
        raise FileError(f"tensor {entry.name}: rows of {row} are not a multiple of the {kind.name} block, {kind.block}")
    count = 1
    for extent in entry.shape:
        count *= extent
    return count // kind.block * kind.block_bytes


def _value(key: str, value: Any) -> bytes:
    kind, plain = value if isinstance(value, Typed) else (None, value)
    if isinstance(plain, list | tuple):
        item_kind = kind or (_kind(key, plain[0], "i32") if plain else "i32")
        items = b"".join(_scalar(key, item_kind, item) for item in plain)
        return struct.pack("<IIQ", numbers.ARRAY, numbers.VALUE_TYPE_IDS[item_kind], len(plain)) + items
    kind = kind or _kind(key, plain, "u32")
    return struct.pack("<I", numbers.VALUE_TYPE_IDS[kind]) + _scalar(key, kind, plain)


def _kind(key: str, value: Any, integer: str) -> str:
    """The usual type of a Python value; Typed says otherwise where it matters."""
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, int):
        return integer if value >= 0 else "i32"
    if isinstance(value, float):
        return "f32"
    if isinstance(value, str):
        return "string"
    raise FileError(f"key {key}: a {type(value).__name__} has no GGUF type")


def _scalar(key: str, kind: str, value: Any) -> bytes:
    if kind == "string":
        return _string(value)
    code = "?" if kind == "bool" else numbers.SCALARS[numbers.VALUE_TYPE_IDS[kind]][1]
    try:
        return struct.pack("<" + code, value)
    except struct.error as error:
        raise FileError(f"key {key}: {value!r} is no {kind}: {error}") from None


def _string(text: str) -> bytes:
    raw = text.encode("utf-8", "surrogateescape")
    return struct.pack("<Q", len(raw)) + raw


def _padded(n_bytes: int, alignment: int) -> int:
    return -(-n_bytes // alignment) * alignment
