"""The cache as bookkeeping: which page holds which positions of which sequence. No tensors here.

A ring of pages. Position p of a sequence lies, for each cache kind, in page ``table[(p // PAGE) % n_table]`` at offset
p % PAGE. Pages are counted by reference, handed out just before they are written, copied on write when shared, and
returned once they have fallen out of the window. Page 0 of every pool is the null page: padded rows write there.

Where a prompt is cut to a budget, layers without a window have dropped some of its positions, the same number in each.
What they keep lies in the first slots, and position p after it in slot p - dropped: there read slot for position above.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bytefloor.engine.batch import Batch, PageCopy
from bytefloor.errors import CapacityError, RequestError
from bytefloor.model.step import CacheKind
from bytefloor.ops.eviction import OBSERVED
from bytefloor.ops.pages import PAGE_SIZE

NULL_PAGE = 0


def ceil_div(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


@dataclass(frozen=True)
class CachePlan:
    """How much cache there is.

    capacity: positions a sequence may have. chunk: most rows of one sequence in one step. n_sequences: how many run
    at once. n_snapshots: how many finished or forked prefixes can keep the windows of their sliding layers.
    positions: how many all sequences and prefixes have together; None for as many as n_sequences of full capacity take.
    budget: of a longer prompt layers without a window keep so many positions once it is read; None for all of them.
    RequestError where positions are less than one sequence may have, for a budget without room for more than the rows
    that choose, and where these might not find a place in one step.
    """

    capacity: int
    chunk: int
    n_sequences: int = 1
    n_snapshots: int = 4
    page_size: int = PAGE_SIZE
    positions: int | None = None
    budget: int | None = None

    def __post_init__(self) -> None:
        if self.positions is not None and self.positions < self.capacity:
            raise RequestError(
                f"a cache of {self.positions} positions in all: one sequence may have {self.capacity}, "
                "expected at least as many"
            )
        if self.budget is None:
            return
        if self.budget <= OBSERVED:
            raise RequestError(
                f"a budget of {self.budget} positions: expected more than {OBSERVED}, the last rows of a prompt, "
                "which choose what is kept"
            )
        # The rows that choose go together, also where all other sequences decode beside them.
        needed = OBSERVED + self.n_sequences - 1
        if self.budget < self.capacity and self.chunk < needed:
            raise RequestError(
                f"chunks of {self.chunk} rows: a budget for {self.n_sequences} sequences needs at least {needed}"
            )

    def cuts(self, n_prompt: int) -> bool:
        """Whether a prompt of this length loses positions."""
        return self.budget is not None and n_prompt > self.budget

    @property
    def n_together(self) -> int:
        """Rows at the end of a prompt that may have to be of one step."""
        return 1 if self.budget is None else OBSERVED

    @property
    def most_positions(self) -> int:
        """How many positions the pools hold in all."""
        return self.positions or self.n_sequences * self.capacity

    def n_table(self, kind: CacheKind) -> int:
        """Entries of a sequence's table: pages that capacity, or the window and a chunk at any alignment, can touch."""
        whole = ceil_div(min(self.capacity, kind.most or self.capacity), self.page_size)
        if kind.window is None or kind.most is not None:
            return whole
        return min(whole, ceil_div(kind.window - 1 + self.chunk, self.page_size) + 1)

    def n_pages(self, kind: CacheKind) -> int:
        """Pages of the kind's pool, the null page included."""
        # A prefix has been committed: of a window, and of no chunk beside it, it holds what the next row will see.
        held = 1 if kind.window is None else ceil_div(kind.window - 1, self.page_size) + 1
        held = self.n_table(kind) if kind.most else min(held, self.n_table(kind))
        live, kept = self.n_sequences * self.n_table(kind), self.n_snapshots * held
        if kind.window is not None:
            # The rows of a step are shared: a window each, on any page border, and one chunk among all of them.
            live = min(live, self.n_sequences * (held + 1) + ceil_div(self.chunk, self.page_size))
        if self.positions is None:
            return live + kept + 1
        within = ceil_div(self.positions, self.page_size)
        grows = kind.window is None and kind.most is None
        return (within if grows else min(within, live + kept)) + 1

    def n_bytes(self, kind: CacheKind, n_layers: int) -> int:
        """Bytes of the kind's pool."""
        return self.n_pages(kind) * n_layers * kind.page_bytes(self.page_size)


