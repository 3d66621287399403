"""config.json -> ModelConfig, one reader a family."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bytefloor.errors import FileError, UnsupportedError
from bytefloor.files.stored import Checkpoint
from bytefloor.model import rope_tables
from bytefloor.model.config import LayerConfig, ModelConfig, Rope, shared_kv_sources

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}
MUST_BE_FALSY = (
    "attention_bias",
    "mlp_bias",
    "enable_moe_block",
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
)


class Keys:
    """The text model's config with typed, named look-ups.

    Multi-modal directories keep it under ``text_config``; a value found there wins over the root's.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        root = checkpoint.metadata
        text = root.get("text_config")
        self.values: dict[str, Any] = {**root, **text} if isinstance(text, Mapping) else dict(root)
        self.model_type = str(self.values.get("model_type", ""))
        for key in MUST_BE_FALSY:
            if self.values.get(key):
                what = "mixture-of-experts layers" if "expert" in key or "moe" in key else "biases"
                raise UnsupportedError(f"{self.path}: {key} = {self.values[key]}: {what} are not supported")

    @property
    def path(self) -> str:
        return f"{self.checkpoint.path}/config.json"

    def get(self, key: str, default: Any = None) -> Any:
        """The value, or the default where the key is absent or null."""
        value = self.values.get(key)
        return default if value is None else value

    def integer(self, key: str, default: int | None = None) -> int:
        """A positive integer; FileError names the key otherwise."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise FileError(f"{self.path}: {key} is {value!r}, expected a positive integer")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A number; FileError names the key otherwise."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise FileError(f"{self.path}: {key} is {value!r}, expected a number")
        return float(value)

    def activation(self) -> str:
        """hidden_activation is Gemma's spelling of hidden_act, and wins where both stand."""
        name = self.get("hidden_activation", self.get("hidden_act", "silu"))
        if name not in ACTIVATIONS:
            raise UnsupportedError(f"{self.path}: activation {name} is not supported ({', '.join(ACTIVATIONS)} are)")
        return ACTIVATIONS[name]

    def layer_types(self, n_layers: int, default: Sequence[str]) -> list[str]:
        """sliding_attention or full_attention for each layer."""
        types = list(self.get("layer_types", default))
        if len(types) != n_layers:
            raise FileError(f"{self.path}: layer_types has {len(types)} entries, expected {n_layers}")
        unknown = set(types) - {"sliding_attention", "full_attention"}
        if unknown:
            raise UnsupportedError(f"{self.path}: layer type {sorted(unknown)[0]} is not supported")
        return types

    def rope(self, layer_type: str, defaults: Mapping[str, Any]) -> dict[str, Any]:
        """RoPE parameters of one layer type, from either generation of config files."""
        nested = self.get("rope_parameters")
        if isinstance(nested, Mapping) and isinstance(nested.get(layer_type), Mapping):
            return {**defaults, **nested[layer_type]}
        if isinstance(nested, Mapping) and any(isinstance(value, Mapping) for value in nested.values()):
            return dict(defaults)
        flat = nested if isinstance(nested, Mapping) else self.get("rope_scaling", {})
        merged = {**defaults, **flat}
        if "rope_theta" in self.values and "rope_theta" not in flat:
            merged["rope_theta"] = self.values["rope_theta"]
        return merged

    def common(self) -> dict[str, Any]:
        """The fields that every family reads alike."""
        return {
            "name": self.checkpoint.path.name,
            "width": self.integer("hidden_size"),
            "vocabulary_size": self.integer("vocab_size"),
            "context_length": self.integer("max_position_embeddings", 2048),
            "eps": self.number("rms_norm_eps", 1e-6),
            "activation": self.activation(),
        }

    def head_size(self) -> int:
        """head_dim, and only where there is none hidden / heads."""
        if self.get("head_dim") is not None:
            return self.integer("head_dim")
        return self.integer("hidden_size") // self.integer("num_attention_heads")


