"""A model's configuration as the config.json that transformers would write for it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from bytefloor.errors import UnsupportedError
from bytefloor.model import rope_tables
from bytefloor.model.config import LayerConfig, ModelConfig, Rope
from bytefloor.model.values import Values
from bytefloor.quantize.gguf_keys import STILL, rope_numbers

_ARCHITECTURES = {
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "gemma3": ("gemma3_text", "Gemma3ForCausalLM"),
    "gemma4": ("gemma4_text", "Gemma4ForCausalLM"),
}
_ACTIVATIONS = {"silu": "silu", "gelu_tanh": "gelu_pytorch_tanh"}
LOW, HIGH = 1.0, 4.0
"""Of Llama 3's rule, wherever it was published: wavelengths of the old context over these are where it blends."""
OLD_CONTEXT = 8192


def config_of(config: ModelConfig, has_head: bool, bases: Sequence[float]) -> dict[str, Any]:
    """config.json without its quantisation. UnsupportedError for a family, or a RoPE, that it cannot express.

    bases: of RoPE, as the source names them.
    """
    if config.family not in _ARCHITECTURES:
        raise UnsupportedError(f"a config.json for {config.family} is not written here")
    model_type, class_name = _ARCHITECTURES[config.family]
    layers = config.layers
    full = next((layer for layer in layers if layer.window is None), layers[-1])
    sliding = next((layer for layer in layers if layer.window is not None), None)
    common: dict[str, Any] = {
        "architectures": [class_name],
        "model_type": model_type,
        "torch_dtype": "bfloat16",
        "vocab_size": config.vocabulary_size,
        "hidden_size": config.width,
        "num_hidden_layers": len(layers),
        "num_attention_heads": layers[0].n_heads,
        "num_key_value_heads": (sliding or full).n_kv_heads,
        "head_dim": (sliding or full).head_size,
        "intermediate_size": layers[0].ffn_width,
        "max_position_embeddings": config.context_length,
        "rms_norm_eps": config.eps,
        "tie_word_embeddings": not has_head,
        "attention_bias": False,
    }
    if config.family == "gemma4":
        return common | _gemma(config, sliding) | _gemma4(config, full, sliding, bases)
    if config.family == "gemma3":
        return common | _gemma(config, sliding) | _gemma3(full, sliding, bases)
    plain = {"hidden_act": _ACTIVATIONS[config.activation], **_rope(full, bases)}
    return common | plain | ({"mlp_bias": False} if config.family == "llama" else {})


def _rope(layer: LayerConfig, bases: Sequence[float]) -> dict[str, Any]:
    """rope_theta, and rope_scaling where the table is no plain one."""
    if layer.rope is None:
        raise UnsupportedError("layers without RoPE have no place in this config.json")
    base, factor, factors = rope_numbers(layer.rope, bases)
    found: dict[str, Any] = {"rope_theta": base}
    if factors is not None:
        found["rope_scaling"] = _llama3(layer.rope, layer.head_size, base, factors)
    elif factor != 1.0:
        found["rope_scaling"] = {"rope_type": "linear", "factor": factor}
    return found


def _llama3(rope: Rope, head_size: int, base: float, ratios: list[float]) -> dict[str, Any]:
    """The rule that the file holds only the results of: its factor is the largest, a blended pair tells the context."""
    factor = max(ratios)
    contexts = [float(OLD_CONTEXT)]
    for ratio, frequency in zip(ratios, rope_tables.plain(head_size, base), strict=True):
        share = (1 / ratio - 1 / factor) / (1 - 1 / factor) if factor > 1 else 1.0
        if 0.01 < share < 0.99:
            contexts.append(float(round(2 * math.pi / frequency * (LOW + share * (HIGH - LOW)))))
    for context in contexts:
        rule = {
            "rope_type": "llama3",
            "factor": float(round(factor)) if abs(factor - round(factor)) < 1e-5 else factor,
            "low_freq_factor": LOW,
            "high_freq_factor": HIGH,
            "original_max_position_embeddings": int(context),
        }
        table = rope_tables.llama3(head_size, base, Values(rule))
        if all(math.isclose(a, b, rel_tol=1e-5) for a, b in zip(table, rope.inverse_frequencies, strict=True)):
            return rule
    raise UnsupportedError("rope_freqs.weight: its factors follow no known rule, so config.json cannot say them")


def _gemma(config: ModelConfig, sliding: LayerConfig | None) -> dict[str, Any]:
    types = ["full_attention" if layer.window is None else "sliding_attention" for layer in config.layers]
    return {
        "hidden_activation": _ACTIVATIONS[config.activation],
        "final_logit_softcapping": config.logit_soft_cap,
        "layer_types": types,
        "sliding_window": sliding.window if sliding is not None else None,
    }


def _gemma3(full: LayerConfig, sliding: LayerConfig | None, bases: Sequence[float]) -> dict[str, Any]:
    local = rope_numbers(sliding.rope, bases)[0] if sliding is not None and sliding.rope is not None else 10_000.0
    scalar = full.attention_scale**-2
    is_whole = abs(scalar - round(scalar)) < 1e-6 * scalar
    return {
        "query_pre_attn_scalar": round(scalar) if is_whole else scalar,
        "rope_local_base_freq": local,
        **_rope(full, bases),
    }


def _gemma4(
    config: ModelConfig, full: LayerConfig, sliding: LayerConfig | None, bases: Sequence[float]
) -> dict[str, Any]:
    layers = config.layers
    n_shared = sum(layer.kv_source != index for index, layer in enumerate(layers))
    widths = {layer.ffn_width for layer in layers}
    return {
        "global_head_dim": full.head_size,
        "num_global_key_value_heads": full.n_kv_heads,
        "attention_k_eq_v": any(layer.has_v_from_k for layer in layers),
        "num_kv_shared_layers": n_shared,
        "use_double_wide_mlp": len(widths) > 1,
        "hidden_size_per_layer_input": config.per_layer_width,
        "vocab_size_per_layer_input": config.vocabulary_size,
        "enable_moe_block": False,
        "rope_parameters": {
            "full_attention": _gemma4_rope(full, bases),
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": rope_numbers((sliding or full).rope or Rope("split", (1.0,)), bases)[0],
            },
        },
    }


def _gemma4_rope(full: LayerConfig, bases: Sequence[float]) -> dict[str, Any]:
    """The first pairs of a global layer turn, the others stand still."""
    if full.rope is None:
        raise UnsupportedError("layers without RoPE have no place in this config.json")
    base, factor, factors = rope_numbers(full.rope, bases)
    n_turning = (
        sum(ratio < STILL / 2 for ratio in factors) if factors is not None else len(full.rope.inverse_frequencies)
    )
    rule: dict[str, Any] = {
        "rope_type": "proportional",
        "rope_theta": base,
        "partial_rotary_factor": 2 * n_turning / full.head_size,
    }
    return rule if factor == 1.0 else rule | {"factor": factor}
