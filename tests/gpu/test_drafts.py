"""Rows of one sequence in a step, as drafts are: each gets, bit for bit, the logits it gets alone."""

from __future__ import annotations

import pytest
import torch
from test_device_executor import SHAPES, step_of
from torch import Tensor

from bytefloor.engine.batch import Batch
from bytefloor.engine.cache import CachePlan, SequenceCache, make_pools
from bytefloor.engine.device import DeviceExecutor

IDS = torch.randint(0, 300, (290,), generator=torch.Generator().manual_seed(1)).tolist()


def decoded(executor: DeviceExecutor, depth: int, chunk: int, n: int = 48) -> Tensor:
    """Logits of n rows behind the first ``depth``, so many at a time."""
    cache = SequenceCache(executor.plan, executor.step.kinds, make_pools(executor.plan, executor.step.kinds))
    found = []
    end = depth + n
    for start, stop in [(0, depth), *((at, min(at + chunk, end)) for at in range(depth, end, chunk))]:
        batch = Batch()
        cache.append_rows(batch, IDS[start:stop], range(stop - start) if start else [])
        found.append(executor.run(batch))
        cache.commit(stop - start)
    return torch.cat(found)


@pytest.mark.parametrize("kind", ["Q4_K_M", "BF16"])
@pytest.mark.parametrize("name", list(SHAPES))
def test_rows_of_a_draft_get_what_each_gets_alone(name: str, kind: str) -> None:
    """Inside a tile and across the ends of tiles, pages, runs and windows; graphs that are full and that are not."""
    executor = DeviceExecutor(step_of(name, kind), CachePlan(512, 256), draft_rows=16)
    assert executor.most_draft_rows == 16
    for depth in (5, 50, 120, 230):
        executor.poison()
        alone = decoded(executor, depth, 1)
        assert bool(alone.isfinite().all())
        for chunk in (2, 4, 5, 8, 11, 16):
            executor.poison()
            assert torch.equal(decoded(executor, depth, chunk), alone), (depth, chunk)


@pytest.mark.parametrize("storage", ["int8", "fp8"])
def test_drafts_over_a_cache_of_codes(storage: str) -> None:
    executor = DeviceExecutor(step_of("gemma3", storage=storage), CachePlan(512, 256), draft_rows=8)
    alone = decoded(executor, 100, 1)
    for chunk in (3, 8):
        executor.poison()
        assert torch.equal(decoded(executor, 100, chunk), alone), chunk


def test_a_draft_deep_in_a_band_of_many_runs() -> None:
    """New positions lie in two runs, of which neither may be read before they are there."""
    executor = DeviceExecutor(step_of("gemma4"), CachePlan(8192, 512, n_snapshots=0), draft_rows=16)
    for pool in executor.pools.values():
        pool.normal_(generator=torch.Generator("cuda").manual_seed(1))
    kept = {name: pool.clone() for name, pool in executor.pools.items()}
    for depth in (4090, 6000, 8100):
        found = []
        for chunk in (1, 4, 16):
            for name, pool in executor.pools.items():
                pool.copy_(kept[name])
            torch.cuda.synchronize()
            cache = SequenceCache(executor.plan, executor.step.kinds, make_pools(executor.plan, executor.step.kinds))
            for start in range(0, depth, 512):
                n = min(512, depth - start)
                cache.show(Batch(), n)
                cache.commit(n)
            rows = []
            for start in range(0, 16, chunk):
                batch = Batch()
                cache.append_rows(batch, IDS[start : start + chunk], range(chunk))
                rows.append(executor.run(batch))
                cache.commit(chunk)
            found.append(torch.cat(rows))
        assert torch.equal(found[0], found[1])
        assert torch.equal(found[0], found[2])
