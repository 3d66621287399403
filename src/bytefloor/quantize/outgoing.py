"""A tensor on its way from one file to another: under its new name, its rows perhaps in another order."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from bytefloor.files.stored import StoredTensor


@dataclass(frozen=True)
class Outgoing:
    """name: as the target spells it. stored: what it is read from.

    order: int64 [N], row i of the target is row order[i] of the source; None for rows as they are. offset: added to
    every value (a Gemma norm means 1 + w in one container and w in the other). is_fixed: never quantised.
    """

    name: str
    stored: StoredTensor
    order: Tensor | None = field(default=None, repr=False)
    offset: float = 0.0
    is_fixed: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stored.shape

    @property
    def n_rows(self) -> int:
        return self.stored.n_rows

    @property
    def n_columns(self) -> int:
        return self.shape[-1] if self.shape else 1

    @property
    def n_weights(self) -> int:
        return self.n_rows * self.n_columns

    @property
    def is_matrix(self) -> bool:
        """Whether it is something that a product multiplies with or a table of rows: what can be quantised."""
        return len(self.shape) == 2 and min(self.shape) > 1 and not self.is_fixed

    @property
    def is_table(self) -> bool:
        """Whether a directory's tensor is a table of rows: other readers of FP8 files expect these unquantised."""
        return self.name.endswith(("embed_tokens.weight", "embed_tokens_per_layer.weight"))

    @property
    def is_as_stored(self) -> bool:
        """Whether the bytes of the source are those of the target where the format is the same."""
        return self.order is None and self.offset == 0.0

    def rows(self, start: int, stop: int) -> Tensor:
        """Float32 [stop - start, K] of the target."""
        ids = torch.arange(start, stop) if self.order is None else self.order[start:stop]
        values = self.stored.rows(ids)
        return values + self.offset if self.offset else values


def interleaved_order(n_rows: int, n_heads: int) -> Tensor:
    """For q and k of llama files: lanes i and i + E/2 of a head become neighbours. int64 [N]."""
    return torch.arange(n_rows).view(n_heads, 2, -1).transpose(1, 2).reshape(-1)


def split_order(n_rows: int, n_heads: int) -> Tensor:
    """The inverse of interleaved_order: neighbours become lanes i and i + E/2. int64 [N]."""
    return torch.arange(n_rows).view(n_heads, -1, 2).transpose(1, 2).reshape(-1)
