"""config.json with typed look-ups: the keys that every family reads alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bytefloor.errors import FileError, UnsupportedError
from bytefloor.files.stored import Checkpoint
from bytefloor.model.values import Values

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}
LAYER_TYPES = ("sliding_attention", "full_attention")
MUST_BE_FALSY = {
    "attention_bias": "biases are",
    "mlp_bias": "biases are",
    "enable_moe_block": "mixture-of-experts layers are",
    "num_experts": "mixture-of-experts layers are",
    "num_local_experts": "mixture-of-experts layers are",
    "n_routed_experts": "mixture-of-experts layers are",
    "attn_logit_softcapping": "a soft cap of attention's scores is",
}
"""What no family here computes, and how an error says so."""


class Keys(Values):
    """The text model's config.

    Multi-modal directories keep it under ``text_config``; a value found there wins over the root's.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        root = checkpoint.metadata
        text = root.get("text_config")
        super().__init__({**root, **text} if isinstance(text, Mapping) else dict(root))
        self.checkpoint = checkpoint
        self.model_type = str(self.get("model_type", ""))
        for key, what in MUST_BE_FALSY.items():
            if self.get(key):
                raise UnsupportedError(f"{key} = {self.get(key)}: {what} not supported")

    def n_layers(self, default: int | None = None) -> int:
        """num_hidden_layers."""
        return self.layers("num_hidden_layers", len(self.checkpoint.tensors), default)

    def activation(self, default: str) -> str:
        """hidden_activation is Gemma's spelling of hidden_act, and wins where both stand."""
        name = self.get("hidden_activation", self.get("hidden_act", default))
        if not isinstance(name, str) or name not in ACTIVATIONS:
            raise UnsupportedError(f"activation {name} is not supported ({', '.join(ACTIVATIONS)} are)")
        return ACTIVATIONS[name]

    def layer_types(self, n_layers: int, default: Sequence[str]) -> list[str]:
        """sliding_attention or full_attention for each layer."""
        types = self.items("layer_types", n_layers, default)
        for layer_type in types:
            if layer_type not in LAYER_TYPES:
                raise UnsupportedError(f"layer type {layer_type} is not supported ({', '.join(LAYER_TYPES)} are)")
        return types

    def rope(self, layer_type: str, defaults: Mapping[str, Any], takes_flat: bool = True) -> Values:
        """RoPE parameters of one layer type, from either generation of config files.

        takes_flat: whether parameters that name no layer type, and rope_scaling, are meant for this one too.
        """
        parameters = self.mapping("rope_parameters")
        if any(isinstance(value, Mapping) for value in parameters.values()):
            parameters = Values(parameters, "rope_parameters.").mapping(layer_type)
        elif not takes_flat:
            parameters = {}
        scaling = self.mapping("rope_scaling") if takes_flat else {}
        merged = {"partial_rotary_factor": self.get("partial_rotary_factor"), **defaults}
        for part in (parameters, scaling):
            merged |= _stated(part)
        return Values(merged, "RoPE: ")

    def common(self, activation: str, context_length: int) -> dict[str, Any]:
        """The fields that every family reads alike, with the family's own defaults."""
        embedding = self.checkpoint.tensors.get("embed_tokens.weight")
        n_rows = embedding.shape[0] if embedding is not None and embedding.shape else None
        return {
            "name": self.checkpoint.path.name,
            "width": self.integer("hidden_size"),
            "vocabulary_size": self.integer("vocab_size", n_rows),
            "context_length": self.integer("max_position_embeddings", context_length),
            "eps": self.positive("rms_norm_eps", 1e-6),
            "activation": self.activation(activation),
            "can_tie_head": self.flag("tie_word_embeddings", True),
        }

    def head_size(self) -> int:
        """head_dim, and only where there is none hidden / heads."""
        if self.get("head_dim") is not None:
            return self.integer("head_dim")
        width, n_heads = self.integer("hidden_size"), self.integer("num_attention_heads")
        if width % n_heads:
            raise FileError(f"hidden_size is {width}, expected a multiple of num_attention_heads = {n_heads}")
        return width // n_heads


def _stated(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Without what is null; ``type``, the older word, counts where rope_type says nothing."""
    stated = {key: value for key, value in parameters.items() if value is not None}
    return {"rope_type": stated["type"], **stated} if "type" in stated else stated
