"""Matrices on the device: packed once in stream forms, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from bytefloor.engine.cache import ceil_div
from bytefloor.engine.progress import LOADING, Progress
from bytefloor.engine.reference import refuse_not_finite
from bytefloor.engine.staging import STAGING_BYTES, Staging
from bytefloor.errors import BytefloorError, CapacityError, FileError, ShapeError, UnsupportedError
from bytefloor.files.stored import ROWS_PER_SCALE_ROW
from bytefloor.formats import stream
from bytefloor.formats.finite import finite_rows
from bytefloor.model.fuse import Fused, FusedEmbed, FusedPerLayer, FusedProduct
from bytefloor.model.step import OpCall
from bytefloor.model.weights import Weight

CHUNK_WEIGHTS = 1 << 25
"""Weights that are checked and packed at a time: bounds the scratch, and is enough work for a device at once."""
PACKING_BYTES_A_WEIGHT = 11
"""Of intermediate tensors, at most, while a chunk is checked and packed: copies of 16-bit weights, and masks."""
Carry = Callable[[Sequence[Tensor]], AbstractContextManager[Sequence[Tensor]]]


class PackedWeights:
    """The matrices of a fused list.

    Gate and up become one matrix whose rows alternate, so that one block has both rows of an output. Sizes are known at
    once, and until ``allocate`` takes the memory all tensors are ``meta``, which launches can be planned with; ``pack``
    fills it.

    The table of per-layer embeddings of an E model may lie in host memory, see ``keep_table_on_host``.
    """

    def __init__(self, fused: Sequence[Fused], device: torch.device) -> None:
        self.device = device
        self._forms: dict[int, stream.StreamForm] = {}
        self._products = [matrix(call) for f in fused if isinstance(f, FusedProduct) for call in f.products]
        self._groups = _find_groups(fused)
        self._places = {id(w): (id(group[0]), len(group), i) for group in self._groups for i, w in enumerate(group)}
        self._packed = {id(group[0]): self._room_for(group) for group in self._groups}
        tables = (id(matrix(f.embed, "table")) for f in fused if isinstance(f, FusedPerLayer))
        self._table = next(tables, None)
        self._is_table_on_host = False
        others = (w for f in fused for call in f.replaces for w in call.weights if len(w.shape) != 2)
        self._others = list({id(weight): weight for weight in others}.values())
        self._vectors = {id(w): torch.empty(w.shape, device="meta") for w in self._others}

    def _room_for(self, group: Sequence[Weight]) -> Tensor:
        """Bytes for a group, not yet filled. UnsupportedError for gate and up of different formats."""
        formats = {weight.stored.format_name for weight in group}
        forms = {self.form_of(weight).name for weight in group}
        if len(formats) > 1 or len(forms) > 1:
            names = ", ".join(sorted(formats if len(formats) > 1 else forms))
            raise UnsupportedError(f"{group[0].name}: gate and up have different formats: {names}")
        n_rows = padded_rows(sum(weight.shape[0] for weight in group))
        n_bytes = self.form_of(group[0]).n_bytes(n_rows, group[0].shape[1])
        return torch.empty(n_bytes, dtype=torch.uint8, device="meta")

    def allocate(self) -> None:
        """Take the memory of the matrices, and read the vectors, so that launches can be planned for good."""
        self._packed = {key: self._allocate(key, packed) for key, packed in self._packed.items()}
        for weight in self._others:
            values = weight.load()
            refuse_not_finite(weight, values)
            self._vectors[id(weight)] = values.to(self.device).contiguous()

    def keep_table_on_host(self) -> None:
        """Before ``allocate``: the table of per-layer embeddings goes to pinned host memory, where kernels read it."""
        self._is_table_on_host = True

    def _allocate(self, key: int, packed: Tensor) -> Tensor:
        if not (self._is_table_on_host and key == self._table):
            return torch.empty_like(packed, device=self.device)
        # Pinned memory of torch comes from cudaHostAlloc. With unified addressing, which every 64-bit process has, that
        # is mapped for all devices whatever its flags, under the same address as on the host: cudaHostGetDevicePointer
        # would return data_ptr (CUDA Runtime API, Unified Addressing). So kernels get it like any other tensor.
        try:
            return torch.empty(packed.numel(), dtype=packed.dtype, pin_memory=self.device.type == "cuda")
        except RuntimeError as error:
            # Free memory may still be more than the system lets a process pin.
            raise CapacityError(f"per-layer embeddings: {packed.nbytes} bytes cannot be pinned: {error}") from None

    def form_of(self, weight: Weight) -> stream.StreamForm:
        """The stream form of a matrix."""
        if id(weight) not in self._forms:
            self._forms[id(weight)] = _choose_form(weight)
        return self._forms[id(weight)]

    def _n_bytes(self, weights: Sequence[Weight]) -> int:
        return sum(self.form_of(w).n_bytes(padded_rows(w.shape[0]), w.shape[1]) for w in weights)

    def n_bytes(self) -> int:
        """Bytes of all packed matrices and of the vectors, wherever they lie."""
        return sum(tensor.nbytes for tensor in (*self._packed.values(), *self._vectors.values()))

    def table_bytes(self) -> int:
        """Bytes of the packed table of per-layer embeddings, 0 where there is none."""
        return 0 if self._table is None else self._packed[self._table].nbytes

    def packing_bytes(self) -> int:
        """The most that packing takes beside the matrices: chunks on their way, and intermediates of one."""
        largest = max(sum(weight.shape[0] for weight in group) * group[0].shape[1] for group in self._groups)
        staged = 2 * STAGING_BYTES if self.device.type == "cuda" else 0
        return staged + PACKING_BYTES_A_WEIGHT * min(CHUNK_WEIGHTS, largest)

    def moved_bytes(self) -> int:
        """Bytes that one token streams: those of every product, each once."""
        return self._n_bytes(self._products)

    def pack(self, progress: Progress) -> None:
        """Read every matrix chunk by chunk, pack each on the device; refuse values that are not finite.

        Which rows are finite stays on the device until all is packed.
        """
        total, done = sum(w.n_bytes for group in self._groups for w in group), 0
        carry = self._carry()
        finite: list[tuple[Weight, Tensor]] = []
        for group in self._groups:
            parts = _with_same_names([_checked_rows(weight, weight.stored.read()) for weight in group])
            flags = [torch.ones(weight.shape[0], dtype=torch.bool, device=self.device) for weight in group]
            n_bytes = sum(weight.n_bytes for weight in group)
            for first, stop in chunks_of(group):
                self._pack_chunk(group, parts, flags, (first, stop), carry)
                progress.advance(LOADING, done + n_bytes * stop // group[0].shape[0], total)
            done += n_bytes
            finite += zip(group, flags, strict=True)
        _refuse_bad_rows(finite)

    def _carry(self) -> Carry:
        """What brings tensors to the device: nothing where they are there already."""
        if self.device.type == "cpu":
            return nullcontext
        staging = Staging(self.device)
        return lambda tensors: staging.on_device(tensors) if tensors[0].device.type == "cpu" else nullcontext(tensors)

    def _pack_chunk(
        self,
        group: Sequence[Weight],
        parts: Sequence[dict[str, Tensor]],
        flags: Sequence[Tensor],
        rows: tuple[int, int],
        carry: Carry,
    ) -> None:
        """Rows first .. stop of each matrix of a group, which are whole tiles of what is packed."""
        names, form, chosen = list(parts[0]), self.form_of(group[0]), slice(*rows)
        with carry([member[name][chosen] for member in parts for name in names]) as there:
            tensors = iter(there)
            chunk = [{name: next(tensors) for name in names} for _ in group]
            for weight, member, flag in zip(group, chunk, flags, strict=True):
                flag[chosen] = _finite_rows(weight, member, rows[0])
            whole = {name: _pad_rows(_alternate([member[name] for member in chunk])) for name in names}
            packed = form.pack(whole).view(-1)
            begin = form.n_bytes(len(group) * rows[0], group[0].shape[1])
            # To host memory too without waiting: whoever asks at the end which rows were finite waits for all of it.
            self._packed[id(group[0])][begin : begin + packed.numel()].copy_(packed, non_blocking=True)

    def vector(self, weight: Weight) -> Tensor:
        """A norm's weight or a scalar, float32 on the device."""
        return self._vectors[id(weight)]

    def packed(self, weight: Weight) -> Tensor:
        """The packed bytes of a matrix (of gate and up together, for gate)."""
        return self._packed[id(weight)]

    def packed_rows(self, weight: Weight) -> tuple[Tensor, int, int]:
        """(packed bytes, step, offset): row i of the matrix is row step * i + offset of what is packed."""
        key, n_members, place = self._places[id(weight)]
        return self._packed[key], n_members, place


