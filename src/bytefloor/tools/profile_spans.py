"""The spans of a step before anybody has measured them: what each launch, or each call, is there for and what it reads.

Over all spans of a token, bytes needed are those of ``Step.token_bytes``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from bytefloor.engine.device import DeviceExecutor
from bytefloor.engine.packed import PackedWeights, matrix, padded_rows
from bytefloor.engine.planner import Launch
from bytefloor.engine.reference import ReferenceExecutor
from bytefloor.engine.row_planner import RowStep
from bytefloor.engine.scratch import dense_weights
from bytefloor.formats.stream import StreamForm
from bytefloor.model.decoder import assign_caches
from bytefloor.model.families import Model
from bytefloor.model.fuse import Fused, FusedAttention, FusedEmbed, FusedPerLayer, FusedProduct, fuse_one_row
from bytefloor.model.step import STORAGE_BYTES, OpCall
from bytefloor.model.weights import Weight, all_weights
from bytefloor.tools.bench_prompt import visible_positions
from bytefloor.tools.profile_data import Kind, LayerCache, Matrix, Span

ROLES: dict[str, Kind] = {
    "q": "qkv", "k": "qkv", "v": "qkv", "o": "o", "gate": "gate_up", "up": "gate_up", "down": "down",
}  # fmt: skip
KINDS_OF_OPS: dict[str, Kind] = {
    "rope": "attention",
    "cache_write": "attention",
    "attention": "attention",
    "embed": "embedding",
    "soft_cap": "sampling",
    "gather_rows": "head",
}
"""The kinds of ops that only ever do one thing; of an E model's per-layer inputs all ops are of their kind."""


@dataclass(frozen=True)
class Rows:
    """A step's rows, of one sequence: how many, behind how many positions, and how many of them want logits."""

    n: int
    depth: int
    n_wanted: int = 1

    @property
    def sizes(self) -> dict[str, int]:
        return {"T": self.n, "R": self.n_wanted, "B": 1, "S": self.depth + self.n}


def cache_bytes(call: OpCall, rows: Rows) -> int:
    """What an attention reads of the cache: the band of its last row, and before it what the first rows see."""
    if not call.op.reads_cache or call.op.cache_bytes is None:
        return 0
    window = call.attributes["window"]
    widened = {**call.attributes, "window": window and window + rows.n - 1}
    return call.op.cache_bytes(call.bind(rows.sizes), widened)


def flops(call: OpCall, rows: Rows) -> int:
    """Of a call; attention sees no more than the mask lets it."""
    if not call.op.reads_cache:
        return call.op.flops(call.bind(rows.sizes))
    window = call.attributes["window"]
    seen = visible_positions(rows.depth + rows.n, window) - visible_positions(rows.depth, window)
    return call.op.flops(call.bind({**rows.sizes, "T": 1, "S": seen}))


def layer_of(part: str) -> int | None:
    """Of ``layers.3.mlp`` 3."""
    found = re.match(r"layers\.(\d+)\.", part)
    return int(found[1]) if found else None


def kind_of(call: OpCall) -> Kind:
    """What a call is there for."""
    if call.part.endswith("per_layer") or call.part == "per_layer_inputs":
        return "per_layer"
    if call.op.name == "linear":
        return "head" if call.part == "head" else ROLES[matrix(call).name.rpartition(".")[2]]
    if call.op.name == "glu":
        return "gate_up"
    if call.op.name == "view" or _is_of_heads(call):
        return "attention"
    return KINDS_OF_OPS.get(call.op.name, "norm")


def _is_of_heads(call: OpCall) -> bool:
    """Norms of q, k and v, whose rows are heads."""
    return call.op.name == "rms_norm" and call.output is not None and len(call.output.shape) == 3


def span_of(
    index: int, part: str, kind: Kind, name: str, calls: Sequence[OpCall], rows: Rows, moved_bytes: int | None = None
) -> Span:
    """A span that does the work of these calls; moved_bytes as in the file where nothing else is said."""
    matrices = _matrices(calls)
    file_bytes = sum(call.weight_bytes(rows.sizes) for call in calls)
    return Span(
        index=index,
        part=part,
        layer=layer_of(part),
        kind=kind,
        name=name,
        weights=tuple(weight.name for weight in matrices),
        formats=tuple(dict.fromkeys(weight.stored.format_name for weight in matrices)),
        file_bytes=file_bytes,
        moved_bytes=file_bytes if moved_bytes is None else moved_bytes,
        cache_bytes=sum(cache_bytes(call, rows) for call in calls),
        flops=sum(flops(call, rows) for call in calls),
    )


def _matrices(calls: Sequence[OpCall]) -> list[Weight]:
    return list({id(w): w for call in calls for w in call.weights if len(w.shape) == 2}.values())


# --- the reference executor


def reference_spans(executor: ReferenceExecutor, rows: Rows) -> tuple[Span, ...]:
    """One for each call of the list."""
    kept = {id(weight) for weight in dense_weights(executor.step)}

    def decoded_bytes(call: OpCall) -> int:
        """Weights are decoded when they are loaded, but for tables that only rows are looked up in."""
        weight_bytes = call.weight_bytes(rows.sizes)
        if not weight_bytes or not all(id(weight) in kept for weight in call.weights):
            return weight_bytes
        if call.op.name == "embed":
            table = matrix(call, "table")
            return rows.n * table.shape[1] * executor._dtype(table).itemsize
        return sum(executor._kept_bytes(weight) for weight in call.weights)

    return tuple(
        span_of(i, call.part, kind_of(call), call.op.name, [call], rows, decoded_bytes(call))
        for i, call in enumerate(executor.step.calls)
    )


