"""Hidden values of many rows, added up: what embeddings are made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from bytefloor.engine.batch import Batch
from bytefloor.engine.cache import CachePlan, SequenceCache
from bytefloor.engine.device import DeviceExecutor
from bytefloor.engine.loading import DEVICE_ROUNDING
from bytefloor.engine.reference import ReferenceExecutor
from bytefloor.model.step import Step
from bytefloor.model.weights import Weight
from device_prompts import MORE, caches_of, ids_of, run_batch, spoil
from device_rows import Make, cache_at, difference, step_of
from gpu.test_prompts import FLOAT32, checkpoint

LENGTHS = (40, 2, 300, 7)
"""Of sequences beside each other: some share an atom of eight rows, one ends behind the rows summed at a time."""
TEXTS = [ids_of(n, seed=n) for n in LENGTHS]


def sums_of(
    executor: DeviceExecutor | ReferenceExecutor, rows: Sequence[tuple[SequenceCache, Sequence[int]]]
) -> Tensor:
    batch = Batch()
    for cache, ids in rows:
        cache.append_rows(batch, ids, [])
    return executor.sum_hidden(batch)


def test_the_head_of_the_sums_is_the_sum_of_the_logits(make: Make, card: torch.device) -> None:
    """Of a model whose head is bf16, without a cap: nothing is left out, added twice or somebody else's."""
    step = step_of(checkpoint("llama", card))
    executor = make(step, CachePlan(512, 384, n_sequences=len(LENGTHS)))
    rows = list(zip(caches_of(executor, len(LENGTHS)), TEXTS, strict=True))
    logits = torch.stack([found.double().sum(0) for found in run_batch(executor, rows)])
    spoil(executor)
    found = sums_of(executor, rows)
    head = step.calls[-1].operands["weight"]
    assert isinstance(head, Weight)
    assert found.dtype == torch.float64
    # Sums of as many rows are as many times as large.
    assert difference(found @ head.load().double().to(card).T, logits) < FLOAT32
    spoil(executor)
    assert torch.equal(found, sums_of(executor, rows))


def reference_rows(step: Step, ids: Sequence[int], card: torch.device) -> Tensor:
    """What the head of the reference gets of each row, [T, D]."""
    executor = ReferenceExecutor(step, CachePlan(384, 384), device=card)
    batch, found = Batch(), []
    cache_at(executor, 0).append_rows(batch, ids, range(len(ids)))
    executor.run(batch, lambda call, result: found.append(result) if call.output is step.hidden else None)
    return found[0].double()


@pytest.mark.parametrize("name", ["gemma4", "gemma4-e", "qwen3"])
def test_sums_are_those_of_the_reference(make: Make, card: torch.device, name: str) -> None:
    """In chunks, over NaN in pages and buffers. A sum is no farther off than all its rows together may be."""
    source, ids, plan = checkpoint(name, card), TEXTS[2], CachePlan(384, 100)
    rounded, rougher = (
        reference_rows(step_of(source, rounding), ids, card)
        for rounding in (DEVICE_ROUNDING, replace(DEVICE_ROUNDING, activations="bf16"))
    )
    executor = make(step_of(source), plan)
    cache, total = cache_at(executor, 0), torch.zeros_like(rounded[0])
    for start in range(0, len(ids), plan.chunk):
        part = ids[start : start + plan.chunk]
        total += sums_of(executor, [(cache, part)])[0]
        cache.commit(len(part))
    error = (total - rounded.sum(0)).norm() / rounded.norm(dim=-1).sum()
    assert error < MORE * difference(rougher, rounded)