def read_llama(keys: Keys) -> ModelConfig:
    """Llama 3, SmolLM2 and what shares their tensors; SmolLM3 leaves RoPE out of some layers."""
    n_heads, head_size = keys.integer("num_attention_heads"), keys.head_size()
    n_layers = keys.integer("num_hidden_layers")
    table = rope_tables.from_parameters(head_size, keys.rope("full_attention", {}), 10_000.0)
    interval = keys.get("no_rope_layer_interval")
    default_uses = [1 if not interval else int((i + 1) % interval != 0) for i in range(n_layers)]
    uses_rope = keys.get("no_rope_layers", default_uses)
    if len(uses_rope) != n_layers:
        raise FileError(f"{keys.path}: no_rope_layers has {len(uses_rope)} entries, expected {n_layers}")
    if keys.get("use_sliding_window", False):
        raise UnsupportedError(f"{keys.path}: use_sliding_window is not supported for {keys.model_type}")
    layers = tuple(
        LayerConfig(
            n_heads=n_heads,
            n_kv_heads=keys.integer("num_key_value_heads", n_heads),
            head_size=head_size,
            attention_scale=head_size**-0.5,
            window=None,
            rope=Rope("split", table) if uses_rope[i] else None,
            ffn_width=keys.integer("intermediate_size"),
            kv_source=i,
        )
        for i in range(n_layers)
    )
    return ModelConfig(family=keys.model_type, layers=layers, **keys.common())


def read_qwen3(keys: Keys) -> ModelConfig:
    """Weighted norms per head on Q and K, before RoPE; a window only where the file asks for one."""
    n_heads, head_size = keys.integer("num_attention_heads"), keys.head_size()
    n_layers = keys.integer("num_hidden_layers")
    has_window = bool(keys.get("use_sliding_window", False))
    first_sliding = keys.get("max_window_layers", n_layers)
    default = ["sliding_attention" if has_window and i >= first_sliding else "full_attention" for i in range(n_layers)]
    types = keys.layer_types(n_layers, default)
    rope = Rope("split", rope_tables.from_parameters(head_size, keys.rope("full_attention", {}), 10_000.0))
    layers = tuple(
        LayerConfig(
            n_heads=n_heads,
            n_kv_heads=keys.integer("num_key_value_heads", n_heads),
            head_size=head_size,
            attention_scale=head_size**-0.5,
            window=keys.integer("sliding_window") if types[i] == "sliding_attention" else None,
            rope=rope,
            ffn_width=keys.integer("intermediate_size"),
            kv_source=i,
        )
        for i in range(n_layers)
    )
    return ModelConfig(family="qwen3", layers=layers, has_qk_norm=True, **keys.common())


def read_gemma3(keys: Keys) -> ModelConfig:
    """Five sliding layers to one global; sliding ones turn with their own base and are never scaled."""
    if keys.get("attn_logit_softcapping"):
        raise UnsupportedError(f"{keys.path}: attn_logit_softcapping is not supported")
    n_layers, head_size = keys.integer("num_hidden_layers", 26), keys.integer("head_dim", 256)
    period = int(keys.get("sliding_window_pattern", keys.get("_sliding_window_pattern", 6)))
    default = ["sliding_attention" if (i + 1) % period else "full_attention" for i in range(n_layers)]
    types = keys.layer_types(n_layers, default)
    ropes = {
        "full_attention": _gemma3_rope(keys, head_size, "full_attention"),
        "sliding_attention": _gemma3_rope(keys, head_size, "sliding_attention"),
    }
    scale = keys.number("query_pre_attn_scalar", 256) ** -0.5
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
    return _gemma(keys, "gemma3", layers, has_layer_scalar=False, has_v_norm=False)


def _gemma3_rope(keys: Keys, head_size: int, layer_type: str) -> Rope:
    """The older files have one rope_scaling, meant for global layers, and rope_local_base_freq for the others."""
    if keys.get("rope_parameters") is not None:
        base = 10_000.0 if layer_type == "sliding_attention" else 1_000_000.0
        return Rope("split", rope_tables.from_parameters(head_size, keys.rope(layer_type, {}), base))
    if layer_type == "sliding_attention":
        return Rope("split", rope_tables.plain(head_size, keys.number("rope_local_base_freq", 10_000.0)))
    parameters = {"rope_theta": keys.number("rope_theta", 1_000_000.0), **keys.get("rope_scaling", {})}
    return Rope("split", rope_tables.from_parameters(head_size, parameters, 1_000_000.0))