def _choose_form(weight: Weight) -> stream.StreamForm:
    """The form for a matrix; the parts are looked at where the format leaves the dtype of scales open."""
    n, k = weight.shape
    stored = weight.stored
    scales = None
    if stored.format_name.startswith("affine"):
        parts = stored.read()
        scales = parts["scales"].dtype
        if parts["biases"].dtype != scales:
            found = f"{scales} and {parts['biases'].dtype}"
            raise UnsupportedError(f"tensor {stored.name}: scales and biases of different types ({found})")
    return stream.choose(stored.format_name, padded_rows(n), k, scales)


def _find_groups(fused: Sequence[Fused]) -> list[list[Weight]]:
    """Matrices in the order of the list, gate and up together."""
    groups: list[list[Weight]] = []
    for part in fused:
        if isinstance(part, FusedProduct):
            weights = [matrix(call) for call in part.products]
            groups += [weights] if part.is_pair else [[weight] for weight in weights]
        elif isinstance(part, FusedEmbed):
            groups.append([matrix(part.call, "table")])
        elif isinstance(part, FusedPerLayer):
            groups.append([matrix(part.embed, "table")])
    return list({id(group[0]): group for group in groups}.values())


def matrix(call: OpCall, operand: str = "weight") -> Weight:
    """The weight that a call multiplies with or looks up."""
    weight = call.operands[operand]
    assert isinstance(weight, Weight)
    return weight


