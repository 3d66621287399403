"""A model's configuration as the keys of a GGUF file, its RoPE as a base, a linear factor and factors of each pair."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bytefloor.errors import UnsupportedError
from bytefloor.files.gguf_writer import Typed
from bytefloor.model import rope_tables
from bytefloor.model.config import LayerConfig, ModelConfig, Rope
from bytefloor.model.families import FAMILIES

STILL = 1e30
"""The factor of a pair that does not turn."""
PERIOD = 6
"""Every so many layers of Gemma the last one is global, where no key says otherwise."""


def bases_in(metadata: Mapping[str, Any]) -> tuple[float, ...]:
    """Every RoPE base that a config.json, or the keys of a GGUF file, names anywhere."""
    found: list[float] = []
    for key, value in metadata.items():
        if isinstance(value, Mapping):
            found += bases_in(value)
        elif isinstance(value, int | float) and key.endswith(
            ("rope_theta", "rope_local_base_freq", "freq_base", "_swa")
        ):
            found.append(float(value))
    return tuple(base for base in found if base > 1)


def rope_numbers(rope: Rope, bases: Sequence[float]) -> tuple[float, float, list[float] | None]:
    """Base, linear factor, and for each pair what its frequency is divided by beside; None where that is 1 for all.

    The first pair of a plain table turns by 1 / factor, the second by base^(-2 / E) / factor. bases: those that the
    source names; the one that explains most pairs without a factor is taken, and only without any the derived one.
    """
    table = rope.inverse_frequencies
    factor = 1 / table[0]
    n_pairs = len(table)
    found = [(base, ratios) for base in bases if (ratios := _ratios(rope, base, factor)) is not None]
    if not found:
        derived = (table[1] * factor) ** -n_pairs if n_pairs > 1 and table[1] else 10_000.0
        if abs(derived - round(derived)) < 1e-6 * derived:
            derived = float(round(derived))
        ratios = _ratios(rope, max(derived, 1.0), factor)
        if ratios is None:
            raise UnsupportedError("RoPE: no base explains its frequencies")
        found = [(derived, ratios)]
    base, ratios = max(found, key=lambda pair: sum(_is_plain(ratio) for ratio in pair[1]))
    return base, factor, None if all(_is_plain(ratio) and ratio != STILL for ratio in ratios) else ratios


def _ratios(rope: Rope, base: float, factor: float) -> list[float] | None:
    """What each frequency of the plain table is divided by; None where one is faster, which no rule makes it."""
    table = rope.inverse_frequencies
    plain = rope_tables.plain(2 * len(table), base, factor)
    ratios = [STILL if not own else expected / own for expected, own in zip(plain, table, strict=True)]
    return ratios if min(ratios) > 1 - 1e-6 else None


def _is_plain(ratio: float) -> bool:
    return abs(ratio - 1) < 1e-6 or ratio == STILL


def architecture(config: ModelConfig) -> str:
    """``general.architecture``; UnsupportedError for a family that these files have no reader for here."""
    names = next(family.gguf for family in FAMILIES if family.name == config.family)
    if not names:
        raise UnsupportedError(f"GGUF files of {config.family} are not read here, so none is written")
    return names[0]


def keys_of(config: ModelConfig, bases: Sequence[float]) -> tuple[dict[str, Typed], list[float] | None]:
    """All keys that say something about the arithmetic, with their types, and the values of rope_freqs.weight.

    bases: of RoPE, as the source names them.
    """
    prefix, layers = architecture(config), config.layers
    is_gemma = config.family.startswith("gemma")
    full = next((layer for layer in layers if layer.window is None), layers[-1])
    sliding = next((layer for layer in layers if layer.window is not None), None)
    keys: dict[str, Typed] = {
        "block_count": _count(len(layers)),
        "context_length": _count(config.context_length),
        "embedding_length": _count(config.width),
        "feed_forward_length": _per_layer([layer.ffn_width for layer in layers]),
        "attention.head_count": _per_layer([layer.n_heads for layer in layers]),
        "attention.head_count_kv": _per_layer([layer.n_kv_heads for layer in layers]),
        "attention.layer_norm_rms_epsilon": Typed("f32", config.eps),
        "vocab_size": _count(config.vocabulary_size),
        **_head_keys(full, ""),
    }
    factors = None
    if full.rope is not None:
        base, factor, factors = rope_numbers(full.rope, bases)
        keys["rope.freq_base"] = Typed("f32", base)
        if factor != 1.0:
            keys |= {"rope.scaling.type": Typed("string", "linear"), "rope.scaling.factor": Typed("f32", factor)}
    if is_gemma and sliding is not None and sliding.rope is not None:
        keys["rope.freq_base_swa"] = Typed("f32", rope_numbers(sliding.rope, bases)[0])
        keys["attention.sliding_window"] = _count(sliding.window)
    if config.logit_soft_cap:
        keys["final_logit_softcapping"] = Typed("f32", config.logit_soft_cap)
    if is_gemma:
        keys |= _sliding_keys(config)
    if config.family == "gemma4":
        keys |= _head_keys(sliding or full, "_swa") | _gemma4_keys(config)
    return {f"{prefix}.{key}": value for key, value in keys.items()}, factors


def _count(value: Any) -> Typed:
    return Typed("u32", value)


def _per_layer(values: list[int]) -> Typed:
    return Typed("u32", values[0] if len(set(values)) == 1 else values)


def _head_keys(layer: LayerConfig, suffix: str) -> dict[str, Typed]:
    size = _count(layer.head_size)
    return {
        f"attention.key_length{suffix}": size,
        f"attention.value_length{suffix}": size,
        f"rope.dimension_count{suffix}": size,
    }


def _sliding_keys(config: ModelConfig) -> dict[str, Typed]:
    is_sliding = [layer.window is not None for layer in config.layers]
    usual = [(i + 1) % PERIOD != 0 for i in range(len(is_sliding))]
    if config.family != "gemma4" and is_sliding == usual:
        return {}
    return {"attention.sliding_window_pattern": Typed("bool", is_sliding)}


def _gemma4_keys(config: ModelConfig) -> dict[str, Typed]:
    n_shared = sum(layer.kv_source != index for index, layer in enumerate(config.layers))
    return {
        "attention.shared_kv_layers": _count(n_shared),
        "embedding_length_per_layer_input": _count(config.per_layer_width),
    }
