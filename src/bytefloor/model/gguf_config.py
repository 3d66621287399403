"""GGUF key-value pairs -> ModelConfig, one reader a family. Norm weights already contain Gemma's +1 in these files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bytefloor.errors import FileError, UnsupportedError
from bytefloor.files.stored import Checkpoint
from bytefloor.model import rope_tables
from bytefloor.model.config import LayerConfig, ModelConfig, Rope, shared_kv_sources

GEMMA3_27B_LAYERS = 62
"""Gemma 3 27B scales attention by 1/sqrt(width / heads) and no key says so; its depth identifies it."""


class Keys:
    """Typed look-ups below ``<architecture>.``; errors name file and key."""

    def __init__(self, architecture: str, checkpoint: Checkpoint) -> None:
        self.architecture = architecture
        self.checkpoint = checkpoint
        if self.get("expert_count", 0):
            raise UnsupportedError(
                f"{checkpoint.path}: {self.get('expert_count')} experts: mixture-of-experts models are not supported"
            )

    def get(self, key: str, default: Any = None) -> Any:
        """The raw value of ``<architecture>.<key>``."""
        return self.checkpoint.metadata.get(f"{self.architecture}.{key}", default)

    def integer(self, key: str, default: int | None = None) -> int:
        """A positive integer; FileError names the key otherwise."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise FileError(self._complaint(key, value, "a positive integer"))
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A number; FileError names the key otherwise."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise FileError(self._complaint(key, value, "a number"))
        return float(value)

    def per_layer(self, key: str, n_layers: int, default: int | None = None) -> list[int]:
        """A value for each layer: an array of that length, or one number for all."""
        value = self.get(key, default)
        if isinstance(value, Sequence) and not isinstance(value, str):
            if len(value) != n_layers:
                raise FileError(self._complaint(key, f"{len(value)} values", f"{n_layers}"))
            return [int(x) for x in value]
        return [self.integer(key, default)] * n_layers

    def _complaint(self, key: str, found: object, expected: str) -> str:
        return f"{self.checkpoint.path}: {self.architecture}.{key} is {found!r}, expected {expected}"

    def head_size(self, n_heads: int) -> int:
        """attention.key_length, and only where there is none width / heads."""
        size = self.integer("attention.key_length", self.integer("embedding_length") // n_heads)
        if self.integer("attention.value_length", size) != size:
            raise UnsupportedError(
                self._complaint("attention.value_length", self.get("attention.value_length"), str(size))
            )
        return size

    def linear_factor(self) -> float:
        """rope.scaling: none or linear (also where only a factor stands); anything else is refused by name."""
        rule = self.get("rope.scaling.type", "linear")
        if rule not in ("none", "linear"):
            raise UnsupportedError(f"{self.checkpoint.path}: RoPE scaling {rule} is not implemented")
        factor = self.number("rope.scaling.factor", self.get("rope.scale_linear", 1.0))
        return 1.0 if rule == "none" or factor == 0 else factor

    def rope_factors(self, table: tuple[float, ...]) -> tuple[float, ...]:
        """Apply rope_freqs.weight where the file has one."""
        stored = self.checkpoint.tensors.get("rope_freqs.weight")
        return table if stored is None else rope_tables.with_factors(table, stored.decode().tolist())

    def full_rotation(self, key: str, head_size: int) -> None:
        """RoPE over a part of the head is not a rule of these families."""
        rotated = self.integer(key, head_size)
        if rotated != head_size:
            raise UnsupportedError(self._complaint(key, rotated, f"the whole head of {head_size}"))

    def common(self) -> dict[str, Any]:
        """The fields that every family reads alike."""
        embedding = self.checkpoint.tensors.get("token_embd.weight")
        if embedding is None or len(embedding.shape) != 2:
            raise FileError(f"{self.checkpoint.path}: token_embd.weight is missing or not a matrix")
        return {
            "name": str(self.checkpoint.metadata.get("general.name", self.checkpoint.path.stem)),
            "width": self.integer("embedding_length"),
            "vocabulary_size": embedding.shape[0],
            "context_length": self.integer("context_length", 2048),
            "eps": self.number("attention.layer_norm_rms_epsilon", 1e-6),
        }


def _uniform(keys: Keys, rope: Rope, head_size: int) -> tuple[LayerConfig, ...]:
    """Layers that are all alike but for what arrays in the file say."""
    n_layers = keys.integer("block_count")
    heads = keys.per_layer("attention.head_count", n_layers)
    kv_heads = keys.per_layer("attention.head_count_kv", n_layers, heads[0])
    widths = keys.per_layer("feed_forward_length", n_layers)
    return tuple(
        LayerConfig(
            n_heads=heads[i],
            n_kv_heads=kv_heads[i],
            head_size=head_size,
            attention_scale=head_size**-0.5,
            window=None,
            rope=rope,
            ffn_width=widths[i],
            kv_source=i,
        )
        for i in range(n_layers)
    )


def read_llama(keys: Keys) -> ModelConfig:
    """Rows of q and k are permuted in these files so that RoPE turns neighbours."""
    head_size = keys.head_size(keys.per_layer("attention.head_count", keys.integer("block_count"))[0])
    keys.full_rotation("rope.dimension_count", head_size)
    table = rope_tables.plain(head_size, keys.number("rope.freq_base", 10_000.0), keys.linear_factor())
    rope = Rope("interleaved", keys.rope_factors(table))
    return ModelConfig(family="llama", layers=_uniform(keys, rope, head_size), activation="silu", **keys.common())


def read_qwen3(keys: Keys) -> ModelConfig:
    """Weighted norms per head on Q and K, before RoPE; rows are not permuted."""
    head_size = keys.head_size(keys.integer("attention.head_count"))
    keys.full_rotation("rope.dimension_count", head_size)
    rope = Rope("split", rope_tables.plain(head_size, keys.number("rope.freq_base", 10_000.0), keys.linear_factor()))
    layers = _uniform(keys, rope, head_size)
    return ModelConfig(family="qwen3", layers=layers, activation="silu", has_qk_norm=True, **keys.common())


def _sliding_pattern(keys: Keys, n_layers: int, default_period: int) -> list[bool]:
    """True for a sliding layer: from an array, or from a period in which the last is global."""
    value = keys.get("attention.sliding_window_pattern", default_period)
    if isinstance(value, int) and not isinstance(value, bool):
        return [value == 0 or (i + 1) % value != 0 for i in range(n_layers)]
    if len(value) != n_layers:
        raise FileError(f"{keys.checkpoint.path}: sliding_window_pattern has {len(value)} values, expected {n_layers}")
    return [bool(x) for x in value]


def read_gemma3(keys: Keys) -> ModelConfig:
    """The linear factor is for global layers only."""
    if keys.get("attn_logit_softcapping"):
        raise UnsupportedError(f"{keys.checkpoint.path}: attn_logit_softcapping is not supported")
    n_layers, n_heads = keys.integer("block_count"), keys.integer("attention.head_count")
    head_size = keys.head_size(n_heads)
    global_base = keys.number("rope.freq_base", 1_000_000.0)
    global_rope = Rope("split", rope_tables.plain(head_size, global_base, keys.linear_factor()))
    sliding_rope = Rope("split", rope_tables.plain(head_size, keys.number("rope.freq_base_swa", 10_000.0)))
    is_sliding = _sliding_pattern(keys, n_layers, 6)
    width = keys.integer("embedding_length")
    scale = (width / n_heads if n_layers == GEMMA3_27B_LAYERS else head_size) ** -0.5
    widths = keys.per_layer("feed_forward_length", n_layers)
    layers = tuple(
        LayerConfig(
            n_heads=n_heads,
            n_kv_heads=keys.integer("attention.head_count_kv"),
            head_size=head_size,
            attention_scale=scale,
            window=keys.integer("attention.sliding_window") if is_sliding[i] else None,
            rope=sliding_rope if is_sliding[i] else global_rope,
            ffn_width=widths[i],
            kv_source=i,
        )
        for i in range(n_layers)
    )
    return _gemma(keys, "gemma3", layers)


def read_gemma4(keys: Keys) -> ModelConfig:
    """Dense Gemma 4. rope_freqs.weight marks the pairs that stand still; it is for global layers only."""
    n_layers = keys.integer("block_count")
    is_sliding = _sliding_pattern(keys, n_layers, 6)
    types = ["sliding_attention" if sliding else "full_attention" for sliding in is_sliding]
    sources = shared_kv_sources(types, int(keys.get("attention.shared_kv_layers", 0) or 0))
    heads = keys.per_layer("attention.head_count", n_layers)
    kv_heads = keys.per_layer("attention.head_count_kv", n_layers)
    widths = keys.per_layer("feed_forward_length", n_layers)
    layers = []
    for i in range(n_layers):
        suffix, base = ("_swa", 10_000.0) if is_sliding[i] else ("", 1_000_000.0)
        head_size = keys.integer(f"attention.key_length{suffix}", keys.get("attention.key_length"))
        table = rope_tables.plain(head_size, keys.number(f"rope.freq_base{suffix}", base))
        layers.append(
            LayerConfig(
                n_heads=heads[i],
                n_kv_heads=kv_heads[i],
                head_size=head_size,
                attention_scale=1.0,
                window=keys.integer("attention.sliding_window") if is_sliding[i] else None,
                rope=Rope("split", table if is_sliding[i] else keys.rope_factors(table)),
                ffn_width=widths[i],
                kv_source=sources[i],
                has_v_from_k=sources[i] == i and f"blk.{i}.attn_v.weight" not in keys.checkpoint.tensors,
            )
        )
    return _gemma(
        keys,
        "gemma4",
        tuple(layers),
        has_v_norm=True,
        has_layer_scalar=True,
        per_layer_width=int(keys.get("embedding_length_per_layer_input", 0) or 0),
    )


def _gemma(keys: Keys, family: str, layers: tuple[LayerConfig, ...], **parts: Any) -> ModelConfig:
    cap = keys.get("final_logit_softcapping")
    return ModelConfig(
        family=family,
        layers=layers,
        activation="gelu_tanh",
        embedding_scale=keys.integer("embedding_length") ** 0.5,
        logit_soft_cap=float(cap) if cap else None,
        has_qk_norm=True,
        has_post_norms=True,
        **parts,
        **keys.common(),
    )