def chunks_of(group: Sequence[Weight]) -> Iterator[tuple[int, int]]:
    """Rows (first, stop) of each matrix, multiples of a tile's but for the end: few enough to stage and to pack."""
    n_rows, k = group[0].shape
    row_bytes = sum(-(-weight.n_bytes // weight.shape[0]) for weight in group)
    n = min(CHUNK_WEIGHTS // (len(group) * k), STAGING_BYTES // row_bytes)
    step = max(1, n // stream.ROWS) * stream.ROWS
    for first in range(0, n_rows, step):
        yield first, min(first + step, n_rows)


def _alternate(rows: Sequence[Tensor]) -> Tensor:
    """Rows of several matrices by turns: gate 0, up 0, gate 1, up 1, ..."""
    return rows[0] if len(rows) == 1 else torch.stack(list(rows), dim=1).flatten(0, 1)


def padded_rows(n: int) -> int:
    """Rows of a packed matrix: whole records."""
    return -(-n // stream.ROWS) * stream.ROWS


def _pad_rows(part: Tensor) -> Tensor:
    """Rows of zero bytes up to whole records; every format reads them as zeros."""
    missing = padded_rows(part.shape[0]) - part.shape[0]
    return part if missing == 0 else torch.cat((part, part.new_zeros(missing, *part.shape[1:])))


def _checked_rows(weight: Weight, parts: dict[str, Tensor]) -> dict[str, Tensor]:
    """The parts, each cut by the rows of the matrix: scales of a tensor or of a band of rows are repeated for each."""
    n = weight.shape[0]
    parts = {name: _for_each_row(name, part, n) for name, part in parts.items()}
    for name, part in parts.items():
        if part.dim() == 0 or part.shape[0] != weight.shape[0]:
            found, expected = list(part.shape), weight.shape[0]
            raise ShapeError(f"tensor {weight.stored.name}: part {name} has shape {found}, expected {expected} rows")
    return parts


def _for_each_row(name: str, part: Tensor, n: int) -> Tensor:
    if part.numel() == 1 and n > 1:
        return part.reshape(1, 1).expand(n, 1)
    band = ROWS_PER_SCALE_ROW.get(name)
    if band is not None and part.shape[0] == ceil_div(n, band):
        return part.repeat_interleave(band, dim=0)[:n]
    return part.reshape(n, 1) if part.dim() == 1 and part.shape[0] == n else part


def _with_same_names(members: Sequence[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    """A scale that one matrix of a group has and another has not is 1 there."""
    rows = {name: part for parts in members for name, part in parts.items()}
    return [{name: parts[name] if name in parts else torch.ones_like(rows[name]) for name in rows} for parts in members]


def _finite_rows(weight: Weight, parts: dict[str, Tensor], first: int) -> Tensor:
    record = weight.stored.require_format()
    try:
        return finite_rows(record, {k: part[:1] if k in record.optional_parts else part for k, part in parts.items()})
    except BytefloorError as error:
        raise type(error)(f"tensor {weight.stored.name}, rows from {first}: {error}") from None


def _refuse_bad_rows(finite: Sequence[tuple[Weight, Tensor]]) -> None:
    """FileError that names the first tensor and row with a flag (bool [N] a matrix) that is not set."""
    flags = torch.cat([flag for _, flag in finite])
    if bool(flags.all()):
        return
    row = int(flags.logical_not().nonzero()[0])
    for weight, flag in finite:
        if row < flag.shape[0]:
            raise FileError(f"tensor {weight.stored.name} holds values that are not finite, the first in row {row}")
        row -= flag.shape[0]
