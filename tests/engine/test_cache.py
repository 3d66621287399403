"""The ring of pages as bookkeeping."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bytefloor.engine.batch import Batch
from bytefloor.engine.cache import NULL_PAGE, CachePlan, Room, SequenceCache, make_pools
from bytefloor.errors import CapacityError, RequestError
from bytefloor.model.step import CacheKind

SLIDING = CacheKind("sliding", 1, 8, 10)
GLOBAL = CacheKind("global", 1, 8, None)
KINDS = (SLIDING, GLOBAL)


def make(capacity: int = 64, chunk: int = 8, **more: int) -> tuple[CachePlan, dict, SequenceCache]:
    plan = CachePlan(capacity, chunk, page_size=4, **more)
    pools = make_pools(plan, KINDS)
    return plan, pools, SequenceCache(plan, KINDS, pools)


def advance(cache: SequenceCache, n: int) -> list:
    copies = cache.reserve(n)
    cache.commit(n)
    return copies


def test_sliding_layers_hold_their_window_and_no_more() -> None:
    plan, pools, cache = make()
    for _ in range(12):
        advance(cache, 4)
        held = plan.n_pages(SLIDING) - 1 - pools["sliding"].n_free
        assert held <= -(-(10 - 1) // 4) + 1
    assert plan.n_pages(GLOBAL) - 1 - pools["global"].n_free == 12


@pytest.mark.parametrize("chunk", [1, 3, 4, 5, 8])
def test_ring_never_puts_two_live_pages_in_one_place(chunk: int) -> None:
    """At any alignment of window and chunk, each position that a row may see has its own entry of the table."""
    plan, _, cache = make(chunk=chunk)
    while cache.length + chunk <= 60:
        cache.reserve(chunk)
        live = range(max(0, cache.length - 9) // 4, (cache.length + chunk - 1) // 4 + 1)
        table = cache.table(SLIDING)
        pages = [table[index % plan.n_table(SLIDING)] for index in live]
        assert NULL_PAGE not in pages
        assert len(set(pages)) == len(pages)
        cache.commit(chunk)


def test_writable_is_what_needs_no_page() -> None:
    _, _, cache = make(capacity=10)
    assert not cache.is_writable(1)
    batch = Batch()
    cache.show(batch, 3)
    assert batch.tables == {kind.name: [cache.table(kind)] for kind in KINDS}
    assert batch.tokens == []
    assert cache.is_writable(4)
    assert not cache.is_writable(5)
    twin = cache.fork()
    assert not cache.is_writable(1)
    cache.show(batch, 1)
    assert len(batch.copies) == len(KINDS)
    twin.free()
    advance(cache, 8)
    cache.reserve(2)
    assert cache.is_writable(2)
    assert not cache.is_writable(3)


def test_null_page_is_never_handed_out() -> None:
    _, pools, _ = make()
    taken = [pools["global"].take() for _ in range(pools["global"].n_free)]
    assert NULL_PAGE not in taken


def test_capacity_is_refused_with_both_numbers() -> None:
    _, _, cache = make(capacity=10)
    with pytest.raises(CapacityError, match=r"12 positions, capacity is 10"):
        cache.reserve(12)


def test_failed_reserve_takes_nothing() -> None:
    plan, pools, _ = make()
    other = SequenceCache(plan, KINDS, pools)
    for _ in range(pools["global"].n_free - 1):
        pools["global"].take()
    before = {name: pool.n_free for name, pool in pools.items()}
    with pytest.raises(CapacityError, match=r"2 pages needed, 1 of"):
        other.reserve(8)
    assert {name: pool.n_free for name, pool in pools.items()} == before


def test_fork_copies_a_shared_page_on_first_write_only() -> None:
    _, pools, cache = make()
    advance(cache, 6)
    twin = cache.fork()
    copies = advance(cache, 1)
    assert {copy.kind for copy in copies} == {"sliding", "global"}
    assert cache.table(GLOBAL)[0] == twin.table(GLOBAL)[0]
    assert cache.table(GLOBAL)[1] != twin.table(GLOBAL)[1]
    assert advance(twin, 1) == []
    free_before = pools["global"].n_free
    twin.free()
    assert pools["global"].n_free == free_before + 1


def test_every_page_comes_back() -> None:
    _, pools, cache = make()
    before = {name: pool.n_free for name, pool in pools.items()}
    advance(cache, 8)
    twin = cache.fork()
    advance(cache, 8)
    advance(twin, 3)
    twin.rewind(9)
    cache.free()
    twin.free()
    assert {name: pool.n_free for name, pool in pools.items()} == before


def test_rewind_is_legal_while_the_window_is_held() -> None:
    """S04: beyond that it is refused, never answered with other positions' keys."""
    _, _, cache = make()
    for _ in range(5):
        advance(cache, 8)
    assert cache.can_rewind(39)
    assert not cache.can_rewind(20)
    with pytest.raises(CapacityError, match="cannot rewind from 40 to 20"):
        cache.rewind(20)
    cache.rewind(39)
    assert cache.length == 39
    assert not cache.can_rewind(41)


