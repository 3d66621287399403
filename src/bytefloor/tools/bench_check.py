"""What ``bench`` looks at before it measures: a speed is worth nothing where kernels are wrong.

The same tokens go row by row and all at once; on a device that is through the kernels of decoding and through those of
many rows, which share no product and no attention. Each layer's keys and values must come out alike, and the last
logits: so a wrong kernel shows in the layer behind it, before what is left of a deep model has made anything of it.
"""

from __future__ import annotations

from collections.abc import Sequence
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
        return self.first + layer * self.more


MOST_ERROR = {
    "float32": Bounds(1e-5, 1e-5),
    "bf16": Bounds(0.03, 0.006),
    "int8": Bounds(0.04, 0.01),
    "fp8": Bounds(0.1, 0.02),
    "k4v2": Bounds(0.03, 0.006),
}
"""By what the cache keeps; of k4v2 what is looked at is bf16. Roundings differ, to bf16 here and to codes of 16 bits
there, and a model with random weights makes more of that in each layer. On a card Llama 3.1 8B, Qwen3 8B, Gemma 4 12B
and SmolLM2 come to at most four fifths of these: docs/log.md has the numbers."""


OF_FEW = 4.0
"""Times these for few rows: of random blocks, whose minimums are anything, their weights are off by half as much again,
and where groups of activations have a sum the errors of minimums add up."""


@dataclass(frozen=True)
class Drift:
    """Relative errors of keys and values, a number a layer that has any of its own, in order; and of logits."""

    layers: tuple[float, ...]
    logits: float


def check_kernels(executor: Executor) -> Drift:
    """NumericalError, with the layer, where the two roads differ by more than roundings can explain."""
    if not isinstance(executor, DeviceExecutor):
        return _check(executor, CHECKED)
    # Few rows have weights and kernels of their own, and so have many.
    _check(executor, MOST_ROWS_ONE_BY_ONE + 8)
    return _check(executor, min(FEW_ROWS + 8, executor.plan.chunk, executor.plan.capacity))


def drift_bounds(executor: Executor, n_rows: int) -> Bounds:
    """What ``drift`` of so many rows is held against."""
    bounds = MOST_ERROR[executor.step.storage]
    is_few = isinstance(executor, DeviceExecutor) and pad_rows(n_rows) <= FEW_ROWS
    return Bounds(OF_FEW * bounds.first, OF_FEW * bounds.more) if is_few else bounds


def _check(executor: Executor, n_rows: int) -> Drift:
    is_device = isinstance(executor, DeviceExecutor)
    found = drift(executor, [(FIRST_TOKEN + 7 * i) % 200 for i in range(n_rows)])
    bounds = drift_bounds(executor, n_rows)
    whose = "the decode kernels" if is_device else "rows one by one"
    other, culprit = ("those of many rows", "a kernel") if is_device else ("all rows at once", "an operation")
    for i, error in enumerate((*found.layers, found.logits)):
        what = f"keys and values of layer {i}" if i < len(found.layers) else "logits"
        most = bounds.at(i)
        # NaN fails too: it compares false with everything.
        if not error < most:
            raise NumericalError(
                f"{what} of {whose} differ from {other} by {error:.3g}, expected below {most:.3g}: {culprit} is wrong"
            )
    return found


def drift(executor: Executor, ids: Sequence[int]) -> Drift:
    """How far rows one by one are from all at once. Writes over the first pages."""
    (at_once, logits), (by_row, logits_by_row) = (_run(executor, ids, chunk) for chunk in (len(ids), 1))
    layers = tuple(_error(*pair) for pair in zip(by_row, at_once, strict=True))
    return Drift(layers, _error(logits_by_row, logits))


def _error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def _run(executor: Executor, ids: Sequence[int], chunk: int) -> tuple[list[Tensor], Tensor]:
    """What a prompt leaves in each layer's pages, float32, and its last logits."""
    cache, logits = empty_cache(executor), torch.empty(0)
    for start in range(0, len(ids), chunk):
        rows, batch = ids[start : start + chunk], Batch()
        cache.append_rows(batch, rows, [len(rows) - 1])
        logits = executor.run(batch)[0].float()
        cache.commit(len(rows))
    return [_kept(executor, cache, layer) for layer in _layers(executor)], logits.clone()


def _layers(executor: Executor) -> list[CacheLayer]:
    """Those that write keys and values, in the order of the model."""
    return [call.cache for call in executor.step.calls if call.op.name == "cache_write" and call.cache is not None]


def _kept(executor: Executor, cache: SequenceCache, layer: CacheLayer) -> Tensor:
    kind, plan = layer.kind, cache.plan
    pages = cache.table(kind)[: -(-cache.length // plan.page_size)]
    held = values_of(executor.pools[kind.name][layer.index][pages], kind.head_size, kind.storage)
    # [pages, 2 or 1, J, PAGE, E]: positions in order.
    return held.movedim(-2, 1).flatten(0, 1)[: cache.length].float().clone()
