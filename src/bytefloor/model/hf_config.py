"""config.json -> ModelConfig, one reader a family. What a file leaves out is what transformers takes for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bytefloor.errors import FileError, UnsupportedError
from bytefloor.model import rope_tables
from bytefloor.model.config import LayerConfig, ModelConfig, Rope, shared_kv_sources
from bytefloor.model.hf_keys import Keys
from bytefloor.model.values import Values

GEMMA4_ROPE: dict[str, dict[str, Any]] = {
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
    "sliding_attention": {"rope_theta": 10_000.0},
}
PER_LAYER_KEYS = {"head_dim", "num_key_value_heads"}


def read_llama(keys: Keys) -> ModelConfig:
    """Llama 3, SmolLM2 and what shares their tensors."""
    return _llama(keys, None, base=10_000.0, context_length=2048)


def read_smollm3(keys: Keys) -> ModelConfig:
    """Llama's tensors; every fourth layer has no RoPE unless the file names others."""
    return _llama(keys, 4, base=2_000_000.0, context_length=32_768)


def _llama(keys: Keys, interval: int | None, base: float, context_length: int) -> ModelConfig:
    n_heads, head_size = keys.integer("num_attention_heads"), keys.head_size()
    n_layers = keys.n_layers()
    has_rope = _layers_with_rope(keys, n_layers, interval)
    if keys.flag("use_sliding_window"):
        raise UnsupportedError(f"use_sliding_window is not supported for {keys.model_type}")
    if "sliding_attention" in keys.layer_types(n_layers, ["full_attention"] * n_layers):
        raise UnsupportedError(f"layer_types names sliding layers, which are not supported for {keys.model_type}")
    rope = _rope(head_size, keys.rope("full_attention", {"rope_theta": keys.get("rope_theta", base)}))
    layers = tuple(
        LayerConfig(
            n_heads=n_heads,
            n_kv_heads=keys.integer("num_key_value_heads", n_heads),
            head_size=head_size,
            attention_scale=head_size**-0.5,
            window=None,
            rope=rope if has_rope[i] else None,
            ffn_width=keys.integer("intermediate_size"),
            kv_source=i,
        )
        for i in range(n_layers)
    )
    return ModelConfig(family=keys.model_type, layers=layers, **keys.common("silu", context_length))


def _layers_with_rope(keys: Keys, n_layers: int, interval: int | None) -> list[bool]:
    """no_rope_layers holds 1 for a layer that has RoPE, in spite of its name; without it, the last of each interval
    has none."""
    if keys.get("no_rope_layer_interval", interval) is None:
        default = [1] * n_layers
    else:
        period = keys.integer("no_rope_layer_interval", interval)
        default = [int((i + 1) % period != 0) for i in range(n_layers)]
    stated = keys.items("no_rope_layers", n_layers, default)
    if any(value not in (0, 1) for value in stated):
        raise keys.wrong("no_rope_layers", stated, "0 or 1 for each layer")
    return [bool(value) for value in stated]


def _rope(head_size: int, parameters: Values) -> Rope:
    return Rope("split", rope_tables.from_parameters(head_size, parameters))


def read_qwen3(keys: Keys) -> ModelConfig:
    """Weighted norms per head on Q and K, before RoPE; a window only where the file asks for one."""
    n_heads, head_size = keys.integer("num_attention_heads"), keys.head_size()
    n_layers = keys.n_layers()
    types = _qwen3_types(keys, n_layers)
    base = {"rope_theta": keys.get("rope_theta", 10_000.0)}
    ropes = {layer_type: _rope(head_size, keys.rope(layer_type, base)) for layer_type in set(types)}
    layers = tuple(
        LayerConfig(
            n_heads=n_heads,
            n_kv_heads=keys.integer("num_key_value_heads", n_heads),
            head_size=head_size,
            attention_scale=head_size**-0.5,
            window=keys.integer("sliding_window", 4096) if types[i] == "sliding_attention" else None,
            rope=ropes[types[i]],
            ffn_width=keys.integer("intermediate_size"),
            kv_source=i,
        )
        for i in range(n_layers)
    )
    return ModelConfig(family="qwen3", layers=layers, has_qk_norm=True, **keys.common("silu", 32_768))


