"""Teacher-forced scoring: what the model says at every position of a text that is given."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from bytefloor.engine.batch import Batch
from bytefloor.engine.cache import SequenceCache, make_pools
from bytefloor.engine.reference import Observer, ReferenceExecutor
from bytefloor.errors import NumericalError


def score_chunks(
    executor: ReferenceExecutor, ids: Sequence[int], chunk: int, observe: Observer | None = None
) -> Iterator[Tensor]:
    """Logits [n, V] of consecutive chunks of a text; row i predicts token i + 1. Starts from an empty cache.

    observe: sees every call's output as it is made.
    """
    pools = make_pools(executor.plan, executor.step.kinds)
    cache = SequenceCache(executor.plan, executor.step.kinds, pools)
    for start in range(0, len(ids), chunk):
        rows = ids[start : start + chunk]
        batch = Batch()
        cache.append_rows(batch, rows, range(len(rows)))
        yield executor.run(batch, observe)
        cache.commit(len(rows))


def token_nll(executor: ReferenceExecutor, ids: Sequence[int], chunk: int) -> Tensor:
    """Negative log-likelihood, nats, of ids[1:], float64 [T - 1].

    NumericalError where the logits are not finite, or say nothing.
    """
    parts = []
    start = 0
    for logits in score_chunks(executor, ids, chunk):
        check_finite(logits, start)
        if start == 0:
            check_not_uniform(logits)
        targets = torch.tensor(ids[start + 1 : start + 1 + logits.shape[0]], device=logits.device)
        log_probabilities = logits[: len(targets)].double().log_softmax(-1)
        parts.append(-log_probabilities.gather(1, targets[:, None])[:, 0])
        start += logits.shape[0]
    return torch.cat(parts).cpu()


def check_finite(logits: Tensor, start: int) -> None:
    """Logits [n, V] of positions start and after; NumericalError names the first that holds NaN or infinity."""
    is_bad = ~logits.isfinite().all(dim=-1)
    if bool(is_bad.any()):
        row = int(is_bad.nonzero()[0])
        found = "NaN" if bool(logits[row].isnan().any()) else "infinity"
        raise NumericalError(f"the logits at position {start + row} hold {found}, expected finite numbers")


def check_not_uniform(logits: Tensor) -> None:
    """Logits [n, V]; NumericalError where a row is all one value, as an embedding of zeros makes it."""
    is_uniform = logits.amax(-1) == logits.amin(-1)
    if bool(is_uniform.any()):
        position = int(is_uniform.nonzero()[0])
        raise NumericalError(
            f"the logits at position {position} give all {logits.shape[-1]} tokens the same probability: "
            "a weight was not filled"
        )
