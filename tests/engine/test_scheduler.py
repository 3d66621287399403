"""The scheduler, without a model."""

from __future__ import annotations

from dataclasses import dataclass

from bytefloor.engine.loops import MIN_SPAN, is_looping
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


def test_loops_are_found_and_ordinary_text_is_not() -> None:
    assert is_looping([1, 2, 3] * 50)
    assert is_looping([9, 9] + [5] * MIN_SPAN)
    assert not is_looping(list(range(500)))
    assert not is_looping([5] * (MIN_SPAN - 1))
    assert not is_looping([1, 2, 3] * 40 + [4])
    assert not is_looping(list(range(60)) * 3)