def read_gemma4(keys: Keys) -> ModelConfig:
    """Dense Gemma 4: 12B, 31B and the E models. Head size and KV heads of global layers are their own."""
    if keys.get("use_bidirectional_attention") == "all":
        raise UnsupportedError(f"{keys.path}: use_bidirectional_attention = all is not supported")
    n_layers = keys.integer("num_hidden_layers")
    default = ["sliding_attention" if (i + 1) % 6 else "full_attention" for i in range(n_layers)]
    types = keys.layer_types(n_layers, default)
    n_shared = int(keys.get("num_kv_shared_layers", 0))
    sources = shared_kv_sources(types, n_shared)
    layers = tuple(_gemma4_layer(keys, i, types[i], sources[i]) for i in range(n_layers))
    has_per_layer = "per_layer_model_projection.weight" in keys.checkpoint.tensors
    width = keys.integer("hidden_size_per_layer_input", 256) if has_per_layer else 0
    if not has_per_layer and keys.get("hidden_size_per_layer_input", 0):
        raise FileError(
            f"{keys.path}: hidden_size_per_layer_input is {keys.get('hidden_size_per_layer_input')}, "
            "but per_layer_model_projection.weight is missing"
        )
    return _gemma(keys, "gemma4", layers, has_layer_scalar=True, has_v_norm=True, per_layer_width=width)


def _gemma4_layer(keys: Keys, index: int, layer_type: str, source: int) -> LayerConfig:
    is_global = layer_type == "full_attention"
    own = _gemma4_overrides(keys, index, is_global)
    head_size = int(own.get("head_dim", keys.integer("head_dim", 256)))
    n_kv_heads = int(own.get("num_key_value_heads", keys.integer("num_key_value_heads")))
    defaults = {"rope_type": "default", "rope_theta": 10_000.0}
    if is_global:
        defaults = {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0}
    rope = keys.rope(layer_type, defaults)
    ffn_width = keys.integer("intermediate_size")
    if keys.get("use_double_wide_mlp", False) and source != index:
        ffn_width *= 2
    return LayerConfig(
        n_heads=keys.integer("num_attention_heads"),
        n_kv_heads=n_kv_heads,
        head_size=head_size,
        attention_scale=1.0,
        window=None if is_global else keys.integer("sliding_window"),
        rope=Rope("split", rope_tables.from_parameters(head_size, rope, 10_000.0)),
        ffn_width=ffn_width,
        kv_source=source,
        has_v_from_k=is_global and bool(keys.get("attention_k_eq_v", False)),
    )


def _gemma4_overrides(keys: Keys, index: int, is_global: bool) -> Mapping[str, Any]:
    """per_layer_config ("05": {...}), or the older global_* keys; both spellings occur."""
    per_layer = keys.get("per_layer_config")
    if isinstance(per_layer, Mapping):
        return {int(layer): values for layer, values in per_layer.items()}.get(index, {})
    if not is_global:
        return {}
    own = {"head_dim": keys.get("global_head_dim", 512)}
    # Files state the number of global KV heads for every size, but it takes effect only where K doubles as V.
    if keys.get("attention_k_eq_v", False) and keys.get("num_global_key_value_heads") is not None:
        own["num_key_value_heads"] = keys.get("num_global_key_value_heads")
    return own


def _gemma(keys: Keys, family: str, layers: tuple[LayerConfig, ...], **parts: Any) -> ModelConfig:
    common = keys.common()
    if keys.get("hidden_activation", keys.get("hidden_act")) is None:
        common["activation"] = "gelu_tanh"
    return ModelConfig(
        family=family,
        layers=layers,
        embedding_scale=common["width"] ** 0.5,
        logit_soft_cap=keys.get("final_logit_softcapping"),
        has_qk_norm=True,
        has_post_norms=True,
        **parts,
        **common,
    )
