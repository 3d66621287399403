"""GGUF checkpoints: one file, or a set of shards that belong together."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bytefloor.errors import FileError, UnsupportedError
from bytefloor.files.gguf_header import MAGIC, Header, TensorEntry, read_header
from bytefloor.files.mapped import MappedFile
from bytefloor.files.stored import Checkpoint, StoredTensor, find_format

SHARD_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)
_VALUE_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# Other halves of multi-modal files, in case somebody merged them into the model.
_TOWER_PREFIXES = ("v.", "mm.", "a.")
_PARTIAL_KINDS = {
    "mmproj": "a vision or audio projector",
    "adapter": "an adapter (LoRA)",
    "imatrix": "an importance matrix",
}


def open_gguf(path: Path) -> Checkpoint:
    """Open a GGUF file; any shard of a split model opens all of them."""
    file = MappedFile(path)
    header = read_header(file)
    _refuse_partial(path, header.metadata)
    count = _split_value(path, header.metadata, "split.count", 1)
    shards = [(file, header)] if count <= 1 else _open_shards(file, header, count)
    _refuse_lone_shard(path, count)
    tensors = _collect(shards)
    _check_total(path, shards[0][1].metadata, tensors, count)
    joined, notices = _join_scales(path, tensors)
    kept = {name: tensor for name, tensor in joined.items() if not name.startswith(_TOWER_PREFIXES)}
    if len(kept) < len(joined):
        notices.append(f"{len(joined) - len(kept)} tensors of vision or audio towers skipped")
    return Checkpoint(shards[0][0].path, "gguf", shards[0][1].metadata, kept, tuple(notices))


def _refuse_partial(path: Path, metadata: dict[str, Any]) -> None:
    """Files that share the container but hold no language model."""
    kind = metadata.get("general.type")
    if metadata.get("general.architecture") == "clip":
        kind = "mmproj"
    if isinstance(kind, str) and kind in _PARTIAL_KINDS:
        raise UnsupportedError(f"{path}: {_PARTIAL_KINDS[kind]} ({kind}), not a language model; give the model's file")


def _split_value(path: Path, metadata: dict[str, Any], key: str, default: int) -> int:
    value = metadata.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise FileError(f"{path}: {key} is {value!r}, expected a count")
    return value


def _refuse_lone_shard(path: Path, count: int) -> None:
    named = SHARD_NAME.fullmatch(path.name)
    if named and int(named["count"]) > 1 and count <= 1:
        raise FileError(
            f"{path}: named as part {int(named['number'])} of {int(named['count'])}, but it does not say that it is "
            "split (no split.count); rename it if it is a whole model"
        )


def _open_shards(file: MappedFile, header: Header, count: int) -> list[tuple[MappedFile, Header]]:
    path = file.path
    # Another header right behind the data (padding at most between) is what `cat` leaves.
    if file.memory.find(MAGIC, header.end, header.end + 65536) >= 0:
        raise FileError(
            f"{path}: the {count} shards of a split model were joined with cat; keep them as separate files"
        )
    named = SHARD_NAME.fullmatch(path.name)
    if named is None or int(named["count"]) != count:
        raise FileError(
            f"{path}: one of {count} shards, but not named ...-00001-of-{count:05d}.gguf; "
            "without their names the other shards cannot be found"
        )
    shards: list[tuple[MappedFile, Header]] = []
    for number in range(count):
        shard = path.with_name(f"{named['stem']}-{number + 1:05d}-of-{count:05d}.gguf")
        if not shard.is_file():
            raise FileError(f"{shard}: missing; shard {number + 1} of {count}")
        shard_file = file if shard == path else MappedFile(shard)
        shard_header = header if shard == path else read_header(shard_file)
        _check_shard(shard, shard_header.metadata, number, count)
        shards.append((shard_file, shard_header))
    return shards


def _check_shard(path: Path, metadata: dict[str, Any], number: int, count: int) -> None:
    found_number = _split_value(path, metadata, "split.no", 0)
    found_count = _split_value(path, metadata, "split.count", 0)
    if (found_number, found_count) != (number, count):
        raise FileError(
            f"{path}: says it is shard {found_number + 1} of {found_count}, its name says {number + 1} of {count}"
        )


def _collect(shards: list[tuple[MappedFile, Header]]) -> dict[str, StoredTensor]:
    tensors: dict[str, StoredTensor] = {}
    for file, header in shards:
        for entry in header.tensors:
            if entry.name in tensors:
                raise FileError(f"{file.path}: tensor {entry.name} occurs in an earlier shard too")
            tensors[entry.name] = _stored(file, entry)
    return tensors


def _check_total(path: Path, metadata: dict[str, Any], tensors: dict[str, StoredTensor], count: int) -> None:
    expected = _split_value(path, metadata, "split.tensors.count", len(tensors))
    if count > 1 and expected != len(tensors):
        raise FileError(f"{path}: the {count} shards hold {len(tensors)} tensors, expected {expected}")


def _stored(file: MappedFile, entry: TensorEntry) -> StoredTensor:
    n_rows = 1
    for extent in entry.shape[:-1]:
        n_rows *= extent
    row = entry.shape[-1] if entry.shape else 1

    def read() -> dict[str, Tensor]:
        tensor.require_format()
        dtype = _VALUE_DTYPES.get(entry.type_name)
        if dtype is not None:
            return {"values": file.tensor(entry.offset, (n_rows, row), dtype)}
        return {"blocks": file.tensor(entry.offset, (n_rows, entry.row_bytes), torch.uint8)}

    record = find_format(entry.type_name)
    tensor = StoredTensor(entry.name, entry.shape, entry.type_name, record, entry.n_bytes, read)
    return tensor


def _join_scales(path: Path, tensors: dict[str, StoredTensor]) -> tuple[dict[str, StoredTensor], list[str]]:
    """Put the per-tensor scale of NVFP4 weights, a tensor of its own in the file, among their parts.

    llama.cpp names it ``X.scale`` beside ``X.weight``; ``X.weight.scale`` is in circulation too.
    """
    joined = dict(tensors)
    n_input_scales = 0
    for name, tensor in tensors.items():
        if tensor.format_name != "NVFP4":
            continue
        stem = name.removesuffix(".weight")
        found = [key for key in (f"{stem}.scale", f"{name}.scale") if key in tensors]
        if len(found) > 1:
            raise FileError(f"{path}: tensor {name} has two scales, {found[0]} and {found[1]}")
        if found:
            joined[name] = _with_scale(path, tensor, joined.pop(found[0]))
        for key in (f"{stem}.input_scale", f"{name}.input_scale"):
            n_input_scales += joined.pop(key, None) is not None
    # Calibrated for 4-bit activations, which we do not use.
    notices = [f"{n_input_scales} activation scales ignored"] if n_input_scales else []
    return joined, notices


def _with_scale(path: Path, tensor: StoredTensor, scale: StoredTensor) -> StoredTensor:
    if scale.format_name != "F32" or scale.n_bytes != 4:
        raise FileError(
            f"{path}: tensor {scale.name} is {scale.format_name} {list(scale.shape)}, expected one F32 value "
            f"(the scale of {tensor.name})"
        )

    def read() -> dict[str, Tensor]:
        return {**tensor.read(), "scale": scale.read()["values"].reshape(1)}

    n_bytes = tensor.n_bytes + scale.n_bytes
    return StoredTensor(tensor.name, tensor.shape, tensor.format_name, tensor.format, n_bytes, read)
