"""From a source and a recipe to a written, checked model: what to carry, where to, and whether it came out right."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from bytefloor.errors import BytefloorError, FileError, RequestError
from bytefloor.files.artifact import CONFIG_KEY
from bytefloor.files.checkpoint import open_checkpoint
from bytefloor.files.directory import INDEX_NAME
from bytefloor.files.gguf_header import read_header
from bytefloor.files.gguf_writer import Typed
from bytefloor.files.mapped import MappedFile
from bytefloor.model.families import Model, load_model
from bytefloor.quantize import carry, gguf_keys, hf_config
from bytefloor.quantize.mixtures import MIXTURES
from bytefloor.quantize.outgoing import Outgoing
from bytefloor.quantize.plan import Plan, make_plan, refuse_unreadable
from bytefloor.quantize.save import Importances, Told, save_gguf, save_safetensors, settings
from bytefloor.quantize.target import Target
from bytefloor.quantize.tokenizer_files import write_tokenizer
from bytefloor.quantize.tokenizer_keys import tokenizer_keys

ROPE_FREQS = "rope_freqs.weight"
_BESIDE_WEIGHTS = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "generation_config.json",
    "chat_template*",
)
"""What is taken from the folder of a lone file, where anything else may lie."""
_IN_A_MODEL = (*_BESIDE_WEIGHTS, "*.json", "*.jinja", "*.model", "*.txt", "*.md", "LICENSE*", "NOTICE*")
_REWRITTEN = ("config.json", "hf_quant_config.json", INDEX_NAME)
_OLD_SETTINGS = ("quantization", "quantization_config", CONFIG_KEY)
_QUANTIZATION_VERSION = 2
_UNIFORM_FILE_TYPES = {"Q3_K": 11, "Q4_K": 14, "Q5_K": 16}
"""What ``general.file_type`` calls a file that is all of a type which only mixtures have a number for."""


@dataclass(frozen=True)
class Job:
    """Everything but the importances. metadata: of a GGUF file, or of config.json without its quantisation."""

    model: Model
    plan: Plan
    metadata: Mapping[str, Any] = field(repr=False)

    @property
    def is_gguf(self) -> bool:
        return self.plan.target.container == "gguf"


def prepare(path: Path, target: Target, has_importances: bool = False) -> Job:
    """Reads headers and tokenizers, decides formats, proves that the model can be carried over. Writes nothing.

    UnsupportedError or RequestError says what cannot be done.
    """
    model = load_model(open_checkpoint(path))
    checkpoint = model.checkpoint
    is_gguf = target.container == "gguf"
    tensors: list[Outgoing]
    metadata: Mapping[str, Any]
    if is_gguf and checkpoint.container == "gguf":
        tensors, metadata = carry.same_container(checkpoint), _own_keys(checkpoint.path)
    elif is_gguf:
        tensors, metadata = _to_gguf(model)
    elif checkpoint.container == "safetensors":
        tensors = carry.same_container(checkpoint)
        metadata = {key: value for key, value in checkpoint.metadata.items() if key not in _OLD_SETTINGS}
        metadata = _without_text_settings(metadata)
    else:
        tensors = carry.other_container(model, "safetensors")
        has_head = model.weights.head is not model.weights.embedding
        metadata = hf_config.config_of(model.config, has_head, gguf_keys.bases_in(checkpoint.metadata))
    refuse_unreadable(tensors)
    plain = {key: value.value if isinstance(value, Typed) else value for key, value in metadata.items()}
    carry.check_same(model, plain, tensors, path)
    first = model.config.layers[0]
    plan = make_plan(
        target, tensors, first.n_heads // first.n_kv_heads, model.config.family == "llama", has_importances
    )
    if is_gguf:
        metadata = {
            **metadata,
            "general.file_type": Typed("u32", _file_type(target)),
            "general.quantization_version": Typed("u32", _QUANTIZATION_VERSION),
        }
    return Job(model, plan, metadata)


def _file_type(target: Target) -> int:
    name = target.mixture or target.format_name
    return MIXTURES[name].file_type if name in MIXTURES else _UNIFORM_FILE_TYPES[name]


def _own_keys(path: Path) -> dict[str, Typed]:
    """Every key of a GGUF file with its type; what says that it was one of several shards goes."""
    header = read_header(MappedFile(path))
    return {
        key: Typed(header.kinds[key], value) for key, value in header.metadata.items() if not key.startswith("split.")
    }


def _without_text_settings(metadata: Mapping[str, Any]) -> dict[str, Any]:
    text = metadata.get("text_config")
    if not isinstance(text, Mapping):
        return dict(metadata)
    return {**metadata, "text_config": {key: value for key, value in text.items() if key not in _OLD_SETTINGS}}


def _to_gguf(model: Model) -> tuple[list[Outgoing], dict[str, Typed]]:
    checkpoint, config = model.checkpoint, model.config
    directory = checkpoint.directory or checkpoint.path.parent
    keys, factors = gguf_keys.keys_of(config, gguf_keys.bases_in(checkpoint.metadata))
    metadata = {
        "general.architecture": Typed("string", gguf_keys.architecture(config)),
        "general.type": Typed("string", "model"),
        "general.name": Typed("string", config.name),
        **keys,
        **tokenizer_keys(directory, checkpoint.metadata, config.family, model.weights.embedding.shape[0]),
    }
    tensors = carry.other_container(model, "gguf")
    if factors is not None or config.family == "gemma4":
        full = next(layer for layer in config.layers if layer.window is None)
        values = torch.tensor(factors or [1.0] * (full.head_size // 2), dtype=torch.float32)
        tensors.append(Outgoing(ROPE_FREQS, carry.held(ROPE_FREQS, values)))
    return tensors, metadata


def carry_out(job: Job, out: Path, importances: Importances, device: torch.device, told: Told) -> None:
    """Write it whole or not at all, open what was written, and compare it with the plan.

    FileError where it is read back otherwise: then it is removed.
    """
    refuse_taken(job, out)
    try:
        if job.is_gguf:
            out.parent.mkdir(parents=True, exist_ok=True)
            save_gguf(out, job.plan, job.metadata, importances, device, told)
        else:
            _save_directory(job, out, importances, device, told)
    except BrokenPipeError:
        raise  # whoever reads what is printed has gone
    except OSError as error:
        # A disk that is full says nothing of whose file it was.
        raise FileError(f"{error.filename or out}: cannot be written: {error.strerror}") from None
    try:
        _check_written(job, out)
    except BytefloorError as error:
        out.unlink() if job.is_gguf else shutil.rmtree(out)
        raise FileError(f"{error}; what was written is not what was planned, and is removed") from None


def refuse_taken(job: Job, out: Path) -> None:
    """RequestError for a name that does not go with the container, FileError for one where something is."""
    if job.is_gguf != out.name.endswith(".gguf"):
        wanted = "a name that ends in .gguf" if job.is_gguf else "the name of a directory to make"
        raise RequestError(f"{out}: expected {wanted} for {job.plan.target.mixture or job.plan.target.format_name}")
    if out.exists():
        raise FileError(f"{out}: there is something already; it is not overwritten")


def _save_directory(job: Job, out: Path, importances: Importances, device: torch.device, told: Told) -> None:
    draft = out.with_name(out.name + ".partial")
    if draft.exists():
        raise FileError(f"{draft}: left over from an earlier run; remove it first")
    draft.mkdir(parents=True)
    try:
        key, value = settings(job.plan)
        config = {**job.metadata, key: value}
        (draft / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        checkpoint = job.model.checkpoint
        if checkpoint.container == "gguf":
            write_tokenizer(draft, checkpoint.metadata, config)
        else:
            _copy_others(checkpoint.path, draft)
        save_safetensors(draft / "model.safetensors", job.plan, importances, device, told)
        draft.rename(out)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _copy_others(source: Path, draft: Path) -> None:
    """Tokenizer, templates, generation settings, and of a model's own folder every text, licences among them."""
    folder, patterns = (source, _IN_A_MODEL) if source.is_dir() else (source.parent, _BESIDE_WEIGHTS)
    for path in sorted(folder.iterdir()):
        is_wanted = path.name not in _REWRITTEN and any(path.match(pattern) for pattern in patterns)
        if path.is_file() and is_wanted:
            shutil.copyfile(path, draft / path.name)


def _check_written(job: Job, out: Path) -> None:
    found = load_model(open_checkpoint(out)).checkpoint.tensors
    wanted = {planned.name: planned for planned in job.plan.tensors if not planned.tensor.is_fixed}
    names = {name: name for name in found} if job.is_gguf else {_full(name, wanted): name for name in found}
    for name, planned in wanted.items():
        if name not in names:
            raise FileError(f"{out}: tensor {name} is not there after writing")
        stored = found[names[name]]
        if (stored.format_name, stored.shape) != (planned.format_name, planned.tensor.shape):
            raise FileError(
                f"{out}: tensor {name} is read back as {stored.format_name} {list(stored.shape)}, expected "
                f"{planned.format_name} {list(planned.tensor.shape)}"
            )


def _full(name: str, wanted: Mapping[str, Any]) -> str:
    return next((full for full in wanted if carry.strip_prefix(full) == name), name)
