"""Who gets the pages when there are not enough for all: prefixes give way first, then the youngest sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from bytefloor.engine.batch import PageCopy
from bytefloor.engine.cache import CachePlan, SequenceCache, make_pools
from bytefloor.engine.prefix import PrefixStore
from bytefloor.engine.scheduler import Scheduler
from bytefloor.errors import CapacityError
from bytefloor.model.step import CacheKind
from bytefloor.ops.eviction import OBSERVED


class Holder(Protocol):
    """A sequence that runs: its cache, and how many of its known tokens are not in it yet."""

    cache: SequenceCache

    @property
    def n_pending(self) -> int: ...


H = TypeVar("H", bound=Holder)


@dataclass(frozen=True)
class PageUse:
    """Pages of one cache kind. n_idle: of those in use, the ones that only stored prefixes hold."""

    n_pages: int
    n_free: int
    n_idle: int

    @property
    def n_used(self) -> int:
        """Those of kept prefixes among them."""
        return self.n_pages - self.n_free


@dataclass(frozen=True)
class Load:
    """How busy an engine is. n_preempted: how often, since it began, a sequence had to give its pages to an older one.

    pages: of each cache kind.
    """

    n_running: int
    n_waiting: int
    n_preempted: int
    pages: dict[str, PageUse]


@dataclass(frozen=True)
class Settled(Generic[H]):
    """A step's rows whose pages are there.

    copies: to be made first, in this order. lacking: who cannot go on even alone, and why.
    """

    rows: list[tuple[H, int]]
    copies: list[PageCopy]
    lacking: list[tuple[H, CapacityError]]


class Pages:
    """All pages of an engine, and the prefixes that are kept in them."""

    def __init__(self, plan: CachePlan, kinds: Sequence[CacheKind]) -> None:
        self._plan, self._kinds = plan, tuple(kinds)
        self.pools = make_pools(plan, kinds)
        self.prefixes = PrefixStore(plan.n_snapshots)
        self.n_preempted = 0

    def use(self) -> dict[str, PageUse]:
        """Pages of each cache kind, the null page left out."""
        return {name: PageUse(pool.n_pages - 1, pool.n_free, pool.n_idle) for name, pool in self.pools.items()}

    def begin(self, ids: Sequence[int], running: Sequence[Holder], n_prompt: int | None) -> SequenceCache | None:
        """A cache for a sequence of these tokens that holds the longest stored prefix, or nothing where it is to be
        new; None where pages are short.

        n_prompt: of ids, the prompt, the last OBSERVED of which are left to compute where it will be cut; None for
        what is to be new.

        Free and idle pages must do for all of its tokens, for what the others still have to read, and for one page
        more for each of them, of kinds that grow. Nothing is taken yet, and prefixes give way only once it is. Alone it
        may always begin.
        """
        found = None
        if n_prompt is not None:
            found = self.prefixes.find(ids[: n_prompt - OBSERVED + 1] if self._plan.cuts(n_prompt) else ids)
        cache = found or SequenceCache(self._plan, self._kinds, self.pools)
        cache.cut_at(n_prompt or 0)
        if not running or all(self._has_room(kind, cache, len(ids), running) for kind in self._kinds):
            return cache
        cache.free()
        return None

    def _has_room(self, kind: CacheKind, cache: SequenceCache, n_ids: int, running: Sequence[Holder]) -> bool:
        pool, n_more = self.pools[kind.name], int(kind.most is None)
        promised = sum(other.cache.n_missing(kind, other.n_pending) + n_more for other in running)
        return cache.n_missing(kind, n_ids - cache.length) + promised <= pool.n_free + pool.n_idle

    def reserve(self, cache: SequenceCache, n_rows: int) -> list[PageCopy]:
        """As ``SequenceCache.reserve``, but prefixes give up their pages before anybody goes without."""
        while True:
            try:
                return cache.reserve(n_rows)
            except CapacityError:
                if not self.prefixes.evict():
                    raise

    def reserve_spare(self, cache: SequenceCache, n_rows: int, n_more: int) -> tuple[int, list[PageCopy]]:
        """Behind n_rows that are writable, how many of n_more can be made so with free pages alone, and the copies."""
        for n in range(n_more, 0, -1):
            try:
                return n, cache.reserve(n_rows + n)
            except CapacityError:
                continue
        return 0, []

    def settle(self, planned: Sequence[tuple[H, int]], scheduler: Scheduler[H]) -> Settled[H]:
        """Make the rows of a step writable.

        Who finds no page pre-empts the youngest that runs: its pages come back and it returns to the queue. The
        youngest itself sits the step out, and keeps its pages until an older one needs them. The oldest always gets
        on, unless it cannot even alone: then it is the caller's to end.
        """
        # Copies stay in the order in which pages were taken: a page that one of them reads may be another's target.
        copies: list[tuple[H, PageCopy]] = []
        rows: list[tuple[H, int]] = []
        lacking: list[tuple[H, CapacityError]] = []
        for sequence, n_rows in planned:
            while sequence in scheduler.running:
                try:
                    copies.extend((sequence, copy) for copy in self.reserve(sequence.cache, n_rows))
                except CapacityError as error:
                    if scheduler.running[-1] is not sequence:
                        self._preempt(scheduler)
                        continue
                    if len(scheduler.running) == 1:
                        lacking.append((sequence, error))
                else:
                    rows.append((sequence, n_rows))
                break
        # Whoever was settled and then pre-empted by an older one takes no part.
        return Settled(
            [(sequence, n) for sequence, n in rows if sequence in scheduler.running],
            [copy for sequence, copy in copies if sequence in scheduler.running],
            lacking,
        )

    def _preempt(self, scheduler: Scheduler[H]) -> None:
        scheduler.preempt().cache.free()
        self.n_preempted += 1