def _qwen3_types(keys: Keys, n_layers: int) -> list[str]:
    """A window that is null is none, whatever the switch says; one that is left out is not."""
    has_window = keys.flag("use_sliding_window") and keys.values.get("sliding_window", 4096) is not None
    first_sliding = keys.integer("max_window_layers", 28, least=0)
    default = ["sliding_attention" if has_window and i >= first_sliding else "full_attention" for i in range(n_layers)]
    types = keys.layer_types(n_layers, default)
    if "sliding_attention" in types and not has_window:
        raise FileError(
            "layer_types names sliding layers, but use_sliding_window or sliding_window says there are none"
        )
    return types


def read_gemma3(keys: Keys) -> ModelConfig:
    """Five sliding layers to one global; sliding ones turn with their own base and are never scaled."""
    if found := keys.get("use_bidirectional_attention"):
        raise UnsupportedError(f"use_bidirectional_attention = {found} is not supported")
    n_layers, head_size = keys.n_layers(26), keys.integer("head_dim", 256)
    period = keys.integer("sliding_window_pattern", keys.get("_sliding_window_pattern", 6))
    types = keys.layer_types(n_layers, _by_period(n_layers, period))
    # A scaling without a layer type is meant for global layers: the older files have rope_local_base_freq beside it.
    base, local_base = keys.get("rope_theta", 1_000_000.0), keys.get("rope_local_base_freq", 10_000.0)
    ropes = {
        "full_attention": _rope(head_size, keys.rope("full_attention", {"rope_theta": base})),
        "sliding_attention": _rope(
            head_size, keys.rope("sliding_attention", {"rope_theta": local_base}, takes_flat=False)
        ),
    }
    scale = keys.positive("query_pre_attn_scalar", 256) ** -0.5
    layers = tuple(
        LayerConfig(
            n_heads=keys.integer("num_attention_heads", 8),
            n_kv_heads=keys.integer("num_key_value_heads", 4),
            head_size=head_size,
            attention_scale=scale,
            window=keys.integer("sliding_window", 4096) if types[i] == "sliding_attention" else None,
            rope=ropes[types[i]],
            ffn_width=keys.integer("intermediate_size"),
            kv_source=i,
        )
        for i in range(n_layers)
    )
    return _gemma(keys, "gemma3", layers, 131_072)


def _by_period(n_layers: int, period: int) -> list[str]:
    return ["sliding_attention" if (i + 1) % period else "full_attention" for i in range(n_layers)]


def read_gemma4(keys: Keys) -> ModelConfig:
    """Dense Gemma 4: 31B and the E models. Head size and KV heads of global layers are their own."""
    return _gemma4(keys, window=512, context_length=131_072)


def read_gemma4_unified(keys: Keys) -> ModelConfig:
    """Gemma 4 12B."""
    return _gemma4(keys, window=1024, context_length=262_144)


def _gemma4(keys: Keys, window: int, context_length: int) -> ModelConfig:
    if keys.get("use_bidirectional_attention") == "all":
        raise UnsupportedError("use_bidirectional_attention = all is not supported")
    n_layers = keys.n_layers(30)
    # The last layer is global, whatever is stated: transformers makes it so.
    types = [*keys.layer_types(n_layers, _by_period(n_layers, 6))[:-1], "full_attention"]
    sources = shared_kv_sources(types, keys.integer("num_kv_shared_layers", 0, least=0, most=n_layers))
    own = _gemma4_own_values(keys, types)
    layers = tuple(_gemma4_layer(keys, i, types[i], sources[i], own[i], window) for i in range(n_layers))
    has_per_layer = "per_layer_model_projection.weight" in keys.checkpoint.tensors
    width = keys.integer("hidden_size_per_layer_input", 256) if has_per_layer else 0
    if not has_per_layer and keys.get("hidden_size_per_layer_input", 0):
        raise FileError(
            f"hidden_size_per_layer_input is {keys.get('hidden_size_per_layer_input')}, "
            "but per_layer_model_projection.weight is missing"
        )
    parts = {"has_layer_scalar": True, "has_v_norm": True, "per_layer_width": width}
    return _gemma(keys, "gemma4", layers, context_length, **parts)


