"""GGUF headers: magic, key-value pairs and tensor table of one file.

Nothing in a header is believed before it is compared with the size of the file: every count and every length is
bounded by the bytes that are left, so that a file of 160 bytes cannot ask for a gigabyte.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from bytefloor.errors import FileError, UnsupportedError
from bytefloor.files import gguf_types as numbers
from bytefloor.files.mapped import MappedFile

MAGIC = b"GGUF"
# The shortest a key-value pair (empty key, type, one byte) and a tensor entry (name, dims, type, offset) can be.
_MIN_PAIR_BYTES = 8 + 4 + 1
_MIN_TENSOR_BYTES = 8 + 4 + 4 + 8
_MAX_NAME_BYTES = 65535


@dataclass(frozen=True)
class TensorEntry:
    """A tensor's place in the file. ``n_bytes`` of an unknown type reaches to the next tensor."""

    name: str
    shape: tuple[int, ...]
    type_name: str
    block: int
    row_bytes: int
    offset: int
    n_bytes: int
    is_known: bool


@dataclass(frozen=True)
class Header:
    """What the front of a GGUF file says. Offsets of the tensors count from the start of the file.

    kinds: the type of each value (``u32``, ``string``), of an array that of its items.
    end: where the last tensor, or the header of a file without any, ends.
    """

    metadata: dict[str, Any]
    tensors: list[TensorEntry]
    end: int
    kinds: dict[str, str]


class _Cursor:
    """Reads forward through a mapped file and refuses to read past its end."""

    def __init__(self, file: MappedFile) -> None:
        self.path = file.path
        self.memory = file.memory
        self.size = file.size
        self.at = 0

    def fail(self, message: str) -> NoReturn:
        raise FileError(f"{self.path}: {message}")

    def need(self, n_bytes: int, what: str) -> None:
        if n_bytes > self.size - self.at:
            self.fail(f"{what} needs {n_bytes} bytes at offset {self.at}, the file has {self.size - self.at} left")

    def scalar(self, code: str, what: str) -> Any:
        n_bytes = struct.calcsize("<" + code)
        self.need(n_bytes, what)
        (value,) = struct.unpack_from("<" + code, self.memory, self.at)
        self.at += n_bytes
        return value

    def text(self, what: str) -> bytes:
        length = self.scalar("Q", f"the length of {what}")
        self.need(length, what)
        raw = self.memory[self.at : self.at + length]
        self.at += length
        return raw

    def name(self, what: str) -> str:
        """A key or tensor name: valid UTF-8, not empty."""
        raw = self.text(what)
        if not raw or len(raw) > _MAX_NAME_BYTES:
            self.fail(f"{what} has {len(raw)} bytes, expected 1 to {_MAX_NAME_BYTES}")
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            self.fail(f"{what} is not valid UTF-8: {raw[:40]!r}")


def read_header(file: MappedFile) -> Header:
    """Parse and check the front of a GGUF file."""
    cursor = _Cursor(file)
    _check_version(cursor)
    n_tensors = cursor.scalar("Q", "the tensor count")
    n_pairs = cursor.scalar("Q", "the key-value count")
    _check_count(cursor, n_tensors, _MIN_TENSOR_BYTES, "tensors")
    _check_count(cursor, n_pairs, _MIN_PAIR_BYTES, "key-value pairs")
    metadata: dict[str, Any] = {}
    kinds: dict[str, str] = {}
    alignment = numbers.ALIGNMENT
    for number in range(n_pairs):
        key = cursor.name(f"key {number}")
        if key in metadata:
            cursor.fail(f"key {key} occurs twice")
        type_id = cursor.scalar("I", f"the type of {key}")
        kinds[key] = _kind_ahead(cursor, type_id)
        if key == "general.alignment":
            alignment = _read_alignment(cursor, type_id)
            metadata[key] = alignment
        else:
            metadata[key] = _read_value(cursor, type_id, key)
    tensors = _read_tensors(cursor, n_tensors, alignment)
    end = max((entry.offset + entry.n_bytes for entry in tensors), default=cursor.at)
    return Header(metadata, tensors, end, kinds)


def _kind_ahead(cursor: _Cursor, type_id: int) -> str:
    """The name of a value's type, or of its items' type, which comes first in an array; nothing is consumed."""
    if type_id == numbers.ARRAY:
        cursor.need(4, "the item type of an array")
        (type_id,) = struct.unpack_from("<I", cursor.memory, cursor.at)
    return _value_type_name(type_id)


