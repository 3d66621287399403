"""What is carried over: every tensor under its new name, and proof that the new file means the same model."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from bytefloor.errors import BytefloorError, UnsupportedError
from bytefloor.files.directory import is_tower, strip_prefix
from bytefloor.files.quantization import plain
from bytefloor.files.safetensors import read_safetensors
from bytefloor.files.stored import Checkpoint, StoredTensor, find_format
from bytefloor.model.config import LayerConfig, ModelConfig
from bytefloor.model.families import FAMILIES, Model, load_model
from bytefloor.model.weights import (
    GGUF_LAYER_NAMES,
    GGUF_MODEL_NAMES,
    NORMS,
    SAFETENSORS_LAYER_NAMES,
    SAFETENSORS_MODEL_NAMES,
)
from bytefloor.quantize.outgoing import Outgoing, interleaved_order, split_order

PREFIX = "model."
_CLOSE = 1e-5
"""Relative: keys and factors of a GGUF file are float32."""


def held(name: str, values: Tensor) -> StoredTensor:
    """A float32 vector in memory as if it were stored."""
    shape = tuple(values.shape)
    return StoredTensor(name, shape, "F32", find_format("F32"), values.numel() * 4, lambda: {"values": values[None]})


def same_container(checkpoint: Checkpoint) -> list[Outgoing]:
    """Every tensor of the source, in its order; those of a directory under their full names, towers included."""
    if checkpoint.container == "gguf":
        return [Outgoing(name, stored) for name, stored in checkpoint.tensors.items()]
    spelled, towers = _spellings(checkpoint)
    embedding = spelled.get("embed_tokens.weight", PREFIX + "embed_tokens.weight")
    prefix = embedding.removesuffix("embed_tokens.weight")
    named = {
        name: spelled.get(name, name if name == "lm_head.weight" else prefix + name) for name in checkpoint.tensors
    }
    return [*(Outgoing(named[name], stored) for name, stored in checkpoint.tensors.items()), *towers]


def _spellings(checkpoint: Checkpoint) -> tuple[dict[str, str], list[Outgoing]]:
    """Names in the files by names without prefix; tensors of vision and audio towers that are plain."""
    spelled: dict[str, str] = {}
    towers: list[Outgoing] = []
    if checkpoint.directory is None or not checkpoint.path.is_dir():
        return spelled, towers
    for path in sorted(checkpoint.directory.glob("*.safetensors")):
        for full, raw in read_safetensors(path).tensors.items():
            name = strip_prefix(full)
            if not is_tower(name):
                spelled.setdefault(name, full)
                continue
            stored = plain(full, raw)
            if stored.format is None:
                raise UnsupportedError(f"tensor {full}: {raw.dtype} in a vision or audio tower cannot be carried over")
            towers.append(Outgoing(full, stored, is_fixed=True))
    return spelled, towers


def other_container(model: Model, container: Literal["gguf", "safetensors"]) -> list[Outgoing]:
    """Every tensor by its role, named as the other container names it; rows and norms as that one has them."""
    is_gguf = container == "gguf"
    layer_names = dict(GGUF_LAYER_NAMES if is_gguf else SAFETENSORS_LAYER_NAMES)
    model_names = GGUF_MODEL_NAMES if is_gguf else SAFETENSORS_MODEL_NAMES
    if not is_gguf and not model.config.has_post_norms:
        layer_names["ffn_norm"] = SAFETENSORS_LAYER_NAMES["post_attention_norm"]
    norm_offset = next(family.norm_offset for family in FAMILIES if family.name == model.config.family)
    prefix, block = ("", "blk") if is_gguf else (PREFIX, "layers")

    def outgoing(role: str, name: str, stored: StoredTensor, order: Tensor | None = None) -> Outgoing:
        offset = (norm_offset if is_gguf else -norm_offset) if role in NORMS else 0.0
        return Outgoing(name, stored, order, offset)

    tensors = []
    outer = {role: weight for role, weight in vars(model.weights).items() if role != "layers" and weight is not None}
    if model.weights.head is model.weights.embedding:
        del outer["head"]
    for role, weight in outer.items():
        own = "" if role == "head" else prefix
        tensors.append(outgoing(role, own + model_names[role], weight.stored))
    for index, (layer, weights) in enumerate(zip(model.config.layers, model.weights.layers, strict=True)):
        for role, weight in vars(weights).items():
            if weight is not None:
                name = f"{prefix}{block}.{index}.{layer_names[role]}"
                tensors.append(outgoing(role, name, weight.stored, _order(model, layer, role, is_gguf)))
    return tensors


def _order(model: Model, layer: LayerConfig, role: str, is_gguf: bool) -> Tensor | None:
    """llama files in GGUF keep rows of q and k such that RoPE turns neighbours."""
    if model.config.family != "llama" or role not in ("q", "k"):
        return None
    n_heads = layer.n_heads if role == "q" else layer.n_kv_heads
    return (interleaved_order if is_gguf else split_order)(n_heads * layer.head_size, n_heads)


def check_same(model: Model, metadata: Mapping[str, Any], tensors: Iterable[Outgoing], path: Path) -> None:
    """UnsupportedError unless the new file will be read as the same model. Nothing has been written yet.

    metadata: the keys of a GGUF file, plain, or the config.json of a directory.
    """
    is_gguf = "general.architecture" in metadata
    container: Literal["gguf", "safetensors"] = "gguf" if is_gguf else "safetensors"
    spelled = {out.name if is_gguf else strip_prefix(out.name): out for out in tensors if not out.is_fixed}
    stored = {name: replace(out.stored, name=name) for name, out in spelled.items()}
    try:
        found = load_model(Checkpoint(path, container, metadata, stored)).config
    except BytefloorError as error:
        raise UnsupportedError(f"{model.config.family} cannot be carried over: {error}") from None
    difference = _difference(model.config, found)
    if difference:
        raise UnsupportedError(f"{model.config.family} cannot be carried over whole: {difference}")


def _difference(wanted: ModelConfig, found: ModelConfig) -> str:
    """The first field in which two configurations differ, empty where none does."""
    for name in vars(wanted):
        if name not in ("name", "layers", "can_tie_head", "family") and not _agree(
            getattr(wanted, name), getattr(found, name)
        ):
            return f"{name} would become {getattr(found, name)}, the source has {getattr(wanted, name)}"
    if len(wanted.layers) != len(found.layers):
        return f"there would be {len(found.layers)} layers, the source has {len(wanted.layers)}"
    for index, (own, other) in enumerate(zip(wanted.layers, found.layers, strict=True)):
        for name in vars(own):
            if not _agree(getattr(own, name), getattr(other, name)):
                return f"{name} of layer {index} differs"
    return ""


def _agree(wanted: Any, found: Any) -> bool:
    if isinstance(wanted, float) and isinstance(found, float):
        return math.isclose(wanted, found, rel_tol=_CLOSE)
    if hasattr(wanted, "inverse_frequencies") and hasattr(found, "inverse_frequencies"):
        pairs = torch.tensor([wanted.inverse_frequencies, found.inverse_frequencies], dtype=torch.float64)
        return pairs.shape[1] > 0 and bool(torch.isclose(pairs[0], pairs[1], rtol=_CLOSE, atol=1e-20).all())
    return bool(wanted == found)
