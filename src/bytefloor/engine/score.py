"""Teacher-forced scoring: what the model says at every position of a text that is given."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from bytefloor.engine.batch import Batch
from bytefloor.engine.cache import SequenceCache, make_pools
from bytefloor.engine.reference import ReferenceExecutor


def score_chunks(executor: ReferenceExecutor, ids: Sequence[int], chunk: int) -> Iterator[Tensor]:
    """Logits [n, V] of consecutive chunks of a text; row i predicts token i + 1. Starts from an empty cache."""
    pools = make_pools(executor.plan, executor.step.kinds)
    cache = SequenceCache(executor.plan, executor.step.kinds, pools)
    for start in range(0, len(ids), chunk):
        rows = ids[start : start + chunk]
        batch = Batch()
        cache.append_rows(batch, rows, range(len(rows)))
        yield executor.run(batch)
        cache.commit(len(rows))


def token_nll(executor: ReferenceExecutor, ids: Sequence[int], chunk: int) -> Tensor:
    """Negative log-likelihood, nats, of ids[1:], float64 [T - 1]."""
    parts = []
    start = 0
    for logits in score_chunks(executor, ids, chunk):
        targets = torch.tensor(ids[start + 1 : start + 1 + logits.shape[0]], device=logits.device)
        log_probabilities = logits[: len(targets)].double().log_softmax(-1)
        parts.append(-log_probabilities.gather(1, targets[:, None])[:, 0])
        start += logits.shape[0]
    return torch.cat(parts).cpu()
