"""Prompts as ``bench -p`` times them: tokens and arithmetic a second, and what part of the time attention takes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

import torch

from bytefloor.engine.batch import Batch
from bytefloor.engine.cache import SequenceCache, make_pools
from bytefloor.engine.device import MOST_ROWS_ONE_BY_ONE, DeviceExecutor
from bytefloor.engine.planner import Launch
from bytefloor.engine.row_products import pad_rows
from bytefloor.engine.stream_limit import timed_us
from bytefloor.engine.tensor_peak import tflops
from bytefloor.model.step import Step
from bytefloor.tools.bench_together import FIRST_TOKEN, Executor, now

TOKEN_STEP = 7919
"""From one token of a prompt to the next: rows that are all alike would take less power than a text's."""


@dataclass(frozen=True)
class PromptSpeed:
    """rates: prompt tokens a second of each repeat. The others are None where there is no peak to compare with, and
    attention_share where there are no kernels; see ``bench_rows.Row``.
    """

    rates: list[float]
    tflops: float | None = None
    peak_tflops: float | None = None
    share_of_peak: float | None = None
    attention_share: float | None = None


def measure_prompt(executor: Executor, n_prompt: int, repeats: int, peak_tflops: float | None) -> PromptSpeed:
    """A prompt from an empty cache, in chunks, of which the last asks for the logits of the last row; timed until the
    device is done, after one that is not timed.
    """
    device, ids = executor.device, prompt_ids(executor, n_prompt)
    rates = []
    for i in range(1 + repeats):
        cache = empty_cache(executor)
        start = now(device)
        for _ in read_prompt(executor, ids, cache):
            pass
        if i > 0:
            rates.append(n_prompt / (now(device) - start))
    seconds = n_prompt / median(rates)
    attention_share = None
    if isinstance(executor, DeviceExecutor):
        attention_share = round(attention_us(executor, ids) / seconds / 1e6, 4)
    if peak_tflops is None:
        return PromptSpeed(rates, attention_share=attention_share)
    speed = tflops(prompt_flops(executor.step, n_prompt), seconds * 1e6)
    share = round(speed / peak_tflops, 4)
    return PromptSpeed(rates, round(speed, 2), round(peak_tflops, 1), share, attention_share)


def prompt_ids(executor: Executor, n_prompt: int) -> list[int]:
    """Tokens of the whole vocabulary."""
    n_vocabulary = executor.step.logits.shape[-1]
    assert isinstance(n_vocabulary, int)
    return [(FIRST_TOKEN + TOKEN_STEP * i) % n_vocabulary for i in range(n_prompt)]


def empty_cache(executor: Executor) -> SequenceCache:
    """Of a sequence by itself."""
    return SequenceCache(executor.plan, executor.step.kinds, make_pools(executor.plan, executor.step.kinds))


def read_prompt(executor: Executor, ids: Sequence[int], cache: SequenceCache) -> Iterator[int]:
    """Rows of each chunk, when the executor has been given it."""
    chunk = executor.plan.chunk
    for first in range(0, len(ids), chunk):
        rows, batch = ids[first : first + chunk], Batch()
        cache.append_rows(batch, rows, [len(rows) - 1] if first + len(rows) == len(ids) else [])
        executor.run(batch)
        cache.commit(len(rows))
        yield len(rows)


def prompt_flops(step: Step, n_prompt: int) -> int:
    """Multiplications and additions that a prompt takes: products of every row but the head, which is of one row, and
    attention over the positions that each row sees. Padding, norms, gates and RoPE do not count.
    """
    total = 0
    for call in step.calls:
        if call.op.name == "linear":
            total += call.op.flops(call.bind({"T": n_prompt, "R": 1, "B": 1}))
        elif call.op.reads_cache:
            seen = visible_positions(n_prompt, call.attributes["window"])
            total += call.op.flops(call.bind({"T": 1, "R": 1, "B": 1, "S": seen}))
    return total


def visible_positions(n: int, window: int | None) -> int:
    """Positions that rows 0 .. n - 1 of a sequence see, added up: of row p the last ``window`` of p + 1."""
    full = n if window is None else min(n, window)
    return full * (full + 1) // 2 + (n - full) * full


def attention_us(executor: DeviceExecutor, ids: Sequence[int]) -> float:
    """Microseconds of attention's kernels in a prompt: after each chunk its own run once more, by themselves, one layer
    after another in a graph. They read the chunk's pages and the queries of the last layer, and what they write is
    written again before it is read.
    """
    graphs: dict[int, torch.cuda.CUDAGraph] = {}
    total = 0.0
    for n_rows in read_prompt(executor, ids, empty_cache(executor)):
        if n_rows <= MOST_ROWS_ONE_BY_ONE:  # of a graph of decoding, which has no such kernels
            continue
        pitch = pad_rows(n_rows)
        if pitch not in graphs:
            graphs[pitch] = executor._capture(attention_launches(executor, pitch))
        with torch.cuda.stream(executor._stream):
            total += timed_us(executor.device, graphs[pitch].replay)
    return total


def attention_launches(executor: DeviceExecutor, pitch: int) -> list[Launch]:
    """Those of all layers, for a padded number of rows."""
    walk = executor._prompts._trunk(pitch).walk
    return [step for step in walk.trunk if isinstance(step, Launch) and step.kernel.name == "attention_rows"]
