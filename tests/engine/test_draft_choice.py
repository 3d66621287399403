"""Which drafts are computed: a simulated executor with a clock of its own, where every cost is known."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from bytefloor.engine.speculation import FIRST_REST, LONGEST_REST, DraftRecord, Speculation, Wish, n_expected
from bytefloor.engine.step_costs import N_KEPT, N_TRIALS, StepCosts, size_of

Cost = Callable[[int], float]
"""Seconds of a step by its drafts; 1 without."""


@dataclass
class Played:
    """sizes: drafts of each step."""

    n_tokens: int = 0
    seconds: float = 0.0
    sizes: list[int] = field(default_factory=list)

    @property
    def gain(self) -> float:
        """Tokens a second, of those of plain decoding."""
        return self.n_tokens / self.seconds


def play(cost: Cost, acceptance: float, n_tokens: int, chosen: Speculation | None = None, lost: bool = False) -> Played:
    """One sequence, for which 15 tokens are always proposed. lost: behind a plain step a draft costs another one."""
    speculation, record, rng = chosen or Speculation(16, lambda: 0.0), DraftRecord(), random.Random(1)
    played = Played()
    while played.n_tokens < n_tokens:
        n, is_lost = 0, lost and (not played.sizes or not played.sizes[-1])
        if not record.is_resting(played.n_tokens):
            (n,) = speculation.choose([Wish(record, played.n_tokens, 15)], 1, 100, int(is_lost))
        n_right = 0
        while n_right < n and rng.random() < acceptance:
            n_right += 1
        if n:
            record.judge(n, n_right)
        speculation.note(1, n, cost(n))
        played.n_tokens += 1 + n_right
        played.seconds += cost(n) + (is_lost and n > 0)
        played.sizes.append(n)
    return played


def flat(n: int) -> float:
    """As on a device: weights are read once for all rows."""
    return 1.2 if n else 1.0


def steep(n: int) -> float:
    """Each row costs half of what a step does."""
    return 1 + n / 2


def ruinous(n: int) -> float:
    """As many steps as rows, and another one."""
    return 2.0 + n if n else 1.0


@pytest.mark.parametrize(("cost", "acceptance", "least"), [(flat, 0.9, 5.5), (flat, 0.5, 1.3), (steep, 1.0, 1.5)])
def test_where_drafts_pay_they_are_made(cost: Cost, acceptance: float, least: float) -> None:
    """The best that could be had: 6.8, 1.67, 1.88."""
    assert play(cost, acceptance, 2000).gain > least


def test_right_drafts_at_next_to_no_cost_are_as_long_as_can_be() -> None:
    sizes = play(flat, 1.0, 2000).sizes
    assert sizes[:N_TRIALS] == [0] * N_TRIALS
    assert set(sizes[20:]) == {15}
    # Each size is tried before a longer one is.
    assert sizes[N_TRIALS : N_TRIALS + 4 * N_TRIALS] == [size for size in (1, 3, 7, 15) for _ in range(N_TRIALS)]


@pytest.mark.parametrize("cost", [flat, steep, ruinous])
@pytest.mark.parametrize("lost", [False, True])
def test_drafts_that_are_always_wrong_cost_next_to_nothing(cost: Cost, lost: bool) -> None:
    played = play(cost, 0.0, 8000, lost=lost)
    assert played.gain > 0.98
    assert sum(n > 0 for n in played.sizes) < 30


@pytest.mark.parametrize("acceptance", [0.3, 0.9, 1.0])
def test_drafts_that_cost_more_than_they_can_give_are_not_made(acceptance: float) -> None:
    assert play(ruinous, acceptance, 8000).gain > 0.97


def test_it_tries_again_after_ever_longer_rests() -> None:
    sizes = play(flat, 0.0, 6000).sizes
    tries = [i for i, n in enumerate(sizes) if n]
    rests = [b - a for a, b in zip(tries[-8:], tries[-7:], strict=False)]
    assert min(rests) >= FIRST_REST
    assert rests == sorted(rests)
    assert rests[-1] == LONGEST_REST + 1  # the attempt gives a token too


def test_what_begins_to_repeat_itself_is_noticed() -> None:
    """Wrong for long, then right: from the next attempt on drafts are made."""
    speculation, record = Speculation(16, lambda: 0.0), DraftRecord()
    n_ids, found = 0, []
    for step in range(1200):
        n = 0
        if not record.is_resting(n_ids):
            (n,) = speculation.choose([Wish(record, n_ids, 15)], 1, 100)
        n_right = n if step > 600 else 0
        if n:
            record.judge(n, n_right)
        speculation.note(1, n, flat(n))
        n_ids += 1 + n_right
        found.append(n_right)
    assert sum(found[:600]) == 0
    assert min(found[1150:]) == 15


def test_a_slow_moment_does_not_forbid_drafts_for_ever() -> None:
    """Sizes that were timed while something else ran are timed again."""
    speculation = Speculation(16, lambda: 0.0)
    for n in (0, 1, 3, 7, 15):
        for _ in range(N_KEPT):
            speculation.note(1, n, 50.0 * (n > 0) + 1)
    # Until then an attempt is made in each rest, by three drafts.
    assert play(flat, 1.0, 4000, speculation).sizes[-1] >= 3


def test_leaving_a_step_behind_needs_more_than_a_likely_token() -> None:
    """On a device the step ahead of the host is thrown away for a draft."""
    speculation = Speculation(16, lambda: 0.0)
    for n in (0, 1, 3):
        for _ in range(N_TRIALS):
            speculation.note(1, n, flat(n))
    record = DraftRecord()
    record.may_attempt = False
    assert speculation.choose([Wish(record, 10, 3)], 1, 100, 0) == [3]
    assert speculation.choose([Wish(record, 10, 3)], 1, 100, 1) == [0]
    assert record.is_resting(11)
    for _ in range(9):
        record.judge(3, 3)
    assert speculation.choose([Wish(record, 500, 3)], 1, 100, 1) == [3]


def learned(n_sequences: int, cost: Cost, most: int = 63) -> Speculation:
    speculation = Speculation(16, lambda: 0.0)
    for n in (0, 1, 3, 7, 15, 31, 63):
        for _ in range(N_TRIALS if n <= most else 0):
            speculation.note(n_sequences, n, cost(n))
    return speculation


def record_of(*judged: tuple[int, int], attempt: bool = False) -> DraftRecord:
    record = DraftRecord()
    record.may_attempt = attempt
    for n, n_right in judged:
        record.judge(n, n_right)
    return record


def test_of_several_the_likely_ones_get_drafts() -> None:
    """All pay for the step's time, so one whose drafts are never right must not make it longer."""
    good, bad = record_of(*[(7, 7)] * 6), record_of(*[(7, 0)] * 6)
    speculation = learned(4, lambda n: 1 + 0.05 * n)
    wishes = [Wish(bad, 50, 7), Wish(good, 50, 7)]
    assert speculation.choose(wishes, 4, 100) == [0, 7]
    assert bad.is_resting(51)
    assert not good.is_resting(51)


