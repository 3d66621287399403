"""Several sequences that decode together on the device, read by the host one step behind.

A step's rows take their tokens from what the step before drew, without the host in between: ``sources`` says from which
of its rows. So a step can start before anyone has read the one before it. What belongs to nobody any more is
computed and forgotten.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bytefloor.engine.batch import Batch, PageCopy
from bytefloor.engine.row_sampler import Draw, RowLogits, RowSampler, as_rows
from bytefloor.engine.sampler import Sampled, Sampler

KNOWN = -1
"""In place of a row of the step before: the host knows the token."""


@dataclass(frozen=True)
class UnderWay:
    """A step that was started: whose its rows are, where their records land, and the event that says they have."""

    draws: Sequence[Draw]
    records: Tensor
    event: torch.cuda.Event


class BatchLoop:
    """What an executor lends for decoding several sequences.

    start: computes logits of a batch with a row for each sequence, tokens drawn before put in place of those that are
    not KNOWN. copy: of pages. sampler: for as many rows as there can be. banned_ids: those that it never takes.
    All on ``stream``. on_wait: called by ``sample`` when there is nothing to do but wait for the device.
    """

    def __init__(
        self,
        start: Callable[[Batch, Tensor | None], RowLogits],
        copy: Callable[[Sequence[PageCopy]], None],
        sampler: RowSampler,
        banned_ids: frozenset[int],
        stream: torch.cuda.Stream,
        device: torch.device,
    ) -> None:
        self._start, self._copy, self._sampler = start, copy, sampler
        self._stream, self._device = stream, device
        self._banned = np.array(sorted(banned_ids), np.int64)
        self.on_wait: Callable[[], None] = lambda: None

    def can_serve(self, sampler: Sampler) -> bool:
        """Whether the device has what a request asks for; the host samples otherwise."""
        banned = sampler.banned_ids
        return self._sampler.can_serve(sampler.params) and (
            len(banned) == len(self._banned) and bool((banned == self._banned).all())
        )

    @torch.inference_mode()
    def copy(self, copies: Sequence[PageCopy]) -> None:
        """Copy pages, without a step."""
        with torch.cuda.stream(self._stream):
            self._copy(copies)

    @torch.inference_mode()
    def launch(self, batch: Batch, draws: Sequence[Draw], sources: Sequence[int]) -> UnderWay:
        """Start a step. batch: a row for each sequence, all wanted. sources: KNOWN, or a row of the step before."""
        with torch.cuda.stream(self._stream):
            drawn = None
            if any(source != KNOWN for source in sources):
                drawn = self._sampler.tokens[self._on_device(np.maximum(sources, 0))]
                drawn = drawn.where(self._on_device(sources) != KNOWN, self._on_device(batch.tokens))
            self._sampler.ask(draws, batch.positions)
            return self._drawn(self._start(batch, drawn), draws)

    @torch.inference_mode()
    def sample(self, logits: Tensor, draws: Mapping[int, Draw], positions: Mapping[int, int]) -> dict[int, Sampled]:
        """Tokens of some rows of logits [R, V] now, by row; those that the device cannot tell are left out."""
        rows = list(draws)
        if not rows:
            return {}
        with torch.cuda.stream(self._stream):
            chosen = logits if len(rows) == len(logits) else logits[self._on_device(rows)]
            self._sampler.ask([draws[row] for row in rows], [positions[row] for row in rows])
            step = self._drawn(as_rows(chosen.contiguous()), [draws[row] for row in rows])
        self.on_wait()
        found = zip(rows, self.read(step), strict=True)
        return {row: sampled for row, sampled in found if sampled is not None}

    def _drawn(self, rows: RowLogits, draws: Sequence[Draw]) -> UnderWay:
        self._sampler.start(rows)
        found = self._sampler.records[: len(draws)]
        records = torch.empty(found.shape, dtype=found.dtype, pin_memory=self._device.type == "cuda")
        records.copy_(found, non_blocking=True)
        event = torch.cuda.Event()
        event.record(self._stream)
        return UnderWay(draws, records, event)

    def read(self, step: UnderWay) -> list[Sampled | None]:
        """Wait for a step. None for a row whose token the host has to choose."""
        step.event.synchronize()
        rows = step.records.tolist()
        return [self._sampler.read(draw.params, row) for draw, row in zip(step.draws, rows, strict=True)]

    def _on_device(self, values: npt.ArrayLike) -> Tensor:
        host = torch.from_numpy(np.asarray(values, np.int64))
        host = host.pin_memory() if self._device.type == "cuda" else host
        return host.to(self._device, non_blocking=True)
