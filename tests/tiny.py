"""Tiny random models of every supported family, with `transformers` as the independent oracle.

The weights are drawn so that mistakes show: norm weights are neither 0 nor 1, layer scalars differ, attention is far
from uniform, logits have a standard deviation near 2. The reference model is always made in memory from the config; the
directory is only what an engine reads.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
import tempfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    Gemma4UnifiedForCausalLM,
    Gemma4UnifiedTextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tiny_variants import VARIANTS, Json, Variant

TINY_NAMES: tuple[str, ...] = tuple(VARIANTS)
SPECIAL_TOKENS = ("<pad>", "<eos>", "<bos>", "<unk>")
MERGES = ("t h", "Ġ t", "Ġt h", "i n", "e r", "a n", "Ġ a", "r e", "o n", "Ġth e")
RESIDUAL_GAIN = 5.0e4  # pushes the residual of the overflow variant past the float16 range

_CLASSES: dict[str, tuple[type[PretrainedConfig], type[PreTrainedModel]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "gemma3": (Gemma3TextConfig, Gemma3ForCausalLM),
    "gemma4": (Gemma4TextConfig, Gemma4ForCausalLM),
    "gemma4_unified": (Gemma4UnifiedTextConfig, Gemma4UnifiedForCausalLM),
}


@dataclass(frozen=True)
class TinyModel:
    """`reference` holds exactly the weights that `directory` (or a GGUF file made from it) decodes to."""

    name: str
    directory: Path
    reference: PreTrainedModel
    config: PretrainedConfig
    family: str
    prefix: str = "model."
    unused: Mapping[str, torch.Tensor] = field(default_factory=dict)  # in the files, read by nobody


# ---------------------------------------------------------------------------------------------------------------------
# Weights


def seeded(*names: str) -> torch.Generator:
    """Seeded by names, so that one tensor's values depend on no other tensor and on no order."""
    return torch.Generator().manual_seed(zlib.crc32("/".join(names).encode()))


def _draw(name: str, like: torch.Tensor, family: str, tied: bool, seed: str) -> torch.Tensor:
    noise = torch.randn(like.shape, generator=seeded(seed, name))
    is_gemma = family.startswith("gemma")
    if name.endswith("layer_scalar"):
        return 0.85 + 0.2 * noise.clamp(-2, 2)
    if like.dim() == 1:
        mean = 1.0
        if is_gemma and name == "model.norm.weight":
            mean = 3.0  # makes up for the quiet embedding below
        elif family.startswith("gemma4") and name.endswith(("q_norm.weight", "k_norm.weight")):
            # Scores are not divided by the root of the head size; small norms keep their deviation near 1.7 instead.
            mean = 1.3 * like.shape[0] ** -0.25
        offset = 1.0 if family == "gemma3" else 0.0  # applied as 1 + w
        return mean * (1.0 + 0.3 * noise) - offset
    n_in = like.shape[-1]
    if name.endswith("embed_tokens_per_layer.weight"):
        return noise * 0.25
    if name.endswith("embed_tokens.weight") and not tied:
        return noise
    if name.endswith(("embed_tokens.weight", "lm_head.weight")):
        # A tied Gemma embedding is scaled up on entry: were it louder, every token would only predict itself.
        return noise * (0.7 if is_gemma else 2.0) * n_in**-0.5
    return noise * 1.2 * n_in**-0.5


@torch.no_grad()
def _fill(model: PreTrainedModel, variant: Variant, seed: str, dtype: torch.dtype) -> None:
    tied = model.config.tie_word_embeddings
    for name, tensor in model.state_dict().items():
        if tied and name == "lm_head.weight":
            continue
        value = _draw(name, tensor, variant.family, tied, seed)
        if variant.overflows and name.endswith("post_feedforward_layernorm.weight") and ".layers.2." in name:
            value = value * RESIDUAL_GAIN + RESIDUAL_GAIN
        tensor.copy_(value.to(dtype))


def _unused_kv(model: PreTrainedModel, seed: str) -> dict[str, torch.Tensor]:
    """K/V weights of the layers that read another layer's cache: published files carry them, nothing may use them."""
    config = model.config
    first_shared = config.num_hidden_layers - config.num_kv_shared_layers
    layers = model.get_submodule("model.layers")
    sources = {config.layer_types[i]: layers[i].self_attn for i in range(first_shared)}
    out: dict[str, torch.Tensor] = {}
    for i in range(first_shared, config.num_hidden_layers):
        source = sources[config.layer_types[i]]
        for part in ("k_proj", "v_proj", "k_norm"):
            name = f"model.layers.{i}.self_attn.{part}.weight"
            out[name] = _draw(name, source.get_submodule(part).weight, "gemma4", True, seed)
    return out


def _unused_towers(family: str, prefix: str) -> dict[str, torch.Tensor]:
    """A few vision tensors under the names that go with the prefix; loaders must step over them."""
    outer = "model." if prefix == "model.language_model." else ""
    shapes = {
        "gemma3": {
            "vision_tower.vision_model.embeddings.patch_embedding.weight": (8, 3, 4, 4),
            "vision_tower.vision_model.encoder.layers.0.self_attn.q_proj.weight": (8, 8),
            "multi_modal_projector.mm_input_projection_weight": (8, 16),
        },
        "gemma4": {
            "vision_tower.patch_embedder.input_proj.weight": (8, 48),
            "vision_tower.encoder.layers.0.self_attn.q_proj.linear.weight": (8, 8),
            "embed_vision.embedding_projection.weight": (16, 8),
        },
    }
    chosen = shapes["gemma3" if family == "gemma3" else "gemma4"]
    return {outer + name: torch.randn(shape, generator=seeded(name)) for name, shape in chosen.items()}


