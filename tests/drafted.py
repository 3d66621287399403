"""Drafts as a test wants them: always computed, and right as often as it says."""

from __future__ import annotations

import random
from collections.abc import Sequence

from bytefloor.engine.engine import Engine
from bytefloor.engine.speculation import Speculation, Wish


class Always(Speculation):
    """Every draft that there is room for, whatever it costs."""

    def choose(self, wishes: Sequence[Wish], n_sequences: int, n_room: int, n_lost: int = 0) -> list[int]:
        chosen = []
        for wish in wishes:
            chosen.append(min(wish.n_drafts, n_room))
            n_room -= chosen[-1]
        return chosen


class Foreseen:
    """In the place of a sequence's NgramIndex: proposes what it will say, one token of four or so wrong.

    Some drafts are shorter than was asked for, some are none, and behind the end of the answer anything is proposed.
    """

    def __init__(self, ids: Sequence[int], answer: Sequence[int], n_tokens: int, rng: random.Random) -> None:
        self._ids, self._n_prompt, self._answer = ids, len(ids), answer
        self._n_tokens, self._rng = n_tokens, rng

    def take_in(self, n_ids: int) -> None:
        assert n_ids <= len(self._ids)

    def propose(self, n_most: int) -> list[int]:
        assert n_most > 0
        at, rng = len(self._ids) - self._n_prompt, self._rng
        known = [*self._answer[at : at + n_most], *rng.choices(range(self._n_tokens), k=n_most)]
        guessed = [token if rng.random() < 0.75 else rng.randrange(self._n_tokens) for token in known]
        return guessed[: rng.choice((0, n_most, n_most, rng.randint(1, n_most)))]


def foresee(engine: Engine, answer: Sequence[int], n_tokens: int, rng: random.Random) -> None:
    """The request added last will be drafted from its own answer."""
    sequence = engine._scheduler.waiting[-1]
    sequence.ngrams = Foreseen(sequence.ids, answer, n_tokens, rng)  # type: ignore[assignment]
