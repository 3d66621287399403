"""GGUF files of the tiny models, named and keyed as llama.cpp's converter does, and their oracles.

What the converter does to a checkpoint, and this module repeats: llama q/k rows are permuted for the interleaved RoPE,
Gemma 3 norm weights gain their +1, Llama 3 scaling and Gemma 4's partial rotation become `rope_freqs.weight`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Q
from gguf.quants import dequantize, quantize
from transformers import PretrainedConfig, PreTrainedModel

from tiny import MERGES, SPECIAL_TOKENS, TinyModel, own_tensors, seeded, token_list

Keys = dict[str, Any]

ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "gemma3": gguf.MODEL_ARCH.GEMMA3,
    "gemma4": gguf.MODEL_ARCH.GEMMA4,
    "gemma4_unified": gguf.MODEL_ARCH.GEMMA4,
}
UNROTATED = 1e30  # divides a frequency down to nothing

# Types without an encoder get random blocks, and the oracle takes whatever they decode to. Per type: the byte offsets
# of its fp16 super-scales, the first being the scale and the second, if any, the minimum.
_SCALE_OFFSETS: dict[Q, tuple[int, ...]] = {
    Q.Q2_K: (80, 82),
    Q.Q3_K: (108,),
    Q.Q4_K: (0, 2),
    Q.Q5_K: (0, 2),
    Q.Q6_K: (208,),
    Q.IQ4_NL: (0,),
    Q.IQ4_XS: (0,),
}
_CODE_MEAN = {Q.Q2_K: 1.5, Q.Q4_K: 7.5, Q.Q5_K: 15.5}
RANDOM_BLOCK_TYPES: tuple[Q, ...] = (*_SCALE_OFFSETS, Q.NVFP4)
ENCODED_TYPES: tuple[Q, ...] = (Q.F32, Q.F16, Q.BF16, Q.Q8_0, Q.Q4_0, Q.Q4_1, Q.Q5_0, Q.Q5_1, Q.MXFP4)


def can_be_gguf(model: TinyModel) -> bool:
    """A Gemma 3 attention scale has no key: readers take the head size, or hidden / heads where there are 62 layers."""
    config = model.config
    if model.family != "gemma3":
        return True
    is_27b = config.num_hidden_layers == 62
    implied = config.hidden_size // config.num_attention_heads if is_27b else config.head_dim
    return config.query_pre_attn_scalar == implied


# ---------------------------------------------------------------------------------------------------------------------
# Metadata


def gguf_keys(model: TinyModel) -> Keys:
    """Every key but the tokenizer's, without the `general.` ones that say nothing about the arithmetic."""
    config, family = model.config, model.family
    arch = gguf.MODEL_ARCH_NAMES[ARCHITECTURES[family]]
    keys: Keys = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": _n_kv_heads(config),
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
    }
    if family in ("llama", "qwen3"):
        keys["rope.freq_base"] = float(config.rope_parameters["rope_theta"])
        keys |= _head_keys(config.head_dim)
    if family == "llama":
        keys["vocab_size"] = config.vocab_size
        keys["rope.dimension_count"] = config.head_dim
        if model.name in ("llama", "llama-tied"):  # files converted before these two keys became usual
            del keys["attention.key_length"], keys["attention.value_length"]
    if family.startswith("gemma"):
        full, sliding = config.rope_parameters["full_attention"], config.rope_parameters["sliding_attention"]
        keys["rope.freq_base"] = float(full["rope_theta"])
        keys["rope.freq_base_swa"] = float(sliding["rope_theta"])
        keys["attention.sliding_window"] = config.sliding_window
        if full["rope_type"] == "linear":
            keys |= {"rope.scaling.type": "linear", "rope.scaling.factor": float(full["factor"])}
        if config.final_logit_softcapping:
            keys["final_logit_softcapping"] = float(config.final_logit_softcapping)
    if family == "gemma3":
        keys |= _head_keys(config.head_dim)
    if family.startswith("gemma4"):
        keys |= _gemma4_keys(config)
    return {f"{arch}.{key}": value for key, value in keys.items()}


def _n_kv_heads(config: PretrainedConfig, layer: int = 0) -> int:
    """Where layers differ, transformers refuses to name one number for all of them."""
    return getattr(config, "per_layer_config", {layer: config})[layer].num_key_value_heads


def _head_keys(n: int, suffix: str = "") -> Keys:
    return {f"attention.key_length{suffix}": n, f"attention.value_length{suffix}": n}


