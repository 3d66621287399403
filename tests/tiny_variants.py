"""The tiny variants: one small config each, and how the files of that kind of model spell it.

The published files say the same thing in several ways, so a variant is a family's config plus the spelling of its
config.json, the prefix of its tensor names, and whether tensors that nobody may read lie beside them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

Json = dict[str, Any]

N_VOCAB = 283  # odd, and larger than the tokenizer: rows of the embedding that no token owns
WINDOW = 8  # a prompt of 40 tokens crosses it several times


@dataclass(frozen=True)
class Variant:
    family: str
    config: Json
    weights: str = ""  # variants that differ only in spelling share their weights
    spell: Callable[[Json], Json] = dict
    prefix: str = "model."
    has_unused_kv: bool = False
    overflows: bool = False


# ---------------------------------------------------------------------------------------------------------------------
# Spellings of config.json: what the published files say where `save_pretrained` of today says something else.


def _spell_old_rope(config: Json, type_key: str = "rope_type") -> Json:
    """Llama and Qwen3 as published: a base and an optional scaling at the top level."""
    out = {key: value for key, value in config.items() if key != "rope_parameters"}
    rope = dict(config["rope_parameters"])
    out["rope_theta"] = rope.pop("rope_theta")
    kind = rope.pop("rope_type")
    out["rope_scaling"] = None if kind == "default" else {**rope, type_key: kind}
    return out


def _spell_old_gemma3(config: Json) -> Json:
    """Gemma 3 as published before layer_types: two bases, a period, and a scaling for the global layers only."""
    out = {key: value for key, value in config.items() if key not in ("rope_parameters", "layer_types")}
    out.pop("_sliding_window_pattern", None)
    rope = config["rope_parameters"]["full_attention"]
    out["rope_theta"] = rope["rope_theta"]
    out["rope_local_base_freq"] = config["rope_parameters"]["sliding_attention"]["rope_theta"]
    out["rope_scaling"] = None if rope["rope_type"] == "default" else {"factor": rope["factor"], "rope_type": "linear"}
    out["sliding_window_pattern"] = 6
    return out


def _spell_sparse_gemma3(config: Json) -> Json:
    """The text_config of gemma-3-4b: every value that equals the family's default is left out."""
    kept = ("hidden_size", "intermediate_size", "model_type", "num_hidden_layers", "rope_scaling", "sliding_window")
    old = _spell_old_gemma3(config)
    return {**{key: old[key] for key in kept}, "vocab_size": config["vocab_size"]}


def _spell_global_keys(config: Json) -> Json:
    """Gemma 4 as published: global layers described by two keys in place of a table by layer."""
    out = dict(config)
    per_layer = out.pop("per_layer_config")
    first = next(iter(per_layer.values()))
    out["global_head_dim"] = first["head_dim"]
    out["num_global_key_value_heads"] = first.get("num_key_value_heads")
    return out


def nest(config: Json, family: str) -> Json:
    """Wrap a text config as a conditional-generation config does, beside a vision tower that must be ignored."""
    model_type = family
    architecture = {
        "gemma3": "Gemma3ForConditionalGeneration",
        "gemma4": "Gemma4ForConditionalGeneration",
        "gemma4_unified": "Gemma4UnifiedForConditionalGeneration",
    }[family]
    text = {key: value for key, value in config.items() if key not in ("architectures", "transformers_version")}
    vision_type = {"gemma3": "siglip_vision_model"}.get(family, f"{family}_vision")
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "text_config": text,
        "vision_config": {"model_type": vision_type},
        "eos_token_id": [1, 106],
        "tie_word_embeddings": config.get("tie_word_embeddings", True),
    }


def _nested(config: Json, family: str, spell: Callable[[Json], Json] = dict) -> Json:
    return nest(spell(config), family)


# ---------------------------------------------------------------------------------------------------------------------
# The variants


_SMALL: Json = {
    "vocab_size": N_VOCAB,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
}
# Rows that hold whole 256-value blocks and head sizes that have kernels.
_WIDE: Json = {"hidden_size": 256, "intermediate_size": 512}

