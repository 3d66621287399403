"""Pages that run out, case by case: who waits, who gives way, who is told so. Schedules at random: test_schedules."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from bytefloor.engine.cache import CachePlan, SequenceCache
from bytefloor.engine.engine import Engine
from bytefloor.engine.pages import Pages
from bytefloor.engine.prefix import STRETCH, common_length
from bytefloor.engine.request import Delta, Request
from bytefloor.engine.sampling_params import SamplingParams
from bytefloor.engine.scheduler import Scheduler
from device_sampling import Numbers
from token_pages import KINDS, N_ROWS, N_TOKENS, TokenPages, answer_of

CAPACITY = 40
SAMPLED = SamplingParams(temperature=1.3, seed=3)


def make(loops: bool = False, **plan: int) -> Engine:
    settings = {"capacity": CAPACITY, "chunk": 16, "n_sequences": 4, "page_size": 4, "positions": CAPACITY} | plan
    return Engine(TokenPages(CachePlan(**settings), loops), Numbers(N_TOKENS), N_ROWS)


def ask(n_prompt: int, n_tokens: int, seed: int = 0) -> Request:
    prompt = tuple(5 + (7 * seed + 3 * i * i) % 24 for i in range(n_prompt))
    return Request(prompt, n_tokens, replace(SAMPLED, seed=seed), ignores_end=True)


def finish(engine: Engine, *told: list[Delta]) -> dict[int, list[Delta]]:
    """Deltas of each request to its end, those that were told before among them."""
    found: dict[int, list[Delta]] = {}
    steps = list(told)
    while engine.has_work:
        steps.append(engine.step())
    for deltas in steps:
        for delta in deltas:
            found.setdefault(delta.request_id, []).append(delta)
    return found


def ids_of(deltas: list[Delta]) -> list[int]:
    return [delta.sampled.id for delta in deltas if delta.sampled]


def states(engine: Engine) -> tuple[list[int], list[int]]:
    """Ids of those that run, and of those that wait."""
    scheduler = engine._scheduler
    return [one.request_id for one in scheduler.running], [one.request_id for one in scheduler.waiting]


def test_a_prompt_waits_until_its_pages_are_free() -> None:
    """Ten pages: five of a prompt that is still being read, one in reserve, so a second one of five waits."""
    engine = make()
    requests = [ask(20, 3), ask(20, 3, seed=1)]
    for request in requests:
        engine.add(request)
    told = [engine.step()]
    assert states(engine) == ([1], [2])
    assert (engine.load.n_running, engine.load.n_waiting) == (1, 1)
    found = finish(engine, *told)
    assert [ids_of(found[i + 1]) for i in range(2)] == [answer_of(request, CAPACITY) for request in requests]
    assert engine.load.n_preempted == 0


def test_prefixes_give_way_to_a_prompt_the_least_recently_used_first() -> None:
    engine = make(n_sequences=1, n_snapshots=8)
    first, second, third = ask(12, 4), ask(12, 4, seed=1), ask(20, 4, seed=2)
    for request in (first, second, first):
        list(engine.generate(request))
    assert sum(use.n_free for use in engine.load.pages.values()) < 3 * 5
    list(engine.generate(third))
    kept = {key[: len(first.prompt_ids)] for key in engine._pages.prefixes._entries}
    assert first.prompt_ids in kept
    assert second.prompt_ids not in kept


def crowded(engine: Engine, *requests: Request) -> tuple[list[int], list[list[Delta]]]:
    """Ids of the requests, and what was said until the first of them was pre-empted."""
    order, told = [engine.add(request) for request in requests], []
    while not engine.load.n_preempted:
        told.append(engine.step())
        assert engine.has_work
    return order, told


@pytest.mark.parametrize("sampling", [{}, {"repetition_penalty": 1.4}, {"mirostat_tau": 3.0}], ids=str)
def test_the_youngest_gives_way_and_is_computed_again(sampling: dict[str, float]) -> None:
    """Its sampler, its text and what was cached for it at first are as they were."""
    engine = make(n_snapshots=1)
    list(engine.generate(ask(9, 1, seed=1)))
    requests = [replace(ask(5, 34), sampling=replace(SAMPLED, **sampling)), ask(12, 20, seed=1)]
    requests[1] = replace(requests[1], sampling=requests[0].sampling)
    order, told = crowded(engine, *requests)
    assert states(engine) == (order[:1], order[1:])
    assert engine.reading(order[1]) is None
    found = finish(engine, *told)
    for request_id, request in zip(order, requests, strict=True):
        assert ids_of(found[request_id]) == answer_of(request, CAPACITY)
    assert [found[request_id][-1].finish.n_cached for request_id in order] == [0, 9]


def test_the_youngest_keeps_its_pages_while_nobody_older_needs_them() -> None:
    """It finds no page for itself and sits out; the older one then ends, and nothing was computed twice."""
    engine = make(positions=48)
    old, young = ask(23, 9), ask(12, 10, seed=1)
    order = [engine.add(old), engine.add(young)]
    sat_out, told = 0, []
    while engine.has_work:
        before = engine.executor.n_rows
        told.append(engine.step())
        sat_out += engine.load.n_running == 2 and engine.executor.n_rows == before + 1
    found = finish(engine, *told)
    assert [ids_of(found[i]) for i in order] == [answer_of(old, CAPACITY), answer_of(young, CAPACITY)]
    assert sat_out > 0
    assert engine.load.n_preempted == 0
    assert engine.executor.n_rows == 23 + 8 + 12 + 9


@dataclass(eq=False)
class Holding:
    cache: SequenceCache
    n_pending: int


def test_a_decoding_row_that_was_settled_gives_its_pages_to_an_older_prompt() -> None:
    """Rows and copies of the step are then those of the older one alone."""
    plan = CachePlan(CAPACITY, 16, 2, page_size=4, positions=CAPACITY)
    pages, scheduler = Pages(plan, KINDS), Scheduler[Holding](2, 16)
    old, young = (Holding(SequenceCache(plan, KINDS, pages.pools), n) for n in (12, 1))
    pages.reserve(young.cache, 13)
    young.cache.commit(13)
    twin = young.cache.fork()
    pages.reserve(old.cache, 9)
    old.cache.commit(9)
    for one in (old, young):
        scheduler.add(one)
    scheduler.admit(lambda one: True)
    settled = pages.settle([(young, 1), (old, 12)], scheduler)
    assert (settled.rows, settled.copies, settled.lacking) == ([(old, 12)], [], [])
    assert list(scheduler.waiting) == [young]
    twin.free()
    old.cache.free()
    assert all(use.n_free == use.n_pages for use in pages.use().values())


def test_alone_a_prompt_begins_even_where_its_own_prefix_holds_all_pages() -> None:
    """Its last page is the prefix's too and would have to be copied; the prefix goes instead."""
    engine = make()
    first = ask(38, 1)
    list(engine.generate(first))
    second = replace(first, prompt_ids=(*first.prompt_ids, 9))
    engine.add(second)
    deltas = engine.step()
    assert ids_of(deltas) == answer_of(second, CAPACITY)
    assert deltas[-1].finish.n_cached == 38


