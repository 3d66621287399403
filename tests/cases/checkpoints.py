"""Checkpoints for tests of what is read from a configuration: real sizes without weights, real files with changes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bytefloor.engine.cache import CachePlan
from bytefloor.engine.engine import Engine
from bytefloor.engine.loading import open_tokenizer
from bytefloor.engine.reference import Precision, ReferenceExecutor
from bytefloor.engine.request import Finish, Request
from bytefloor.files.checkpoint import open_checkpoint
from bytefloor.files.stored import Checkpoint, StoredTensor, find_format
from bytefloor.model import gguf_keys, hf_keys
from bytefloor.model.config import ModelConfig, Rounding
from bytefloor.model.decoder import build_step
from bytefloor.model.families import FAMILIES, load_model


def tensor_of(name: str, values: torch.Tensor) -> StoredTensor:
    """A plain float32 tensor that lies in no file."""
    matrix = values.reshape(-1, values.shape[-1])
    return StoredTensor(
        name, tuple(values.shape), "F32", find_format("F32"), 4 * values.numel(), lambda: {"values": matrix}
    )


Values = Mapping[str, torch.Tensor]
Open = Callable[[str, str], Checkpoint]
"""A tiny model's checkpoint by its name and container."""
FAMILY_NAMES = ("llama", "qwen3", "gemma3", "gemma4-unified", "gemma4-31b", "gemma4-e")


def one_a_layer(prefix: str, n_layers: int | None) -> Values:
    """A file with so many layers has at least as many tensors."""
    return {f"{prefix}.{i}.norm": torch.zeros(1, 1) for i in range(n_layers or 0)}


def read_config(config: Mapping[str, Any], values: Values | None = None) -> ModelConfig:
    """What a directory with this config.json and these tensors says about the model."""
    text = {**config, **config.get("text_config", {})}
    all_values = {**one_a_layer("layers", text.get("num_hidden_layers")), **(values or {})}
    tensors = {name: tensor_of(name, tensor) for name, tensor in all_values.items()}
    keys = hf_keys.Keys(Checkpoint(Path("model"), "safetensors", config, tensors))
    family = next(family for family in FAMILIES if keys.model_type in family.hf)
    return family.read_hf(keys)


def read_keys(
    architecture: str, keys: Mapping[str, Any], rope_freqs: torch.Tensor | None = None, values: Values | None = None
) -> ModelConfig:
    """What a GGUF file with these keys and tensors says about the model."""
    layers = one_a_layer("blk", keys.get("block_count"))
    all_values = {"token_embd.weight": torch.zeros(1, 1), **layers, **(values or {})}
    tensors = {name: tensor_of(name, tensor) for name, tensor in all_values.items()}
    if rope_freqs is not None:
        tensors["rope_freqs.weight"] = tensor_of("rope_freqs.weight", rope_freqs)
    metadata = {f"{architecture}.{key}": value for key, value in keys.items()}
    checkpoint = Checkpoint(Path("m.gguf"), "gguf", {"general.architecture": architecture, **metadata}, tensors)
    family = next(family for family in FAMILIES if architecture in family.gguf)
    return family.read_gguf(gguf_keys.Keys(architecture, checkpoint))


def without_tensor(checkpoint: Checkpoint, name: str) -> Checkpoint:
    return replace(checkpoint, tensors={key: value for key, value in checkpoint.tensors.items() if key != name})


def with_tensor(checkpoint: Checkpoint, name: str, *shape: int) -> Checkpoint:
    return replace(checkpoint, tensors={**checkpoint.tensors, name: tensor_of(name, torch.ones(shape))})


def with_value(checkpoint: Checkpoint, key: str, value: Any) -> Checkpoint:
    return replace(checkpoint, metadata={**checkpoint.metadata, key: value})


def make_engine(path: Path, precision: Precision | None = None, **plan: int) -> Engine:
    """An engine whose whole cache is poisoned before it starts."""
    model = load_model(open_checkpoint(path))
    settings = {"capacity": 128, "chunk": 16, "n_sequences": 1, "page_size": 4} | plan
    step = build_step(model.config, model.weights, Rounding())
    executor = ReferenceExecutor(step, CachePlan(**settings), precision=precision)
    executor.poison()
    return Engine(executor, open_tokenizer(model.checkpoint), model.config.vocabulary_size)


def run_together(engine: Engine, requests: list[Request]) -> list[tuple[list[int], Finish]]:
    """Token ids and end of each request, all of them queued at once."""
    order = [engine.add(request) for request in requests]
    ids: dict[int, list[int]] = {request_id: [] for request_id in order}
    ends: dict[int, Finish] = {}
    while engine.has_work:
        for delta in engine.step():
            if delta.sampled:
                ids[delta.request_id].append(delta.sampled.id)
            if delta.finish:
                ends[delta.request_id] = delta.finish
    return [(ids[request_id], ends[request_id]) for request_id in order]


@torch.inference_mode()
def greedy_of(model: Callable[..., Any], prompt: list[int], n: int, banned: Collection[int]) -> list[int]:
    """The likeliest tokens by a transformers model, the whole text computed anew for each."""
    ids = list(prompt)
    for _ in range(n):
        logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].float()
        logits[list(banned)] = float("-inf")
        ids.append(int(logits.argmax()))
    return ids[len(prompt) :]
