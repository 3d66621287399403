"""Weights by role: which tensor of the file each line of the decoder multiplies with."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bytefloor.errors import FileError, ShapeError, UnsupportedError
from bytefloor.files.stored import Checkpoint, StoredTensor
from bytefloor.model.config import LayerConfig, ModelConfig

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, eq=False)
class Weight:
    """A stored tensor in its role (``layers.3.q``).

    offset: added to every value on loading; 1 where a file keeps w for a norm that means 1 + w.
    """

    name: str
    stored: StoredTensor
    offset: float = 0.0

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stored.shape

    @property
    def n_bytes(self) -> int:
        return self.stored.n_bytes

    def load(self) -> Tensor:
        """Exact float32 values."""
        values = self.stored.decode()
        return values + self.offset if self.offset else values


@dataclass(frozen=True)
class LayerWeights:
    """One layer's; None for what the layer does not have."""

    input_norm: Weight
    q: Weight
    k: Weight | None
    v: Weight | None
    o: Weight
    q_norm: Weight | None
    k_norm: Weight | None
    post_attention_norm: Weight | None
    ffn_norm: Weight
    gate: Weight
    up: Weight
    down: Weight
    post_ffn_norm: Weight | None
    per_layer_gate: Weight | None
    per_layer_projection: Weight | None
    post_per_layer_norm: Weight | None
    scalar: Weight | None


@dataclass(frozen=True)
class ModelWeights:
    """A whole model's. ``head`` is the embedding where the file has no head of its own."""

    embedding: Weight
    layers: tuple[LayerWeights, ...]
    final_norm: Weight
    head: Weight
    per_layer_embedding: Weight | None
    per_layer_model_projection: Weight | None
    per_layer_projection_norm: Weight | None


GGUF_LAYER_NAMES = {
    "input_norm": "attn_norm.weight",
    "q": "attn_q.weight",
    "k": "attn_k.weight",
    "v": "attn_v.weight",
    "o": "attn_output.weight",
    "q_norm": "attn_q_norm.weight",
    "k_norm": "attn_k_norm.weight",
    "post_attention_norm": "post_attention_norm.weight",
    "ffn_norm": "ffn_norm.weight",
    "gate": "ffn_gate.weight",
    "up": "ffn_up.weight",
    "down": "ffn_down.weight",
    "post_ffn_norm": "post_ffw_norm.weight",
    "per_layer_gate": "inp_gate.weight",
    "per_layer_projection": "proj.weight",
    "post_per_layer_norm": "post_norm.weight",
    "scalar": "layer_output_scale.weight",
}
GGUF_MODEL_NAMES = {
    "embedding": "token_embd.weight",
    "final_norm": "output_norm.weight",
    "head": "output.weight",
    "per_layer_embedding": "per_layer_token_embd.weight",
    "per_layer_model_projection": "per_layer_model_proj.weight",
    "per_layer_projection_norm": "per_layer_proj_norm.weight",
}
SAFETENSORS_LAYER_NAMES = {
    "input_norm": "input_layernorm.weight",
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "o": "self_attn.o_proj.weight",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "post_attention_norm": "post_attention_layernorm.weight",
    "ffn_norm": "pre_feedforward_layernorm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
    "post_ffn_norm": "post_feedforward_layernorm.weight",
    "per_layer_gate": "per_layer_input_gate.weight",
    "per_layer_projection": "per_layer_projection.weight",
    "post_per_layer_norm": "post_per_layer_input_norm.weight",
    "scalar": "layer_scalar",
}
SAFETENSORS_MODEL_NAMES = {
    "embedding": "embed_tokens.weight",
    "final_norm": "norm.weight",
    "head": "lm_head.weight",
    "per_layer_embedding": "embed_tokens_per_layer.weight",
    "per_layer_model_projection": "per_layer_model_projection.weight",
    "per_layer_projection_norm": "per_layer_projection_norm.weight",
}
NORMS = frozenset(
    [
        "input_norm",
        "q_norm",
        "k_norm",
        "post_attention_norm",
        "ffn_norm",
        "post_ffn_norm",
        "post_per_layer_norm",
        "final_norm",
        "per_layer_projection_norm",
    ]
)
IGNORED_PARTS = frozenset(["inv_freq", "input_scale", "input_global_scale", "k_scale", "v_scale", "q_scale"])
"""Last parts of names. Derived tables, and activation or cache scales of engines that quantise those: unneeded."""


def layer_shapes(config: ModelConfig, layer: LayerConfig, index: int) -> dict[str, tuple[int, ...]]:
    """The roles that this layer has, with the shape each must have."""
    d, e, p = config.width, layer.head_size, config.per_layer_width
    shapes: dict[str, tuple[int, ...]] = {
        "input_norm": (d,),
        "q": (layer.n_heads * e, d),
        "o": (d, layer.n_heads * e),
        "ffn_norm": (d,),
        "gate": (layer.ffn_width, d),
        "up": (layer.ffn_width, d),
        "down": (d, layer.ffn_width),
    }
    if layer.kv_source == index:
        shapes["k"] = (layer.n_kv_heads * e, d)
        if not layer.has_v_from_k:
            shapes["v"] = (layer.n_kv_heads * e, d)
    if config.has_qk_norm:
        shapes["q_norm"] = (e,)
        if layer.kv_source == index:
            shapes["k_norm"] = (e,)
    if config.has_post_norms:
        shapes |= {"post_attention_norm": (d,), "post_ffn_norm": (d,)}
    if config.has_layer_scalar:
        shapes["scalar"] = (1,)
    if p:
        shapes |= {"per_layer_gate": (p, d), "per_layer_projection": (d, p), "post_per_layer_norm": (d,)}
    return shapes


