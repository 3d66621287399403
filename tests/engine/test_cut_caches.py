"""Prompts that are cut, as bookkeeping: slots, pages, what may be rewound, and which rows go together."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bytefloor.engine.batch import Batch, part_of
from bytefloor.engine.cache import NULL_PAGE, CachePlan, Room, SequenceCache, make_pools, next_rows
from bytefloor.engine.prefix import PrefixStore
from bytefloor.engine.score import steps_of
from bytefloor.errors import CapacityError, RequestError
from bytefloor.model.step import CacheKind
from bytefloor.ops.eviction import OBSERVED

SLIDING = CacheKind("sliding", 1, 8, 10)
GLOBAL = CacheKind("global", 1, 8, None)
KINDS = (SLIDING, GLOBAL)


def make(capacity: int = 256, chunk: int = 64, **more: int) -> tuple[CachePlan, dict, SequenceCache]:
    plan = CachePlan(capacity, chunk, page_size=4, **{"budget": 38, **more})
    pools = make_pools(plan, KINDS)
    return plan, pools, SequenceCache(plan, KINDS, pools)


def read(cache: SequenceCache, n_rows: int) -> Batch:
    """The next rows through a step."""
    batch = Batch()
    cache.append_rows(batch, [7] * n_rows, [])
    cache.commit(n_rows)
    return batch


def read_prompt(cache: SequenceCache, n_prompt: int) -> Batch:
    cache.cut_at(n_prompt)
    batch = Batch()
    while cache.length < n_prompt:
        batch = read(cache, cache.together(min(cache.plan.chunk, n_prompt - cache.length)))
    return batch


def n_held(plan: CachePlan, pools: dict, kind: CacheKind) -> int:
    return plan.n_pages(kind) - 1 - pools[kind.name].n_free


def test_pages_beyond_the_budget_come_back_with_the_step_that_ends_the_prompt() -> None:
    plan, pools, cache = make()
    cache.cut_at(100)
    read(cache, 64)
    assert n_held(plan, pools, GLOBAL) == 16
    assert read(cache, 36).evicting == [0]
    assert (cache.length, cache.dropped) == (100, 62)
    assert n_held(plan, pools, GLOBAL) == 10  # 38 positions
    assert n_held(plan, pools, SLIDING) == 3  # its window, as ever
    assert cache.table(GLOBAL)[10:] == [NULL_PAGE] * 54


def test_slots_go_on_behind_what_is_kept_and_positions_behind_the_prompt() -> None:
    _, _, cache = make()
    read_prompt(cache, 100)
    batch = read(cache, 3)
    assert (batch.positions, batch.slots, batch.evicting) == ([100, 101, 102], [38, 39, 40], [])
    other = make()[2]
    read(other, 5)
    batch = next_rows([cache, other], [1, 2], [1, 0], [])
    assert (batch.positions, batch.slots) == ([104, 5], [42, 5])
    pages = [page for page in cache.table(GLOBAL) if page != NULL_PAGE]
    assert len(pages) == 11  # 41 slots
    assert len(set(pages)) == 11


@given(st.lists(st.integers(1, 9), max_size=30), st.integers(39, 120), st.integers(33, 60))
@settings(max_examples=60, deadline=None)
def test_every_row_has_a_place_of_its_own_and_every_page_comes_back(
    counts: list[int], n_prompt: int, budget: int
) -> None:
    plan, pools, cache = make(budget=budget)
    before = {name: pool.n_free for name, pool in pools.items()}
    read_prompt(cache, n_prompt)
    for n in counts:
        if cache.length + n + 3 > plan.capacity:
            break
        was_there = cache.is_writable(n)
        copies = cache.reserve(n)
        assert cache.is_writable(n)
        assert not was_there or not copies
        batch = read(cache, n)
        table = batch.tables["global"][0]
        assert all(table[slot // 4] != NULL_PAGE for slot in range(batch.slots[-1] + 1))
        ring = batch.tables["sliding"][0]
        held = [ring[p // 4 % len(ring)] for p in range(max(0, batch.positions[0] - 9), batch.positions[-1] + 1)]
        assert NULL_PAGE not in held
    cache.reserve(3)
    cache.rewind(cache.length)
    n_slots = cache.length - cache.dropped
    assert n_held(plan, pools, GLOBAL) == -(-n_slots // 4)
    cache.free()
    assert {name: pool.n_free for name, pool in pools.items()} == before


def test_a_short_prompt_is_left_alone() -> None:
    plan, pools, cache = make()
    assert read_prompt(cache, 38).evicting == []
    assert cache.dropped == 0
    assert n_held(plan, pools, GLOBAL) == 10
    assert cache.can_rewind(37)


def test_drafts_are_rewound_and_the_prompt_is_not() -> None:
    _, _, cache = make()
    read_prompt(cache, 100)
    cache.reserve(9)
    cache.rewind(100)
    assert (cache.length, cache.dropped, read(cache, 1).slots) == (100, 62, [38])
    assert not cache.can_rewind(99)
    with pytest.raises(CapacityError, match="cannot rewind from 101 to 40: the prompt was cut"):
        cache.rewind(40)
    for _ in range(6):
        read(cache, 4)
    cache.reserve(5)
    cache.rewind(125)
    with pytest.raises(CapacityError, match="cannot rewind from 125 to 101: its window has been returned"):
        cache.rewind(101)


@pytest.mark.parametrize("chunk", [32, 33, 40, 64, 100])
def test_the_rows_that_choose_go_together(chunk: int) -> None:
    """Whatever a scheduler offers; and those who do not choose are not held up."""
    _, _, cache = make(chunk=chunk)
    assert cache.together(17) == 17
    read_prompt(cache, 90)
    assert cache.together(5) == 5
    _, _, cache = make(chunk=chunk)
    cache.cut_at(90)
    read(cache, cache.together(30))
    assert [cache.together(n) for n in (1, 28, 29, 59, 60, 61)] == [1, 28, 28, 28, 60, 60]
    read(cache, 28)
    assert [cache.together(n) for n in (1, 31, 32, 70)] == [0, 0, 32, 32]
    with pytest.raises(AssertionError, match="those before 90 choose"):
        cache.append_rows(Batch(), [7] * 31, [])


@pytest.mark.parametrize("chunk", [1, 16, 31, 32, 33, 40, 89, 90, 200])
@pytest.mark.parametrize("n_prompt", [0, 10, 33, 64, 90])
def test_steps_of_a_text_end_with_its_prompt(chunk: int, n_prompt: int) -> None:
    steps = steps_of(150, chunk, n_prompt)
    assert [row for step in steps for row in step] == [*range(150)]
    assert all(len(step) <= max(chunk, OBSERVED) for step in steps)
    if n_prompt:
        last = next(step for step in steps if step.stop == n_prompt)
        assert len(last) >= min(n_prompt, OBSERVED)
    assert [*map(len, steps_of(150, 64))] == [64, 64, 22]


def test_what_is_shared_is_copied_before_it_is_written_over() -> None:
    """A stored prefix keeps its pages, and the prompt that continues from it is cut in its own."""
    plan, pools, cache = make()
    read(cache, 50)
    twin = cache.fork()
    twin.cut_at(90)
    assert not twin.is_writable(40)
    # What it keeps takes 10 pages, all of which are shared; the one that is written next is half full.
    needed = twin.n_missing(GLOBAL, 40)
    assert needed == 10 + 11
    copies = [copy for copy in twin.reserve(40) if copy.kind == "global"]
    assert [copy.source for copy in copies] == [*cache.table(GLOBAL)[:10], cache.table(GLOBAL)[12]]
    twin.commit(40)
    assert set(twin.table(GLOBAL)[:10]).isdisjoint(cache.table(GLOBAL)[:13])
    assert n_held(plan, pools, GLOBAL) == 13 + 10
    short = make(positions=256)[0]
    assert short.n_pages(GLOBAL) == 65


def test_no_prefix_is_made_of_what_was_cut() -> None:
    plan, pools, cache = make()
    store = PrefixStore(4)
    ids = list(range(100))
    read_prompt(cache, 100)
    twin = cache.fork()
    assert (twin.dropped, twin.can_rewind(99)) == (62, False)
    before = n_held(plan, pools, GLOBAL)
    store.put(ids, twin)
    assert store.find(ids) is None
    store.put(ids, cache)
    assert (before, n_held(plan, pools, GLOBAL)) == (10, 0)


def test_a_part_of_a_batch_has_its_own_sequences_that_are_cut() -> None:
    _, _, first = make()
    second = make()[2]
    first.cut_at(40)
    second.cut_at(50)
    batch = Batch()
    make()[2].append_rows(batch, [1, 2], [])
    first.append_rows(batch, [3] * 40, [])
    second.append_rows(batch, [4] * 50, [])
    assert batch.evicting == [1, 2]
    assert part_of(batch, range(42, 92)).evicting == [0]
    assert part_of(batch, range(42)).evicting == [1]
    assert part_of(batch, range(2)).evicting == []


def test_plans_that_cannot_be_are_refused() -> None:
    with pytest.raises(RequestError, match="a budget of 32 positions: expected more than 32"):
        CachePlan(256, 64, budget=32)
    with pytest.raises(RequestError, match="chunks of 39 rows: a budget for 9 sequences needs at least 40"):
        CachePlan(256, 39, n_sequences=9, budget=64)
    assert CachePlan(256, 40, n_sequences=9, budget=64).cuts(65)
    assert not CachePlan(64, 1, budget=64).cuts(64)
    assert not CachePlan(256, 1).cuts(200)
    assert Room(256, budget=40).plan(64).budget == 40
