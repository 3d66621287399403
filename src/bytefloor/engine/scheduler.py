"""Which sequences take part in the next step, and with how many rows. Pure: no torch, no clock."""

from __future__ import annotations

from collections import deque
from typing import Generic, Protocol, TypeVar


class Schedulable(Protocol):
    """What the scheduler needs to know of a sequence: how many of its known tokens are not computed yet."""

    @property
    def n_pending(self) -> int: ...


S = TypeVar("S", bound=Schedulable)


class Scheduler(Generic[S]):
    """First come, first served; sequences that are decoding ride along with a chunk of somebody's prompt.

    n_sequences: how many may run at once. chunk: most rows a step may have.
    """

    def __init__(self, n_sequences: int, chunk: int) -> None:
        self.n_sequences = n_sequences
        self.chunk = chunk
        self.waiting: deque[S] = deque()
        self.running: list[S] = []

    def add(self, sequence: S) -> None:
        """Queue a sequence."""
        self.waiting.append(sequence)

    def remove(self, sequence: S) -> None:
        """Forget a sequence, queued or running."""
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def admit(self) -> list[S]:
        """Move sequences from the queue to the running ones while there is room; returns those moved."""
        moved = []
        while self.waiting and len(self.running) < self.n_sequences:
            moved.append(self.waiting.popleft())
            self.running.append(moved[-1])
        return moved

    def plan(self) -> list[tuple[S, int]]:
        """(sequence, rows) of the next step: one row for each that decodes, then prompts until the chunk is full."""
        decoding = [(sequence, 1) for sequence in self.running if sequence.n_pending == 1]
        budget = self.chunk - len(decoding)
        planned = decoding[: self.chunk]
        for sequence in self.running:
            if sequence.n_pending > 1 and budget > 0:
                n_rows = min(sequence.n_pending, budget)
                planned.append((sequence, n_rows))
                budget -= n_rows
        return planned
