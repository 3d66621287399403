"""Teacher-forced scoring: what the model says at every position of a text that is given."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from torch import Tensor

from bytefloor.engine.batch import Batch
from bytefloor.engine.cache import SequenceCache, make_pools
from bytefloor.engine.executor import Executor
from bytefloor.engine.reference import Observer, ReferenceExecutor
from bytefloor.errors import NumericalError
from bytefloor.ops.eviction import OBSERVED


def steps_of(n_rows: int, chunk: int, n_prompt: int = 0) -> list[range]:
    """The rows of each step: chunks, one of which ends with the prompt and has its last OBSERVED rows, even where those
    are more than a chunk. n_prompt: rows of a prompt that a budget cuts, or 0."""
    steps: list[range] = []
    start = 0
    while start < n_rows:
        end, n_left = min(start + chunk, n_rows), n_prompt - start
        if n_left > 0:
            is_last = n_left <= max(OBSERVED, chunk)
            end = n_prompt if is_last else min(end, n_prompt - OBSERVED)
        steps.append(range(start, end))
        start = end
    return steps


def score_rows(
    executor: Executor,
    ids: Sequence[int],
    steps: Sequence[range],
    wanted: Sequence[int],
    run: Callable[[Batch], Tensor] | None = None,
    n_prompt: int = 0,
) -> Iterator[tuple[list[int], Tensor]]:
    """Of each step that holds wanted rows: these, and their logits [n, V]; row i predicts token i + 1.

    steps: of ``steps_of``. wanted: ascending. run: in place of the executor's own. n_prompt: of ids, those which the
    plan's budget cuts, if it has one. Starts from an empty cache. Logits may be written over when the next are asked
    for.
    """
    run = run or executor.run
    pools = make_pools(executor.plan, executor.step.kinds)
    cache = SequenceCache(executor.plan, executor.step.kinds, pools)
    cache.cut_at(n_prompt)
    for step in steps:
        found = list(wanted[bisect_left(wanted, step.start) : bisect_left(wanted, step.stop)])
        batch = Batch()
        cache.append_rows(batch, ids[step.start : step.stop], [row - step.start for row in found])
        logits = run(batch)
        if found:
            yield found, logits
        cache.commit(len(step))


def score_chunks(
    executor: ReferenceExecutor, ids: Sequence[int], chunk: int, observe: Observer | None = None
) -> Iterator[Tensor]:
    """Logits [n, V] of consecutive chunks of a text; row i predicts token i + 1. Starts from an empty cache.

    observe: sees every call's output as it is made.
    """
    run = executor.run if observe is None else partial(executor.run, observe=observe)
    for _, logits in score_rows(executor, ids, steps_of(len(ids), chunk), range(len(ids)), run):
        yield logits


def check_finite(logits: Tensor, start: int) -> None:
    """Logits [n, V] of positions start and after; NumericalError names the first that holds NaN or infinity."""
    found = find_not_finite(logits)
    if found is not None:
        row, what = found
        raise NumericalError(f"the logits at position {start + row} hold {what}, expected finite numbers")


def find_not_finite(logits: Tensor) -> tuple[int, str] | None:
    """The first row of [n, V] that holds ``NaN`` or ``infinity``, and which; None where all are finite."""
    is_bad = ~logits.isfinite().all(dim=-1)
    if not bool(is_bad.any()):
        return None
    row = int(is_bad.nonzero()[0])
    return row, "NaN" if bool(logits[row].isnan().any()) else "infinity"


def check_not_uniform(logits: Tensor) -> None:
    """Logits [n, V]; NumericalError where a row is all one value, as an embedding of zeros makes it."""
    is_uniform = logits.amax(-1) == logits.amin(-1)
    if bool(is_uniform.any()):
        position = int(is_uniform.nonzero()[0])
        raise NumericalError(
            f"the logits at position {position} give all {logits.shape[-1]} tokens the same probability: "
            "a weight was not filled"
        )
