"""Writing the planned tensors, some rows at a time, and measuring on the way what each of them has lost."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from bytefloor.errors import NumericalError
from bytefloor.formats import get
from bytefloor.formats.finite import finite_rows
from bytefloor.quantize.plan import Planned

PIECE_WEIGHTS = 1 << 20
"""Weights that are in memory at a time: a few copies in float32, whatever the size of the tensor."""


@dataclass
class Loss:
    """What one tensor has lost, added up while it is written. error: root of summed squares over those of the source.

    largest: the largest difference of a weight.
    """

    name: str
    format_name: str
    n_weights: int = 0
    difference: float = 0.0
    square: float = 0.0
    largest: float = 0.0

    @property
    def error(self) -> float:
        return math.sqrt(self.difference / self.square) if self.square else 0.0

    def add(self, found: Tensor, wanted: Tensor) -> None:
        """Float32 of equal shape."""
        difference = (found - wanted).abs_()
        self.largest = max(self.largest, float(difference.max()))
        self.difference += float(difference.double().square_().sum())
        self.square += float(wanted.double().square_().sum())


def pieces(
    planned: Planned, importance: Tensor | None, device: torch.device, loss: Loss
) -> Iterator[tuple[int, Mapping[str, Tensor]]]:
    """(first row, parts of these rows) from the first to the last; ``loss`` is complete after the last one.

    NumericalError names a tensor that holds, or would hold, NaN or infinity.
    """
    loss.n_weights = planned.tensor.n_weights
    n_rows = max(1, PIECE_WEIGHTS // planned.tensor.n_columns)
    step = n_rows if planned.tensor.is_matrix else planned.tensor.n_rows
    for start in range(0, planned.tensor.n_rows, step):
        stop = min(start + step, planned.tensor.n_rows)
        try:
            if planned.is_copied:
                yield start, _copied(planned, start, stop, loss)
            else:
                yield start, _encoded(planned, start, stop, importance, device, loss)
        except NumericalError as error:
            raise NumericalError(f"tensor {planned.name}: {error} (from row {start} on)") from None


def _encoded(
    planned: Planned, start: int, stop: int, importance: Tensor | None, device: torch.device, loss: Loss
) -> Mapping[str, Tensor]:
    record = get(planned.format_name)
    weights = planned.tensor.rows(start, stop).reshape(stop - start, -1).to(device)
    assert record.encode is not None, f"{record.name} is offered without an encoder"
    if importance is not None and record.encode_weighted is not None:
        parts = record.encode_weighted(weights, importance.to(device))
    else:
        parts = record.encode(weights)
    decoded = record.decode(parts)
    if not bool(torch.isfinite(decoded).all()):
        raise NumericalError(f"{record.name} of it is not finite")
    loss.add(decoded, weights)
    return {name: part.cpu() for name, part in parts.items()}


def _copied(planned: Planned, start: int, stop: int, loss: Loss) -> Mapping[str, Tensor]:
    stored = planned.tensor.stored
    loss.square += float(planned.tensor.rows(start, stop).double().square_().sum())
    # Whole where it is small, so that a scale that all rows share stays what it is.
    cut = stored if (start, stop) == (0, stored.n_rows) else stored.row_slice(stored.name, start, stop)
    parts = cut.read()
    if not bool(finite_rows(stored.require_format(), parts).all()):
        raise NumericalError(f"{stored.format_name} of the source is not finite")
    return parts