# --- the device executor


def token_spans(executor: DeviceExecutor, depth: int) -> tuple[Span, ...]:
    """One for each of ``executor.launches``, in their order."""
    rows, launches = Rows(1, depth), iter(executor.launches)
    spans: list[Span] = []
    for fused in fuse_one_row(executor.step):
        for calls, moved in _token_work(fused, executor.weights):
            launch, kind = next(launches), _kind_of_fused(fused)
            spans.append(span_of(len(spans), launch.part, kind, launch.kernel.name, calls, rows, moved))
    return tuple(spans)


def _kind_of_fused(fused: Fused) -> Kind:
    if isinstance(fused, FusedProduct):
        return kind_of(fused.products[0])
    if isinstance(fused, FusedAttention):
        return "attention"
    return (
        "embedding"
        if isinstance(fused, FusedEmbed)
        else "per_layer"
        if isinstance(fused, FusedPerLayer)
        else "sampling"
    )


def _token_work(fused: Fused, packed: PackedWeights) -> Iterator[tuple[Sequence[OpCall], int | None]]:
    """For each launch of a fused call the calls whose work it does, and the bytes that it moves of weights.

    Matrices whose records have different widths are launches one after another; the first has the norms.
    """
    if not isinstance(fused, FusedProduct):
        yield fused.replaces, _table_bytes(fused, packed)
        return
    others = [call for call in fused.replaces if call not in fused.products]
    for _, products in groupby(fused.products, lambda call: packed.form_of(matrix(call)).columns):
        calls = [*others, *products]
        yield calls, _moved_bytes(calls, packed)
        others = []


def _table_bytes(fused: Fused, packed: PackedWeights) -> int | None:
    """Of a token's row; None where there is no table."""
    if isinstance(fused, FusedEmbed):
        return packed_bytes(packed.form_of(table := matrix(fused.call, "table")), table.shape) // table.shape[0]
    if isinstance(fused, FusedPerLayer):
        return packed_bytes(packed.form_of(table := matrix(fused.embed, "table")), table.shape) // table.shape[0]
    return None


def packed_bytes(form: StreamForm, shape: tuple[int, ...]) -> int:
    """Of a matrix [N, K] on the device."""
    n, k = shape
    return form.n_bytes(padded_rows(n), k)


def _moved_bytes(calls: Sequence[OpCall], packed: PackedWeights) -> int:
    """Of products and what stands before them: matrices as they are packed, vectors as in the file."""
    weights = {id(weight): weight for call in calls for weight in call.weights}.values()
    return sum(packed_bytes(packed.form_of(w), w.shape) if len(w.shape) == 2 else w.n_bytes for w in weights)


def chunk_spans(executor: DeviceExecutor, steps: Sequence[RowStep], rows: Rows) -> tuple[Span, ...]:
    """One for each step of a chunk, in their order: those of ``Walk.trunk``, and where rows want logits, those of
    ``Walk.head``. What torch does behind it, sums of planes and the cap, is not among them.
    """
    left, spans = list(steps), list[Span]()

    def take(kind: Kind, part: str, calls: Sequence[OpCall], moved: int | None = None) -> None:
        step = left.pop(0)
        is_kernel = isinstance(step, Launch)
        name = step.kernel.name if isinstance(step, Launch) else "torch"
        spans.append(span_of(len(spans), part, kind if is_kernel else "torch", name, calls, rows, moved))

    packed = executor.weights
    for fused in fuse_one_row(executor.step):
        if not left:
            break
        if isinstance(fused, FusedEmbed):
            take("embedding", fused.call.part, fused.replaces)
        elif isinstance(fused, FusedPerLayer):
            take("per_layer", fused.part, [fused.embed])
            take("per_layer", fused.part, [call for call in fused.replaces if call is not fused.embed])
        elif isinstance(fused, FusedAttention):
            take("attention", fused.part, [call for call in fused.replaces if call is not fused.attention])
            take("attention", fused.part, [fused.attention])
        elif isinstance(fused, FusedProduct):
            before = [call for call in fused.replaces if call not in (*fused.products, fused.glu)]
            if isinstance(left[0], Launch) and left[0].kernel.name == "norm_rows":
                take("norm", fused.part, before)
            glu = [fused.glu] if fused.glu is not None else []
            work = [*fused.products, *(glu if fused.is_pair else [])]
            take(kind_of(fused.products[0]), fused.part, work, _moved_bytes(work, packed))
            if fused.factor is not None:
                take("per_layer", fused.part, glu)
    return tuple(spans)


# --- the model


def matrices_of(model: Model) -> tuple[Matrix, ...]:
    """Every matrix of the model once."""
    return tuple(
        Matrix(weight.name, *weight.shape, weight.stored.format_name, weight.n_bytes)
        for weight in all_weights(model.weights)
        if len(weight.shape) == 2
    )


def caches_of(model: Model) -> tuple[LayerCache, ...]:
    """Of every layer, what a position of its cache takes in each storage there is."""
    by_storage = {storage: assign_caches(model.config, storage)[0] for storage in STORAGE_BYTES}
    return tuple(
        LayerCache(i, layer.window, {name: caches[i].kind.position_bytes for name, caches in by_storage.items()})
        for i, layer in enumerate(model.config.layers)
    )
