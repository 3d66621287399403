"""Several sequences a step: each gets, bit for bit, the logits it gets alone."""

from __future__ import annotations

import pytest
import torch
from test_device_executor import SHAPES, step_of
from torch import Tensor

from bytefloor.engine.batch import Batch
from bytefloor.engine.cache import CachePlan, SequenceCache, make_pools
from bytefloor.engine.device import DeviceExecutor

LENGTHS = (3, 140, 27, 200, 1, 70, 12, 150, 8, 64, 45, 65, 63, 90, 5, 127)
"""Of what each sequence has before it decodes with the others: one tile and several, inside windows and beyond."""
N_STEPS = 9
CAPACITY = 512


def ids_of(sequence: int) -> list[int]:
    generator = torch.Generator().manual_seed(sequence)
    return torch.randint(0, 300, (LENGTHS[sequence] + N_STEPS,), generator=generator).tolist()


def one_row(executor: DeviceExecutor, cache: SequenceCache, token: int) -> Tensor:
    batch = Batch()
    cache.append_rows(batch, [token], [0])
    logits = executor.run(batch)[0]
    cache.commit(1)
    return logits


def prefill(executor: DeviceExecutor, caches: list[SequenceCache]) -> None:
    for sequence, cache in enumerate(caches):
        batch, n = Batch(), LENGTHS[sequence]
        cache.append_rows(batch, ids_of(sequence)[:n], [])
        executor.run(batch)
        cache.commit(n)


def caches_of(executor: DeviceExecutor) -> list[SequenceCache]:
    pools = make_pools(executor.plan, executor.step.kinds)
    return [SequenceCache(executor.plan, executor.step.kinds, pools) for _ in LENGTHS]


def together(
    executor: DeviceExecutor, caches: list[SequenceCache], chosen: list[int], is_eager: bool = False
) -> Tensor:
    batch = Batch()
    for s in chosen:
        caches[s].append_rows(batch, [ids_of(s)[caches[s].length]], [0])
    logits = executor.run(batch, is_eager)
    for s in chosen:
        caches[s].commit(1)
    return logits


@pytest.mark.parametrize("kind", ["Q4_K_M", "BF16"])
@pytest.mark.parametrize("name", list(SHAPES))
def test_sequences_together_get_the_bits_that_each_gets_alone(name: str, kind: str) -> None:
    """S06, S07, S08, X02: every number from 2 to 16, unequal lengths, sequences that come and go, padded graphs."""
    executor = DeviceExecutor(step_of(name, kind), CachePlan(CAPACITY, 256, len(LENGTHS)))
    assert executor.batch_sizes == (4, 8, 16)
    executor.poison()
    alone = caches_of(executor)
    prefill(executor, alone)
    expected = [[one_row(executor, cache, t) for t in ids_of(s)[LENGTHS[s] :]] for s, cache in enumerate(alone)]
    for cache in alone:
        cache.free()
    executor.poison()
    caches = caches_of(executor)
    prefill(executor, caches)
    done = [0] * len(LENGTHS)
    for n in (16, 2, 3, 5, 9, 13, 4, 8, 7, 6, 10, 11, 12, 14, 15):
        open_ones = sorted((s for s in range(len(LENGTHS)) if done[s] < N_STEPS), key=lambda s: (done[s], -s))[:n]
        for s, logits in zip(open_ones, together(executor, caches, open_ones), strict=True):
            assert torch.equal(logits, expected[s][done[s]]), f"sequence {s} of {len(open_ones)}, step {done[s]}"
            done[s] += 1
    assert sum(done) == sum(range(2, 17))


def test_replaying_a_batch_equals_launching() -> None:
    """X02: for every number of sequences up to the largest graph."""
    executor = DeviceExecutor(step_of("gemma4"), CachePlan(CAPACITY, 256, len(LENGTHS)))
    for n in range(2, len(LENGTHS) + 1):
        found = []
        for is_eager in (False, True):
            executor.poison()
            caches = caches_of(executor)
            prefill(executor, caches[:n])
            found.append(together(executor, caches, list(range(n)), is_eager))
        assert bool(found[0].isfinite().all())
        assert torch.equal(*found)


def test_deep_and_shallow_sequences_share_a_step() -> None:
    """A band of many runs beside bands of one: blocks take several runs, cut as they are for one sequence."""
    executor = DeviceExecutor(step_of("gemma4"), CachePlan(16384, 512, 8, n_snapshots=0))
    pools = make_pools(executor.plan, executor.step.kinds)
    caches = [SequenceCache(executor.plan, executor.step.kinds, pools) for _ in range(8)]
    for pool in executor.pools.values():
        pool.normal_()
    depths = (9001, 15000, 3, 700, 12345, 64, 2048, 5000)
    for cache, depth in zip(caches, depths, strict=True):
        batch = Batch()
        for start in range(0, depth, 512):
            n = min(512, depth - start)
            cache.show(batch, n)
            cache.commit(n)
    expected = [one_row(executor, cache, 7) for cache in caches]
    for cache in caches:
        cache.rewind(cache.length - 1)
    batch = Batch()
    for cache in caches:
        cache.append_rows(batch, [7], [0])
    assert torch.equal(executor.run(batch), torch.stack(expected))
