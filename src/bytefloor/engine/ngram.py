"""What a text may go on with, if it goes on as it did the last time it said the same. Pure: no model, no torch."""

from __future__ import annotations

from collections.abc import Sequence

LONGEST, SHORTEST = 4, 2
"""Tokens of an n-gram that is looked for. One token alone says little about the next."""


class NgramIndex:
    """Where each n-gram of a growing list of tokens has last been seen.

    ids: the list itself, to which the caller appends and nothing else. Each token costs one entry a length, once.
    """

    def __init__(self, ids: Sequence[int]) -> None:
        self._ids = ids
        # The place behind each n-gram. Of one that ends the list, nobody knows yet what follows: it is not among them.
        self._ends: dict[tuple[int, ...], int] = {}
        self._n_taken = 0

    def take_in(self, n_ids: int | None = None) -> None:
        """Look at the first n_ids tokens, all where none is given; those that were seen before cost nothing."""
        ids, ends = self._ids, self._ends
        n_ids = len(ids) if n_ids is None else n_ids
        for end in range(self._n_taken, n_ids):
            for n in range(SHORTEST, min(LONGEST, end) + 1):
                ends[tuple(ids[end - n : end])] = end
        self._n_taken = max(self._n_taken, n_ids)

    def propose(self, n_most: int) -> list[int]:
        """n_most tokens that may come next: those behind the last earlier occurrence of the longest suffix.

        Where that reaches the end of the list it goes on with what it has proposed, so a text that repeats itself is
        continued for as long as wanted. Empty where no suffix has been there before.
        """
        self.take_in()
        ids = self._ids
        for n in range(min(LONGEST, len(ids)), SHORTEST - 1, -1):
            start = self._ends.get(tuple(ids[-n:]))
            if start is not None:
                period = len(ids) - start
                return [ids[start + i % period] for i in range(n_most)]
        return []
