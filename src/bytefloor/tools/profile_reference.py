"""A token or a chunk of the reference executor, call by call, by the clock of the host.

The executor walks its list as ever; each op's reference has a clock around it while it is profiled. What the clocks
cost is measured against the same step without them, the two by turns.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from statistics import median
from typing import Any

from torch import Tensor

from bytefloor.engine.batch import Batch
from bytefloor.engine.reference import ReferenceExecutor
from bytefloor.engine.sampler import Sampler
from bytefloor.engine.sampling_params import SamplingParams
from bytefloor.model.step import OpCall
from bytefloor.tools.bench_prompt import empty_cache, prompt_ids
from bytefloor.tools.bench_rows import spread
from bytefloor.tools.bench_together import FIRST_TOKEN, fill_to, now
from bytefloor.tools.profile_data import StepProfile
from bytefloor.tools.profile_spans import Rows, reference_spans

WARM_UP = 2


def measure_token(executor: ReferenceExecutor, depth: int, repeats: int) -> StepProfile:
    """The token behind ``depth`` positions, whose pages hold what they hold."""
    batch = _batch(executor, [FIRST_TOKEN], depth)
    measured = _measure(executor, batch, Rows(1, depth), repeats)
    return replace(measured, sampling_us=_sampling_us(executor.run(batch), depth, repeats))


def measure_chunk(executor: ReferenceExecutor, n_rows: int, depth: int, repeats: int) -> StepProfile:
    """So many rows behind ``depth`` positions, of which the last wants logits: the last chunk of a prompt."""
    return _measure(executor, _batch(executor, prompt_ids(executor, n_rows), depth), Rows(n_rows, depth), repeats)


def _batch(executor: ReferenceExecutor, ids: list[int], depth: int) -> Batch:
    cache, batch = empty_cache(executor), Batch()
    fill_to(cache, depth)
    cache.append_rows(batch, ids, [len(ids) - 1])
    return batch


def _measure(executor: ReferenceExecutor, batch: Batch, rows: Rows, repeats: int) -> StepProfile:
    for _ in range(WARM_UP):
        executor.run(batch)
    plain, profiled, clocks = list[float](), list[float](), list[list[tuple[float, float]]]()
    for _ in range(repeats):
        begin = now(executor.device)
        executor.run(batch)
        plain.append((now(executor.device) - begin) * 1e6)
        with clocked(executor) as stamps:
            begin = now(executor.device)
            executor.run(batch)
            profiled.append((now(executor.device) - begin) * 1e6)
        clocks.append([((start - begin) * 1e6, (end - begin) * 1e6) for start, end in stamps])
    spans = reference_spans(executor, rows)
    times = [[median(found) for found in zip(*of_one, strict=True)] for of_one in zip(*clocks, strict=True)]
    return StepProfile(
        kind="token" if rows.n == 1 else "chunk",
        rows=rows.n,
        depth=rows.depth,
        spans=tuple(span.timed(start, start, end) for span, (start, end) in zip(spans, times, strict=True)),
        wall_us=median(plain),
        profiled_us=median(profiled),
        sampling_us=None,
        n_repeats=repeats,
        spread=spread(plain),
    )


@contextmanager
def clocked(executor: ReferenceExecutor) -> Iterator[list[tuple[float, float]]]:
    """While it lasts each call leaves (start, end) in seconds; on a GPU each waits for the one before it."""
    stamps: list[tuple[float, float]] = []

    def with_clock(call: OpCall) -> OpCall:
        def reference(**operands: Any) -> Any:
            start = now(executor.device)
            found = call.op.reference(**operands)
            stamps.append((start, now(executor.device)))
            return found

        return replace(call, op=replace(call.op, reference=reference))

    calls = executor._calls
    executor._calls = [(with_clock(call), constants, sources) for call, constants, sources in calls]
    try:
        yield stamps
    finally:
        executor._calls = calls


def _sampling_us(logits: Tensor, depth: int, repeats: int) -> float:
    """What a token with the default parameters costs the host beyond taking the best one."""
    values = logits[0].float().cpu().numpy()
    sampler = Sampler(SamplingParams(seed=1), [FIRST_TOKEN])
    beyond = []
    for _ in range(WARM_UP + repeats):
        begin = time.perf_counter()
        values.argmax()
        middle = time.perf_counter()
        sampler.sample(values, depth)
        beyond.append(((time.perf_counter() - middle) - (middle - begin)) * 1e6)
    return median(beyond[WARM_UP:])
