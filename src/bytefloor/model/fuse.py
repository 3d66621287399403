"""Rewriting the plain list for one row: fewer, fatter calls, each of which says which plain calls it stands for.

A norm is never a call of its own: it is computed again in every block of the product that needs it, right for one
row. What ends a block of the model (the norm after it, the residual sum, the layer's scalar) moves into the prologue
of the next block's product. The calls a fused call replaces, run in order, compute the same buffers: the reference
executor proves it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from bytefloor.errors import UnsupportedError
from bytefloor.model.step import CacheLayer, OpCall, Step
from bytefloor.model.weights import Weight


@dataclass(frozen=True)
class FusedEmbed:
    """A row of the embedding."""

    replaces: tuple[OpCall, ...]

    @property
    def call(self) -> OpCall:
        return self.replaces[0]


@dataclass(frozen=True)
class FusedProduct:
    """Products that share their input, with the norms before them.

    has_delta: the residual first takes up what the last block gave, through post_norm and scalar where there are any.
    norm: None where the input is only rounded. glu: gate and up become act(gate) * up. factor: where up is no product
    but a slice of the per-layer inputs.
    """

    part: str
    products: tuple[OpCall, ...]
    norm: OpCall | None
    has_delta: bool
    post_norm: OpCall | None
    scalar: Weight | None
    glu: OpCall | None
    replaces: tuple[OpCall, ...]
    factor: OpCall | None = None

    @property
    def is_pair(self) -> bool:
        """Gate and up, which are one matrix with rows by turns."""
        return self.glu is not None and self.factor is None


@dataclass(frozen=True)
class FusedPerLayer:
    """The per-layer inputs of all layers: (norm(scaled projection) + the token's own row) * a constant."""

    part: str
    embed: OpCall
    projected: OpCall
    norm: OpCall
    scaled: OpCall
    replaces: tuple[OpCall, ...]


@dataclass(frozen=True)
class FusedAttention:
    """From the rows of q, k and v to the mixed values: norms, RoPE, cache write, attention."""

    part: str
    attention: OpCall
    q_norm: OpCall | None
    k_norm: OpCall | None
    v_norm: OpCall | None
    rope: OpCall | None
    cache: CacheLayer
    owns_kv: bool
    has_v_from_k: bool
    replaces: tuple[OpCall, ...]


@dataclass(frozen=True)
class FusedLogits:
    """The soft cap, where there is one."""

    cap: float
    replaces: tuple[OpCall, ...]


Fused = FusedEmbed | FusedPerLayer | FusedProduct | FusedAttention | FusedLogits


class _Reader:
    """Takes calls off the list in order; what does not fit is named."""

    def __init__(self, calls: Sequence[OpCall]) -> None:
        self._calls = calls
        self._at = 0

    def peek(self, ahead: int = 0) -> str:
        at = self._at + ahead
        return self._calls[at].op.name if at < len(self._calls) else ""

    @property
    def is_done(self) -> bool:
        return self._at == len(self._calls)

    def take(self, name: str) -> OpCall:
        if self.peek() != name:
            at = min(self._at, len(self._calls) - 1)
            found = self.peek() or "the end"
            raise UnsupportedError(f"{self._calls[at].part}: {found} where the one-row list expects {name}")
        self._at += 1
        return self._calls[self._at - 1]

    def maybe(self, name: str) -> OpCall | None:
        return self.take(name) if self.peek() == name else None


@dataclass
class _Tail:
    """What the last block left for the next product's prologue."""

    post_norm: OpCall | None = None
    add: OpCall | None = None
    scale: OpCall | None = None

    @property
    def calls(self) -> tuple[OpCall, ...]:
        return _present(self.post_norm, self.add, self.scale)


def _present(*calls: OpCall | None) -> tuple[OpCall, ...]:
    return tuple(call for call in calls if call is not None)


def fuse_one_row(step: Step) -> tuple[Fused, ...]:
    """The fused list. UnsupportedError names the first call that has no place in it."""
    reader = _Reader(step.calls)
    fused: list[Fused] = [FusedEmbed((reader.take("embed"),))]
    if reader.peek() == "embed":
        fused += _per_layer_inputs(reader)
    tail = _Tail()
    while reader.peek() != "gather_rows":
        fused += _attention_block(reader, tail)
        tail = _read_tail(reader)
        fused += _mlp_block(reader, tail)
        tail = _read_tail(reader)
        if reader.peek() == "select":
            fused += _per_layer_block(reader, tail)
            tail = _read_tail(reader)
    gather = reader.take("gather_rows")
    norm, rounding, head = reader.take("rms_norm"), reader.maybe("round_to"), reader.take("linear")
    fused.append(_product(tail, norm, rounding, (head,), None, gather))
    cap = reader.maybe("soft_cap")
    fused.append(FusedLogits(cap.attributes["cap"] if cap else 0.0, _present(cap)))
    if not reader.is_done:
        reader.take("the end")
    return tuple(fused)


def _read_tail(reader: _Reader) -> _Tail:
    post_norm = reader.take("rms_norm") if reader.peek(1) == "add" else None
    return _Tail(post_norm, reader.take("add"), reader.maybe("scale"))


def _product(
    tail: _Tail,
    norm: OpCall | None,
    rounding: OpCall | None,
    products: tuple[OpCall, ...],
    glu: OpCall | None,
    gather: OpCall | None = None,
    factor: OpCall | None = None,
) -> FusedProduct:
    scalar = tail.scale.operands["weight"] if tail.scale is not None else None
    assert scalar is None or isinstance(scalar, Weight)
    return FusedProduct(
        part=products[0].part,
        products=products,
        norm=norm,
        has_delta=tail.add is not None,
        post_norm=tail.post_norm,
        scalar=scalar,
        glu=glu,
        replaces=(*tail.calls, *_present(gather, factor, norm, rounding), *products, *_present(glu)),
        factor=factor,
    )


def _attention_block(reader: _Reader, tail: _Tail) -> list[Fused]:
    norm, rounding = reader.take("rms_norm"), reader.maybe("round_to")
    products, inner = [reader.take("linear")], [reader.take("view")]
    q_norm, q_rope = reader.maybe("rms_norm"), reader.maybe("rope")
    k_norm = v_norm = k_rope = write = None
    owns_kv = reader.peek() == "linear"
    if owns_kv:
        products.append(reader.take("linear"))
        inner.append(reader.take("view"))
        if reader.peek() == "linear":
            products.append(reader.take("linear"))
            inner.append(reader.take("view"))
        k_norm = reader.maybe("rms_norm") if q_norm is not None else None
        v_norm, k_rope = reader.maybe("rms_norm"), reader.maybe("rope")
        write = reader.take("cache_write")
    attention = reader.take("attention")
    inner += _present(q_norm, q_rope, k_norm, v_norm, k_rope, write, attention)
    inner.append(reader.take("view"))
    rounding_o, o = reader.maybe("round_to"), reader.take("linear")
    assert attention.cache is not None
    mixed = FusedAttention(
        part=attention.part,
        attention=attention,
        q_norm=q_norm,
        k_norm=k_norm,
        v_norm=v_norm,
        rope=q_rope,
        cache=attention.cache,
        owns_kv=owns_kv,
        has_v_from_k=owns_kv and len(products) == 2,
        replaces=tuple(inner),
    )
    return [
        _product(tail, norm, rounding, tuple(products), None),
        mixed,
        _product(_Tail(), None, rounding_o, (o,), None),
    ]


def _mlp_block(reader: _Reader, tail: _Tail) -> list[Fused]:
    norm, rounding = reader.take("rms_norm"), reader.maybe("round_to")
    gate, up, glu = reader.take("linear"), reader.take("linear"), reader.take("glu")
    rounding_down, down = reader.maybe("round_to"), reader.take("linear")
    return [
        _product(tail, norm, rounding, (gate, up), glu),
        _product(_Tail(), None, rounding_down, (down,), None),
    ]


def _per_layer_inputs(reader: _Reader) -> list[Fused]:
    """The projection is a product of the embedded token; norm, own row and constants are one call behind it."""
    own, own_view = reader.take("embed"), reader.take("view")
    rounding, projection = reader.maybe("round_to"), reader.take("linear")
    projected, view, norm = reader.take("scale"), reader.take("view"), reader.take("rms_norm")
    add, scaled = reader.take("add"), reader.take("scale")
    inputs = FusedPerLayer(
        part=own.part,
        embed=own,
        projected=projected,
        norm=norm,
        scaled=scaled,
        replaces=(own, own_view, projected, view, norm, add, scaled),
    )
    return [_product(_Tail(), None, rounding, (projection,), None), inputs]


def _per_layer_block(reader: _Reader, tail: _Tail) -> list[Fused]:
    factor, rounding = reader.take("select"), reader.maybe("round_to")
    gate, glu = reader.take("linear"), reader.take("glu")
    rounding_out, projection = reader.maybe("round_to"), reader.take("linear")
    return [
        _product(tail, None, rounding, (gate,), glu, factor=factor),
        _product(_Tail(), None, rounding_out, (projection,), None),
    ]


def unfused(step: Step, fused: Sequence[Fused]) -> Step:
    """The step with its calls in the order in which the fused list runs them: what proves the rewriting."""
    return replace(step, calls=tuple(call for part in fused for call in part.replaces))
