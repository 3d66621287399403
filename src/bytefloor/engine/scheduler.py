"""Which sequences take part in the next step, and with how many rows. Pure: no torch, no clock, no pages.

Arrival is the only rank. Who runs arrived before all who wait, and stays in that order; where pages run out the
youngest goes back to the front of the queue. So the oldest one always gets on, then the next, and nobody starves.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar


class Schedulable(Protocol):
    """What the scheduler needs to know of a sequence: how many of its known tokens are not computed yet."""

    @property
    def n_pending(self) -> int: ...


S = TypeVar("S", bound=Schedulable)


class Scheduler(Generic[S]):
    """First come, first served; sequences that are decoding ride along with a chunk that prompts share.

    n_sequences: how many may run at once. chunk: most rows a step may have. n_least: rows without which a prompt may
    not get on; the oldest has as many before it shares.
    waiting, running: the oldest first.
    """

    def __init__(self, n_sequences: int, chunk: int, n_least: int = 1) -> None:
        self.n_sequences = n_sequences
        self.chunk = chunk
        self.n_least = n_least
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

    def admit(self, begin: Callable[[S], bool]) -> list[S]:
        """Move sequences from the queue to the running ones while there is room; returns those moved.

        begin: gives the next one what it needs to run beside those that do, or says False. Then nobody overtakes it.
        """
        moved: list[S] = []
        while self.waiting and len(self.running) < self.n_sequences and begin(self.waiting[0]):
            moved.append(self.waiting.popleft())
            self.running.append(moved[-1])
        return moved

    def preempt(self) -> S:
        """Send the youngest that runs back to the front of the queue; returns it."""
        youngest = self.running.pop()
        self.waiting.appendleft(youngest)
        return youngest

    def plan(self) -> list[tuple[S, int]]:
        """(sequence, rows) of the next step.

        One row for each that decodes, the oldest first; one is left for a prompt that is the oldest of all. Prompts
        share what remains of the chunk. The oldest of them gets all it needs where this finishes it, otherwise half,
        and no fewer than n_least; the other half goes to those with the least left to read, so that short ones do not
        wait behind a long one; what they leave is the oldest one's again.
        """
        pending = [(sequence, sequence.n_pending) for sequence in self.running]
        decoding = [sequence for sequence, n in pending if n == 1]
        prompts = [sequence for sequence, n in pending if n > 1]
        n_left = 1 if prompts and prompts[0] is self.running[0] else 0
        planned = [(sequence, 1) for sequence in decoding[: self.chunk - n_left]]
        shares = self._shares([prompt.n_pending for prompt in prompts], self.chunk - len(planned))
        return planned + [(prompt, n) for prompt, n in zip(prompts, shares, strict=True) if n]

    def n_spare(self, planned: Sequence[tuple[S, int]]) -> int:
        """Rows that a step has left."""
        return self.chunk - sum(n for _, n in planned)

    def _shares(self, pending: list[int], budget: int) -> list[int]:
        """Rows of each prompt, the oldest first."""
        shares = [0] * len(pending)
        if not pending:
            return shares
        shares[0] = pending[0] if pending[0] <= budget else max((budget + 1) // 2, min(budget, self.n_least))
        left = budget - shares[0]
        for i in sorted(range(1, len(pending)), key=pending.__getitem__):
            shares[i] = min(pending[i], left)
            left -= shares[i]
        shares[0] = min(pending[0], shares[0] + left)
        return shares
