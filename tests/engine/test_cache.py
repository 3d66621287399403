"""The ring of pages as bookkeeping."""

from __future__ import annotations

import pytest

from bytefloor.engine.batch import Batch
from bytefloor.engine.cache import NULL_PAGE, CachePlan, SequenceCache, make_pools
from bytefloor.errors import CapacityError
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