def _gemma4_keys(config: PretrainedConfig) -> Keys:
    is_sliding = [kind == "sliding_attention" for kind in config.layer_types]
    full, sliding = config.per_layer_config["full_attention"], config.per_layer_config["sliding_attention"]
    keys: Keys = {
        "attention.shared_kv_layers": config.num_kv_shared_layers,
        "embedding_length_per_layer_input": getattr(config, "hidden_size_per_layer_input", 0) or 0,
        "attention.sliding_window_pattern": is_sliding,
        "rope.dimension_count": full.head_dim,  # the whole head: rope_freqs says which lanes stand still
        "rope.dimension_count_swa": sliding.head_dim,
        **_head_keys(full.head_dim),
        **_head_keys(sliding.head_dim, "_swa"),
    }
    if full.num_key_value_heads != sliding.num_key_value_heads:
        keys["attention.head_count_kv"] = [
            sliding.num_key_value_heads if slides else full.num_key_value_heads for slides in is_sliding
        ]
    if config.use_double_wide_mlp:
        first_shared = config.num_hidden_layers - config.num_kv_shared_layers
        keys["feed_forward_length"] = [
            config.intermediate_size * (2 if i >= first_shared else 1) for i in range(config.num_hidden_layers)
        ]
    return keys


def rope_factors(config: PretrainedConfig, family: str) -> list[float] | None:
    """`rope_freqs.weight`: what each frequency of the (global) layers is divided by; None where the file has none."""
    if family.startswith("gemma4"):
        head = config.per_layer_config["full_attention"].head_dim
        n_rotated = int(config.rope_parameters["full_attention"]["partial_rotary_factor"] * head / 2)
        return [1.0] * n_rotated + [UNROTATED] * (head // 2 - n_rotated)
    if family != "llama" or config.rope_parameters["rope_type"] != "llama3":
        return None
    rope, head = config.rope_parameters, config.head_dim
    low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
    factors = []
    for i in range(head // 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (2 * i / head)
        turns = rope["original_max_position_embeddings"] / wavelength  # in the original context
        blend = min(max((turns - low) / (high - low), 0.0), 1.0)
        factors.append(1.0 / (blend + (1.0 - blend) / factor))
    return factors


# ---------------------------------------------------------------------------------------------------------------------
# Tensors


def permute_rows(w: torch.Tensor, n_heads: int) -> torch.Tensor:
    """Rows of a head from (first halves, second halves) to interleaved pairs, for q and k of the llama architecture."""
    pairs = w.reshape(n_heads, 2, w.shape[0] // n_heads // 2, *w.shape[1:])
    return pairs.swapaxes(1, 2).reshape(w.shape)


def unpermute_rows(w: torch.Tensor, n_heads: int) -> torch.Tensor:
    pairs = w.reshape(n_heads, w.shape[0] // n_heads // 2, 2, *w.shape[1:])
    return pairs.swapaxes(1, 2).reshape(w.shape)


@dataclass(frozen=True)
class _Entry:
    name: str  # in the GGUF file
    source: str  # in the flat text model
    stored: torch.Tensor
    restore: Callable[[torch.Tensor], torch.Tensor]  # from stored values back to the model's


def _entries(model: TinyModel) -> list[_Entry]:
    config = model.config
    names = gguf.get_tensor_name_map(ARCHITECTURES[model.family], config.num_hidden_layers)
    entries = []
    for source, tensor in {**own_tensors(model.reference), **model.unused}.items():
        stem = source.removesuffix(".weight")
        name = names.get_name(stem)
        if name is None:
            raise ValueError(f"{source}: no GGUF name in the architecture of {model.family}")
        stored, restore = tensor, _same
        if model.family == "llama" and stem.endswith(("q_proj", "k_proj")):
            n_heads = config.num_attention_heads if stem.endswith("q_proj") else config.num_key_value_heads
            stored, restore = permute_rows(tensor, n_heads), _unpermuter(n_heads)
        elif model.family == "gemma3" and stem.endswith("norm"):
            stored, restore = tensor + 1.0, _minus_one
        entries.append(_Entry(f"{name}.weight", source, stored, restore))
    return entries


def _same(w: torch.Tensor) -> torch.Tensor:
    return w


def _minus_one(w: torch.Tensor) -> torch.Tensor:
    return w - 1.0


def _unpermuter(n_heads: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda w: unpermute_rows(w, n_heads)


def random_blocks(shape: tuple[int, int], kind: Q, std: float, seed: str) -> np.ndarray:
    """Valid blocks of random codes and scales whose values have about this deviation."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    n_rows, n_in = shape
    if n_in % block:
        raise ValueError(f"{seed}: rows of {n_in} do not divide into {kind.name} blocks of {block}")
    rng = np.random.default_rng(int(seeded(seed, kind.name).initial_seed()))
    data = rng.integers(0, 256, (n_rows, n_in // block, size), dtype=np.uint8)
    if kind == Q.NVFP4:
        # The first four bytes are UE4M3 scales; 0x20..0x3F are 1/16 to 15/16 of what follows, and none is a NaN.
        data[..., :4] = rng.integers(0x20, 0x40, data[..., :4].shape, dtype=np.uint8)
        return data.reshape(n_rows, -1)
    spread = rng.uniform(0.6, 1.4, data.shape[:2])

    def with_scale(scale: float) -> np.ndarray:
        out = data.copy()
        for offset, factor in zip(_SCALE_OFFSETS[kind], (1.0, _CODE_MEAN.get(kind, 0.0)), strict=False):
            halves = (spread * scale * factor).astype(np.float16)
            out[..., offset : offset + 2] = halves[..., None].view(np.uint8)
        return out.reshape(n_rows, -1)

    unit = dequantize(with_scale(1.0), kind)
    return with_scale(std / float(unit.std()))


def _encode(entry: _Entry, kind: Q) -> tuple[np.ndarray, torch.Tensor]:
    """The bytes of one tensor, and the values they decode to in the stored order."""
    values = entry.stored.detach().contiguous().numpy()
    if kind == Q.F32:
        return values, entry.stored
    if kind in RANDOM_BLOCK_TYPES:
        shape = (values.shape[0], values.shape[1])
        data = random_blocks(shape, kind, float(values.std()), entry.source)
    else:
        data = quantize(values, kind)
    return data, torch.from_numpy(np.ascontiguousarray(dequantize(data, kind), dtype=np.float32).copy())


# ---------------------------------------------------------------------------------------------------------------------
# Files


def _add_tokenizer(writer: gguf.GGUFWriter, n_vocab: int) -> None:
    tokens = token_list()
    padding = [f"[PAD{i}]" for i in range(len(tokens), n_vocab)]
    kinds = [gguf.TokenType.CONTROL] * len(SPECIAL_TOKENS)
    kinds += [gguf.TokenType.NORMAL] * (len(tokens) - len(kinds))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list(tokens + padding)
    writer.add_token_types([*kinds, *[gguf.TokenType.UNUSED] * len(padding)])
    writer.add_token_merges(list(MERGES))
    writer.add_pad_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_bos_token_id(2)
    writer.add_unk_token_id(3)
    writer.add_add_bos_token(True)


def _add_key(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_string(key, value)


def _chosen_type(name: str, n_dims: int, types: Mapping[str, Q]) -> Q:
    if n_dims < 2:
        return Q.F32
    return next((kind for pattern, kind in types.items() if fnmatchcase(name, pattern)), Q.F32)


def write_tiny_gguf(model: TinyModel, path: Path, *, omit: Collection[str] = (), extra: Keys | None = None) -> Path:
    """The model in F32. `omit` and `extra` drop and set keys, for files that older or other converters wrote."""
    write_tiny_quant_gguf(model, path, {}, omit=omit, extra=extra)
    return path


def write_tiny_quant_gguf(
    model: TinyModel,
    path: Path,
    types: Mapping[str, Q],
    *,
    omit: Collection[str] = (),
    extra: Keys | None = None,
) -> TinyModel:
    """The model with the types of the first matching name pattern (F32 without one), and the oracle of that file.

    Matrices only; norms stay F32. NVFP4 tensors of a layer come with a per-tensor `.scale` beside them.
    """
    if not can_be_gguf(model):
        raise ValueError(f"{model.name}: no GGUF key carries its attention scale")
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[ARCHITECTURES[model.family]])
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_name(model.name)
    for key, value in {**gguf_keys(model), **(extra or {})}.items():
        if key not in omit:
            _add_key(writer, key, value)
    _add_tokenizer(writer, model.config.vocab_size)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)

    oracle = copy.deepcopy(model.reference)
    for entry in _entries(model):
        kind = _chosen_type(entry.name, entry.stored.dim(), types)
        data, values = _encode(entry, kind)
        if kind == Q.NVFP4:
            scale = float(entry.stored.std() / values.std())
            values = values * np.float32(scale)
            writer.add_tensor(entry.name.replace(".weight", ".scale"), np.array([scale], np.float32))
        writer.add_tensor(entry.name, data, raw_dtype=kind)
        if entry.source not in model.unused and kind != Q.F32:
            set_weight(oracle, entry.source, entry.restore(values))
    factors = rope_factors(model.config, model.family)
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", np.array(factors, np.float32))
    path.parent.mkdir(parents=True, exist_ok=True)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return replace(model, directory=path.parent, reference=oracle, config=oracle.config)


@torch.no_grad()
def set_weight(model: PreTrainedModel, name: str, value: torch.Tensor) -> None:
    target = model.state_dict()[name]
    if target.shape != value.shape:
        raise ValueError(f"{name}: the model has {tuple(target.shape)}, the file {tuple(value.shape)}")
    target.copy_(value)