# An eps this large is visible in the logits, so a constant in place of the file's value is too.
_LLAMA: Json = {**_SMALL, "rms_norm_eps": 1e-3, "rope_parameters": {"rope_type": "default", "rope_theta": 5.0e5}}
_LLAMA_TIED: Json = {**_LLAMA, "tie_word_embeddings": True}


def _llama3_rope(factor: float) -> Json:
    # With heads of 32 and base 5e5 the wavelengths are 6.3, 14.3, 32, 74, ...: below 48/4, between, and above 48.
    return {
        "rope_type": "llama3",
        "rope_theta": 5.0e5,
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 48,
    }


_QWEN3: Json = {
    **_SMALL,
    "head_dim": 48,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1.0e6},
}


def _gemma3_rope(factor: float | None = None) -> Json:
    base = {"rope_theta": 1.0e6}
    full = {"rope_type": "default", **base} if factor is None else {"rope_type": "linear", "factor": factor, **base}
    return {"full_attention": full, "sliding_attention": {"rope_type": "default", "rope_theta": 1.0e4}}


_GEMMA3: Json = {
    **_SMALL,
    "num_hidden_layers": 7,  # five sliding, one global, and one sliding after it
    "head_dim": 32,
    "query_pre_attn_scalar": 32,
    "sliding_window": WINDOW,
    "rope_parameters": _gemma3_rope(),
}
_GEMMA3_4B: Json = {
    **_GEMMA3,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "max_position_embeddings": 131072,
    "rope_parameters": _gemma3_rope(8.0),
}


def _layer_types(pattern: str) -> list[str]:
    return ["full_attention" if kind == "G" else "sliding_attention" for kind in pattern]


_GEMMA4: Json = {
    **_SMALL,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": WINDOW,
    "final_logit_softcapping": 30.0,
    "layer_types": _layer_types("sssssG"),
}
_GEMMA4_12B: Json = {**_GEMMA4, "attention_k_eq_v": True, "num_global_key_value_heads": 1}
# A cap that bites: logits reach 7.
_GEMMA4_31B: Json = {
    **_GEMMA4,
    "hidden_size_per_layer_input": 0,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 2,
    "final_logit_softcapping": 6.0,
}
_GEMMA4_E: Json = {
    **_GEMMA4,
    "num_hidden_layers": 8,
    "num_key_value_heads": 2,
    "layer_types": _layer_types("ssGsGssG"),  # the last three read the caches of layers 3 and 4
    "num_kv_shared_layers": 3,
    "hidden_size_per_layer_input": 32,
    "vocab_size_per_layer_input": N_VOCAB,
    "use_double_wide_mlp": True,
}
_GEMMA4_E4B: Json = {**_GEMMA4_E, "use_double_wide_mlp": False}

