"""A step: one forward pass as plain data, and the builder whose calls append to it.

Rows are symbolic: T token rows, R of them wanting logits, B sequences. The same list serves decoding, prefill,
batches and the oracle. Shapes are checked as calls are appended, which is when a model is bound; nothing checks them
again at each launch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from bytefloor import ops
from bytefloor.model.weights import Weight
from bytefloor.ops.op import Axis, Op, Sizes
from bytefloor.ops.page_codes import CODED, n_page_bytes
from bytefloor.ops.pages import PAGE_SIZE

STORAGE_BYTES = {"float32": (4, 0), "bf16": (2, 0), "int8": (1, 2), "fp8": (1, 2)}
"""Bytes of an element that a cache keeps, and of the scale of a head at a position."""
ONE_TOKEN = {"T": 1, "R": 1, "B": 1}
INPUTS: dict[str, tuple[Axis, ...]] = {
    "tokens": ("T",),
    "positions": ("T",),
    "slots": ("T",),
    "sequence": ("T",),
    "wanted": ("R",),
}
"""What every step takes from the host, all int64: token ids, their positions (RoPE; cache and mask of layers with a
window), their slots (cache and mask of all others, which may have lost positions), the sequence each row belongs to,
and the rows that want logits. Page tables, one a cache kind, come beside them."""


@dataclass(frozen=True)
class Buffer:
    """A value that exists while a step runs: an input, or the output of one call."""

    id: int
    name: str
    shape: tuple[Axis, ...]
    dtype: str = "float32"


@dataclass(frozen=True)
class CacheKind:
    """Layers whose keys and values have one shape and one window share a pool of pages and a table.

    rotated: 0, or the lanes of K that are kept beside V where all others are V times a weight: see ``ops/pages.py``.
    most: only positions below it are kept; None for all. recent, first: where pages are coded as a whole, the kinds
    that hold a sequence's recent and its first positions as they were written: see ``ops/code_pages.py``.
    """

    name: str
    n_kv_heads: int
    head_size: int
    window: int | None
    storage: str = "float32"
    rotated: int = 0
    most: int | None = None
    recent: CacheKind | None = None
    first: CacheKind | None = None

    def n_kept(self, length: int) -> int:
        """How many positions it keeps of a sequence so long."""
        return min(length, self.window or length, self.most or length)

    @property
    def beside(self) -> dict[str, CacheKind]:
        """The kinds that hold positions of the same layers as they were written, by what they hold."""
        return {} if self.recent is None or self.first is None else {"recent": self.recent, "first": self.first}

    def page_bytes(self, page_size: int) -> int:
        """Bytes of a page in one layer."""
        if self.storage == CODED:
            return self.n_kv_heads * n_page_bytes(page_size, self.head_size)
        return page_size * self.position_bytes

    @property
    def position_bytes(self) -> int:
        """Bytes of keys and values of one position in one layer."""
        return self.n_kv_heads * self.head_bytes

    @property
    def head_bytes(self) -> int:
        """Bytes of key and value of one head at one position; of coded pages its share, rounded up."""
        if self.storage == CODED:
            return -(-n_page_bytes(PAGE_SIZE, self.head_size) // PAGE_SIZE)
        element, scale = STORAGE_BYTES[self.storage]
        return self.head_values * element + 2 * scale

    @property
    def head_values(self) -> int:
        """Values that are kept of one head at one position."""
        return self.head_size + (self.rotated or self.head_size)


@dataclass(frozen=True)
class CacheLayer:
    """One layer's place in the pool of its kind."""

    kind: CacheKind
    index: int


Operands = Mapping[str, Buffer | Weight]


@dataclass(frozen=True)
class OpCall:
    """One line of the list: which op, on what, giving what.

    part: where in the model it stands (``layers.3.attention``), for profiles and for naming a wrong op.
    cache: the layer it reads or writes, for the ops that do.
    sizes: what each letter of the op's shapes is bound to.
    """

    op: Op
    part: str
    operands: Operands
    attributes: Mapping[str, Any]
    output: Buffer | None
    sizes: Mapping[str, Axis]
    cache: CacheLayer | None = None

    @property
    def weights(self) -> tuple[Weight, ...]:
        return tuple(operand for operand in self.operands.values() if isinstance(operand, Weight))

    def bind(self, sizes: Sizes) -> dict[str, int]:
        """Every letter of the op in numbers, given T, R, B and S (live cache positions a sequence)."""
        known = {letter: axis for letter, axis in self.sizes.items() if isinstance(axis, int) or axis in sizes}
        return {**sizes, **{k: axis if isinstance(axis, int) else sizes[axis] for k, axis in known.items()}}

    def weight_bytes(self, sizes: Sizes) -> int:
        """Bytes of weights, in the file's own encoding, that this call must read."""
        stored_bytes = sum(weight.n_bytes for weight in self.weights)
        return stored_bytes if self.op.weight_bytes is None else self.op.weight_bytes(self.bind(sizes), stored_bytes)

    def cache_bytes(self, sizes: Sizes) -> int:
        """Bytes of the cache that this call reads or writes."""
        return 0 if self.op.cache_bytes is None else self.op.cache_bytes(self.bind(sizes), self.attributes)


