"""Sequences that decode together, each step begun before the one before it was read: the engine's side of it.

At most two steps are under way. A step's rows are those that may want a token after the one that is still to be read;
who ends with that one has a row that is computed for nobody. Whoever drives this keeps to the order launch, read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from bytefloor.engine.batch import PageCopy
from bytefloor.engine.batch_loop import KNOWN, BatchLoop, UnderWay
from bytefloor.engine.cache import next_rows
from bytefloor.engine.pages import Pages
from bytefloor.engine.row_sampler import Draw, draw_of
from bytefloor.engine.sampler import Sampled
from bytefloor.engine.sequence import SequenceState
from bytefloor.errors import CapacityError


@dataclass
class _Step:
    """members: the sequence of each row; None once it is nobody's."""

    members: list[SequenceState | None]
    work: UnderWay


class Ahead:
    """capacity: positions a sequence may have."""

    def __init__(self, loop: BatchLoop | None, pages: Pages, capacity: int) -> None:
        self._loop, self._pages, self._capacity = loop, pages, capacity
        self._steps: deque[_Step] = deque()
        self._draws: dict[SequenceState, Draw | None] = {}

    @property
    def is_under_way(self) -> bool:
        return bool(self._steps)

    def draw(self, sequence: SequenceState) -> Draw | None:
        """What to ask the device for a sequence's next token; None where it is the host's."""
        if self._loop is None or not sequence.chooses_freely:
            return None
        if sequence not in self._draws:
            sampler = sequence.sampler
            self._draws[sequence] = draw_of(sampler) if self._loop.can_serve(sampler) else None
        return self._draws[sequence]

    def can_serve(self, planned: Sequence[tuple[SequenceState, int]]) -> bool:
        """Whether a step is several sequences that decode, and the device can choose the tokens of all."""
        return len(planned) > 1 and all(self.draw(sequence) is not None for sequence, _ in planned)

    def launch(self, sequences: Iterable[SequenceState]) -> bool:
        """Start a step of those that want a token beyond what is under way. False where that is nobody, or where pages
        are short: what is under way is to be read then, and a plain step says who gives way."""
        assert self._loop is not None
        before = self._steps[-1].members if self._steps else []
        rows = {sequence: row for row, sequence in enumerate(before) if sequence is not None}
        chosen = [each for each in sequences if each not in rows or each.may_go_on(self._capacity)]
        if not chosen:
            return False
        sources = [rows.get(each, KNOWN) for each in chosen]
        n_before = [int(source != KNOWN) for source in sources]
        copies: list[PageCopy] = []
        try:
            for sequence, n in zip(chosen, n_before, strict=True):
                if not sequence.cache.is_writable(1 + n):
                    copies.extend(self._pages.reserve(sequence.cache, 1 + n))
        except CapacityError:
            # Pages that were found are held, and soon wanted; nobody else would make the copies that belong to them.
            self._loop.copy(copies)
            return False
        batch = next_rows([each.cache for each in chosen], [each.ids[-1] for each in chosen], n_before, copies)
        draws = [self._asked(each) for each in chosen]
        self._steps.append(_Step(list(chosen), self._loop.launch(batch, draws, sources)))
        return True

    def _asked(self, sequence: SequenceState) -> Draw:
        draw = self._draws[sequence]
        assert draw is not None
        return draw

    def read(self) -> list[tuple[SequenceState, Sampled | None]]:
        """The tokens of the oldest step, whose rows are computed now: None for one that the host has to choose."""
        assert self._loop is not None
        step = self._steps.popleft()
        found = zip(step.members, self._loop.read(step.work), strict=True)
        return [(sequence, sampled) for sequence, sampled in found if sequence is not None]

    def sample(self, logits: Tensor, draws: Mapping[int, Draw], positions: Mapping[int, int]) -> dict[int, Sampled]:
        """Tokens of some rows of a plain step's logits, see ``BatchLoop.sample``."""
        return self._loop.sample(logits, draws, positions) if self._loop is not None else {}

    def forget(self, sequence: SequenceState) -> None:
        """What is under way of a sequence is nobody's now, and pages that it took are returned. It may still run, but
        writes only beyond what is kept, and all that comes later comes later on the same stream."""
        self._draws.pop(sequence, None)
        for step in self._steps:
            if sequence in step.members:
                step.members[step.members.index(sequence)] = None
        if self._loop is not None and sequence.has_started:
            sequence.cache.rewind(sequence.cache.length)

    def clear(self) -> list[SequenceState]:
        """Forget all that is under way; returns whose it was."""
        members = {sequence for step in self._steps for sequence in step.members if sequence is not None}
        self._steps.clear()
        return list(members)
