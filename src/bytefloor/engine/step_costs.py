"""What steps cost that only decode, as they were measured. No clock of its own."""

from __future__ import annotations

from collections import deque
from statistics import median

N_KEPT = 5
"""Measurements of which the median counts: two that something else disturbed change nothing."""
N_TRIALS = 3
"""Measurements before a size counts as known."""


class StepCosts:
    """Seconds of a step, by how many sequences take part and how many rows it has beside one of each.

    Such rows are counted in sizes of 1, 3, 7, 15 and so on: with the row that they follow, of one sequence, that is as
    many as kernels are made for.
    """

    def __init__(self) -> None:
        self._measured: dict[tuple[int, int], deque[float]] = {}

    def note(self, n_sequences: int, n_extra: int, seconds: float) -> None:
        """A step took so long."""
        self._measured.setdefault((n_sequences, size_of(n_extra)), deque(maxlen=N_KEPT)).append(seconds)

    def seconds(self, n_sequences: int, n_extra: int) -> float | None:
        """What a step will take; None where that is not known.

        A size that has not been tried often enough is taken to cost what the next smaller one does, which is how it
        comes to be tried; one beyond it is not known.
        """
        size = size_of(n_extra)
        found = self._median(n_sequences, size)
        return found if found is not None or size == 0 else self._median(n_sequences, size >> 1)

    def _median(self, n_sequences: int, size: int) -> float | None:
        measured = self._measured.get((n_sequences, size), ())
        return median(measured) if len(measured) >= N_TRIALS else None


def size_of(n_extra: int) -> int:
    """The least of 0, 1, 3, 7, 15 and so on that holds them."""
    return (1 << n_extra.bit_length()) - 1