def model_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The roles outside layers, with the shape each must have."""
    d, v, p, n = config.width, config.vocabulary_size, config.per_layer_width, len(config.layers)
    shapes: dict[str, tuple[int, ...]] = {"embedding": (v, d), "final_norm": (d,), "head": (v, d)}
    if p:
        shapes |= {
            "per_layer_embedding": (v, n * p),
            "per_layer_model_projection": (n * p, d),
            "per_layer_projection_norm": (p,),
        }
    return shapes


def assign_weights(
    checkpoint: Checkpoint, config: ModelConfig, norm_offset: float, tables: Collection[str] = ()
) -> ModelWeights:
    """Every role from its tensor, shapes checked; a tensor that no role takes is refused unless known to be idle.

    tables: tensors that the configuration was read from.
    Raises FileError for a missing tensor, ShapeError for a wrong shape, UnsupportedError for an unknown tensor.
    """
    is_gguf = checkpoint.container == "gguf"
    layer_names = GGUF_LAYER_NAMES if is_gguf else dict(SAFETENSORS_LAYER_NAMES)
    model_names = GGUF_MODEL_NAMES if is_gguf else SAFETENSORS_MODEL_NAMES
    prefix = "blk" if is_gguf else "layers"
    if not is_gguf and not config.has_post_norms:
        # Without norms after the blocks, Hugging Face names the one before the MLP after what precedes it.
        layer_names["ffn_norm"] = SAFETENSORS_LAYER_NAMES["post_attention_norm"]
    offset = 0.0 if is_gguf else norm_offset

    def take(role: str, prefix_of_role: str, name: str, shape: tuple[int, ...]) -> Weight:
        stored = _checked(checkpoint, name, shape)
        return Weight(prefix_of_role + role, stored, offset if role in NORMS else 0.0)

    layers = []
    for index, layer in enumerate(config.layers):
        shapes = layer_shapes(config, layer, index)
        roles: dict[str, Weight | None] = dict.fromkeys(GGUF_LAYER_NAMES)
        for role, shape in shapes.items():
            roles[role] = take(role, f"layers.{index}.", f"{prefix}.{index}.{layer_names[role]}", shape)
        layers.append(LayerWeights(**roles))  # type: ignore[arg-type]
    outer: dict[str, Weight | None] = dict.fromkeys(GGUF_MODEL_NAMES)
    for role, shape in model_shapes(config).items():
        if role == "head" and config.can_tie_head and model_names["head"] not in checkpoint.tensors:
            outer["head"] = outer["embedding"]
        else:
            outer[role] = take(role, "", model_names[role], shape)
    weights = ModelWeights(layers=tuple(layers), **outer)  # type: ignore[arg-type]
    _refuse_leftovers(checkpoint, config, weights, tables)
    return weights


def _checked(checkpoint: Checkpoint, name: str, shape: tuple[int, ...]) -> StoredTensor:
    stored = checkpoint.tensors.get(name)
    if stored is None:
        raise FileError(f"{checkpoint.path}: tensor {name} is missing, expected with shape {list(shape)}")
    found = stored.shape if stored.shape or shape != (1,) else (1,)
    for axis, (have, want) in enumerate(zip(found, shape, strict=False)):
        if have != want:
            raise ShapeError(
                f"{checkpoint.path}: tensor {name} axis {axis} is {have}, expected {want} of {list(shape)}"
            )
    if len(found) != len(shape):
        raise ShapeError(f"{checkpoint.path}: tensor {name} has shape {list(found)}, expected {list(shape)}")
    return stored


def all_weights(weights: ModelWeights) -> list[Weight]:
    """Each weight once; a tied head does not count twice."""
    outer = [value for name, value in vars(weights).items() if name != "layers"]
    inner = [value for layer in weights.layers for value in vars(layer).values()]
    unique = {id(weight): weight for weight in (*outer, *inner) if weight is not None}
    return list(unique.values())


def _refuse_leftovers(
    checkpoint: Checkpoint, config: ModelConfig, weights: ModelWeights, tables: Collection[str]
) -> None:
    """A bias or a router that nothing multiplies with would change every answer, silently."""
    used = {weight.stored.name for weight in all_weights(weights)}
    idle = _idle_kv_names(checkpoint, config) | set(tables)
    for name in checkpoint.tensors:
        if name not in used and name not in idle and name.rpartition(".")[2] not in IGNORED_PARTS:
            raise UnsupportedError(
                f"{checkpoint.path}: tensor {name} has no place in {config.family}; running without it would be wrong"
            )


def _idle_kv_names(checkpoint: Checkpoint, config: ModelConfig) -> set[str]:
    """Key and value weights that files carry for layers which read another layer's cache.

    A layer that takes V from K has none: a value projection there would be another model's, and is refused.
    """
    names: Mapping[str, str] = GGUF_LAYER_NAMES if checkpoint.container == "gguf" else SAFETENSORS_LAYER_NAMES
    prefix = "blk" if checkpoint.container == "gguf" else "layers"
    idle = set()
    for index, layer in enumerate(config.layers):
        if layer.kv_source != index:
            idle |= {f"{prefix}.{index}.{names[role]}" for role in ("k", "v", "k_norm")}
    return idle
