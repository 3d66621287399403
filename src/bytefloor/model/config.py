"""What distinguishes one model from another, as data. Nothing here asks which family it is."""

from __future__ import annotations

import math
from dataclasses import dataclass

from bytefloor.errors import FileError, ShapeError, UnsupportedError


@dataclass(frozen=True)
class Rope:
    """How positions turn lanes: pairing (``split`` or ``interleaved``) and radians a position for each pair."""

    style: str
    inverse_frequencies: tuple[float, ...]

    def __post_init__(self) -> None:
        if not all(math.isfinite(frequency) for frequency in self.inverse_frequencies):
            raise FileError("RoPE: a base or a factor makes a frequency infinite, expected finite ones")


@dataclass(frozen=True)
class LayerConfig:
    """One layer. Heads, scale, window, RoPE and feed-forward width are per-layer values, always.

    window: positions a row sees, its own included; None for all.
    rope: None for a layer that has none.
    kv_source: the layer whose cache it reads; its own index unless keys and values are shared.
    has_v_from_k: V is the raw key projection (K=V layers).
    """

    n_heads: int
    n_kv_heads: int
    head_size: int
    attention_scale: float
    window: int | None
    rope: Rope | None
    ffn_width: int
    kv_source: int
    has_v_from_k: bool = False

    def __post_init__(self) -> None:
        if self.n_heads % self.n_kv_heads:
            raise ShapeError(
                f"{self.n_heads} query heads cannot share {self.n_kv_heads} key/value heads, expected a divisor"
            )
        if self.rope is not None and self.head_size != 2 * len(self.rope.inverse_frequencies):
            raise ShapeError(
                f"a head of {self.head_size} does not pair up as RoPE needs, "
                f"expected {2 * len(self.rope.inverse_frequencies)}"
            )


@dataclass(frozen=True)
class ModelConfig:
    """A whole model. per_layer_width: width of per-layer embeddings, 0 where there are none.

    has_qk_norm, has_v_norm, has_post_norms, has_layer_scalar: parts that a layer has or has not.
    can_tie_head: whether the embedding stands in for an output head that the file does not hold.
    """

    family: str
    name: str
    width: int
    vocabulary_size: int
    context_length: int
    layers: tuple[LayerConfig, ...]
    eps: float
    activation: str
    embedding_scale: float = 1.0
    logit_soft_cap: float | None = None
    has_qk_norm: bool = False
    has_v_norm: bool = False
    has_post_norms: bool = False
    has_layer_scalar: bool = False
    per_layer_width: int = 0
    can_tie_head: bool = True


@dataclass(frozen=True)
class Rounding:
    """Which roundings a step's list carries: what products make of their activations, and what the cache keeps."""

    activations: str | None = None
    cache: str = "float32"


def shared_kv_sources(layer_types: list[str], n_shared: int) -> list[int]:
    """For each layer the index of the layer whose cache it reads.

    The last n_shared layers have no keys and values of their own: each reads those of the last unshared layer of its
    own type.
    """
    first_shared = len(layer_types) - n_shared
    sources = list(range(len(layer_types)))
    for index in range(first_shared, len(layer_types)):
        own = [i for i in range(first_shared) if layer_types[i] == layer_types[index]]
        if not own:
            raise UnsupportedError(
                f"layer {index} shares keys and values, but no earlier {layer_types[index]} layer has any"
            )
        sources[index] = own[-1]
    return sources
