"""A tensor as it lies in a file, and the set of them that makes a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from bytefloor.errors import UnsupportedError
from bytefloor.formats.record import QuantFormat

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class StoredTensor:
    """One weight: where its bytes are and what they mean.

    shape: logical, outermost first: a matrix is (N produced, K reduced), whatever order the file uses.
    format: None when the type is unknown to us; listing still works, reading refuses and names it.
    n_bytes: bytes of all parts in the file.
    read: returns the parts as torch tensors over the mapped file, no copy where the file allows it.
    """

    name: str
    shape: tuple[int, ...]
    format_name: str
    format: QuantFormat | None
    n_bytes: int
    read: Callable[[], dict[str, Tensor]] = field(repr=False)

    def require_format(self) -> QuantFormat:
        """The format, or UnsupportedError naming tensor and type."""
        if self.format is None:
            raise UnsupportedError(f"tensor {self.name}: type {self.format_name} cannot be decoded by this version")
        return self.format

    def decode(self) -> Tensor:
        """The exact float32 values, shaped as ``shape``."""
        return self.require_format().decode(self.read()).reshape(self.shape)


@dataclass(frozen=True)
class Checkpoint:
    """A model on disk: named tensors plus what the container says about the model.

    metadata: a GGUF's key-value pairs, or the parsed config.json of a directory.
    tensors: by name as the container spells it; for safetensors the model prefix (``model.``,
        ``language_model.model.``, ``model.language_model.``) is stripped, so ``layers.0.self_attn.q_proj.weight``,
        ``embed_tokens.weight``, ``norm.weight`` and ``lm_head.weight`` are found under one spelling.
    notices: what a user should be told: skipped vision towers, ignored extras.
    """

    path: Path
    container: Literal["gguf", "safetensors"]
    metadata: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]
    notices: tuple[str, ...] = ()