def _gemma4_layer(keys: Keys, index: int, layer_type: str, source: int, own: Values, window: int) -> LayerConfig:
    is_global = layer_type == "full_attention"
    head_size = own.integer("head_dim", keys.integer("head_dim", 256))
    ffn_width = keys.integer("intermediate_size")
    if keys.flag("use_double_wide_mlp") and source != index:
        ffn_width *= 2
    return LayerConfig(
        n_heads=keys.integer("num_attention_heads", 8),
        n_kv_heads=own.integer("num_key_value_heads", keys.integer("num_key_value_heads", 4)),
        head_size=head_size,
        attention_scale=1.0,
        window=None if is_global else keys.integer("sliding_window", window),
        rope=_gemma4_rope(keys, layer_type, head_size),
        ffn_width=ffn_width,
        kv_source=source,
        has_v_from_k=is_global and keys.flag("attention_k_eq_v"),
    )


def _gemma4_rope(keys: Keys, layer_type: str, head_size: int) -> Rope:
    """rope_parameters, where they stand, are nested and say everything but the base."""
    defaults = GEMMA4_ROPE[layer_type]
    stated = keys.mapping("rope_parameters")
    if stated:
        defaults = {"rope_theta": defaults["rope_theta"]}
        if stated.get(layer_type) is None:
            raise keys.wrong(f"rope_parameters.{layer_type}", None, "a mapping")
    return _rope(head_size, keys.rope(layer_type, defaults, takes_flat=layer_type == "full_attention"))


def _gemma4_own_values(keys: Keys, types: Sequence[str]) -> list[Values]:
    """Each layer's own sizes: per_layer_config ("05": {...}), or the older global_* keys; both spellings occur."""
    if keys.get("per_layer_config") is not None:
        return _per_layer_config(keys, len(types))
    shared: dict[str, Any] = {"head_dim": keys.integer("global_head_dim", 512)}
    # Files state the number of global KV heads for every size, but it takes effect only where K doubles as V.
    if keys.flag("attention_k_eq_v"):
        shared["num_key_value_heads"] = keys.get("num_global_key_value_heads")
    return [Values(shared if layer_type == "full_attention" else {}, "global ") for layer_type in types]


def _per_layer_config(keys: Keys, n_layers: int) -> list[Values]:
    """A value that no layer here can have of its own is refused, never ignored."""
    out = [Values({}) for _ in range(n_layers)]
    indices = {str(i): i for i in range(n_layers)}
    stated = Values(keys.mapping("per_layer_config"), "per_layer_config.")
    for name in stated.values:
        index = indices.get(name.lstrip("0") or name[:1])
        if index is None:
            raise FileError(f"per_layer_config has a layer {name[:20]!r}, expected 0 to {n_layers - 1}")
        if stated.get(name) is None:
            raise stated.wrong(name, None, "a mapping")
        own = stated.mapping(name)
        for key in own:
            if key not in PER_LAYER_KEYS:
                raise UnsupportedError(f"per_layer_config.{name}.{key} = {own[key]}: a layer cannot have its own {key}")
        out[index] = Values(own, f"per_layer_config.{name}.")
    return out


def _gemma(keys: Keys, family: str, layers: tuple[LayerConfig, ...], context_length: int, **parts: Any) -> ModelConfig:
    common = keys.common("gelu_tanh", context_length)
    return ModelConfig(
        family=family,
        layers=layers,
        embedding_scale=common["width"] ** 0.5,
        logit_soft_cap=keys.positive_or_none("final_logit_softcapping"),
        has_qk_norm=True,
        has_post_norms=True,
        **parts,
        **common,
    )
