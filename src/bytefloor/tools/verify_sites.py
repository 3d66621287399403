"""What the kernels of a fused call are asked, whichever kernels they are: inputs, probes, and what to expect.

Teacher forcing: a fused call gets the oracle's inputs, so that nothing which is wrong before it matters. Beside them it
is asked with inputs that make small faults large:

- *quiet*: all inputs so small that mean squares are as large as eps: another eps changes every value;
- *large inputs*: 1024 times as large, so that eps is nothing: what is right there and wrong elsewhere has a wrong eps;
- *nothing added*: what the block before gave is zero, so norms of it are idle, and the scalar behind them is not;
- *loud edge*: the value at the oldest position that a row sees is 1024 times as large, and what lies outside a row's
  band is NaN: a window that is off by one misses it, or sees what it must not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bytefloor.model.fuse import Fused, FusedAttention, FusedEmbed, FusedLogits, FusedPerLayer, FusedProduct
from bytefloor.model.step import Buffer, OpCall
from bytefloor.model.weights import Weight
from bytefloor.tools.verify_bounds import (
    SCORE_ERROR,
    Valued,
    attention_error,
    differs_from_rounded,
    evaluate,
    kept_error,
    mixture,
)
from bytefloor.tools.verify_oracle import Oracle, hide, hold_queries, kept_values, keys_and_values
from bytefloor.tools.verify_report import Seen, makers

QUIET, LARGE, NOTHING_ADDED = "quiet inputs", "large inputs", "nothing added"
LOUD_EDGE = "loud edge of the window"
LOUD = 1024.0


@dataclass(frozen=True)
class Probe:
    """Inputs by buffer, float64 but exactly float32. idle, blames, unproven: as in ``Seen``."""

    name: str
    inputs: dict[int, Tensor]
    idle: tuple[OpCall, ...] = ()
    blames: tuple[str, ...] = ()
    unproven: tuple[OpCall, ...] = ()


def cut(x: Tensor) -> Tensor:
    """The float32 whose last bit is 0, float64: what a kernel can be handed."""
    return (x.float().contiguous().view(torch.int32) & ~1).view(torch.float32).double()


def part_of(fused: Fused) -> str:
    return (
        fused.call.part if isinstance(fused, FusedEmbed) else "head" if isinstance(fused, FusedLogits) else fused.part
    )


def buffer_of(call: OpCall, name: str) -> int:
    operand = call.operands[name]
    assert isinstance(operand, Buffer)
    return operand.id


def output_of(call: OpCall) -> int:
    assert call.output is not None
    return call.output.id


@dataclass(frozen=True)
class ProductParts:
    """The buffers of a fused product. x: the residual, or the input itself. delta: what the block before gave.
    summed: the call that makes the residual which is handed on."""

    x: int
    delta: int | None
    factor: int | None
    summed: OpCall | None
    tail: tuple[OpCall, ...]


def parts_of(fused: FusedProduct) -> ProductParts:
    """Found in the calls that it replaces."""
    add = next((call for call in fused.replaces if call.op.name == "add"), None)
    first = fused.replaces[0]
    factor = output_of(fused.factor) if fused.factor is not None else None
    if add is None:
        start = next(call for call in fused.replaces if call is not fused.factor)
        return ProductParts(buffer_of(start, "x"), None, factor, None, ())
    at = next(i for i, call in enumerate(fused.replaces) if call is add)
    scaled = fused.replaces[at + 1] if fused.scalar is not None else None
    tail = fused.replaces[: at + 1 + (scaled is not None)]
    delta = buffer_of(first, "x") if fused.post_norm is not None else buffer_of(add, "b")
    return ProductParts(buffer_of(add, "a"), delta, factor, scaled or add, tail)


def taken_out(fused: FusedProduct) -> tuple[OpCall, ...]:
    """Calls that what is behind the norm says nothing of: it takes every factor out again."""
    return tuple(call for call in parts_of(fused).tail if call.op.name == "scale" and fused.norm is not None)


def probes(fused: Fused, inputs: dict[int, Tensor]) -> list[Probe]:
    """The oracle's own inputs, and those that show more."""
    floats = {key: cut(x) if x.is_floating_point() else x for key, x in inputs.items()}
    found = [Probe("", floats)]
    norms = [call for call in fused.replaces if call.op.name == "rms_norm"]
    if not isinstance(fused, FusedPerLayer) and norms:
        small = {key: quiet(x, norms[0].attributes["eps"]) for key, x in floats.items() if x.is_floating_point()}
        found.append(Probe(QUIET, {**floats, **small}, blames=("rms_norm",)))
        large = {key: LOUD * x for key, x in floats.items() if x.is_floating_point()}
        found.append(Probe(LARGE, {**floats, **large}, unproven=tuple(norms)))
    if isinstance(fused, FusedProduct) and fused.has_delta:
        parts = parts_of(fused)
        assert parts.delta is not None
        idle = tuple(call for call in parts.tail if call.op.name != "scale")
        zero = {parts.delta: torch.zeros_like(floats[parts.delta])}
        found.append(Probe(NOTHING_ADDED, {**floats, **zero}, idle=idle))
    return found


