"""What must not make decoding slower."""

from __future__ import annotations

import time

import torch

from bytefloor.engine.batch import Batch
from bytefloor.engine.cache import CachePlan, SequenceCache
from bytefloor.engine.device import DeviceExecutor
from bytefloor.engine.synthetic import checkpoint_of
from device_rows import Make, cache_at, rows_of, step_of
from gpu.test_device_executor import SHAPES

DEPTH, N_TOKENS = 8200, 200


def seconds_of(executor: DeviceExecutor, cache: SequenceCache) -> float:
    """Of tokens that go from the device to the device, on top of what the cache holds."""
    batch = Batch()
    cache.append_rows(batch, [5], [0], n_reserved=N_TOKENS)
    start = time.perf_counter()
    assert len(executor.decode_greedy(batch, N_TOKENS).tolist()) == N_TOKENS
    return time.perf_counter() - start


def test_a_long_prompt_leaves_decoding_as_fast_as_it_was(make: Make, card: torch.device) -> None:
    """X04: prompts are launched past the graph of decoding, which goes on being replayed."""
    step = step_of(checkpoint_of("qwen3", SHAPES["qwen3"], "Q4_K_M", card))
    executor = make(step, CachePlan(DEPTH + 2 * N_TOKENS, 2048))
    for pool in executor.pools.values():
        pool.zero_()
    before = min(seconds_of(executor, cache_at(executor, DEPTH)) for _ in range(5))
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        rows_of(executor, torch.randint(0, 300, (DEPTH,), generator=generator).tolist(), 2048)
    after = min(seconds_of(executor, cache_at(executor, DEPTH)) for _ in range(5))
    assert after < 1.15 * before