def test_rows_of_several_sequences_carry_their_own_tables() -> None:
    plan, pools, first = make(n_sequences=2)
    second = SequenceCache(plan, KINDS, pools)
    advance(first, 5)
    batch = Batch()
    first.append_rows(batch, [7], [0])
    second.append_rows(batch, [8, 9], [1])
    assert batch.tokens == [7, 8, 9]
    assert batch.positions == [5, 0, 1]
    assert batch.sequence == [0, 1, 1]
    assert batch.wanted == [0, 2]
    assert [len(batch.tables[kind.name]) for kind in KINDS] == [2, 2]


def test_positions_in_all_say_how_many_pages_there_are() -> None:
    plan = CachePlan(64, 8, n_sequences=5, page_size=4, positions=90)
    assert plan.n_pages(GLOBAL) == 23 + 1
    # Five windows of four pages and a border each, two pages of a chunk, four prefixes of four pages: more than 23.
    assert plan.n_pages(SLIDING) == 23 + 1
    roomy = CachePlan(64, 8, n_sequences=5, page_size=4, positions=300)
    assert roomy.n_pages(GLOBAL) == 75 + 1
    assert roomy.n_pages(SLIDING) == 5 * 5 + 2 + 4 * 4 + 1
    assert (plan.most_positions, CachePlan(64, 8, 5).most_positions) == (90, 320)


@pytest.mark.parametrize("chunk", [1, 5, 8, 64])
@pytest.mark.parametrize("n_sequences", [1, 2, 7])
def test_pools_hold_at_least_one_whole_sequence(chunk: int, n_sequences: int) -> None:
    _, pools, cache = make(chunk=chunk, n_sequences=n_sequences, n_snapshots=0, positions=64)
    while cache.length < 64:
        advance(cache, min(chunk, 64 - cache.length))
    assert pools["global"].n_free == 0
    with pytest.raises(RequestError, match=r"a cache of 63 positions in all: one sequence may have 64"):
        CachePlan(64, chunk, n_sequences, positions=63)
    with pytest.raises(RequestError, match="a cache of 63 positions"):
        Room(64, chunk, n_sequences, positions=63).plan(8)
    assert Room(64, 8, 2, 3, 90).plan(8) == CachePlan(64, 8, 2, 3, positions=90)


def test_pages_that_only_prefixes_hold_are_idle() -> None:
    _, pools, cache = make()
    advance(cache, 6)
    first, second = cache.fork(), cache.fork()
    first.keep()
    second.keep()
    assert pools["global"].n_idle == 0  # the sequence holds them too
    twin = first.fork()
    cache.free()
    assert pools["global"].n_idle == 0
    twin.free()
    assert pools["global"].n_idle == 2
    second.free()
    assert pools["global"].n_idle == 2
    first.free()
    assert (pools["global"].n_idle, pools["global"].n_free) == (0, pools["global"].n_pages - 1)


def test_missing_pages_are_those_that_writing_takes() -> None:
    plan, pools, cache = make(chunk=8)
    assert [cache.n_missing(kind, 60) for kind in KINDS] == [plan.n_table(SLIDING), 15]
    advance(cache, 8)
    advance(cache, 6)
    twin = cache.fork()
    assert cache.n_missing(GLOBAL, 3) == 2  # the last page is shared, and the next one not there
    assert cache.n_missing(SLIDING, 3) == 2
    before = {name: pool.n_free for name, pool in pools.items()}
    cache.reserve(3)
    assert {name: before[name] - pool.n_free for name, pool in pools.items()} == {"sliding": 2, "global": 2}
    assert [cache.n_missing(kind, 3) for kind in KINDS] == [0, 0]
    twin.free()


ACTIONS = st.sampled_from(["advance", "look", "fork", "rewind", "free", "keep"])


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(ACTIONS, st.integers(0, 3), st.integers(1, 5)), max_size=40))
def test_what_is_remembered_is_what_would_be_found(actions: list[tuple[str, int, int]]) -> None:
    """Against caches that forget before each action what pages they hold alone, and their tables."""
    played = [play(actions, forgets=False), play(actions, forgets=True)]
    assert played[0] == played[1]


def play(actions: list[tuple[str, int, int]], *, forgets: bool) -> list[object]:
    _, pools, first = make(capacity=24, chunk=5, n_sequences=3)
    caches, kept, said = [first], [], []
    for action, which, n in actions:
        cache = caches[which % len(caches)]
        if forgets:
            cache._writable_to = 0
            cache._tables.clear()
        try:
            if action == "advance":
                said.append(cache.reserve(n))
                cache.commit(n - n // 3)
            elif action == "fork":
                caches.append(cache.fork())
            elif action == "rewind":
                cache.rewind(max(0, cache.length - n))
            elif action == "free":
                cache.free()
            elif action == "keep":
                kept.append(cache.fork())
                kept[-1].keep()
        except CapacityError as error:
            said.append(str(error))
        said += [cache.is_writable(n), [cache.table(kind) for kind in KINDS], [pool.n_free for pool in pools.values()]]
    return said


def test_tables_that_were_given_stay_as_they_were() -> None:
    _, _, cache = make()
    advance(cache, 4)
    table = cache.table(GLOBAL)
    before = list(table)
    advance(cache, 1)
    assert cache.table(GLOBAL) != before
    assert table == before
