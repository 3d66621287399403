"""``inspect``: what a model file holds, what a token must read of it, and what it needs to run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bytefloor.engine.loading import DEVICE_ROUNDING, check_kv, choose_context
from bytefloor.engine.scratch import dense_weights, n_values
from bytefloor.errors import BytefloorError
from bytefloor.files.stored import Checkpoint, FormatCount, StoredTensor, count_formats
from bytefloor.model.config import Rounding
from bytefloor.model.decoder import build_step
from bytefloor.model.families import Model, describe_layers, load_model
from bytefloor.model.step import Step

LONG_VALUE = 60


@dataclass(frozen=True)
class Report:
    """Everything ``inspect`` says. token_bytes is None for a model that this version cannot run: ``refusal`` says why.

    token_bytes: weights and live cache that one token of batch-1 decoding must read at the context length. kv: what the
    cache keeps. per_layer_bytes: of the weights, a table of per-layer embeddings. reference_bytes: of weights and cache
    where there are no kernels: both float32, tables that are only gathered from left in the file.
    """

    path: str
    container: str
    metadata: Mapping[str, Any]
    formats: tuple[FormatCount, ...]
    tensors: tuple[StoredTensor, ...]
    notices: tuple[str, ...]
    refusal: str | None
    architecture: Mapping[str, Any]
    context: int
    weight_bytes: int
    cache_bytes: int
    token_bytes: int | None
    kv: str
    per_layer_bytes: int = 0
    reference_bytes: int = 0

    @property
    def n_weights(self) -> int:
        return sum(count.n_weights for count in self.formats)

    @property
    def n_bytes(self) -> int:
        return sum(count.n_bytes for count in self.formats)

    def floor_tok_s(self, gb_s: float) -> float | None:
        """Tokens a second when a token's bytes are read at that bandwidth and nothing else takes time."""
        return gb_s * 1e9 / self.token_bytes if self.token_bytes else None

    def to_json(self, gb_s: float) -> dict[str, Any]:
        """The same as a JSON-ready dictionary."""
        return {
            "path": self.path,
            "container": self.container,
            "architecture": dict(self.architecture),
            "n_weights": self.n_weights,
            "n_bytes": self.n_bytes,
            "bits_per_weight": 8 * self.n_bytes / max(1, self.n_weights),
            "formats": [{**vars(count), "bits_per_weight": count.bits_per_weight} for count in self.formats],
            "context": self.context,
            "kv": self.kv,
            "weight_bytes": self.weight_bytes,
            "cache_bytes": self.cache_bytes,
            "token_bytes": self.token_bytes,
            "per_layer_bytes": self.per_layer_bytes,
            "reference_bytes": self.reference_bytes,
            "gb_s": gb_s,
            "floor_tok_s": self.floor_tok_s(gb_s),
            "notices": list(self.notices),
            "refusal": self.refusal,
            "metadata": {key: shorten(value) for key, value in self.metadata.items()},
            "tensors": [
                {"name": t.name, "shape": list(t.shape), "format": t.format_name, "n_bytes": t.n_bytes}
                for t in self.tensors
            ],
        }


def inspect(checkpoint: Checkpoint, context: int | None, kv: str | None = None) -> Report:
    """Never fails because of a tensor type or an architecture that cannot be run; it says so instead."""
    check_kv(kv)
    kv = kv or DEVICE_ROUNDING.cache
    refusal, model = None, None
    try:
        model = load_model(checkpoint)
    except BytefloorError as error:
        refusal = str(error)
    length = choose_context(context, model) if model is not None else 0
    weight_bytes, cache_bytes, token_bytes = _costs(model, length, kv) if model is not None else (0, 0, None)
    return Report(
        path=str(checkpoint.path),
        container=checkpoint.container,
        metadata=checkpoint.metadata,
        formats=count_formats(checkpoint),
        tensors=tuple(checkpoint.tensors.values()),
        notices=checkpoint.notices,
        refusal=refusal,
        architecture=_describe(model) if model is not None else {},
        context=length,
        weight_bytes=weight_bytes,
        cache_bytes=cache_bytes,
        token_bytes=token_bytes,
        kv=kv,
        per_layer_bytes=_per_layer_bytes(model),
        reference_bytes=_reference_bytes(model, length) if model is not None else 0,
    )


def _costs(model: Model, context: int, kv: str) -> tuple[int, int, int]:
    """Stored weights, a cache of ``context`` positions, and what one token reads of both."""
    step = build_step(model.config, model.weights, Rounding(cache=kv))
    stored = {weight.name: weight.n_bytes for call in step.calls for weight in call.weights}
    return sum(stored.values()), _cache_bytes(step, context), sum(step.token_bytes(context - 1))


def _cache_bytes(step: Step, context: int) -> int:
    return sum(kind.position_bytes * step.n_cache_layers[kind.name] * kind.n_kept(context) for kind in step.kinds)


def _reference_bytes(model: Model, context: int) -> int:
    step = build_step(model.config, model.weights, Rounding(cache="float32"))
    return 4 * sum(map(n_values, dense_weights(step))) + _cache_bytes(step, context)


def _per_layer_bytes(model: Model | None) -> int:
    table = model.weights.per_layer_embedding if model is not None else None
    return table.n_bytes if table is not None else 0


def _describe(model: Model) -> dict[str, Any]:
    config = model.config
    return {
        "family": config.family,
        "name": config.name,
        "width": config.width,
        "vocabulary": config.vocabulary_size,
        "context": config.context_length,
        **describe_layers(config),
        "head": "tied to the embedding" if model.weights.head is model.weights.embedding else "its own",
    }


def shorten(value: Any) -> Any:
    """Metadata as a line: arrays by length and first values, long text cut."""
    if isinstance(value, str):
        return value if len(value) <= LONG_VALUE else value[:LONG_VALUE] + f"... ({len(value)} characters)"
    if isinstance(value, Mapping):
        return {key: shorten(item) for key, item in value.items()}
    if hasattr(value, "__len__"):
        head = [shorten(item) for item in list(value[:4])]
        return head if len(value) <= len(head) else f"{head[:3]} ... ({len(value)} values)"
    return value
