"""GGUF key-value pairs -> ModelConfig, one reader a family. Norm weights already contain Gemma's +1 in these files."""

from __future__ import annotations

from typing import Any

from bytefloor.errors import FileError
from bytefloor.model import rope_tables
from bytefloor.model.config import LayerConfig, ModelConfig, Rope, shared_kv_sources
from bytefloor.model.gguf_keys import ROPE_FREQS, Keys

GEMMA3_27B_LAYERS = 62
"""Gemma 3 27B scales attention by 1/sqrt(width / heads) and no key says so; its depth identifies it."""


def _uniform(keys: Keys, rope: Rope, head_size: int) -> tuple[LayerConfig, ...]:
    """Layers that are all alike but for what arrays in the file say."""
    keys.no_window()
    n_layers = keys.n_layers()
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
    head_size = keys.head_size(keys.per_layer("attention.head_count", keys.n_layers())[0])
    keys.full_rotation("rope.dimension_count", head_size)
    table = rope_tables.plain(head_size, keys.positive("rope.freq_base", 10_000.0), keys.linear_factor())
    rope = Rope("interleaved", keys.rope_factors(table))
    return ModelConfig(family="llama", layers=_uniform(keys, rope, head_size), activation="silu", **keys.common())


def read_qwen3(keys: Keys) -> ModelConfig:
    """Weighted norms per head on Q and K, before RoPE; rows are not permuted."""
    head_size = keys.head_size(keys.integer("attention.head_count"))
    keys.full_rotation("rope.dimension_count", head_size)
    rope = Rope("split", rope_tables.plain(head_size, keys.positive("rope.freq_base", 10_000.0), keys.linear_factor()))
    layers = _uniform(keys, rope, head_size)
    return ModelConfig(family="qwen3", layers=layers, activation="silu", has_qk_norm=True, **keys.common())


def _sliding_pattern(keys: Keys, n_layers: int, default_period: int) -> list[bool]:
    """True for a sliding layer: from an array, or from a period in which the last is global; 0 is a period without."""
    key = "attention.sliding_window_pattern"
    if not isinstance(keys.get(key), list):
        period = keys.integer(key, default_period, least=0)
        return [period == 0 or (i + 1) % period != 0 for i in range(n_layers)]
    pattern = keys.items(key, n_layers)
    if any(value not in (0, 1) for value in pattern):
        raise keys.wrong(key, pattern, "true or false for each layer")
    return [bool(value) for value in pattern]


def read_gemma3(keys: Keys) -> ModelConfig:
    """The linear factor is for global layers only."""
    n_layers, n_heads = keys.n_layers(), keys.integer("attention.head_count")
    head_size = keys.head_size(n_heads)
    keys.full_rotation("rope.dimension_count", head_size)
    global_base = keys.positive("rope.freq_base", 1_000_000.0)
    global_rope = Rope("split", rope_tables.plain(head_size, global_base, keys.linear_factor()))
    sliding_rope = Rope("split", rope_tables.plain(head_size, keys.positive("rope.freq_base_swa", 10_000.0)))
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
    """Dense Gemma 4: head size, KV heads and RoPE of global layers are their own."""
    n_layers = keys.n_layers()
    is_sliding = _sliding_pattern(keys, n_layers, 6)
    types = ["sliding_attention" if sliding else "full_attention" for sliding in is_sliding]
    n_shared = keys.integer("attention.shared_kv_layers", 0, least=0, most=n_layers)
    sources = shared_kv_sources(types, n_shared)
    heads = keys.per_layer("attention.head_count", n_layers)
    kv_heads = keys.per_layer("attention.head_count_kv", n_layers)
    widths = keys.per_layer("feed_forward_length", n_layers)
    head_sizes = {
        False: keys.stated_head_size(""),
        True: keys.stated_head_size("_swa", keys.integer("attention.key_length")),
    }
    ropes = {sliding: _gemma4_rope(keys, sliding, head_sizes[sliding]) for sliding in set(is_sliding)}
    owners = [i for i in range(n_layers) if sources[i] == i and not is_sliding[i]]
    # All global layers take V from K, or none: where some have a projection, the others have lost theirs.
    has_v_from_k = not any(f"blk.{i}.attn_v.weight" in keys.checkpoint.tensors for i in owners)
    layers = tuple(
        LayerConfig(
            n_heads=heads[i],
            n_kv_heads=kv_heads[i],
            head_size=head_sizes[is_sliding[i]],
            attention_scale=1.0,
            window=keys.integer("attention.sliding_window") if is_sliding[i] else None,
            rope=ropes[is_sliding[i]],
            ffn_width=widths[i],
            kv_source=sources[i],
            has_v_from_k=i in owners and has_v_from_k,
        )
        for i in range(n_layers)
    )
    per_layer_width = keys.integer("embedding_length_per_layer_input", 0, least=0)
    return _gemma(keys, "gemma4", layers, has_v_norm=True, has_layer_scalar=True, per_layer_width=per_layer_width)


def _gemma4_rope(keys: Keys, is_sliding: bool, head_size: int) -> Rope:
    """rope_freqs.weight marks the pairs that stand still; it is for global layers only, and so is a linear factor."""
    keys.full_rotation("rope.dimension_count_swa" if is_sliding else "rope.dimension_count", head_size)
    if is_sliding:
        return Rope("split", rope_tables.plain(head_size, keys.positive("rope.freq_base_swa", 10_000.0)))
    if ROPE_FREQS not in keys.checkpoint.tensors:
        raise FileError(f"tensor {ROPE_FREQS} is missing: it says which pairs of a global layer turn")
    table = rope_tables.plain(head_size, keys.positive("rope.freq_base", 1_000_000.0), keys.linear_factor())
    return Rope("split", keys.rope_factors(table))


def _gemma(keys: Keys, family: str, layers: tuple[LayerConfig, ...], **parts: Any) -> ModelConfig:
    return ModelConfig(
        family=family,
        layers=layers,
        activation="gelu_tanh",
        embedding_scale=keys.integer("embedding_length") ** 0.5,
        logit_soft_cap=keys.positive_or_none("final_logit_softcapping"),
        has_qk_norm=True,
        has_post_norms=True,
        **parts,
        **keys.common(),
    )