VARIANTS: dict[str, Variant] = {
    "llama": Variant("llama", {**_LLAMA, "tie_word_embeddings": False}, spell=_spell_old_rope),
    "llama-tied": Variant("llama", _LLAMA_TIED, spell=_spell_old_rope),
    "llama3-rope": Variant("llama", {**_LLAMA_TIED, "rope_parameters": _llama3_rope(8.0)}, spell=_spell_old_rope),
    "llama3-rope-type": Variant(
        "llama",
        {**_LLAMA_TIED, "rope_parameters": _llama3_rope(32.0)},
        spell=partial(_spell_old_rope, type_key="type"),
    ),
    "llama3-rope-parameters": Variant(
        "llama", {**_LLAMA_TIED, "rope_parameters": _llama3_rope(8.0)}, weights="llama3-rope"
    ),
    "smollm2": Variant(
        "llama",
        {
            **_LLAMA_TIED,
            "hidden_size": 288,  # rows of nine 32-value blocks: no 256-value block fits, as in SmolLM2
            "intermediate_size": 320,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1.0e5},
        },
        spell=_spell_old_rope,
    ),
    # Rows that no block divides, and no step of a kernel: files hold them in 16 bits.
    "llama-172": Variant(
        "llama",
        {**_LLAMA_TIED, "hidden_size": 172, "intermediate_size": 172, "head_dim": 32},
        spell=_spell_old_rope,
    ),
    "qwen3": Variant("qwen3", _QWEN3, spell=_spell_old_rope),
    "qwen3-untied": Variant("qwen3", {**_QWEN3, "tie_word_embeddings": False}, spell=_spell_old_rope),
    "gemma3": Variant("gemma3", _GEMMA3),
    "gemma3-old-keys": Variant("gemma3", _GEMMA3, weights="gemma3", spell=_spell_old_gemma3),
    "gemma3-linear": Variant("gemma3", {**_GEMMA3, "rope_parameters": _gemma3_rope(8.0)}, spell=_spell_old_gemma3),
    "gemma3-scaled": Variant("gemma3", {**_GEMMA3, "rope_parameters": _gemma3_rope(8.0), "query_pre_attn_scalar": 20}),
    # GGUF has no key for this scale: readers know the 27B by its 62 layers and use (hidden / heads)^-0.5.
    "gemma3-27b": Variant(
        "gemma3",
        {**_GEMMA3, "num_hidden_layers": 62, "rope_parameters": _gemma3_rope(8.0), "query_pre_attn_scalar": 16}
        | {"hidden_size": 64, "intermediate_size": 96},
    ),
    "gemma3-overflow": Variant("gemma3", _GEMMA3, overflows=True),
    "gemma3-nested": Variant(
        "gemma3", _GEMMA3, weights="gemma3", spell=partial(_nested, family="gemma3"), prefix="model.language_model."
    ),
    "gemma3-nested-sparse": Variant(
        "gemma3",
        _GEMMA3_4B,
        spell=partial(_nested, family="gemma3", spell=_spell_sparse_gemma3),
        prefix="language_model.model.",
    ),
    "gemma4-unified": Variant("gemma4_unified", _GEMMA4_12B),
    "gemma4-unified-global-keys": Variant(
        "gemma4_unified", _GEMMA4_12B, weights="gemma4-unified", spell=_spell_global_keys
    ),
    "gemma4-unified-nested": Variant(
        "gemma4_unified",
        _GEMMA4_12B,
        weights="gemma4-unified",
        spell=partial(_nested, family="gemma4_unified", spell=_spell_global_keys),
        prefix="model.language_model.",
    ),
    "gemma4-31b": Variant("gemma4", _GEMMA4_31B),
    "gemma4-31b-nested": Variant(
        "gemma4",
        _GEMMA4_31B,
        weights="gemma4-31b",
        spell=partial(_nested, family="gemma4"),
        prefix="language_model.model.",
    ),
    "gemma4-e": Variant("gemma4", _GEMMA4_E),
    "gemma4-e4b": Variant("gemma4", _GEMMA4_E4B),
    "gemma4-e-unused-kv": Variant("gemma4", _GEMMA4_E, weights="gemma4-e", has_unused_kv=True),
    "gemma4-e-nested": Variant(
        "gemma4",
        _GEMMA4_E,
        weights="gemma4-e",
        spell=partial(_nested, family="gemma4", spell=_spell_global_keys),
        prefix="model.language_model.",
        has_unused_kv=True,
    ),
    "llama-wide": Variant(
        "llama",
        {**_LLAMA, **_WIDE, "tie_word_embeddings": False, "rope_parameters": _llama3_rope(8.0)},
        spell=_spell_old_rope,
    ),
    "qwen3-wide": Variant("qwen3", {**_QWEN3, **_WIDE, "head_dim": 128}, spell=_spell_old_rope),
    "gemma3-wide": Variant("gemma3", {**_GEMMA3, **_WIDE, "head_dim": 256, "query_pre_attn_scalar": 256}),
    "gemma4-wide": Variant(
        "gemma4_unified",
        {**_GEMMA4_12B, **_WIDE, "num_hidden_layers": 4, "num_key_value_heads": 2, "head_dim": 256}
        | {"global_head_dim": 512, "layer_types": _layer_types("ssGG")},
    ),
    "gemma4-e-wide": Variant(
        "gemma4",
        {**_GEMMA4_E, **_WIDE, "num_hidden_layers": 8, "num_key_value_heads": 2, "head_dim": 256}
        | {"global_head_dim": 512, "hidden_size_per_layer_input": 256},
    ),
}