def _check_version(cursor: _Cursor) -> None:
    cursor.need(24, "a GGUF header")
    if cursor.memory[:4] != MAGIC:
        cursor.fail(f"not a GGUF file: it starts with {bytes(cursor.memory[:4])!r}")
    cursor.at = 4
    version = cursor.scalar("I", "the version")
    if version in (2, 3):
        return
    if version and not version & 0xFFFF:
        raise UnsupportedError(f"{cursor.path}: a big-endian GGUF file; only little-endian files are read")
    if version == 1:
        raise UnsupportedError(f"{cursor.path}: GGUF version 1 is obsolete; convert the model again (versions 2 and 3)")
    if version == 0:
        cursor.fail("GGUF version 0 does not exist")
    raise UnsupportedError(f"{cursor.path}: GGUF version {version} is newer than this reader (versions 2 and 3)")


def _check_count(cursor: _Cursor, count: int, min_bytes: int, what: str) -> None:
    if count * min_bytes > cursor.size - cursor.at:
        cursor.fail(f"the header announces {count} {what}, more than {cursor.size} bytes can hold")


def _read_alignment(cursor: _Cursor, type_id: int) -> int:
    if type_id != numbers.U32:
        cursor.fail(f"general.alignment has value type {_value_type_name(type_id)}, expected u32")
    alignment = cursor.scalar("I", "general.alignment")
    if not 0 < alignment <= numbers.MAX_ALIGNMENT or alignment & (alignment - 1):
        cursor.fail(f"general.alignment is {alignment}, expected a power of two up to {numbers.MAX_ALIGNMENT}")
    return alignment


def _value_type_name(type_id: int) -> str:
    names = {number: name for name, number in numbers.VALUE_TYPE_IDS.items()}
    return names.get(type_id, str(type_id))


def _read_value(cursor: _Cursor, type_id: int, key: str) -> Any:
    if type_id == numbers.STRING:
        # Vocabulary pieces may be arbitrary bytes: surrogateescape keeps them and gives them back.
        return cursor.text(f"the value of {key}").decode("utf-8", "surrogateescape")
    if type_id == numbers.ARRAY:
        return _read_array(cursor, key)
    if type_id == numbers.BOOL:
        value = cursor.scalar("B", f"the value of {key}")
        if value > 1:
            cursor.fail(f"the boolean {key} is stored as {value}, expected 0 or 1")
        return bool(value)
    if type_id not in numbers.SCALARS:
        cursor.fail(f"key {key} has unknown value type {type_id}")
    return cursor.scalar(numbers.SCALARS[type_id][1], f"the value of {key}")


def _read_array(cursor: _Cursor, key: str) -> list[Any]:
    item_type = cursor.scalar("I", f"the item type of {key}")
    count = cursor.scalar("Q", f"the length of {key}")
    if item_type == numbers.STRING:
        return _read_strings(cursor, count, key)
    if item_type == numbers.BOOL:
        flags = _read_numbers(cursor, "B", count, key)
        if count and max(flags) > 1:
            cursor.fail(f"array {key} holds the boolean {max(flags)}, expected 0 or 1")
        return [bool(flag) for flag in flags]
    if item_type == numbers.ARRAY:
        cursor.fail(f"key {key} is an array of arrays, which no reader supports")
    if item_type not in numbers.SCALARS:
        cursor.fail(f"array {key} has unknown item type {item_type}")
    return _read_numbers(cursor, numbers.SCALARS[item_type][1], count, key)


def _read_numbers(cursor: _Cursor, code: str, count: int, key: str) -> list[Any]:
    dtype = np.dtype("<" + code)
    cursor.need(count * dtype.itemsize, f"array {key} of {count} items")
    values = np.frombuffer(cursor.memory, dtype=dtype, count=count, offset=cursor.at).tolist() if count else []
    cursor.at += count * dtype.itemsize
    return values


def _read_strings(cursor: _Cursor, count: int, key: str) -> list[str]:
    cursor.need(count * 8, f"array {key} of {count} strings")
    # A vocabulary has 262k of these and its merges twice as many, hence the bare loop over local names.
    memory, at, size = cursor.memory, cursor.at, cursor.size
    length_at = struct.Struct("<Q").unpack_from
    strings: list[str] = []
    append = strings.append
    for _ in range(count):
        start = at + 8
        if start > size:
            break
        at = start + length_at(memory, at)[0]
        if at > size:
            break
        append(memory[start:at].decode("utf-8", "surrogateescape"))
    if len(strings) != count:
        cursor.fail(f"string {len(strings)} of array {key} runs past the end of the file")
    cursor.at = at
    return strings