@pytest.mark.parametrize("loops", [False, True])
def test_one_that_cannot_run_alone_ends_with_an_error_of_its_own(loops: bool) -> None:
    """Whoever else took the pages: it is told how many there are, and the next one is served once they are back."""
    engine = make(loops)
    pool = engine._pages.pools["global"]
    taken = [pool.take() for _ in range(6)]
    first, second = engine.add(ask(5, 30)), engine.add(ask(4, 6, seed=1))
    found = finish(engine)
    assert found[first][-1].finish.reason == "error"
    assert found[first][-1].finish.detail == "cache global: 1 pages needed, 0 of 10 free"
    assert ids_of(found[first]) == answer_of(ask(5, 30), CAPACITY)[:12]
    assert ids_of(found[second]) == answer_of(ask(4, 6, seed=1), CAPACITY)
    for page in taken:
        pool.release(page)
    assert ids_of(list(engine.generate(ask(5, 30)))) == answer_of(ask(5, 30), CAPACITY)


def test_a_pre_empted_one_can_be_cancelled() -> None:
    engine = make()
    requests = [ask(5, 34), ask(12, 20, seed=1)]
    (old, young), told = crowded(engine, *requests)
    said = [delta for deltas in told for delta in deltas if delta.request_id == young]
    end = engine.cancel(young)
    assert end is not None
    assert (end.reason, end.n_generated, end.n_cached) == ("cancelled", len(said), 0)
    assert len(said) > 0
    assert engine.cancel(young) is None
    assert ids_of(finish(engine, *told)[old]) == answer_of(requests[0], CAPACITY)
    while engine._pages.prefixes.evict():
        pass
    assert all(use.n_free == use.n_pages for use in engine.load.pages.values())


@pytest.mark.parametrize(("n_shared", "n_cached"), [(12, 0), (20, 20), (27, 20), (28, 28)])
def test_what_one_kind_of_layer_has_lost_is_computed_again_for_all(n_shared: int, n_cached: int) -> None:
    """S04: the prompt's own end and the answer's are kept; between them a window has moved on."""
    engine = make(positions=4 * CAPACITY)
    first = ask(20, 9)
    answer = ids_of(list(engine.generate(first)))
    ids = (*first.prompt_ids, *answer)[:n_shared]
    before = engine.executor.n_rows
    second = replace(first, prompt_ids=(*ids, 28, 27), max_tokens=4)
    deltas = list(engine.generate(second))
    assert deltas[-1].finish.n_cached == n_cached
    assert engine.executor.n_rows - before == n_shared + 2 - n_cached + 3
    assert ids_of(deltas) == answer_of(second, CAPACITY)


def test_pools_are_counted_by_kind() -> None:
    engine = make(positions=60)
    list(engine.generate(ask(10, 3)))
    use = engine.load.pages
    assert set(use) == {kind.name for kind in KINDS}
    assert (use["global"].n_pages, use["global"].n_free, use["global"].n_idle) == (15, 15 - 4, 4)


@pytest.mark.parametrize("n", [0, 1, STRETCH - 1, STRETCH, STRETCH + 1, 2 * STRETCH, 2 * STRETCH + 3])
def test_common_beginnings_are_measured_to_the_token(n: int) -> None:
    same = tuple(range(n))
    assert common_length(same, same) == n
    assert common_length((*same, 7, 1), (*same, 8, 1)) == n
    assert common_length(same, (*same, 8)) == n
    assert common_length((*same, 8, *range(STRETCH)), same) == n
