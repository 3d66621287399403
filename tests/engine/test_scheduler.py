"""The scheduler, without a model."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from bytefloor.engine.loops import MAX_PERIOD, MIN_REPEATS, MIN_SPAN, is_looping
from bytefloor.engine.scheduler import Scheduler


@dataclass(eq=False)
class Job:
    n_pending: int


def always(job: Job) -> bool:
    return True


def test_decoding_rows_ride_along_with_a_chunk_of_a_prompt() -> None:
    scheduler: Scheduler[Job] = Scheduler(n_sequences=3, chunk=8)
    jobs = [Job(1), Job(20), Job(1)]
    for job in jobs:
        scheduler.add(job)
    scheduler.admit(always)
    assert [(id(job), n) for job, n in scheduler.plan()] == [(id(jobs[0]), 1), (id(jobs[2]), 1), (id(jobs[1]), 6)]


def test_prompts_share_a_chunk_in_order_of_arrival() -> None:
    scheduler: Scheduler[Job] = Scheduler(n_sequences=3, chunk=8)
    for n in (5, 5, 5):
        scheduler.add(Job(n))
    scheduler.admit(always)
    assert [n for _, n in scheduler.plan()] == [5, 3]


def test_no_more_run_than_there_is_room_for() -> None:
    scheduler: Scheduler[Job] = Scheduler(n_sequences=2, chunk=8)
    jobs = [Job(1) for _ in range(3)]
    for job in jobs:
        scheduler.add(job)
    assert len(scheduler.admit(always)) == 2
    assert scheduler.admit(always) == []
    scheduler.remove(jobs[0])
    assert scheduler.admit(always) == [jobs[2]]


def test_a_cancelled_job_never_starts() -> None:
    scheduler: Scheduler[Job] = Scheduler(n_sequences=1, chunk=8)
    first, second = Job(2), Job(3)
    scheduler.add(first)
    scheduler.add(second)
    scheduler.admit(always)
    scheduler.remove(second)
    scheduler.remove(first)
    assert scheduler.admit(always) == []


def test_nobody_overtakes_one_that_has_no_room() -> None:
    scheduler: Scheduler[Job] = Scheduler(n_sequences=3, chunk=8)
    large, small = Job(20), Job(1)
    scheduler.add(large)
    scheduler.add(small)
    assert scheduler.admit(lambda job: job is small) == []
    assert scheduler.admit(always) == [large, small]


def test_the_pre_empted_keep_their_place_among_all_who_came() -> None:
    scheduler: Scheduler[Job] = Scheduler(n_sequences=3, chunk=8)
    jobs = [Job(1) for _ in range(4)]
    for job in jobs:
        scheduler.add(job)
    scheduler.admit(always)
    assert [scheduler.preempt(), scheduler.preempt()] == [jobs[2], jobs[1]]
    assert list(scheduler.waiting) == jobs[1:]
    assert scheduler.admit(always) == jobs[1:3]
    assert scheduler.running == jobs[:3]


def shares(chunk: int, *pending: int) -> dict[int, int]:
    """Rows that each place in the order of arrival gets."""
    scheduler: Scheduler[Job] = Scheduler(len(pending), chunk)
    jobs = [Job(n) for n in pending]
    for job in jobs:
        scheduler.add(job)
    scheduler.admit(always)
    return {jobs.index(job): n for job, n in scheduler.plan()}


def test_short_prompts_share_a_chunk_with_a_long_one_before_them() -> None:
    """Half for the oldest, the rest shortest first, and what nobody wants is the oldest one's again."""
    assert shares(16, 1000, 500, 6, 3) == {0: 8, 3: 3, 2: 5}
    assert shares(16, 1000, 2, 2) == {0: 12, 1: 2, 2: 2}
    assert shares(15, 1000, 500) == {0: 8, 1: 7}
    assert shares(16, 16, 2) == {0: 16}
    assert shares(16, 10, 20, 5) == {0: 10, 2: 5, 1: 1}
    assert shares(16, 1000) == {0: 16}


def test_the_oldest_gets_the_rows_without_which_it_cannot_get_on() -> None:
    scheduler: Scheduler[Job] = Scheduler(n_sequences=3, chunk=40, n_least=32)
    jobs = [Job(62), Job(32), Job(1)]
    for job in jobs:
        scheduler.add(job)
    scheduler.admit(always)
    assert {jobs.index(job): n for job, n in scheduler.plan()} == {2: 1, 0: 32, 1: 7}


def test_the_oldest_gets_on_whoever_decodes_beside_it() -> None:
    assert shares(4, 100, 1, 1, 1, 1, 1) == {0: 1, 1: 1, 2: 1, 3: 1}
    assert shares(1, 100, 1, 1) == {0: 1}
    assert shares(2, 1, 100, 1, 1) == {0: 1, 2: 1}
    assert shares(1, 1, 100, 1) == {0: 1}


def test_a_short_prompt_behind_a_long_one_is_read_in_its_own_time() -> None:
    """Not in the 63 steps that the long one takes."""
    scheduler: Scheduler[Job] = Scheduler(n_sequences=2, chunk=16)
    long, short = Job(1000), Job(30)
    for job in (long, short):
        scheduler.add(job)
    scheduler.admit(always)
    n_steps = 0
    while short.n_pending > 0:
        for job, n in scheduler.plan():
            job.n_pending -= n
        n_steps += 1
    assert n_steps == 4
    assert long.n_pending == 1000 - 4 * 16 + 30


def test_loops_are_found_and_ordinary_text_is_not() -> None:
    assert is_looping([1, 2, 3] * 50)
    assert is_looping([9, 9] + [5] * MIN_SPAN)
    assert not is_looping(list(range(500)))
    assert not is_looping([5] * (MIN_SPAN - 1))
    assert not is_looping([1, 2, 3] * 40 + [4])
    assert not is_looping(list(range(60)) * 3)
    assert not is_looping([7] * 100 + [5] * (MIN_SPAN - 1), 100)
    assert is_looping([7] * 100 + [5] * MIN_SPAN, 100)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(0, 2), max_size=5),
    st.lists(st.integers(0, 2), min_size=1, max_size=MAX_PERIOD + 2),
    st.integers(MIN_SPAN - 40, MIN_REPEATS * MAX_PERIOD + 40),
    st.lists(st.integers(0, 2), max_size=2),
)
def test_loops_are_found_by_what_they_are(before: list[int], gram: list[int], n: int, behind: list[int]) -> None:
    ids = before + (gram * n)[:n] + behind

    def repeats(period: int) -> bool:
        last = ids[len(before) :][-max(MIN_SPAN, MIN_REPEATS * period) :]
        return len(last) >= max(MIN_SPAN, MIN_REPEATS * period) and last[period:] == last[:-period]

    assert is_looping(ids, len(before)) == any(map(repeats, range(1, MAX_PERIOD + 1)))
