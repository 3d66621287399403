"""One text while it is made one vector: its tokens, its cache, and the sum of what its rows gave so far."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from bytefloor.engine.batch import Batch
from bytefloor.engine.cache import SequenceCache
from bytefloor.engine.request import Delta, EmbeddingRequest, Finish, FinishReason, Reading
from bytefloor.engine.sequence import SequenceState


class EmbeddingState:
    """Scheduled like a prompt, but it begins from an empty cache: every row is needed, also one that some prefix has.

    ids: the text's tokens. The first cache.length of them are in the sum, the others pending.
    """

    def __init__(self, request_id: int, request: EmbeddingRequest) -> None:
        self.request_id = request_id
        self.request = request
        self.ids = list(request.prompt_ids)
        self.cache: SequenceCache
        self.has_started = False
        self._sum: Tensor
        self._started_at = time.perf_counter()

    @property
    def n_pending(self) -> int:
        return len(self.ids) - self.cache.length

    @property
    def reading(self) -> Reading | None:
        """How far the text has been read; None before it has begun."""
        return Reading(self.cache.length, len(self.ids), 0) if self.has_started else None

    def start(self, cache: SequenceCache) -> None:
        """Begin, or begin once more after pages ran out, with an empty cache."""
        self.cache = cache
        self._sum = torch.zeros((), dtype=torch.float64)
        if not self.has_started:
            self._started_at = time.perf_counter()
        self.has_started = True

    def take(self, n_rows: int, sum_hidden: Tensor) -> None:
        """Rows that were computed now, and their sum, float64 [D]."""
        self._sum = self._sum + sum_hidden
        self.cache.commit(n_rows)

    def last(self) -> Delta:
        """The mean over all positions, once none is pending, made one long. An error where it is no direction."""
        mean = self._sum / len(self.ids)
        length = float(torch.linalg.vector_norm(mean))
        if not 0.0 < length < float("inf"):  # NaN is neither
            detail = f"the text's mean has a length of {length}, expected a finite number above 0"
            return Delta(self.request_id, "", None, self.finish("error", detail))
        vector = tuple((mean / length).tolist())
        return Delta(self.request_id, "", None, self.finish("stop", "embedded"), vector)

    def finish(self, reason: FinishReason, detail: str) -> Finish:
        """What the request took until now."""
        seconds = time.perf_counter() - self._started_at
        return Finish(reason, detail, len(self.ids), 0, 0, prompt_s=seconds, decode_s=0.0, seed=0)


def add_up(rows: Sequence[tuple[EmbeddingState, int]], sum_hidden: Callable[[Batch], Tensor]) -> None:
    """Compute the next rows of each text, whose pages are there."""
    batch = Batch()
    for text, n_rows in rows:
        start = text.cache.length
        text.cache.append_rows(batch, text.ids[start : start + n_rows], [])
    for (text, n_rows), found in zip(rows, sum_hidden(batch).cpu(), strict=True):
        text.take(n_rows, found)


Rows = Sequence[tuple[SequenceState | EmbeddingState, int]]
"""Who takes part in a step, with how many rows."""


def parted(rows: Rows) -> tuple[list[tuple[SequenceState, int]], list[tuple[EmbeddingState, int]]]:
    """Answers, and texts to be embedded."""
    answers = [(each, n) for each, n in rows if isinstance(each, SequenceState)]
    return answers, [(each, n) for each, n in rows if isinstance(each, EmbeddingState)]