def _read_tensors(cursor: _Cursor, n_tensors: int, alignment: int) -> list[TensorEntry]:
    entries: list[TensorEntry] = []
    names: set[str] = set()
    for number in range(n_tensors):
        entry = _read_tensor(cursor, number)
        if entry.name in names:
            cursor.fail(f"tensor {entry.name} occurs twice")
        names.add(entry.name)
        entries.append(entry)
    return _place(cursor, entries, alignment)


def _read_tensor(cursor: _Cursor, number: int) -> TensorEntry:
    name = cursor.name(f"the name of tensor {number}")
    n_dims = cursor.scalar("I", f"the dimension count of {name}")
    if n_dims > numbers.MAX_DIMS:
        cursor.fail(f"tensor {name} has {n_dims} dimensions, expected at most {numbers.MAX_DIMS}")
    # Stored innermost first; ours are outermost first.
    shape = tuple(cursor.scalar("Q", f"the shape of {name}") for _ in range(n_dims))[::-1]
    n_weights = 1
    for extent in shape:
        n_weights *= extent
        if extent >= 1 << 63 or n_weights >= 1 << 63:
            cursor.fail(f"the dimensions of tensor {name}, {list(shape)}, multiply beyond 64 bits")
    type_id = cursor.scalar("I", f"the type of {name}")
    offset = cursor.scalar("Q", f"the offset of {name}")
    kind = numbers.TENSOR_TYPES.get(type_id)
    if kind is None:
        return TensorEntry(name, shape, f"type {type_id}", 1, 0, offset, 0, is_known=False)
    row = shape[-1] if shape else 1
    if row % kind.block:
        cursor.fail(f"tensor {name}: rows of {row} weights are not a multiple of the {kind.name} block, {kind.block}")
    n_bytes = n_weights // kind.block * kind.block_bytes
    row_bytes = row // kind.block * kind.block_bytes
    return TensorEntry(name, shape, kind.name, kind.block, row_bytes, offset, n_bytes, is_known=True)


def _place(cursor: _Cursor, entries: list[TensorEntry], alignment: int) -> list[TensorEntry]:
    """Turn offsets into places in the file, checking that the tensors follow each other without hole or overlap.

    Every writer lays them out so; a file that does not was laid out with another alignment than it declares, and
    reading it would give shifted weights.
    """
    data_start = _align(cursor.at, alignment)
    placed: list[TensorEntry] = []
    expected: int | None = 0
    for number, entry in enumerate(entries):
        if entry.offset % alignment:
            cursor.fail(f"tensor {entry.name} starts at offset {entry.offset}, not a multiple of {alignment}")
        if expected is not None and entry.offset != expected:
            cursor.fail(f"tensor {entry.name} starts at offset {entry.offset}, expected {expected}")
        start = data_start + entry.offset
        n_bytes = entry.n_bytes
        if not entry.is_known:
            n_bytes = _unknown_bytes(cursor, entries, number, data_start)
        if n_bytes and start + n_bytes > cursor.size:
            expected_size = _last_end(entries, data_start)
            n_short = expected_size - cursor.size
            found = f"has {cursor.size} of {expected_size} (tensor {entry.name})"
            cursor.fail(f"file is {n_short} bytes short: {found}")
        expected = _align(entry.offset + n_bytes, alignment) if entry.is_known else None
        placed.append(TensorEntry(**{**vars(entry), "offset": start, "n_bytes": n_bytes}))
    return placed


def _unknown_bytes(cursor: _Cursor, entries: list[TensorEntry], number: int, data_start: int) -> int:
    """A type we do not know reaches to the next tensor or to the end of the file."""
    here = entries[number].offset
    end = entries[number + 1].offset if number + 1 < len(entries) else max(cursor.size - data_start, 0)
    if end < here:
        cursor.fail(f"tensor {entries[number].name} starts at offset {here}, beyond what follows it ({end})")
    return end - here


def _last_end(entries: list[TensorEntry], data_start: int) -> int:
    """Where the file should end at least: the end of its last tensor."""
    return data_start + max(entry.offset + entry.n_bytes for entry in entries)


def _align(offset: int, alignment: int) -> int:
    return -(-offset // alignment) * alignment
