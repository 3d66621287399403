"""A Hugging Face style directory: which safetensors files make the model, their arrays, and its config.json."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bytefloor.errors import FileError
from bytefloor.files.safetensors import RawTensor, SafetensorsFile, parse_json, read_safetensors

INDEX_NAME = "model.safetensors.index.json"
_TOWERS = (
    "vision_tower", "vision_model", "vision_embedder", "vision_encoder", "multi_modal_projector", "mm_projector",
    "audio_tower", "audio_model", "embed_vision", "embed_audio", "visual", "mm",
)  # fmt: skip
# Activation and cache scales of calibrated files: nothing here quantises activations with fixed scales.
_IGNORED_PARTS = ("input_scale", "input_global_scale", "output_scale", "k_scale", "v_scale", "q_scale", "prob_scale")


@dataclass(frozen=True)
class Arrays:
    """All arrays of a model under normalised names, before anything is said about their meaning."""

    config: dict[str, Any]
    raw: dict[str, RawTensor]
    notices: list[str]


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file beside the weights; empty when the file is absent."""
    if not path.is_file():
        return {}
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise FileError(f"{path}: cannot be read: {error.strerror}") from None
    return parse_json(raw, str(path))


def read_directory(directory: Path) -> Arrays:
    """Every array of the model in ``directory``, through its index where it has one."""
    notices: list[str] = []
    index = directory / INDEX_NAME
    single = directory / "model.safetensors"
    if index.is_file():
        raw = _read_indexed(directory, index, notices)
    elif single.is_file():
        raw = dict(read_safetensors(single).tensors)
        others = sorted(path.name for path in directory.glob("*.safetensors") if path != single)
        if others:
            notices.append(f"{', '.join(others)} left out: {single.name} is the whole model where there is no index")
    else:
        raw = _merge([read_safetensors(path) for path in sorted(directory.glob("*.safetensors"))])
    return normalise(read_json(directory / "config.json"), raw, notices)


def normalise(config: dict[str, Any], raw: dict[str, RawTensor], notices: list[str]) -> Arrays:
    """Strip model prefixes and leave out what is not the language model."""
    kept: dict[str, RawTensor] = {}
    n_tower = n_ignored = 0
    for spelled, array in raw.items():
        name = strip_prefix(spelled)
        if is_tower(name):
            n_tower += 1
        elif name.rsplit(".", 1)[-1] in _IGNORED_PARTS:
            n_ignored += 1
        elif name in kept:
            raise FileError(f"{array.file.path}: tensors {kept[name].name} and {spelled} are both {name}")
        else:
            kept[name] = array
    if n_tower:
        notices.append(f"{n_tower} tensors of vision or audio towers skipped")
    if n_ignored:
        notices.append(f"{n_ignored} activation or cache scales ignored")
    return Arrays(config, kept, notices)


def is_tower(name: str) -> bool:
    """Whether a name without its model prefix belongs to a vision or audio tower."""
    return name.split(".", 1)[0] in _TOWERS


def strip_prefix(name: str) -> str:
    """The name without its model prefix: four spellings are in use, and a bare one."""
    while True:
        for prefix in ("model.", "language_model."):
            if name.startswith(prefix):
                name = name[len(prefix) :]
                break
        else:
            return name


def _read_indexed(directory: Path, index: Path, notices: list[str]) -> dict[str, RawTensor]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise FileError(f"{index}: weight_map must map tensor names to file names")
    files: dict[str, SafetensorsFile] = {}
    for shard in sorted(set(weight_map.values())):
        if Path(shard).name != shard or shard in ("", ".", ".."):
            raise FileError(f"{index}: shard {shard!r} is not a plain file name")
        if not (directory / shard).is_file():
            raise FileError(f"{directory / shard}: missing; {INDEX_NAME} names it")
        files[shard] = read_safetensors(directory / shard)
    raw: dict[str, RawTensor] = {}
    for name, shard in weight_map.items():
        if name not in files[shard].tensors:
            raise FileError(f"{directory / shard}: tensor {name} is missing; {INDEX_NAME} places it here")
        raw[name] = files[shard].tensors[name]
    n_extra = sum(len(file.tensors) for file in files.values()) - len(raw)
    if n_extra:
        notices.append(f"{n_extra} tensors that {INDEX_NAME} does not list ignored")
    return raw


def _merge(files: list[SafetensorsFile]) -> dict[str, RawTensor]:
    raw: dict[str, RawTensor] = {}
    for file in files:
        for name, array in file.tensors.items():
            if name in raw:
                raise FileError(f"{file.path}: tensor {name} is in {raw[name].file.path.name} too")
            raw[name] = array
    return raw
