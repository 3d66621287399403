"""What ``bench`` looks at before it measures: a speed is worth nothing where kernels are wrong.

The same tokens go one by one, a few at a time and all at once. On a device those are roads that share little: decoding
has products and attention of its own, few rows and many have other weights. Each layer's keys and values must come out
alike, and the last logits: so a wrong kernel shows in the layer behind it, before what is left of a deep model has made
anything of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bytefloor.engine.batch import Batch
from bytefloor.engine.cache import SequenceCache
from bytefloor.engine.device import MOST_ROWS_ONE_BY_ONE, DeviceExecutor
from bytefloor.engine.row_products import FEW_ROWS, pad_rows
from bytefloor.errors import NumericalError
from bytefloor.model.step import CacheLayer
from bytefloor.ops.pages import values_of
from bytefloor.tools.bench_prompt import empty_cache
from bytefloor.tools.bench_together import CHECKED, FIRST_TOKEN, Executor


@dataclass(frozen=True)
class Bounds:
    """Of relative errors: first, of keys and values in the first layer; more, for each layer after it. Logits come
    behind the last."""

    first: float
    more: float

    def at(self, layer: int) -> float:
        """Of keys and values; the logits' layer is the number of layers."""
        return self.first + layer * self.more


MOST_ERROR = {
    "float32": Bounds(1e-5, 1e-5),
    "bf16": Bounds(0.03, 0.006),
    "int8": Bounds(0.04, 0.01),
    "fp8": Bounds(0.1, 0.02),
    "k4v2": Bounds(0.03, 0.006),
}
"""By what the cache keeps; of k4v2 what is looked at is bf16. Roundings differ, to bf16 here and to codes of 16 bits
there, and a model with random weights makes more of that in each layer. On a card Qwen3 8B, Gemma 4 12B and SmolLM2
come to at most four fifths of these, a random Llama 3.1 8B to three times as much: docs/log.md has the numbers."""


LOOSE = 4.0
"""Times these for few rows: of random blocks, whose minimums are anything, their weights are off by half as much again,
and where groups of activations have a sum the errors of minimums add up. Nothing is allowed more."""
AMPLIFIED = 4.0
"""Up to that, so many times as far as the others lie from each other a road may lie from them. Some models make ten
times as much of a rounding as others, random ones without norms of queries and keys above all, and do it on each road;
one that is wrong leaves the others near."""
FEW_AT_A_TIME = MOST_ROWS_ONE_BY_ONE + 8


@dataclass(frozen=True)
class Apart:
    """In one place, the road that lies farthest from its nearest. layer: None for the last logits. error: of the norm,
    to the nearest of the others; bound: what that may be."""

    layer: int | None
    road: str
    others: str
    error: float
    bound: float

    @property
    def what(self) -> str:
        """In words."""
        return "logits" if self.layer is None else f"keys and values of layer {self.layer}"

    @property
    def is_wrong(self) -> bool:
        """NaN is, too: it compares false with everything."""
        return not self.error < self.bound


def check_kernels(executor: Executor) -> tuple[Apart, ...]:
    """NumericalError, with the layer, where roads differ by more than roundings can explain."""
    n_rows = most_rows(executor) if isinstance(executor, DeviceExecutor) else CHECKED
    found = compare_roads(executor, [(FIRST_TOKEN + 7 * i) % 200 for i in range(n_rows)])
    culprit = "a kernel" if isinstance(executor, DeviceExecutor) else "an operation"
    for apart in found:
        if apart.is_wrong:
            raise NumericalError(
                f"{apart.what}: {apart.road} differ from {apart.others} by {apart.error:.3g}, "
                f"expected below {apart.bound:.3g}: {culprit} is wrong"
            )
    return found


def most_rows(executor: Executor) -> int:
    """As many as it takes for the kernels of many rows, where there is room."""
    return min(FEW_ROWS + 8, executor.plan.chunk, executor.plan.capacity)


def compare_roads(executor: Executor, ids: Sequence[int]) -> tuple[Apart, ...]:
    """The same rows one by one, a few at a time and all at once, layer by layer, and the last logits behind them.
    Writes over the first pages. Only kernels have a road for few rows: elsewhere there are two."""
    chunks = [1, len(ids)]
    if isinstance(executor, DeviceExecutor) and pad_rows(len(ids)) > FEW_ROWS:
        chunks.insert(1, FEW_AT_A_TIME)
    left = {chunk: _run(executor, ids, chunk) for chunk in chunks}
    n_layers = len(left[1]) - 1
    return tuple(
        _compare(executor, {chunk: values[i] for chunk, values in left.items()}, None if i == n_layers else i, i)
        for i in range(n_layers + 1)
    )


def _compare(executor: Executor, values: Mapping[int, Tensor], layer: int | None, depth: int) -> Apart:
    """values: of each road, by rows at a time. depth: layers before."""
    is_device, n_all = isinstance(executor, DeviceExecutor), max(values)
    roads = {1: "rows one by one", FEW_AT_A_TIME: f"{FEW_AT_A_TIME} rows at a time", n_all: f"{n_all} rows at once"}
    aparts = []
    for chunk, own in values.items():
        others = {at: other for at, other in values.items() if at != chunk}
        bound = MOST_ERROR[executor.step.storage].at(depth)
        most = LOOSE * bound
        # Of two roads neither is the one that is apart.
        blamed = [chunk] if len(others) == 2 else values
        if is_device and any(at > 1 and pad_rows(at) <= FEW_ROWS for at in blamed):
            bound = most
        elif len(others) == 2:
            bound = max(bound, min(most, AMPLIFIED * _error(*others.values())))
        error = min(_error(own, other) for other in others.values())
        aparts.append(Apart(layer, roads[chunk], " and ".join(roads[at] for at in others), error, bound))
    return max(aparts, key=lambda apart: (apart.is_wrong, apart.error / apart.bound))


def _error(one: Tensor, other: Tensor) -> float:
    """Of the smaller norm; infinite where a value is not finite."""
    error = float((one - other).norm() / torch.minimum(one.norm(), other.norm()))
    return error if math.isfinite(error) else math.inf


def _run(executor: Executor, ids: Sequence[int], chunk: int) -> list[Tensor]:
    """What a prompt leaves in each layer's pages, float32, and its last logits behind them."""
    cache, logits = empty_cache(executor), torch.empty(0)
    for start in range(0, len(ids), chunk):
        rows, batch = ids[start : start + chunk], Batch()
        cache.append_rows(batch, rows, [len(rows) - 1])
        logits = executor.run(batch)[0].float()
        cache.commit(len(rows))
    return [*(_kept(executor, cache, layer) for layer in _layers(executor)), logits.clone()]


def _layers(executor: Executor) -> list[CacheLayer]:
    """Those that write keys and values, in the order of the model."""
    return [call.cache for call in executor.step.calls if call.op.name == "cache_write" and call.cache is not None]


def _kept(executor: Executor, cache: SequenceCache, layer: CacheLayer) -> Tensor:
    kind, plan = layer.kind, cache.plan
    pages = cache.table(kind)[: -(-cache.length // plan.page_size)]
    held = values_of(executor.pools[kind.name][layer.index][pages], kind.head_size, kind.storage)
    # [pages, 2 or 1, J, PAGE, E]: positions in order.
    return held.movedim(-2, 1).flatten(0, 1)[: cache.length].float().clone()
