"""The side of ``verify`` that is right by definition: plain calls in float64, with the roundings of whom it judges.

Nothing here knows kernels. ``Oracle`` walks a step for the rows of one text, so that the inputs of every call are at
hand; ``verify_bounds.py`` says how far from its values another's may be.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from bytefloor.engine.batch import Batch
from bytefloor.engine.cache import CachePlan, SequenceCache, make_pools
from bytefloor.engine.reference import StoredRows
from bytefloor.model.step import Buffer, CacheLayer, OpCall, Step
from bytefloor.model.weights import Weight
from bytefloor.ops.pages import SCALE_BYTES, codes_and_scales, holds_codes, keys_of, page_shape, values_of
from bytefloor.ops.round_to import round_to

BAND_VALUES = 1 << 26
"""Values of a matrix that are turned into float64 at a time."""


@dataclass(frozen=True)
class Roundings:
    """What an executor rounds beside what the list says.

    activations: what products take, in place of the list's rounding; None for the list's own. weights: what values of
    matrices become. has_bf16_queries: scores take bf16 queries, which hold the scale, log2(e) and, where keys are made
    of values, the norm of the lanes that do not turn. sums: what a product's result becomes.
    """

    activations: str | None = None
    weights: str = "float32"
    has_bf16_queries: bool = False
    sums: str = "float32"


ROW_ROUNDINGS = Roundings(activations="bf16", weights="bf16", has_bf16_queries=True)
"""Of the kernels of many rows; those of decoding round what the list says."""


@dataclass
class Matrices:
    """Decoded matrices of the calls at hand: the next call drops those of the one before."""

    device: torch.device
    _held: dict[int, tuple[Weight, Tensor]] = field(default_factory=dict)

    def values(self, weight: Weight) -> Tensor:
        """Float32, as the file has them."""
        if id(weight) not in self._held:
            self._held[id(weight)] = (weight, load_on(weight, self.device))
        return self._held[id(weight)][1]

    def bands(self, weight: Weight, to: str) -> Iterator[Tensor]:
        """Some rows after the other, rounded and in float64."""
        whole = self.values(weight)
        step = max(1, BAND_VALUES // whole.shape[1])
        for first in range(0, whole.shape[0], step):
            yield round_to(whole[first : first + step], to).double()

    def keep_only(self, calls: Sequence[OpCall]) -> None:
        needed = {id(weight) for call in calls for weight in call.weights}
        self._held = {key: held for key, held in self._held.items() if key in needed}


def load_on(weight: Weight, device: torch.device) -> Tensor:
    """Exact float32 values, decoded where they will be used: a large model takes minutes on a CPU."""
    if device.type == "cpu":
        return weight.load()
    stored = weight.stored

    def read() -> dict[str, Tensor]:
        return {name: part.to(device) for name, part in stored.read().items()}

    return replace(weight, stored=replace(stored, read=read)).load()


def new_pools(step: Step, plan: CachePlan, device: torch.device) -> dict[str, Tensor]:
    """The pages of each kind as a device keeps them, all NaN: float64 where the list rounds nothing."""
    pools = {}
    for kind in step.kinds:
        page, dtype = page_shape(kind.storage, kind.n_kv_heads, plan.page_size, kind.head_size, kind.rotated)
        shape = (step.n_cache_layers[kind.name], plan.n_pages(kind), *page)
        if kind.storage == "float32":
            pools[kind.name] = torch.full(shape, math.nan, dtype=torch.float64, device=device)
        else:
            pools[kind.name] = torch.empty(shape, dtype=dtype, device=device)
            pools[kind.name].view(torch.uint8).fill_(0xFF)
    return pools


class Oracle:
    """The values of every buffer of a step over one text, float64, all rows at once.

    ids: the text, whose pages the plan has room for in one chunk. The cache is kept as the list says it is.
    """

    def __init__(
        self, step: Step, plan: CachePlan, ids: Sequence[int], device: torch.device, roundings: Roundings | None = None
    ) -> None:
        self.step, self.plan, self.ids, self.device = step, plan, tuple(ids), device
        self.roundings = roundings or Roundings()
        self.matrices = Matrices(device)
        self.pools = new_pools(step, plan, device)
        self.cache, self.batch = SequenceCache(plan, step.kinds, make_pools(plan, step.kinds)), Batch()
        self.cache.append_rows(self.batch, ids, range(len(ids)))
        self.values: dict[int, Tensor] = {}
        for name, buffer in step.inputs.items():
            self.values[buffer.id] = torch.tensor(getattr(self.batch, name), dtype=torch.int64, device=device)
        for name, buffer in step.tables.items():
            self.values[buffer.id] = torch.tensor(self.batch.tables[name], dtype=torch.int64, device=device)
        self._uses: dict[int, int] = {}
        for call in step.calls:
            for operand in call.operands.values():
                if isinstance(operand, Buffer):
                    self._uses[operand.id] = self._uses.get(operand.id, 0) + 1
        self._kept = {buffer.id for buffer in (*step.inputs.values(), *step.tables.values(), step.logits)}

    def inputs_of(self, calls: Sequence[OpCall]) -> dict[int, Tensor]:
        """What these calls read that they do not make; they have not been taken in yet."""
        made = {call.output.id for call in calls if call.output is not None}
        read = {o.id for call in calls for o in call.operands.values() if isinstance(o, Buffer)}
        return {key: self.values[key] for key in read - made}

    def take_in(self, calls: Sequence[OpCall]) -> None:
        """Compute the next calls; values that nobody reads after them are dropped, so each call comes once."""
        self.matrices.keep_only(calls)
        for call in calls:
            result = self.result(call, self.values)
            if call.output is not None:
                self.values[call.output.id] = result
        for call in calls:
            for operand in call.operands.values():
                if isinstance(operand, Buffer):
                    self._uses[operand.id] -= 1
        gone = [key for key in self.values if self._uses.get(key, 0) == 0 and key not in self._kept]
        for key in gone:
            del self.values[key]

    def result(self, call: OpCall, values: Mapping[int, Tensor], pool: Tensor | None = None) -> Any:
        """What the call makes of values by buffer. pool: of its layer, in place of the oracle's own."""
        arguments: dict[str, Any] = dict(call.attributes)
        for name, operand in call.operands.items():
            if isinstance(operand, Buffer):
                arguments[name] = values[operand.id]
            elif call.op.name == "embed":
                arguments[name] = StoredRows(operand, torch.float64, self.device)
            elif call.op.name != "linear":
                arguments[name] = self.matrices.values(operand).double()
        if call.cache is not None:
            arguments["cache"] = self.pool_of(call.cache) if pool is None else pool
        if call.op.name == "linear":
            return self._product(arguments["x"], call)
        if call.op.name == "round_to" and self.roundings.activations is not None:
            arguments["to"] = self.roundings.activations
        if call.op.name == "attention" and self.roundings.has_bf16_queries:
            arguments["q"] = hold_queries(**arguments)
        return call.op.reference(**arguments)

    def _product(self, x: Tensor, call: OpCall) -> Tensor:
        weight = call.operands["weight"]
        assert isinstance(weight, Weight)
        if self.roundings.sums != "float32":  # of an executor whose products take whatever they get in that type
            x = round_to(x, self.roundings.sums)
        bands = self.matrices.bands(weight, self.roundings.weights)
        return torch.cat([x @ band.T for band in bands], dim=-1)

    def pool_of(self, layer: CacheLayer) -> Tensor:
        return self.pools[layer.kind.name][layer.index]