@dataclass(frozen=True)
class Room:
    """What is asked of a cache before it is known who computes.

    capacity: positions a sequence may have. chunk: most rows of one step, None for what suits whoever computes.
    n_sequences, n_snapshots, positions, budget: as in ``CachePlan``.
    """

    capacity: int
    chunk: int | None = None
    n_sequences: int = 1
    n_snapshots: int = 4
    positions: int | None = None
    budget: int | None = None

    def plan(self, chunk: int) -> CachePlan:
        """chunk: where none was asked for. More than all sequences can have buys nothing, and costs buffers.

        RequestError for a chunk that was asked for and is none, and for too few positions.
        """
        if self.chunk is not None:
            chunk = self.chunk
        if chunk < 1:
            raise RequestError(f"chunks of {chunk} rows: expected at least 1")
        chunk = min(chunk, self.n_sequences * self.capacity)
        return CachePlan(
            self.capacity, chunk, self.n_sequences, self.n_snapshots, positions=self.positions, budget=self.budget
        )


class PagePool:
    """The pages of one cache kind, by number.

    n_idle: pages that only stored prefixes hold, which are there for whoever needs them.
    """

    def __init__(self, name: str, n_pages: int) -> None:
        self.name = name
        self.n_pages = n_pages
        self.n_idle = 0
        self._references = [0] * n_pages
        # How many of the references are those of stored prefixes.
        self._kept = [0] * n_pages
        self._free = list(range(n_pages - 1, NULL_PAGE, -1))

    @property
    def n_free(self) -> int:
        return len(self._free)

    def take(self) -> int:
        """A free page, now referenced once. CapacityError when there is none."""
        if not self._free:
            raise CapacityError(f"cache {self.name}: all {self.n_pages - 1} pages are in use")
        page = self._free.pop()
        self._references[page] = 1
        return page

    def share(self, page: int) -> None:
        """One more owner."""
        self._count(page, 1, 0)

    def release(self, page: int, is_kept: bool = False) -> None:
        """One owner fewer, a stored prefix or not; the last one returns the page."""
        self._count(page, -1, -1 if is_kept else 0)
        if self._references[page] == 0:
            self._free.append(page)

    def keep(self, page: int) -> None:
        """One of the owners is a stored prefix from now on."""
        self._count(page, 0, 1)

    def _count(self, page: int, references: int, kept: int) -> None:
        was_idle = self._is_idle(page)
        self._references[page] += references
        self._kept[page] += kept
        self.n_idle += self._is_idle(page) - was_idle

    def _is_idle(self, page: int) -> bool:
        return 0 < self._references[page] == self._kept[page]

    def is_shared(self, page: int) -> bool:
        return self._references[page] > 1


