"""What one run of a step takes from the host. Plain lists: whoever plans a batch needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby


@dataclass(frozen=True)
class PageCopy:
    """Copy page ``source`` to page ``target`` in the pool of one cache kind, all layers, before the step."""

    kind: str
    source: int
    target: int


@dataclass
class Batch:
    """T token rows of B sequences. Rows of one sequence are contiguous and ascend.

    tokens, positions, slots, sequence: T numbers each. slots: where rows go in layers without a window; in layers with
    one that is their position. wanted: the R rows whose logits are asked for.
    tables: for each cache kind, B rows of page ids. evicting: sequences whose prompt ends with their last row, and of
    which layers without a window then keep the plan's budget, in the first slots.
    """

    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    sequence: list[int] = field(default_factory=list)
    wanted: list[int] = field(default_factory=list)
    tables: dict[str, list[list[int]]] = field(default_factory=dict)
    copies: list[PageCopy] = field(default_factory=list)
    evicting: list[int] = field(default_factory=list)

    @property
    def spans(self) -> list[tuple[int, int]]:
        """(first row, rows) of each sequence, in order."""
        found: list[tuple[int, int]] = []
        for _, rows in groupby(self.sequence):
            first = sum(found[-1]) if found else 0
            found.append((first, sum(1 for _ in rows)))
        return found


def part_of(batch: Batch, rows: Sequence[int]) -> Batch:
    """Some rows of a batch, those of a sequence next to each other, and nothing of other sequences; without copies."""
    members = list(dict.fromkeys(batch.sequence[row] for row in rows))
    wanted = set(batch.wanted)
    return Batch(
        tokens=[batch.tokens[row] for row in rows],
        positions=[batch.positions[row] for row in rows],
        slots=[batch.slots[row] for row in rows],
        sequence=[members.index(batch.sequence[row]) for row in rows],
        wanted=[i for i, row in enumerate(rows) if row in wanted],
        tables={name: [tables[sequence] for sequence in members] for name, tables in batch.tables.items()},
        evicting=[members.index(sequence) for sequence in batch.evicting if sequence in members],
    )
