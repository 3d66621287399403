"""Matrices on the device: packed once in stream forms, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from bytefloor.engine.reference import refuse_not_finite
from bytefloor.errors import BytefloorError, UnsupportedError
from bytefloor.formats import stream
from bytefloor.model.fuse import Fused, FusedEmbed, FusedProduct
from bytefloor.model.step import OpCall
from bytefloor.model.weights import Weight

CHECKED_VALUES = 1 << 26
"""Values decoded at a time to see that all are finite: 256 MB beside the weights."""
Progress = Callable[[int, int], None]


class PackedWeights:
    """The matrices of a fused list.

    Gate and up become one matrix whose rows alternate, so that one block has both rows of an output. Sizes are known at
    once; ``allocate`` takes the memory, ``pack`` fills it.
    """

    def __init__(self, fused: Sequence[Fused], device: torch.device) -> None:
        self.device = device
        self._products = [matrix(call) for f in fused if isinstance(f, FusedProduct) for call in f.products]
        self._groups = _find_groups(fused)
        self._packed = {id(group[0]): self._room_for(group) for group in self._groups}
        self._vectors: dict[int, Tensor] = {}

    def _room_for(self, group: Sequence[Weight]) -> Tensor:
        """Bytes for a group, not yet filled. UnsupportedError for gate and up of different formats."""
        forms = {self.form_of(weight).name for weight in group}
        if len(forms) > 1:
            names = ", ".join(sorted(forms))
            raise UnsupportedError(f"{group[0].name}: gate and up have different formats: {names}")
        return torch.empty(self._n_bytes(group), dtype=torch.uint8, device="meta")

    def allocate(self) -> None:
        """Take the memory, so that launches can be planned before the long work of packing."""
        self._packed = {key: torch.empty_like(packed, device=self.device) for key, packed in self._packed.items()}

    def form_of(self, weight: Weight) -> stream.StreamForm:
        """The stream form of a matrix."""
        n, k = weight.shape
        return stream.choose(weight.stored.format_name, padded_rows(n), k)

    def _n_bytes(self, weights: Sequence[Weight]) -> int:
        return sum(self.form_of(w).n_bytes(padded_rows(w.shape[0]), w.shape[1]) for w in weights)

    def n_bytes(self) -> int:
        """Bytes of all packed matrices."""
        return self._n_bytes([weight for group in self._groups for weight in group])

    def moved_bytes(self) -> int:
        """Bytes that one token streams: those of every product, each once."""
        return self._n_bytes(self._products)

    def pack(self, progress: Progress | None) -> None:
        """Read every matrix, refuse values that are not finite, pack. progress: (bytes done, bytes in all)."""
        total, done = sum(w.n_bytes for group in self._groups for w in group), 0
        for group in self._groups:
            stored = [{name: part.to(self.device) for name, part in w.stored.read().items()} for w in group]
            for weight, parts in zip(group, stored, strict=True):
                _refuse_bad_values(weight, parts)
            parts = stored[0] if len(stored) == 1 else {k: _alternate([s[k] for s in stored]) for k in stored[0]}
            padded = {name: _pad_rows(part) for name, part in parts.items()}
            self._packed[id(group[0])].copy_(self.form_of(group[0]).pack(padded).view(-1))
            done += sum(weight.n_bytes for weight in group)
            if progress is not None:
                progress(done, total)

    def vector(self, weight: Weight) -> Tensor:
        """A norm's weight or a scalar, float32 on the device, read once."""
        if id(weight) not in self._vectors:
            values = weight.load()
            refuse_not_finite(weight, values)
            self._vectors[id(weight)] = values.to(self.device).contiguous()
        return self._vectors[id(weight)]

    def packed(self, weight: Weight) -> Tensor:
        """The packed bytes of a matrix (of gate and up together, for gate)."""
        return self._packed[id(weight)]

    def packed_rows(self, weight: Weight) -> tuple[Tensor, int, int]:
        """(packed bytes, step, offset): row i of the matrix is row step * i + offset of what is packed."""
        for group in self._groups:
            for place, member in enumerate(group):
                if member is weight:
                    return self._packed[id(group[0])], len(group), place
        raise KeyError(weight.name)


def _find_groups(fused: Sequence[Fused]) -> list[list[Weight]]:
    """Matrices in the order of the list, gate and up together."""
    groups: list[list[Weight]] = []
    for part in fused:
        if isinstance(part, FusedProduct):
            weights = [matrix(call) for call in part.products]
            groups += [weights] if part.glu is not None else [[weight] for weight in weights]
        elif isinstance(part, FusedEmbed):
            groups.append([matrix(part.call, "table")])
    return list({id(group[0]): group for group in groups}.values())


def matrix(call: OpCall, operand: str = "weight") -> Weight:
    """The weight that a call multiplies with or looks up."""
    weight = call.operands[operand]
    assert isinstance(weight, Weight)
    return weight


def _alternate(rows: Sequence[Tensor]) -> Tensor:
    """Rows of several matrices by turns: gate 0, up 0, gate 1, up 1, ..."""
    return torch.stack(list(rows), dim=1).flatten(0, 1)


def padded_rows(n: int) -> int:
    """Rows of a packed matrix: whole records."""
    return -(-n // stream.ROWS) * stream.ROWS


def _pad_rows(part: Tensor) -> Tensor:
    """Rows of zero bytes up to whole records; every format reads them as zeros."""
    missing = padded_rows(part.shape[0]) - part.shape[0]
    return part if missing == 0 else torch.cat((part, part.new_zeros(missing, *part.shape[1:])))


def _refuse_bad_values(weight: Weight, parts: dict[str, Tensor]) -> None:
    """What decoding would refuse, packing must not let through: the values are decoded once, some rows at a time."""
    record = weight.stored.require_format()
    n_rows = next(iter(parts.values())).shape[0]
    step = max(1, CHECKED_VALUES // weight.shape[1])
    for start in range(0, n_rows, step):
        try:
            values = record.decode({name: part[start : start + step] for name, part in parts.items()})
        except BytefloorError as error:
            raise type(error)(f"tensor {weight.stored.name}, rows from {start}: {error}") from None
        refuse_not_finite(weight, values)