@dataclass(frozen=True)
class Step:
    """The finished list. Everything else in the project is a walk over ``calls``.

    hidden: [R, D], the last layer's output behind the final norm, of which the head makes logits.
    """

    calls: tuple[OpCall, ...]
    inputs: Mapping[str, Buffer]
    tables: Mapping[str, Buffer]
    hidden: Buffer
    logits: Buffer
    kinds: tuple[CacheKind, ...]
    n_cache_layers: Mapping[str, int]

    @property
    def storage(self) -> str:
        """What the cache keeps: that of its kinds, k4v2 where some of them have coded pages."""
        storages = {kind.storage for kind in self.kinds}
        return CODED if CODED in storages else self.kinds[0].storage

    def token_bytes(self, depth: int, dropped: int = 0) -> tuple[int, int]:
        """Weights, in the file's own encoding, and live cache that a token at a depth must read. dropped: positions
        that layers without a window have no more."""
        sizes = {**ONE_TOKEN, "S": depth + 1}
        cut = {**ONE_TOKEN, "S": depth + 1 - dropped}
        weights, reads = self._token_reads
        return weights, sum(n * call.cache_bytes(cut if kind.window is None else sizes) for n, call, kind in reads)

    @cached_property
    def _token_reads(self) -> tuple[int, list[tuple[int, OpCall, CacheKind]]]:
        """Bytes of weights, and each different reading of the cache with how many layers do it. Every answer of a
        server asks what its tokens had to read, and a walk over the list takes longer than a token."""
        weights = sum(call.weight_bytes(ONE_TOKEN) for call in self.calls)
        found: dict[str, tuple[int, OpCall, CacheKind]] = {}
        for call in self.calls:
            if call.op.reads_cache and call.cache is not None:
                kind = call.cache.kind
                like = repr((call.op.name, kind, sorted(call.sizes.items()), sorted(call.attributes.items())))
                found[like] = (found[like][0] + 1 if like in found else 1, call, kind)
        return weights, list(found.values())


def _whole_pages(kind: CacheKind) -> dict[str, Any]:
    """What says which pages are coded."""
    assert kind.recent is not None
    assert kind.first is not None
    return {"recent_window": kind.recent.window, "n_first": kind.first.most}