def test_one_attempt_a_step() -> None:
    wishes = [Wish(record_of((7, 0), (7, 0), attempt=True), 50, 7) for _ in range(3)]
    assert learned(3, ruinous).choose(wishes, 3, 100) == [3, 0, 0]
    assert learned(3, ruinous).choose(wishes, 3, 100) == [0, 3, 0]


@pytest.mark.parametrize("n_room", range(0, 20))
def test_no_more_than_there_is_room_for(n_room: int) -> None:
    wishes = [Wish(record_of((7, 7), attempt=True), 50, n) for n in (15, 2, 9)]
    chosen = learned(3, flat).choose(wishes, 3, n_room)
    assert sum(chosen) <= n_room
    assert all(n <= wish.n_drafts for n, wish in zip(chosen, wishes, strict=True))
    assert n_room == 0 or sum(chosen) > 0


def test_no_drafts_before_plain_steps_are_known() -> None:
    speculation = Speculation(16, lambda: 0.0)
    for _ in range(N_TRIALS):
        assert speculation.choose([Wish(DraftRecord(), 10, 7)], 1, 100) == [0]
        speculation.note(1, 0, 1.0)
    assert speculation.choose([Wish(DraftRecord(), 10, 7)], 1, 100) == [1]
    assert speculation.choose([Wish(DraftRecord(), 10, 7)], 2, 100) == [0]


def test_sizes_and_their_costs() -> None:
    assert [size_of(n) for n in (0, 1, 2, 3, 4, 7, 8, 15, 16)] == [0, 1, 3, 3, 7, 7, 15, 15, 31]
    costs = StepCosts()
    assert costs.seconds(1, 0) is None
    for seconds in (9.0, 1.0, 1.1):
        costs.note(1, 0, seconds)
    assert (costs.seconds(1, 0), costs.seconds(1, 1), costs.seconds(1, 2)) == (1.1, 1.1, None)
    for seconds in (3.0, 2.0, 2.0, 2.0, 2.0, 2.0, 3.0):
        costs.note(1, 1, seconds)
    assert (costs.seconds(1, 1), costs.seconds(1, 3), costs.seconds(1, 4)) == (2.0, 2.0, None)


def test_acceptance_is_what_was_judged() -> None:
    record = DraftRecord()
    assert record.acceptance == 0.5
    for _ in range(50):
        record.judge(15, 3)  # three right, one wrong, eleven that nobody looked at
    assert record.acceptance == pytest.approx(0.75, abs=1e-3)
    assert n_expected(0.5, 3) == 0.875
    assert n_expected(1.0, 7) == 7