class SequenceCache:
    """The pages of one sequence, over all kinds.

    length: positions that are written. dropped: of them, those that layers without a window have no more. ``reserve``
    before a step, ``commit`` after it.
    """

    def __init__(self, plan: CachePlan, kinds: Sequence[CacheKind], pools: dict[str, PagePool]) -> None:
        self.plan = plan
        self.kinds = tuple(kinds)
        self.length = self.dropped = 0
        # Where the prompt ends, if it is to be cut there, or has been; otherwise 0.
        self._cut_at = 0
        self._sliding = [(kind, kind.window) for kind in kinds if kind.window is not None]
        self._is_kept = False
        self._pools = pools
        self._pages: dict[str, dict[int, int]] = {kind.name: {} for kind in kinds}
        # All pages from that of ``length`` up to this position are held, and nobody else's. Most rows need no more.
        self._writable_to = 0
        # Tables since the last change of pages.
        self._tables: dict[str, list[int]] = {}

    def cut_at(self, n_prompt: int) -> None:
        """Once this many positions are written the prompt is whole, and is cut to the plan's budget if it is longer."""
        self._cut_at = n_prompt if self.plan.cuts(n_prompt) else 0

    def together(self, n_rows: int) -> int:
        """How many of the next n_rows may be one step's. Of a prompt that will be cut the last OBSERVED rows are, and
        nothing comes behind them: their attention to all before them says what is kept."""
        n_left = self._n_to_cut
        if n_left == 0:
            return n_rows
        return n_left if n_rows >= n_left else max(0, min(n_rows, n_left - OBSERVED))

    @property
    def _n_to_cut(self) -> int:
        """Rows up to the end of a prompt that is to be cut; 0 where none is."""
        return max(0, self._cut_at - self.length)

    def _is_cut_before(self, end: int) -> bool:
        return self.length < self._cut_at <= end

    def _slot(self, kind: CacheKind, position: int) -> int:
        return position - self.dropped if kind.window is None else position

    def reserve(self, n_rows: int) -> list[PageCopy]:
        """Make the next n_rows positions writable; returns the copies that must happen before they are written.

        CapacityError when the sequence's capacity or a pool is exhausted; then nothing has been taken.
        """
        end = self.length + n_rows
        if end <= self._writable_to and n_rows <= self.plan.chunk and not self._is_cut_before(end):
            return []
        if end > self.plan.capacity:
            raise CapacityError(f"sequence would reach {end} positions, capacity is {self.plan.capacity}")
        if n_rows > self.plan.chunk and any(kind.window is not None for kind in self.kinds):
            raise CapacityError(f"{n_rows} rows at once, but sliding layers have room for chunks of {self.plan.chunk}")
        needed = [(kind, index) for kind in self.kinds for index in self._unwritable(kind, end)]
        for kind in self.kinds:
            n_needed = sum(other is kind for other, _ in needed)
            pool = self._pools[kind.name]
            if n_needed > pool.n_free:
                raise CapacityError(
                    f"cache {kind.name}: {n_needed} pages needed, {pool.n_free} of {pool.n_pages - 1} free"
                )
        copies = [copy for kind, index in needed for copy in self._make_writable(kind, index)]
        self._writable_to = min(self.plan.capacity, *(self._page_end(kind, end) for kind in self.kinds))
        return copies

    def _page_end(self, kind: CacheKind, end: int) -> int:
        """The last position, rounded up, that the pages of those up to ``end`` have room for."""
        size, slot = self.plan.page_size, self._slot(kind, end)
        return end - slot + ceil_div(slot, size) * size

    def _unwritable(self, kind: CacheKind, end: int) -> list[int]:
        """Which of the pages up to ``end`` are not held yet, or are shared. Where a prompt is cut before that, what it
        keeps is written to its first pages."""
        pages, pool, size = self._pages[kind.name], self._pools[kind.name], self.plan.page_size
        first, end_slot = self._slot(kind, self.length) // size, self._slot(kind, end)
        touched = [*range(first, ceil_div(min(end_slot, kind.most or end_slot), size))]
        if kind.window is None and self._is_cut_before(end):
            touched = [*range(min(first, self._n_kept_pages)), *touched]
        return [index for index in touched if index not in pages or pool.is_shared(pages[index])]

    @property
    def _n_kept_pages(self) -> int:
        """Of a prompt that is cut."""
        return ceil_div(self.plan.budget or 0, self.plan.page_size)

    def _make_writable(self, kind: CacheKind, index: int) -> list[PageCopy]:
        pages, pool = self._pages[kind.name], self._pools[kind.name]
        shared = pages.get(index)
        pages[index] = pool.take()
        self._tables.clear()
        if shared is None:
            return []
        pool.release(shared)
        return [PageCopy(kind.name, shared, pages[index])]

    def append_rows(self, batch: Batch, ids: Sequence[int], wanted: Sequence[int], n_reserved: int = 0) -> None:
        """Put the next rows of this sequence into a batch; ``wanted`` counts from the first of them.

        n_reserved: make this many positions writable where that is more: a device that feeds its own tokens back will
        write them too.
        """
        n, start = len(ids), self.length
        assert n == self.together(n), f"{n} rows from {start} on, but those before {self._cut_at} choose what is kept"
        self.show(batch, max(n, n_reserved))
        first_row, index = len(batch.tokens), max(batch.sequence, default=-1) + 1
        batch.tokens.extend(ids)
        batch.positions.extend(range(start, start + n))
        batch.slots.extend(range(start - self.dropped, start - self.dropped + n))
        if n == self._n_to_cut:
            batch.evicting.append(index)
        batch.sequence.extend([index] * len(ids))
        batch.wanted.extend(first_row + row for row in wanted)

    def show(self, batch: Batch, n_rows: int) -> None:
        """Make the next n_rows positions writable, and put copies and tables that this takes into a batch; no rows."""
        batch.copies.extend(self.reserve(n_rows))
        for kind in self.kinds:
            batch.tables.setdefault(kind.name, []).append(self.table(kind))

    def is_writable(self, n_rows: int) -> bool:
        """Whether the next n_rows positions need no page that is not held."""
        end = self.length + n_rows
        if end <= self._writable_to and not self._is_cut_before(end):
            return True
        return end <= self.plan.capacity and not any(self._unwritable(kind, end) for kind in self.kinds)

    def n_missing(self, kind: CacheKind, n_rows: int) -> int:
        """The most pages that the next n_rows positions, chunk by chunk, can take at a time beside those held."""
        n_pages = len(self._unwritable(kind, self.length + n_rows))
        if kind.window is None:
            return n_pages
        pool = self._pools[kind.name]
        n_own = sum(not pool.is_shared(page) for page in self._pages[kind.name].values())
        return min(n_pages, self.plan.n_table(kind) - n_own)

    def commit(self, n_rows: int) -> None:
        """The rows are written. Pages that no later row can see are returned."""
        before, size = self.length, self.plan.page_size
        self.length += n_rows
        for kind, window in self._sliding:
            first = (self.length - window + 1) // size
            if first > (before - window + 1) // size:
                self._release(kind, [index for index in self._pages[kind.name] if index < first])
        if before < self._cut_at == self.length:
            self._drop()

    def _drop(self) -> None:
        """The prompt was cut: pages beyond its budget are returned."""
        assert self.plan.budget is not None
        self.dropped, self._writable_to = self.length - self.plan.budget, 0
        for kind in self.kinds:
            if kind.window is None:
                self._release(kind, [index for index in self._pages[kind.name] if index >= self._n_kept_pages])

    def _release(self, kind: CacheKind, places: Sequence[int]) -> None:
        pages, pool = self._pages[kind.name], self._pools[kind.name]
        for index in places:
            pool.release(pages.pop(index))
        self._tables.clear()

    @staticmethod
    def _first_visible(kind: CacheKind, length: int) -> int:
        """The oldest position that a row at position ``length`` sees."""
        return 0 if kind.window is None else max(0, length - kind.window + 1)

    def can_rewind(self, length: int) -> bool:
        """Whether all that a row at this position would see is still held; of a prompt that was cut, what is kept."""
        if not (self._cut_at if self.dropped else 0) <= length <= self.length:
            return False
        size = self.plan.page_size
        for kind in self.kinds:
            slot = self._slot(kind, length)
            needed = range(self._first_visible(kind, length) // size, ceil_div(min(slot, kind.most or slot), size))
            if any(index not in self._pages[kind.name] for index in needed):
                return False
        return True

    def rewind(self, length: int) -> None:
        """Forget the positions from ``length`` on. CapacityError where layers no longer hold what its row would see."""
        if not self.can_rewind(length):
            why = "the prompt was cut" if self.dropped and length < self._cut_at else "its window has been returned"
            raise CapacityError(f"cannot rewind from {self.length} to {length}: {why}")
        self.length, self._writable_to = length, 0
        for kind in self.kinds:
            end = ceil_div(self._slot(kind, length), self.plan.page_size)
            self._release(kind, [index for index in self._pages[kind.name] if index >= end])

    def fork(self) -> SequenceCache:
        """A second owner of the same positions; whichever writes into a shared page first copies it."""
        twin = SequenceCache(self.plan, self.kinds, self._pools)
        twin.length, self._writable_to = self.length, 0
        twin.dropped, twin._cut_at = self.dropped, self._cut_at if self.dropped else 0
        for kind in self.kinds:
            for index, page in self._pages[kind.name].items():
                self._pools[kind.name].share(page)
                twin._pages[kind.name][index] = page
        return twin

    def keep(self) -> None:
        """From now on a stored prefix: nothing is written or rewound any more, and its pages count as idle."""
        self._is_kept = True
        for kind in self.kinds:
            for page in self._pages[kind.name].values():
                self._pools[kind.name].keep(page)

    def free(self) -> None:
        """Return every page."""
        self.length = self.dropped = self._writable_to = 0
        self._tables.clear()
        for kind in self.kinds:
            for page in self._pages[kind.name].values():
                self._pools[kind.name].release(page, self._is_kept)
            self._pages[kind.name].clear()
        self._is_kept = False

    def table(self, kind: CacheKind) -> list[int]:
        """Page ids in ring order; the null page where nothing is held. Never changed: other pages make another list."""
        found = self._tables.get(kind.name)
        if found is not None:
            return found
        n_table = self.plan.n_table(kind)
        ring = [NULL_PAGE] * n_table
        for index, page in self._pages[kind.name].items():
            ring[index % n_table] = page
        self._tables[kind.name] = ring
        return ring


def next_rows(
    caches: Sequence[SequenceCache], tokens: list[int], n_before: Sequence[int], copies: list[PageCopy]
) -> Batch:
    """A batch of one wanted row of each sequence: its next, or the one behind as many as are under way of it. It and
    they are writable once the copies are made."""
    places = [cache.length + n for cache, n in zip(caches, n_before, strict=True)]
    slots = [place - cache.dropped for cache, place in zip(caches, places, strict=True)]
    return Batch(
        tokens=tokens,
        positions=places,
        slots=slots,
        sequence=list(range(len(caches))),
        wanted=list(range(len(caches))),
        tables={kind.name: [cache.table(kind) for cache in caches] for kind in caches[0].kinds},
        copies=copies,
    )


def make_pools(plan: CachePlan, kinds: Sequence[CacheKind]) -> dict[str, PagePool]:
    """One pool a kind."""
    return {kind.name: PagePool(kind.name, plan.n_pages(kind)) for kind in kinds}
