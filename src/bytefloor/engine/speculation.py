"""How many proposed tokens are worth computing beside the next one. Pure but for the clock, which is given.

A step with drafts takes longer than one without, and gives more tokens only where drafts turn out right. Both are
measured: the seconds of either kind of step, and for each sequence how often a draft was right. Drafts are made where
tokens a second are to be had by it, otherwise the sequence rests until it has more text, longer each time, and then
tries once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bytefloor.engine.step_costs import StepCosts

MOST_ROWS = 16
"""Rows of one sequence in a step that decodes: its next token, and drafts behind it."""
SIZES = (1, 3, 7, 15)
"""Drafts of a sequence, where as many are proposed and wanted."""
GAIN = 1.05
"""How many times the tokens a second of a plain step there must be: less is lost in what nobody measures."""
MEMORY = 0.9
"""What the drafts before count for beside those of the last step."""
PRIOR = 2.0
"""Drafts that what is believed without any, or from before a rest, counts for."""
FIRST_REST, LONGEST_REST = 16, 512
"""Tokens. A rest is twice as long as the one before, unless drafts paid in between."""
N_ATTEMPT = 3
"""Drafts of the one step with which a sequence tries again."""
LINGER = 4
"""Steps without drafts, one after another, before a sequence goes back to where leaving costs a step."""


class DraftRecord:
    """What one sequence's drafts came to.

    n_draft, n_draft_accepted: tokens. n_since: steps without drafts since the last with some.
    may_attempt: whether it may have drafts once where they do not seem to pay.
    """

    def __init__(self) -> None:
        self.n_draft = 0
        self.n_draft_accepted = 0
        self.n_since = LINGER
        # As if one of two had been right.
        self._n_right, self._n_judged = PRIOR / 2, PRIOR
        self._rest, self._rests_until = FIRST_REST, 0
        self.may_attempt = True

    @property
    def acceptance(self) -> float:
        """How likely a draft is right where the one before it was."""
        return self._n_right / self._n_judged

    def is_resting(self, n_ids: int) -> bool:
        """Whether drafts are not even looked for."""
        return n_ids < self._rests_until

    def rest(self, n_ids: int) -> None:
        """None paid: look again when the text has grown, and believe less of what was."""
        self._n_right, self._n_judged = PRIOR * self.acceptance, PRIOR
        self._rests_until = n_ids + self._rest
        self._rest = min(2 * self._rest, LONGEST_REST)
        self.may_attempt = True

    def wake(self) -> None:
        """They pay: the next rest will be a short one."""
        self._rest = FIRST_REST

    def judge(self, n_drafts: int, n_accepted: int) -> None:
        """So many drafts of one step, and how many of them were right. Those behind a wrong one say nothing."""
        self._n_right = MEMORY * self._n_right + n_accepted
        self._n_judged = MEMORY * self._n_judged + min(n_accepted + 1, n_drafts)


@dataclass(frozen=True)
class Wish:
    """Drafts that a sequence could have. n_ids: its tokens. n_drafts: how many at most."""

    record: DraftRecord
    n_ids: int
    n_drafts: int


@dataclass(frozen=True)
class _Choice:
    """Drafts of each, the likeliest wishes first, and tokens a second."""

    n_drafts: tuple[int, ...]
    rate: float


class Speculation:
    """One engine's choice of drafts, and its clock.

    most_rows: of one sequence in a step, at most MOST_ROWS; with 1 there are no drafts.
    """

    def __init__(self, most_rows: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self.most_rows = min(most_rows, MOST_ROWS)
        self._clock = clock
        self._costs = StepCosts()

    @property
    def is_on(self) -> bool:
        return self.most_rows > 1

    def now(self) -> float:
        """Seconds; 0 where nobody measures."""
        return self._clock() if self.is_on else 0.0

    def note(self, n_sequences: int, n_drafts: int, seconds: float) -> None:
        """A step that only decoded, with so many drafts in all, took so long."""
        if self.is_on:
            self._costs.note(n_sequences, n_drafts, seconds)

    def choose(self, wishes: Sequence[Wish], n_sequences: int, n_room: int, n_lost: int = 0) -> list[int]:
        """How many drafts each gets in a step of n_sequences; who gets none begins to rest, or tries once.

        n_room: rows that the step has left. n_lost: plain steps that are thrown away for it.
        """
        plain_s = self._costs.seconds(n_sequences, 0)
        if plain_s is None:
            return [0] * len(wishes)
        order = sorted(range(len(wishes)), key=lambda i: -wishes[i].record.acceptance)
        best = self._best([wishes[i] for i in order], n_sequences, n_room, n_lost * plain_s)
        paid = best.n_drafts if best.rate * plain_s >= GAIN * n_sequences else ()
        chosen = [0] * len(wishes)
        for i, n in zip(order, paid, strict=False):
            chosen[i] = n
            wishes[i].record.wake()
        n_left = n_room - sum(chosen)
        is_tried = False
        for i, wish in enumerate(wishes):
            if chosen[i]:
                continue
            chosen[i] = 0 if is_tried or not wish.record.may_attempt else min(N_ATTEMPT, wish.n_drafts, n_left)
            if chosen[i]:
                is_tried, wish.record.may_attempt = True, False
                n_left -= chosen[i]
            elif not wish.record.may_attempt:
                wish.record.rest(wish.n_ids)
        return chosen

    def _best(self, wishes: Sequence[Wish], n_sequences: int, n_room: int, lost_s: float) -> _Choice:
        """The most tokens a second: some of the likeliest wishes, and of each up to one of SIZES."""
        best = _Choice((), 0.0)
        for size in SIZES:
            drafts: list[int] = []
            n_tokens = float(n_sequences)
            for wish in wishes:
                drafts.append(min(size, wish.n_drafts))
                n_tokens += n_expected(wish.record.acceptance, drafts[-1])
                n_drafts = sum(drafts)
                seconds = self._costs.seconds(n_sequences, n_drafts)
                if n_drafts > n_room or seconds is None:
                    break
                rate = n_tokens / (seconds + lost_s)
                if rate > best.rate:
                    best = _Choice(tuple(drafts), rate)
        return best


def n_expected(acceptance: float, n_drafts: int) -> float:
    """How many of so many drafts will be right, each as likely as the other where all before it were."""
    return sum(acceptance**i for i in range(1, n_drafts + 1))
