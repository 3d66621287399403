"""Several sequences at once on the device, a token each: one CUDA graph a number of tokens.

Tokens, positions and page tables lie in device memory, so a graph serves any sequences. Where there are fewer than the
graph has rows, it is filled up with rows whose pages are all the null page: what they compute is thrown away.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bytefloor.engine.cache import NULL_PAGE
from bytefloor.engine.launches import RINGS
from bytefloor.engine.planner import DeviceMemory, Launch

SIZES = tuple(n for n in sorted(RINGS) if n > 1)
"""Rows of the graphs that there can be."""


def sizes_for(n_sequences: int) -> tuple[int, ...]:
    """The graphs that up to n_sequences at once need: the least that holds them, and all below."""
    if n_sequences == 1:
        return ()
    enough = next((size for size in SIZES if size >= n_sequences), SIZES[-1])
    return tuple(size for size in SIZES if size <= enough)


def draft_sizes_for(n_rows: int) -> tuple[int, ...]:
    """Likewise of one sequence's rows, up to n_rows of them."""
    return tuple(size for size in SIZES if size <= n_rows)


@dataclass(frozen=True)
class DecodingRow:
    """A sequence's next token, its position, its page table of each cache kind, and how many positions layers without
    a window have dropped."""

    token: int
    position: int
    tables: dict[str, list[int]]
    dropped: int = 0


PADDING = DecodingRow(0, 0, {})


class BatchGraph:
    """One step of up to n_tokens sequences.

    written: what the launches hand to each other. replay: runs the captured launches on the current stream.
    """

    def __init__(
        self, memory: DeviceMemory, launches: Sequence[Launch], written: Sequence[Tensor], replay: Callable[[], None]
    ) -> None:
        self.memory, self.launches, self._written, self.replay = memory, launches, written, replay
        self.n_tokens = memory.n_tokens
        self._tables = {name: torch.full_like(table, NULL_PAGE, device="cpu") for name, table in memory.tables.items()}
        # The same as lists: what has not changed since the last step, nearly all of it, is compared and not copied.
        self._empty = {name: [NULL_PAGE] * table.shape[1] for name, table in memory.tables.items()}
        self._shown = {name: [empty] * self.n_tokens for name, empty in self._empty.items()}
        self._dropped = [0] * self.n_tokens

    def place(self, rows: Sequence[DecodingRow], tokens: Tensor | None = None) -> None:
        """Put rows where the next step finds them. tokens: int64 on the device, in place of the rows' own."""
        padded = [*rows, *[PADDING] * (self.n_tokens - len(rows))]
        state = torch.tensor([(row.token, row.position) for row in padded], dtype=torch.int32)
        self.memory.state[:, :2].copy_(self._pinned(state), non_blocking=True)
        dropped = [row.dropped for row in padded]
        if dropped != self._dropped:
            self.memory.state[:, 3].copy_(self._pinned(torch.tensor(dropped, dtype=torch.int32)), non_blocking=True)
            self._dropped = dropped
        if tokens is not None:
            self.memory.state[: len(rows), 0].copy_(tokens)
        for name, tables in self._tables.items():
            wanted = [row.tables.get(name, self._empty[name]) for row in padded]
            changed = [i for i, (old, new) in enumerate(zip(self._shown[name], wanted, strict=True)) if old != new]
            for i in changed:
                tables[i] = torch.tensor(wanted[i], dtype=torch.int32)
            if changed:
                self.memory.tables[name].copy_(self._pinned(tables), non_blocking=True)
                self._shown[name] = wanted

    def _pinned(self, values: Tensor) -> Tensor:
        """A copy that the device may read whenever it comes to it: such memory is given to nobody else before."""
        return values.pin_memory() if self.memory.device.type == "cuda" else values

    def poison(self) -> None:
        """As ``DeviceExecutor.poison``: NaN in all that a step writes, with the parity of the last one."""
        nan = 0x7FC00000 | (int(self.memory.state[0, 2]) - 1) % 2
        for buffer in (*self._written, self.memory.logits):
            buffer.view(torch.int32).fill_(nan)