# ---------------------------------------------------------------------------------------------------------------------
# Files


def stored_name(name: str, prefix: str) -> str:
    """The name under which a tensor of the flat text model is stored in a file with this prefix."""
    if name.startswith("model."):
        return prefix + name.removeprefix("model.")
    return f"language_model.{name}" if prefix == "language_model.model." else name


def own_tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The tensors a checkpoint of this model holds, under the flat text model's names."""
    tied = model.config.tie_word_embeddings
    return {name: t for name, t in model.state_dict().items() if not (tied and name == "lm_head.weight")}


def token_list() -> list[str]:
    """Byte-level BPE in the GPT-2 alphabet: four control tokens, 256 bytes, a few merges."""
    return [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(m.split()) for m in MERGES)]


def write_tokenizer(directory: Path) -> None:
    vocabulary = {token: i for i, token in enumerate(token_list())}
    merges = [tuple(m.split()) for m in MERGES]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": True}
    settings |= {"pad_token": "<pad>", "eos_token": "<eos>", "bos_token": "<bos>", "unk_token": "<unk>"}
    write_json(directory / "tokenizer_config.json", settings)


def write_json(path: Path, value: Json) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")


def config_json(model: PreTrainedModel, dtype: torch.dtype) -> Json:
    """The config as `save_pretrained` writes it (defaults included), before any respelling."""
    config = json.loads(model.config.to_json_string(use_diff=False))
    config.pop("_name_or_path", None)
    return {**config, "architectures": [type(model).__name__], "dtype": str(dtype).removeprefix("torch.")}


def fill_directory(directory: Path, write: Callable[[Path], None]) -> None:
    """Write a directory so that a concurrent builder of the same one sees all of it or nothing."""
    if directory.exists():
        return
    directory.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(dir=directory.parent, prefix=f".{directory.name}."))
    write(draft)
    try:
        os.rename(draft, directory)
    except OSError:  # another process was faster; its files are the same
        shutil.rmtree(draft)


def _write_checkpoint(draft: Path, model: PreTrainedModel, variant: Variant, unused: Json, dtype: torch.dtype) -> None:
    if variant.prefix == "model.":
        copied = copy.deepcopy(model)  # casting the reference itself would round its rotary frequencies too
        copied.config.dtype = dtype
        copied.to(dtype).save_pretrained(draft)
        config = json.loads((draft / "config.json").read_text())
        if unused:
            tensors = {**own_tensors(model), **unused}
            save_file({k: t.to(dtype).contiguous() for k, t in tensors.items()}, draft / "model.safetensors", _PT)
    else:
        config = config_json(model, dtype)
        tensors = {stored_name(name, variant.prefix): t for name, t in {**own_tensors(model), **unused}.items()}
        tensors |= _unused_towers(variant.family, variant.prefix)
        save_file({k: t.to(dtype).contiguous() for k, t in tensors.items()}, draft / "model.safetensors", _PT)
        write_json(draft / "generation_config.json", {"bos_token_id": 2, "eos_token_id": [1, 106], "pad_token_id": 0})
    write_json(draft / "config.json", variant.spell(config))
    write_tokenizer(draft)


_PT = {"format": "pt"}


def build_tiny(name: str, root: Path, dtype: torch.dtype = torch.float32) -> TinyModel:
    """Make the variant under `root` (once) and its reference in memory; bfloat16 rounds the reference's weights too."""
    variant = VARIANTS[name]
    seed = variant.weights or name
    config_class, model_class = _CLASSES[variant.family]
    config = config_class(**copy.deepcopy(variant.config))  # configs keep, and change, the dicts they are given
    config._attn_implementation = "eager"
    model = model_class(config).float().eval().requires_grad_(False)
    _fill(model, variant, seed, dtype)
    unused = _unused_kv(model, seed) if variant.has_unused_kv else {}
    directory = root / (name if dtype == torch.float32 else f"{name}-{str(dtype).removeprefix('torch.')}")
    fill_directory(directory, lambda draft: _write_checkpoint(draft, model, variant, unused, dtype))
    return TinyModel(name, directory, model, config, variant.family, variant.prefix, unused)


def prompt_ids(n_tokens: int = 40, seed: int = 0) -> list[int]:
    """A random prompt of ordinary tokens after a BOS."""
    generator = seeded("prompt", str(seed))
    body = torch.randint(len(SPECIAL_TOKENS), len(token_list()), (n_tokens - 1,), generator=generator)
    return [2, *body.tolist()]


@torch.inference_mode()
def reference_logits(model: TinyModel | PreTrainedModel, ids: list[int]) -> torch.Tensor:
    """[T, V] float32 logits of one prompt in one pass: eager attention, no cache."""
    reference = model.reference if isinstance(model, TinyModel) else model
    return reference(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float()