def quiet(x: Tensor, eps: float) -> Tensor:
    """Rows whose mean square is eps."""
    dims = tuple(range(1, x.dim()))
    size = x.square().mean(dims, keepdim=True).clamp_min(1e-30)
    return cut(x * (eps / size).sqrt())


def chosen_rows(inputs: dict[int, Tensor], oracle: Oracle, rows: Sequence[int]) -> dict[int, Tensor]:
    """Of what has a row a token, these; page tables as they are. The head's wanted rows are all of them."""
    tables = {buffer.id for buffer in oracle.step.tables.values()}
    wanted = oracle.step.inputs["wanted"].id
    at = torch.tensor(rows, device=oracle.device)
    found = {key: x if key in tables else x[at] for key, x in inputs.items()}
    if wanted in found:
        found[wanted] = torch.arange(len(rows), device=oracle.device)
    return found


def projected_buffers(fused: FusedAttention) -> list[int]:
    """Of q, and where the layer has any of its own of k and v, as products leave them."""
    return [buffer_of(call, "x") for call in fused.replaces if call.op.name == "view" and call.output is not None][
        : 1 + (fused.owns_kv and (1 if fused.has_v_from_k else 2))
    ]


@dataclass
class HeadsExpected:
    """What comes out of the attention block of some rows, but for the mixing: queries, and what the cache gets."""

    valued: Valued
    q: Tensor
    q_error: Tensor
    k: tuple[Tensor, Tensor] | None
    v: tuple[Tensor, Tensor] | None


def heads_expected(
    oracle: Oracle, fused: FusedAttention, inputs: dict[int, Tensor], input_error: float = 0.0
) -> HeadsExpected:
    """From the rows of q, k and v."""
    valued = evaluate(oracle, fused.replaces, inputs, input_error)
    write = next((call for call in fused.replaces if call.op.name == "cache_write"), None)

    def pair(buffer: int) -> tuple[Tensor, Tensor]:
        x = valued.values[buffer]
        return x, valued.errors[buffer].expand_as(x)

    q, q_error = pair(buffer_of(fused.attention, "q"))
    k = pair(buffer_of(write, "k")) if write is not None else None
    v = pair(buffer_of(write, "v")) if write is not None else None
    return HeadsExpected(valued, q, q_error, k, v)


