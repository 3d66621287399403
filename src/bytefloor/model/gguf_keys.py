"""A GGUF file's key-value pairs with typed look-ups: the keys that every family reads alike."""

from __future__ import annotations

from typing import Any

from bytefloor.errors import FileError, UnsupportedError
from bytefloor.files.stored import Checkpoint
from bytefloor.model import rope_tables
from bytefloor.model.values import Values

ROPE_FREQS = "rope_freqs.weight"
MUST_BE_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attn_logit_softcapping": (0,),
    "attention.scale": (0,),
    "attention.clamp_kqv": (0,),
    "embedding_scale": (0, 1),
    "residual_scale": (0, 1),
    "logit_scale": (0, 1),
    "attention.causal": (True,),
}
"""Keys that would change what is computed, which no family here reads, and the values that change nothing."""


class Keys(Values):
    """Those below ``<architecture>.``."""

    def __init__(self, architecture: str, checkpoint: Checkpoint) -> None:
        prefix = f"{architecture}."
        own = {key.removeprefix(prefix): value for key, value in checkpoint.metadata.items() if key.startswith(prefix)}
        super().__init__(own, prefix)
        self.checkpoint = checkpoint
        if self.get("expert_count", 0):
            raise UnsupportedError(f"{self.get('expert_count')} experts: mixture-of-experts models are not supported")
        for key, neutral in MUST_BE_NEUTRAL.items():
            if self.get(key, neutral[0]) not in neutral:
                raise UnsupportedError(f"{prefix}{key} = {self.get(key)} is not supported")

    def n_layers(self) -> int:
        """block_count."""
        return self.layers("block_count", len(self.checkpoint.tensors))

    def per_layer(self, key: str, n_layers: int, default: int | None = None) -> list[int]:
        """A value for each layer: an array of that length, or one number for all."""
        if not isinstance(self.get(key), list):
            return [self.integer(key, default)] * n_layers
        values = self.items(key, n_layers)
        return [Values({key: value}, self.prefix).integer(key) for value in values]

    def head_size(self, n_heads: int) -> int:
        """attention.key_length, and only where there is none width / heads."""
        if self.get("attention.key_length") is not None:
            return self.stated_head_size("")
        width = self.integer("embedding_length")
        if width % n_heads:
            raise FileError(f"{self.prefix}embedding_length is {width}, expected a multiple of {n_heads} heads")
        return width // n_heads

    def stated_head_size(self, suffix: str, default: int | None = None) -> int:
        """attention.key_length, which that of values must equal."""
        size = self.integer(f"attention.key_length{suffix}", default)
        value_key = f"attention.value_length{suffix}"
        if self.integer(value_key, size) != size:
            raise UnsupportedError(str(self.wrong(value_key, self.get(value_key), str(size))))
        return size

    def linear_factor(self) -> float:
        """rope.scaling: none or linear (also where only a factor stands); anything else is refused by name."""
        rule = self.get("rope.scaling.type", "linear")
        if rule not in ("none", "linear"):
            raise UnsupportedError(f"RoPE scaling {rule} is not implemented")
        factor = self.positive_or_none("rope.scaling.factor") or self.positive_or_none("rope.scale_linear")
        return factor if rule == "linear" and factor is not None else 1.0

    def rope_factors(self, table: tuple[float, ...]) -> tuple[float, ...]:
        """Apply rope_freqs.weight where the file has one."""
        stored = self.checkpoint.tensors.get(ROPE_FREQS)
        return table if stored is None else rope_tables.with_factors(table, stored.decode().flatten().tolist())

    def full_rotation(self, key: str, head_size: int) -> None:
        """RoPE over a part of the head is not a rule of these families."""
        rotated = self.integer(key, head_size)
        if rotated != head_size:
            raise UnsupportedError(str(self.wrong(key, rotated, f"the whole head of {head_size}")))

    def no_window(self) -> None:
        """These families have no sliding layers in GGUF: a window is honoured or refused, never ignored."""
        if found := self.get("attention.sliding_window"):
            raise UnsupportedError(f"{self.prefix}attention.sliding_window = {found}: sliding layers are not supported")

    def common(self) -> dict[str, Any]:
        """The fields that every family reads alike."""
        embedding = self.checkpoint.tensors.get("token_embd.weight")
        if embedding is None or len(embedding.shape) != 2:
            raise FileError("token_embd.weight is missing or not a matrix")
        return {
            "name": str(self.checkpoint.metadata.get("general.name", self.checkpoint.path.stem)),
            "width": self.integer("embedding_length"),
            "vocabulary_size": embedding.shape[0],
            "context_length": self.integer("context_length", 2048),
            "eps": self.positive("attention.layer_norm_rms_epsilon", 1e-6),
        }
