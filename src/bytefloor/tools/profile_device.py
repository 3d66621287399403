"""A token or a chunk on a device, inside its CUDA graph, by the card's own clock: see engine/stamps.py.

The graph that is measured and one of the same launches with stamps run by turns, several replays at a time. The time of
a step is that of the first; what the stamps cost is how much longer the second takes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Literal

import torch

from bytefloor.engine.batch import Batch
from bytefloor.engine.decode_loop import N_AHEAD, record
from bytefloor.engine.device import DeviceExecutor
from bytefloor.engine.planner import Launch
from bytefloor.engine.row_planner import RowStep
from bytefloor.engine.row_products import pad_rows
from bytefloor.engine.sampler import Sampler
from bytefloor.engine.sampling_params import SamplingParams
from bytefloor.engine.stamps import StampedGraph, Times
from bytefloor.tools.bench_prompt import empty_cache, prompt_ids
from bytefloor.tools.bench_rows import spread
from bytefloor.tools.bench_together import FIRST_TOKEN, fill_to
from bytefloor.tools.profile_data import Span, StepProfile
from bytefloor.tools.profile_spans import Rows, chunk_spans, token_spans

TOKENS_AT_A_TIME, CHUNKS_AT_A_TIME = 12, 4
"""Replays between two looks at a clock: of tokens each at the position behind the last."""
US = 1e-3


def measure_token(executor: DeviceExecutor, depth: int, repeats: int) -> StepProfile:
    """The token behind ``depth`` positions, whose pages hold what they hold; later replays see a few positions more.

    There must be room for two tokens.
    """
    n = min(TOKENS_AT_A_TIME, executor.plan.capacity - depth)
    cache, batch = empty_cache(executor), Batch()
    fill_to(cache, depth)
    cache.append_rows(batch, [FIRST_TOKEN], [0], n_reserved=n)

    def place() -> None:
        executor._prepare(batch)
        executor._set_state(FIRST_TOKEN, depth)

    graph = StampedGraph(executor.launches, executor.architecture, executor._stream, executor.device)
    measured = _measure(executor, place, executor._graph.replay, graph, n, repeats)
    profile = measured.profile("token", Rows(1, depth), token_spans(executor, depth))
    return replace(profile, sampling_us=_sampling_us(executor, batch, depth, n, profile.wall_us, repeats))


def measure_chunk(executor: DeviceExecutor, n_rows: int, depth: int, repeats: int) -> StepProfile:
    """So many rows behind ``depth`` positions, of which the last wants logits: the last chunk of a prompt."""
    cache, batch, prompts = empty_cache(executor), Batch(), executor._prompts
    fill_to(cache, depth)
    cache.append_rows(batch, prompt_ids(executor, n_rows), [n_rows - 1])
    pitch = pad_rows(n_rows)

    def place() -> None:
        executor._copy_pages(batch.copies)
        prompts._place(batch, pitch)

    with torch.cuda.stream(executor._stream), torch.inference_mode():
        place()
        walk = prompts._trunk(pitch).walk
        steps: list[RowStep] = [*walk.trunk, *walk.head(pad_rows(1)).launches]
        work = prompts._prepare(steps)
        work()
        plain = record(work, executor.device)
    graph = StampedGraph(steps, executor.architecture, executor._stream, executor.device)
    measured = _measure(executor, place, plain, graph, CHUNKS_AT_A_TIME, repeats)
    rows = Rows(n_rows, depth)
    return measured.profile("chunk", rows, chunk_spans(executor, steps, rows), steps)


@dataclass(frozen=True)
class _Measured:
    """Microseconds of a step without stamps and with them, and the launches' times, a list for each repeat."""

    plain: list[float]
    profiled: list[float]
    times: list[list[Times]]

    def profile(
        self, kind: Literal["token", "chunk"], rows: Rows, spans: Sequence[Span], steps: Sequence[RowStep] | None = None
    ) -> StepProfile:
        """steps: those of the spans, where some are torch's, which leave no times of their own."""
        launched = [i for i in range(len(spans)) if steps is None or isinstance(steps[i], Launch)]
        found = [_medians([times[place] for times in self.times], self.times) for place in range(len(launched))]
        timed: list[Span] = list(spans)
        for i, (there, ready, done) in zip(launched, found, strict=True):
            timed[i] = spans[i].timed(there, ready, done)
        for i in sorted(set(range(len(spans))) - set(launched)):
            # From the end of what was before it until the launch behind it has its inputs.
            start = max(span.end_us for span in timed[:i])
            timed[i] = spans[i].timed(start, start, max(start, timed[i + 1].ready_us))
        return StepProfile(
            kind=kind,
            rows=rows.n,
            depth=rows.depth,
            spans=tuple(timed),
            wall_us=median(self.plain),
            profiled_us=median(self.profiled),
            sampling_us=None,
            n_repeats=len(self.plain),
            spread=spread(self.plain),
        )


def _medians(of_one: Sequence[Times], all_times: Sequence[Sequence[Times]]) -> tuple[float, float, float]:
    """There, ready, done: microseconds from the step's first block."""
    begins = [times[0].there for times in all_times]
    there = median((time.there - begin) * US for time, begin in zip(of_one, begins, strict=True))
    ready = median((time.ready - begin) * US for time, begin in zip(of_one, begins, strict=True))
    return there, ready, median((time.done - begin) * US for time, begin in zip(of_one, begins, strict=True))


def _measure(
    executor: DeviceExecutor,
    place: Callable[[], None],
    plain: Callable[[], None],
    graph: StampedGraph,
    n: int,
    repeats: int,
) -> _Measured:
    """n replays of each at a time. place: puts the step where the replays find it."""
    found = _Measured([], [], [])
    for repeat in range(repeats + 1):
        plain_us = _us_a_replay(executor, place, plain, n)
        profiled_us = _us_a_replay(executor, place, graph.replay, n)
        if repeat:  # the first time warms up
            found.plain.append(plain_us)
            found.profiled.append(profiled_us)
            found.times.append(graph.times())
    return found


def _us_a_replay(executor: DeviceExecutor, place: Callable[[], None], replay: Callable[[], None], n: int) -> float:
    """Between the ends of the first and of the last of n replays."""
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    with torch.cuda.stream(executor._stream), torch.inference_mode():
        place()
        replay()
        first.record()
        for _ in range(n - 1):
            replay()
        last.record()
    torch.cuda.synchronize(executor.device)
    return first.elapsed_time(last) * 1e3 / (n - 1)


def _sampling_us(
    executor: DeviceExecutor, batch: Batch, depth: int, n: int, greedy_us: float, repeats: int
) -> float | None:
    """What a token with the default parameters takes beyond a greedy one, both from device to device."""
    params = SamplingParams(seed=1)
    loop = executor.make_loop()
    if not loop.can_serve(params):
        return None
    beyond = []
    for repeat in range(repeats + 1):
        loop.start(Sampler(params, [FIRST_TOKEN]), [FIRST_TOKEN] * (depth + 1), depth + 1)
        loop.launch(batch)
        loop.next()
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record(executor._stream)
        for _ in range(n - 1):
            loop.launch(None)
            while loop.n_under_way >= N_AHEAD:
                loop.next()
        last.record(executor._stream)
        torch.cuda.synchronize(executor.device)
        loop.stop()
        if repeat:
            beyond.append(first.elapsed_time(last) * 1e3 / (n - 1) - greedy_us)
    return median(beyond)
