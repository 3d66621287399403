"""What a chunk of many rows takes from the host: numbers, page tables, and the pieces that attention takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from bytefloor.engine.cache import CachePlan, ceil_div
from bytefloor.model.step import CacheKind


def places_of(kind: CacheKind) -> str:
    """Where rows of such layers go: to their positions where there is a window, else to their slots."""
    return "slots" if kind.window is None else "positions"


class Items(NamedTuple):
    """Pieces of rows that attention takes: so many rows at most, by their places."""

    n_rows: int
    places: str

    @property
    def name(self) -> str:
        return f"items.{self.places}.{self.n_rows}"


class RowInputs:
    """What a chunk takes from the host, int32 on the device, in one tensor that one copy fills.

    rows: the most there may be. items: of each kind of layer.
    """

    def __init__(
        self, rows: int, plan: CachePlan, tables: Mapping[str, int], items: Sequence[Items], device: torch.device
    ) -> None:
        self.items = tuple(dict.fromkeys(items))
        sizes = {"positions": rows, "slots": rows, "sequence": rows, "wanted": rows}
        sizes |= {each.name: 4 * self.n_items(rows, each.n_rows, plan) for each in self.items}
        sizes |= {f"table.{name}": plan.n_sequences * n for name, n in tables.items()}
        self.sizes, self.starts, end = sizes, {}, 0
        for name, n in sizes.items():
            self.starts[name] = end
            end += ceil_div(n, 4) * 4  # each on 16 bytes: an item is read at once
        self.values = torch.zeros(end, dtype=torch.int32, device=device)
        self.tokens = torch.zeros(rows, dtype=torch.int64, device=device)

    @staticmethod
    def n_items(rows: int, item_rows: int, plan: CachePlan) -> int:
        """The most pieces that so many rows of all sequences are cut into."""
        return ceil_div(rows, item_rows) + plan.n_sequences

    def view(self, name: str) -> Tensor:
        start = self.starts[name]
        return self.values[start : start + self.sizes[name]]