def query_factor(q: Tensor, scale: float, rotated: int, k_norm: Tensor | None) -> Tensor:
    """[E]: what queries are multiplied with before they become bf16."""
    factor = torch.full_like(q[0, 0], scale * math.log2(math.e))
    if k_norm is None:
        return factor
    e = q.shape[-1]
    stands = torch.arange(e, device=q.device) % (e // 2) >= rotated // 2
    return torch.where(stands & (k_norm != 0), factor * k_norm, factor)


def hold_queries(q: Tensor, scale: float, rotated: int = 0, k_norm: Tensor | None = None, **others: object) -> Tensor:
    """Queries [T, H, E] as bf16 ones act, which hold the factor."""
    factor = query_factor(q, scale, rotated, k_norm)
    return round_to(q * factor, "bf16") / factor


def kept_values(pool: Tensor, layer: CacheLayer, table: Sequence[int], page_size: int, n: int) -> Tensor:
    """What a layer's pages hold of positions 0 .. n - 1, float64 [n, 2 or 1, J, values of a head]."""
    pages = [table[(p // page_size) % len(table)] for p in range(0, n, page_size)]
    held = values_of(pool[pages], layer.kind.head_size, layer.kind.storage)
    return held.movedim(-2, 1).flatten(0, 1)[:n].double()


def keys_and_values(kept: Tensor, layer: CacheLayer, k_norm: Tensor | None) -> tuple[Tensor, Tensor]:
    """K and V [n, J, E] of what pages hold, as attention takes them."""
    if not layer.kind.rotated:
        return kept[:, 0], kept[:, 1]
    assert k_norm is not None
    return keys_of(kept[:, 0], k_norm.double(), layer.kind.rotated), kept[:, 0, :, : layer.kind.head_size]


def hide(pool: Tensor, table: Sequence[int], page_size: int, first: int, stop: int) -> None:
    """NaN in a layer's pages at positions first .. stop - 1, in place; of codes in their scales."""
    positions = torch.arange(first, max(first, stop), device=pool.device)
    pages = torch.tensor(table, device=pool.device)[(positions // page_size) % len(table)]
    offsets = positions % page_size
    if holds_codes(pool):
        codes, scales = codes_and_scales(pool, pool.shape[-1] // page_size - SCALE_BYTES)
        codes[pages, :, :, offsets] = 0xFF
        scales[pages, :, :, offsets] = math.nan
    else:
        pool[pages, :, :, offsets] = math.nan