@dataclass
class Asked:
    """A fused call, asked with one probe. rows: which of the text. is_rows: of the kernels of many rows."""

    oracle: Oracle
    fused: Fused
    probe: Probe
    rows: tuple[int, ...]
    is_rows: bool = False
    seen: list[Seen] = field(default_factory=list)

    def look(
        self, what: str, made_by: tuple[OpCall, ...], found: Tensor, expected: Tensor, allowed: Tensor,
        others: tuple[int, float] = (0, 1.0), idle_at_0: tuple[OpCall, ...] = (),
        unproven: tuple[OpCall, ...] = (), until: int | None = None,
    ) -> None:  # fmt: skip
        """Take down values [rows, ...]; by themselves the row at position 0, where some ops can do nothing wrong, and
        those before ``until``, which say nothing of others. until: None for all rows."""
        allowed = allowed.expand_as(expected)
        groups: dict[tuple[bool, bool], list[int]] = {}
        for i, row in enumerate(self.rows):
            groups.setdefault((row == 0 and bool(idle_at_0), until is None or row < until), []).append(i)
        for (is_at_0, is_before), rows in groups.items():
            at = torch.tensor(rows, device=expected.device)
            self.seen.append(
                Seen(
                    what, made_by, found.double()[at], expected[at], allowed[at], tuple(self.rows[i] for i in rows),
                    idle=(*self.probe.idle, *(idle_at_0 if is_at_0 else ())), 
                    unproven=(*self.probe.unproven, *(unproven if is_before else ())),
                    probe=self.probe.name, blames=self.probe.blames, others=(0, 1.0) if is_at_0 else others,
                )
            )  # fmt: skip

    def look_at_kept(self, heads: HeadsExpected, kept: Tensor) -> None:
        """Keys and values that were written. kept: what pages hold of these rows, [rows, 2 or 1, J, ...]."""
        fused = self.fused
        assert isinstance(fused, FusedAttention)
        write = next((call for call in fused.replaces if call.op.name == "cache_write"), None)
        if write is None or heads.k is None or heads.v is None:
            return
        kind, calls = fused.cache.kind, fused.replaces
        turning = tuple(call for call in calls if call.op.name == "rope")
        k_makers, v_makers = (makers(write, calls, name) for name in ("k", "v"))
        (k, k_error), (v, v_error) = heads.k, heads.v
        if kind.rotated:
            e, n = kind.head_size, kind.rotated // 2
            lanes = torch.cat((torch.arange(n), torch.arange(n) + e // 2)).to(k.device)
            k, k_error = k[..., lanes], k_error[..., lanes]
            found_v, found_k = kept[:, 0].split([e, kind.rotated], dim=-1)
        else:
            found_k, found_v = kept[:, 0], kept[:, 1]
        for what, by, found, x, error, idle in (
            ("keys in the cache", k_makers, found_k, k, k_error, turning),
            ("values in the cache", v_makers, found_v, v, v_error, ()),
        ):
            others = differs_from_rounded(found, x, error) if kind.storage == "bf16" else (0, 1.0)
            self.look(what, by, found, x, kept_error(x, error, kind.storage), idle_at_0=idle, others=others)

    def look_at_mixed(
        self, heads: HeadsExpected, pool: Tensor, found: Tensor, score_error: float = SCORE_ERROR
    ) -> None:
        """What attention gives of the pages as they are. found [rows, H E]."""
        fused, oracle = self.fused, self.oracle
        assert isinstance(fused, FusedAttention)
        call, layer = fused.attention, fused.cache
        slots = torch.tensor(self.rows, device=oracle.device)
        table = oracle.batch.tables[layer.kind.name][0]
        k_norm = call.operands.get("k_norm")
        weight = oracle.matrices.values(k_norm) if isinstance(k_norm, Weight) else None
        kept = kept_values(pool, layer, table, oracle.plan.page_size, max(self.rows) + 1)
        k, v = keys_and_values(kept, layer, weight)
        q, q_error = heads.q, heads.q_error
        if self.is_rows:  # queries are given, as bf16 that hold the factor
            q, q_error = (
                hold_queries(
                    q, call.attributes["scale"], call.attributes["rotated"], None if weight is None else weight.double()
                ),
                torch.zeros_like(q),
            )
        values = {**heads.valued.values, buffer_of(call, "q"): q}
        values[buffer_of(call, "slots")] = slots
        values[buffer_of(call, "sequence")] = torch.zeros_like(slots)
        parts = [self._attend(call, values, pool, i) for i in range(len(self.rows))]
        expected, scale = torch.cat(parts), call.attributes["scale"]
        mixed = mixture(q, q_error, k, v, slots, scale, call.attributes["window"])
        allowed = attention_error(mixed, expected, score_error, self.is_rows)
        queries = tuple(made for made in makers(call, fused.replaces, "q") if made is not call)
        by = (call,) if self.is_rows else (*queries, call)
        shape = (len(self.rows), -1)
        self.look(
            "mixed values", by, found, expected.reshape(shape), allowed.reshape(shape),
            idle_at_0=() if self.is_rows else queries,
            unproven=(call,), until=max(0, (call.attributes["window"] or 0) - 1),
        )  # fmt: skip

    def _attend(self, call: OpCall, values: dict[int, Tensor], pool: Tensor, row: int) -> Tensor:
        """Rows one by one: those that were chosen do not follow each other."""
        own = dict(values)
        for name in ("q", "slots", "sequence"):
            buffer = buffer_of(call, name)
            own[buffer] = values[buffer][row : row + 1]
        roundings = self.oracle.roundings
        self.oracle.roundings = type(roundings)()  # queries are what they are
        try:
            return self.oracle.result(call, own, pool)
        finally:
            self.oracle.roundings = roundings


def prepare_pages(oracle: Oracle, fused: FusedAttention, rows: Sequence[int], until: int, is_loud: bool) -> Tensor:
    """The oracle's pages of a layer, NaN in positions that none of these rows may look at, and from ``until`` on.

    rows: positions that are read at once; the loud edge is that of the middle one.
    """
    layer, window, n = fused.cache, fused.attention.attributes["window"], len(oracle.ids)
    pool, table = oracle.pool_of(layer).clone(), oracle.batch.tables[layer.kind.name][0]
    size = oracle.plan.page_size
    first = 0 if window is None else max(0, min(rows) - window + 1)
    if is_loud:
        assert window is not None
        _make_loud(pool, fused, table, size, max(first, rows[len(rows) // 2] - window + 1))
    hide(pool, table, size, 0, first)
    hide(pool, table, size, until, n)
    return pool


def has_loud_edge(fused: FusedAttention) -> bool:
    """Where there is a window, and values say nothing of keys."""
    return fused.attention.attributes["window"] is not None and not fused.cache.kind.rotated


def _make_loud(pool: Tensor, fused: FusedAttention, table: Sequence[int], size: int, position: int) -> None:
    """V at one position, in place: of codes the scale."""
    kind = fused.cache.kind
    page, offset = table[(position // size) % len(table)], position % size
    if pool.dtype == torch.uint8:
        start = size * kind.head_size + 2 * offset
        scales = pool[page, 1, :, start : start + 2].contiguous().view(torch.bfloat16)
        pool[page, 1, :, start : start + 2] = (scales * LOUD).view(torch.uint8)
    else:
        pool[page, 1, :, offset] *= LOUD
