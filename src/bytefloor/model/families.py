"""The families: which architecture name in a file means which reader, and how a checkpoint becomes a Model.

A family is data plus two readers, one for each container. To add one, add a row to FAMILIES; the decoder does not
change unless the family computes something new.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bytefloor.errors import BytefloorError, FileError, UnsupportedError
from bytefloor.files.artifact import CONFIG_KEY
from bytefloor.files.stored import Checkpoint
from bytefloor.model import gguf_config, gguf_keys, hf_config, hf_keys
from bytefloor.model.config import ModelConfig
from bytefloor.model.weights import ModelWeights, assign_weights


@dataclass(frozen=True)
class Family:
    """gguf: its ``general.architecture``; hf: its ``model_type`` spellings, text configs included.

    norm_offset: what a safetensors norm weight lacks (Gemma 3 stores w for a norm that multiplies by 1 + w).
    gguf_tables: tensors that read_gguf itself takes; no layer multiplies with them.
    """

    name: str
    gguf: tuple[str, ...]
    hf: tuple[str, ...]
    read_gguf: Callable[[gguf_keys.Keys], ModelConfig]
    read_hf: Callable[[hf_keys.Keys], ModelConfig]
    norm_offset: float = 0.0
    gguf_tables: tuple[str, ...] = ()


FAMILIES = (
    Family(
        "llama",
        ("llama",),
        ("llama",),
        gguf_config.read_llama,
        hf_config.read_llama,
        gguf_tables=(gguf_keys.ROPE_FREQS,),
    ),
    Family("smollm3", (), ("smollm3",), gguf_config.read_llama, hf_config.read_smollm3),
    Family("qwen3", ("qwen3",), ("qwen3",), gguf_config.read_qwen3, hf_config.read_qwen3),
    Family(
        "gemma3",
        ("gemma3",),
        ("gemma3", "gemma3_text"),
        gguf_config.read_gemma3,
        hf_config.read_gemma3,
        norm_offset=1.0,
    ),
    Family(
        "gemma4",
        ("gemma4",),
        ("gemma4", "gemma4_text"),
        gguf_config.read_gemma4,
        hf_config.read_gemma4,
        gguf_tables=(gguf_keys.ROPE_FREQS,),
    ),
    Family(
        "gemma4-unified",
        (),
        ("gemma4_unified", "gemma4_unified_text"),
        gguf_config.read_gemma4,
        hf_config.read_gemma4_unified,
    ),
)


@dataclass(frozen=True)
class Model:
    """A checkpoint understood: its configuration and its weights by role, nothing loaded yet."""

    checkpoint: Checkpoint
    config: ModelConfig
    weights: ModelWeights


def load_model(checkpoint: Checkpoint) -> Model:
    """Reads configuration and assigns weights. UnsupportedError names an architecture that is refused."""
    try:
        family, config = _read(checkpoint)
    except BytefloorError as error:
        raise type(error)(f"{config_path(checkpoint)}: {error}") from None
    tables = family.gguf_tables if checkpoint.container == "gguf" else ()
    return Model(checkpoint, config, assign_weights(checkpoint, config, family.norm_offset, tables))


def config_path(checkpoint: Checkpoint) -> Path:
    """The file that holds the configuration: config.json beside the weights, or the one that holds both."""
    directory, metadata = checkpoint.directory, checkpoint.metadata
    is_beside = checkpoint.container == "safetensors" and metadata and CONFIG_KEY not in metadata
    return directory / "config.json" if is_beside and directory is not None else checkpoint.path


def _read(checkpoint: Checkpoint) -> tuple[Family, ModelConfig]:
    if checkpoint.container == "gguf":
        architecture = str(checkpoint.metadata.get("general.architecture", ""))
        family = _find(architecture, "gguf")
        return family, family.read_gguf(gguf_keys.Keys(architecture, checkpoint))
    keys = hf_keys.Keys(checkpoint)
    family = _find(keys.model_type, "hf")
    return family, family.read_hf(keys)


def _find(architecture: str, container: str) -> Family:
    if not architecture:
        key = "general.architecture" if container == "gguf" else "model_type"
        raise FileError(f"{key} is missing, so the architecture is unknown")
    for family in FAMILIES:
        if architecture in getattr(family, container):
            return family
    known = sorted({name for family in FAMILIES for name in getattr(family, container)})
    why = "mixture-of-experts models are not supported" if "moe" in architecture.lower() else "not supported"
    raise UnsupportedError(f"architecture {architecture}: {why} (known: {', '.join(known)})")


def describe_layers(config: ModelConfig) -> Mapping[str, Any]:
    """What ``inspect`` says about the layers, counted rather than listed."""
    sliding = [layer for layer in config.layers if layer.window is not None]
    return {
        "layers": len(config.layers),
        "sliding": f"{len(sliding)} of window {sliding[0].window}" if sliding else "none",
        "sharing keys and values": sum(layer.kv_source != i for i, layer in enumerate(config.layers)),
        "query heads": _counts(layer.n_heads for layer in config.layers),
        "key/value heads": _counts(layer.n_kv_heads for layer in config.layers),
        "head size": _counts(layer.head_size for layer in config.layers),
        "feed-forward width": _counts(layer.ffn_width for layer in config.layers),
    }


def _counts(values: Any) -> str:
    return ", ".join(str(value) for value in sorted(set(values)))