@dataclass
class StepBuilder:
    """Turns ordinary-looking calls into a list. No call computes."""

    kinds: tuple[CacheKind, ...]
    n_cache_layers: Mapping[str, int]
    calls: list[OpCall] = field(default_factory=list)
    part: str = ""
    _n_buffers: int = 0

    def __post_init__(self) -> None:
        self.inputs = {name: self._buffer(name, shape, "int64") for name, shape in INPUTS.items()}
        self.tables = {
            kind.name: self._buffer(f"table.{kind.name}", ("B", f"P.{kind.name}"), "int64") for kind in self.kinds
        }

    def _buffer(self, name: str, shape: tuple[Axis, ...], dtype: str = "float32") -> Buffer:
        self._n_buffers += 1
        return Buffer(self._n_buffers - 1, name, shape, dtype)

    def _append(
        self,
        op: Op,
        operands: dict[str, Buffer | Weight | None],
        attributes: dict[str, Any] | None = None,
        cache: CacheLayer | None = None,
        shape: tuple[Axis, ...] | None = None,
    ) -> Buffer:
        present = {name: operand for name, operand in operands.items() if operand is not None}
        letters = op.bind({name: operand.shape for name, operand in present.items()})
        if op.outputs:
            shape = op.infer(letters)[op.outputs[0].name]
        output = None if shape is None else self._buffer(f"{self.part}.{op.name}", shape)
        if cache is not None:
            kind = cache.kind
            letters |= {"J": kind.n_kv_heads, "E": kind.head_size, "C": kind.head_bytes}
        self.calls.append(OpCall(op, self.part, present, attributes or {}, output, letters, cache))
        return output  # type: ignore[return-value]  # only cache_write has none, and its caller takes none

    def embed(self, tokens: Buffer, table: Weight, scale: float) -> Buffer:
        """[T] -> [T, D]"""
        return self._append(ops.embed.OP, {"tokens": tokens, "table": table}, {"scale": scale})

    def rms_norm(self, x: Buffer, weight: Weight | None, eps: float) -> Buffer:
        """[..., D] -> [..., D]"""
        return self._append(ops.rms_norm.OP, {"x": x, "weight": weight}, {"eps": eps})

    def linear(self, x: Buffer, weight: Weight) -> Buffer:
        """[T, K] -> [T, N]"""
        return self._append(ops.linear.OP, {"x": x, "weight": weight})

    def round_to(self, x: Buffer, to: str | None) -> Buffer:
        """Appends nothing where no rounding is asked for."""
        return x if to is None else self._append(ops.round_to.OP, {"x": x}, {"to": to})

    def rope(self, x: Buffer, style: str, inverse_frequencies: tuple[float, ...]) -> Buffer:
        """[T, H, E] -> [T, H, E]"""
        attributes = {"style": style, "inverse_frequencies": inverse_frequencies}
        return self._append(ops.rope.OP, {"x": x, "positions": self.inputs["positions"]}, attributes)

    def rotate(self, x: Buffer) -> Buffer:
        """[T, H, E] -> [T, H, E]"""
        return self._append(ops.rotate.OP, {"x": x})

    def cache_write(self, cache: CacheLayer, k: Buffer, v: Buffer) -> None:
        """Two [T, J, E] into the pages; of a kind whose pages are coded, those of it that are due go into codes."""
        kind = cache.kind
        written = kind if kind.recent is None else kind.recent
        operands: dict[str, Buffer | Weight | None] = {"k": k, "v": v, **self._places(written)}
        attributes = {"storage": written.storage, "rotated": written.rotated}
        self._append(ops.cache_write.OP, operands, attributes, CacheLayer(written, cache.index))
        if kind.recent is not None:
            self._append(ops.code_pages.OP, {**self._places(kind)}, _whole_pages(kind), cache)

    def attention(self, cache: CacheLayer, q: Buffer, scale: float, k_norm: Weight | None) -> Buffer:
        """[T, H, E] -> [T, H, E]. k_norm: of the layer that wrote the cache."""
        kind = cache.kind
        operands: dict[str, Buffer | Weight | None] = {"q": q, **self._places(kind)}
        if kind.recent is not None:
            attributes = {"scale": scale, "window": kind.window, **_whole_pages(kind)}
            return self._append(ops.attention_coded.OP, operands, attributes, cache)
        if kind.rotated:
            operands["k_norm"] = k_norm
        attributes = {"scale": scale, "window": kind.window, "storage": kind.storage, "rotated": kind.rotated}
        return self._append(ops.attention.OP, operands, attributes, cache)

    def _places(self, kind: CacheKind) -> dict[str, Buffer]:
        others = {f"{name}_table": self.tables[other.name] for name, other in kind.beside.items()}
        slots = self.inputs["slots" if kind.window is None else "positions"]
        return {"slots": slots, "sequence": self.inputs["sequence"], "table": self.tables[kind.name], **others}

    def glu(self, gate: Buffer, up: Buffer, activation: str) -> Buffer:
        """Two [T, F] -> [T, F]"""
        return self._append(ops.glu.OP, {"gate": gate, "up": up}, {"activation": activation})

    def add(self, a: Buffer, b: Buffer) -> Buffer:
        """Same shapes"""
        return self._append(ops.add.OP, {"a": a, "b": b})

    def scale(self, x: Buffer, factor: float = 1.0, weight: Weight | None = None) -> Buffer:
        """Same shape"""
        return self._append(ops.scale.OP, {"x": x, "weight": weight}, {"factor": factor})

    def soft_cap(self, x: Buffer, cap: float) -> Buffer:
        """[R, V] -> [R, V]"""
        return self._append(ops.soft_cap.OP, {"x": x}, {"cap": cap})

    def gather_rows(self, x: Buffer, rows: Buffer) -> Buffer:
        """[T, D] -> [R, D]"""
        return self._append(ops.gather_rows.OP, {"x": x, "rows": rows})

    def select(self, x: Buffer, index: int) -> Buffer:
        """[T, L, P] -> [T, P]"""
        return self._append(ops.select.OP, {"x": x}, {"index": index})

    def view(self, x: Buffer, *row_shape: int) -> Buffer:
        """Another shape for each row; the first axis stays."""
        return self._append(ops.view.OP, {"x": x}, {"shape": row_shape}, shape=(x.shape[0], *row_shape))

    def finish(self, hidden: Buffer, logits: Buffer) -> Step:
        """Close the list."""
        return Step(tuple(self.calls), self.inputs, self.tables, hidden, logits, self.kinds, self.n_cache_layers)
