"""Batches of prompts on the device, and how far bf16 may move their logits: what tests of prompts share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bytefloor.engine.batch import Batch
from bytefloor.engine.cache import NULL_PAGE, CachePlan, SequenceCache, make_pools
from bytefloor.engine.device import DeviceExecutor
from bytefloor.engine.loading import DEVICE_ROUNDING
from bytefloor.engine.reference import ReferenceExecutor
from bytefloor.files.stored import Checkpoint
from bytefloor.model.step import Step
from device_rows import difference, reference_rows, settle, step_of, worst_row
from rows_reference import as_rows

MORE = 1.7
"""Times what rounding activations, weights and queries as the kernels of few rows do makes of the reference's logits.

Shares of attention are rounded too, which the reference leaves as they are, and keys and values then stand elsewhere
between two numbers of the cache: the rest is for these."""
MORE_A_ROW = 2.7
"""The same of the row that is farthest off, where the largest of many such errors is compared with that of as many."""


def ids_of(n: int, seed: int = 1, below: int = 300) -> list[int]:
    """Random tokens."""
    return torch.randint(0, below, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


@dataclass(frozen=True)
class Expected:
    """Logits [T, V] of the reference that rounds what the decoding kernels round, and how far others may be from them.

    most: of all rows together, relative. most_a_row: of each.
    """

    logits: Tensor
    most: float
    most_a_row: float

    def check(self, found: Tensor, first: int = 0) -> None:
        """found: rows of consecutive positions, from the first on."""
        expected = self.logits[first : first + len(found)]
        assert found.shape == expected.shape
        error, worst = difference(found, expected), worst_row(found, expected)
        assert error < self.most, f"{len(found)} rows: {error:.2e}, at most {self.most:.2e}"
        assert worst < self.most_a_row, f"{len(found)} rows, the worst: {worst:.2e}, at most {self.most_a_row:.2e}"


def expect(checkpoint: Checkpoint, ids: Sequence[int], device: torch.device, storage: str = "bf16") -> Expected:
    """Of a text; what comes after a position changes nothing before it, so one text serves all shorter ones."""
    codes = step_of(checkpoint, replace(DEVICE_ROUNDING, cache=storage))
    rounded, rougher = (reference_rows(step, ids, device) for step in (codes, as_rows(codes, 1, device)))
    return Expected(rounded, MORE * difference(rougher, rounded), MORE_A_ROW * worst_row(rougher, rounded))


def spoil(executor: DeviceExecutor) -> None:
    """NaN in the cache, in what decoding writes, and in every buffer of a chunk.

    In whole row tiles too: all that write them write zeros behind their columns, and rows of padding may hold anything.
    """
    settle(executor.device)
    for room in executor._prompts._planner._rooms.values():
        room.fill_(float("nan"))
    executor.poison()
    settle(executor.device)


def caches_of(executor: DeviceExecutor, n: int) -> list[SequenceCache]:
    """Of n sequences that share the pools."""
    pools = make_pools(executor.plan, executor.step.kinds)
    return [SequenceCache(executor.plan, executor.step.kinds, pools) for _ in range(n)]


def run_batch(
    executor: DeviceExecutor, rows: Sequence[tuple[SequenceCache, Sequence[int]]], wanted: Sequence[int] | None = None
) -> list[Tensor]:
    """Logits of each sequence's next rows, in one batch; they are not committed, so they can be run again.

    wanted: rows of each sequence, all where there is None.
    """
    batch, n_wanted = Batch(), []
    for cache, ids in rows:
        chosen = [row for row in range(len(ids)) if wanted is None or row in wanted]
        cache.append_rows(batch, ids, chosen)
        n_wanted.append(len(chosen))
    return list(executor.run(batch).float().clone().split(n_wanted))


def feed(executor: DeviceExecutor, cache: SequenceCache, ids: Sequence[int], chunk: int = 0) -> None:
    """Rows that want no logits, so many at a time or all at once; nobody waits for them."""
    for start in range(0, len(ids), chunk or len(ids)):
        rows, batch = ids[start : start + (chunk or len(ids))], Batch()
        cache.append_rows(batch, rows, [])
        assert executor.run(batch).shape == (0, executor.step.logits.shape[-1])
        cache.commit(len(rows))


def spoil_pages(executor: DeviceExecutor, cache: SequenceCache) -> None:
    """NaN in all that one sequence has in the cache, of codes in their scales."""
    settle(executor.device)
    for kind in executor.step.kinds:
        pages = sorted({page for page in cache.table(kind) if page != NULL_PAGE})
        assert pages
        executor.pools[kind.name].view(torch.uint8)[:, pages] = 0xFF
    settle(executor.device)


def largest_of(step: Step, ids: Sequence[int], device: torch.device, op: str) -> float:
    """The largest absolute result of an op anywhere in the model, by the reference."""
    plan, found, batch = CachePlan(max(256, len(ids)), len(ids)), [0.0], Batch()
    executor = ReferenceExecutor(step, plan, device=device)
    SequenceCache(plan, step.kinds, make_pools(plan, step.kinds)).append_rows(batch, ids, [])
    executor.run(batch, lambda call, result: found.append(result.abs().max().item()) if call.op.name == op else None)
    return max(found)
