"""Drafts of a step: what may follow each sequence's last token, where there is room to compute it along."""

from __future__ import annotations

from bytefloor.engine.batch import PageCopy
from bytefloor.engine.embedding import EmbeddingState
from bytefloor.engine.pages import Pages
from bytefloor.engine.scheduler import Scheduler
from bytefloor.engine.sequence import SequenceState
from bytefloor.engine.speculation import Speculation, Wish

Drafts = dict[SequenceState, list[int]]
"""Of each sequence that has some: tokens that may follow its last one. They are computed with it, and kept if right."""


class Drafting:
    """capacity: positions a sequence may have."""

    def __init__(
        self,
        speculation: Speculation,
        scheduler: Scheduler[SequenceState | EmbeddingState],
        pages: Pages,
        capacity: int,
    ) -> None:
        self._speculation, self._scheduler, self._pages, self._capacity = speculation, scheduler, pages, capacity

    def propose(self, planned: list[tuple[SequenceState, int]], is_looping: bool) -> Drafts:
        """Tokens that may come next, of sequences where it pays to compute them along.

        None beside a prompt, whose rows take time of their own where those of decoding wait for weights.
        """
        speculation = self._speculation
        if not speculation.is_on or not all(sequence.is_decoding for sequence, _ in planned):
            return {}
        n_room = self._scheduler.n_spare(planned)
        n_most = min(speculation.most_rows - 1, n_room)
        proposed = {sequence: sequence.propose(n_most, self._capacity) for sequence, _ in planned}
        found = {sequence: draft for sequence, draft in proposed.items() if draft}
        wishes = [Wish(sequence.drafting, len(sequence.ids), len(draft)) for sequence, draft in found.items()]
        chosen = speculation.choose(wishes, len(planned), n_room, int(is_looping))
        drafts = {sequence: found[sequence][:n] for sequence, n in zip(found, chosen, strict=True) if n}
        for sequence, _ in planned:
            sequence.drafting.n_since = 0 if sequence in drafts else sequence.drafting.n_since + 1
        return drafts

    def settle(self, drafts: Drafts, rows: list[tuple[SequenceState, int]], copies: list[PageCopy]) -> Drafts:
        """Those for which there are pages beside all rows of the step; adds the copies that they take."""
        settled: Drafts = {}
        for sequence, _ in rows:
            if sequence in drafts:
                n, more = self._pages.reserve_spare(sequence.cache, 1, len(drafts[sequence]))
                copies.extend(more)
                settled |= {sequence: drafts[sequence][:n]} if n else {}
        return settled
