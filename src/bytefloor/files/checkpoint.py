"""Opening a model, whatever it is: one call from a path to a Checkpoint."""

from __future__ import annotations

import difflib
from dataclasses import replace
from pathlib import Path

from bytefloor.errors import FileError, UnsupportedError
from bytefloor.files.artifact import is_artifact, read_artifact
from bytefloor.files.directory import INDEX_NAME, Arrays, normalise, read_directory, read_json
from bytefloor.files.gguf import SHARD_NAME, open_gguf
from bytefloor.files.gguf_header import MAGIC
from bytefloor.files.huggingface import from_hf_quant_config
from bytefloor.files.quantization import interpret
from bytefloor.files.safetensors import is_safetensors, read_safetensors
from bytefloor.files.stored import Checkpoint

_HEAD_BYTES = 64
_OLD_GGML = (b"ggml", b"lmgg", b"ggmf", b"fmgg", b"ggjt", b"tjgg", b"ggla", b"algg")
_PICKLE_ADVICE = "pickled weights can run code when opened and are not read; convert them to safetensors"


def open_checkpoint(path: Path | str) -> Checkpoint:
    """Open a GGUF file (or any shard of one), a safetensors file, or a directory with either."""
    path = Path(path).expanduser()
    if path.is_dir():
        return _open_directory(path)
    if not path.exists():
        what = "a link to what is not there" if path.is_symlink() else f"no such file or directory{suggestion(path)}"
        raise FileError(f"{path}: {what}")
    if not path.is_file():
        raise FileError(f"{path}: not a regular file")
    head = _head(path)
    if head.startswith(MAGIC):
        return open_gguf(path)
    _refuse_strangers(path, head)
    if is_safetensors(head):
        return _open_single(path)
    raise FileError(f"{path}: not a model file: neither GGUF nor safetensors (it starts with {head[:8]!r})")


def _head(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD_BYTES)
    except OSError as error:
        raise FileError(f"{path}: cannot be read: {error.strerror}") from None
    if not head:
        raise FileError(f"{path}: the file is empty")
    return head


def _refuse_strangers(path: Path, head: bytes) -> None:
    """Files that turn up where a model should be, each with what to do about it."""
    text = head.lstrip().lower()
    if head.startswith(b"version https://git-lfs"):
        raise FileError(f"{path}: a git-lfs pointer, not the model; fetch the file itself with `git lfs pull`")
    if text.startswith((b"<!doctype", b"<html", b"<?xml")):
        raise FileError(f"{path}: a web page, not a model; the download went wrong (a login or error page)")
    if head.startswith(b"PK\x03\x04") or (head[:1] == b"\x80" and head[1:2] in b"\x02\x03\x04\x05"):
        raise UnsupportedError(f"{path}: {_PICKLE_ADVICE}")
    if head.startswith(_OLD_GGML):
        raise UnsupportedError(f"{path}: a GGML file from before GGUF; convert the model again")
    if head.startswith(b"FUGG"):
        raise UnsupportedError(f"{path}: a big-endian GGUF file; only little-endian files are read")


def suggestion(path: Path) -> str:
    parent = path.parent
    try:
        names = [entry.name for entry in parent.iterdir()] if parent.is_dir() else []
    except OSError:
        names = []
    if not names:
        return ""
    # Endings that all have would make everything alike.
    by_stem = {_stem(name): name for name in names}
    near = [by_stem[stem] for stem in difflib.get_close_matches(_stem(path.name), by_stem, n=3, cutoff=0.6)]
    return f"; did you mean {' or '.join(str(parent / name) for name in near)}?" if near else ""


def _stem(name: str) -> str:
    return name.removesuffix(".gguf").removesuffix(".safetensors")


def _open_directory(directory: Path) -> Checkpoint:
    files = sorted(entry.name for entry in directory.iterdir() if entry.is_file())
    weights = [name for name in files if name.endswith(".safetensors")]
    ggufs = [name for name in files if name.endswith(".gguf")]
    if INDEX_NAME in files or weights:
        if len(weights) == 1 and INDEX_NAME not in files:
            checkpoint = replace(_open_single(directory / weights[0]), path=directory)
        else:
            checkpoint = _from_arrays(directory, directory, read_directory(directory))
        told = (f"{', '.join(ggufs)} left out: the directory's safetensors are read",) if ggufs else ()
        return replace(checkpoint, notices=(*checkpoint.notices, *told))
    if ggufs:
        return open_gguf(directory / _only_gguf(directory, ggufs))
    pickled = [name for name in files if name.endswith((".bin", ".pt", ".pth", ".ckpt"))]
    if pickled:
        raise UnsupportedError(f"{directory}: holds only {pickled[0]}; {_PICKLE_ADVICE}")
    raise FileError(f"{directory}: no model in it: neither .safetensors nor .gguf files")


def _only_gguf(directory: Path, names: list[str]) -> str:
    """The one model among GGUF files: shards of a set count once, projectors not at all."""
    models: dict[str, str] = {}
    for name in names:
        if name.lower().startswith("mmproj"):
            continue
        named = SHARD_NAME.fullmatch(name)
        models.setdefault(f"{named['stem']} of {named['count']}" if named else name, name)
    if len(models) == 1:
        return next(iter(models.values()))
    if not models:
        raise UnsupportedError(f"{directory}: holds only a vision or audio projector ({names[0]})")
    raise FileError(f"{directory}: holds {len(models)} GGUF models; name one: {', '.join(sorted(models.values()))}")


def _open_single(path: Path) -> Checkpoint:
    """One safetensors file; config.json and the other shards, if any, lie beside it."""
    directory = path.parent
    index = read_json(directory / INDEX_NAME)
    weight_map = index.get("weight_map")
    if isinstance(weight_map, dict) and path.name in weight_map.values():
        return _from_arrays(directory, directory, read_directory(directory))
    file = read_safetensors(path)
    if is_artifact(file):
        config, tensors = read_artifact(file)
        return Checkpoint(path, "safetensors", config, tensors, directory=directory)
    return _from_arrays(path, directory, normalise(read_json(directory / "config.json"), dict(file.tensors), []))


def _from_arrays(path: Path, directory: Path, arrays: Arrays) -> Checkpoint:
    own = read_json(directory / "hf_quant_config.json")
    if own and "quantization_config" not in arrays.config:
        arrays = replace(arrays, config={**arrays.config, "quantization_config": from_hf_quant_config(own)})
    tensors = interpret(arrays)
    return Checkpoint(path, "safetensors", arrays.config, tensors, tuple(arrays.notices), directory)
