"""Many rows at once on the device: chunks of prompts, and more sequences than the graphs of decoding hold.

The fused list, each call with kernels for many rows: norms, products on tensor cores with bf16 activations and weights,
flash attention over the pages. The host only starts what it has planned once for each padded number of rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bytefloor.engine.batch import Batch
from bytefloor.engine.decode_loop import capture, record
from bytefloor.engine.eviction import Evictions
from bytefloor.engine.kernels import Kernel, KernelSpec
from bytefloor.engine.plan_rows import Item, attention_items
from bytefloor.engine.planner import Launch
from bytefloor.engine.row_planner import SUMMED_ROWS, Planes, RowPlanner, RowStep, Walk
from bytefloor.engine.row_products import pad_rows, row_paddings
from bytefloor.engine.row_sampler import RowLogits
from bytefloor.errors import CapacityError
from bytefloor.model.fuse import FusedLogits
from bytefloor.ops.attention import reader
from bytefloor.ops.row_tiles import ROWS, from_row_tiles, pitch_of, tiles_shape

PADDING_SEQUENCE = -1
"""Of a row that is nobody's: it writes to no page."""


@dataclass
class _Trunk:
    """A walk, and what starts its launches: the host one by one, and as a graph once their number has come twice. Some
    hundred launches take the host longer than a short chunk takes the device, and more where other threads want it."""

    walk: Walk
    start: Callable[[], None]
    n_runs: int = 0


class PromptRunner:
    """Runs batches of many rows of one sequence or several.

    planner: for the pages and packed weights of a device executor. kernels: those of its ``specs``. stream: where all
    runs.
    """

    def __init__(self, planner: RowPlanner, kernels: Mapping[KernelSpec, Kernel], stream: torch.cuda.Stream) -> None:
        self._planner, self._kernels, self._stream = planner, kernels, stream
        self._device = planner.device
        logits = planner.fused[-1]
        assert isinstance(logits, FusedLogits)
        self._cap = logits.cap
        # Results lie in the planner's rooms; what torch takes for per-layer inputs is counted once.
        self._pool = torch.cuda.graph_pool_handle() if self._device.type == "cuda" else None
        self._trunks: dict[int, _Trunk] = {}
        self._decoding: dict[int, tuple[Callable[[], None], Planes]] = {}
        self._logits: Tensor | None = None
        self._tables = {name: np.zeros((planner.plan.n_sequences, n), np.int32) for name, n in planner.n_table.items()}
        self._shown: dict[str, list[list[int]]] = {name: [[]] * planner.plan.n_sequences for name in self._tables}
        # The planner's buffers were filled with zeros on the stream that was current, for which this one does not wait.
        stream.wait_stream(torch.cuda.current_stream(self._device))

    @property
    def most_rows(self) -> int:
        """Of a batch."""
        return self._planner.most_rows

    def record_all(self, decoded: Iterable[int]) -> None:
        """Record chunks of every padded number of rows, and decoding of these numbers of sequences: a server's first
        requests should not wait for that. It runs rows of nobody, which write nothing."""
        if self._device.type != "cuda":
            return
        for pitch in row_paddings(self.most_rows):
            self._place(Batch(), pitch)
            trunk = self._trunk(pitch)
            trunk.start()
            trunk.start, trunk.n_runs = record(trunk.start, self._device, self._pool), 2
        for pitch in sorted({pad_rows(n) for n in decoded}):
            self._place(Batch(), pitch)
            self._decoder(pitch)

    def run(self, batch: Batch) -> Tensor:
        """Logits float32 [R, V] of the wanted rows; nobody waits for them. CapacityError for more rows than may be."""
        return self._head(self._run_trunk(batch), len(batch.wanted))

    def sum_hidden(self, batch: Batch) -> Tensor:
        """Float64 [B, D]: of each sequence the sum over its rows of what the head would get, in bf16. As ``run``."""
        walk = self._run_trunk(batch)
        norm, tiles = walk.final_norm()
        self._prepare([norm])()
        shape = tiles_shape(walk.width, walk.pitch)
        atoms = tiles[: math.prod(shape)].view(shape)
        spans = batch.spans
        sums = torch.zeros(len(spans), walk.width, dtype=torch.float64, device=self._device)
        for begin in range(0, len(batch.tokens), SUMMED_ROWS):
            end = min(begin + SUMMED_ROWS, len(batch.tokens))
            values = from_row_tiles(atoms[:, begin // ROWS : pitch_of(end) // ROWS], end - begin, walk.width)
            for total, (first, n) in zip(sums, spans, strict=True):
                total += values[max(first - begin, 0) : max(first + n - begin, 0)].sum(0, dtype=torch.float64)
        return sums

    def _run_trunk(self, batch: Batch) -> Walk:
        """All but the head."""
        n = len(batch.tokens)
        if n > self.most_rows:
            raise CapacityError(f"{n} rows at once: there is room for chunks of {self.most_rows}")
        pitch = pad_rows(n)
        self._place(batch, pitch)
        trunk = self._trunk(pitch)
        if batch.evicting:
            self._run_and_cut(batch, trunk.walk)
            return trunk.walk
        trunk.start()
        trunk.n_runs += 1
        if trunk.n_runs == 2:
            trunk.start = record(trunk.start, self._device, self._pool)
        return trunk.walk

    def _run_and_cut(self, batch: Batch, walk: Walk) -> None:
        """The trunk, launched one by one, and in between the choice of what layers keep of prompts that end here, which
        is all that they have afterwards."""
        planner, evictions = self._planner, Evictions(batch, self._planner.plan)
        for n, start in enumerate(self._starts(walk.trunk), 1):
            start()
            if n in walk.choosing:
                layer, n_heads = walk.choosing[n]
                kind = layer.kind
                # Queries have taken up the weight of keys that are values.
                k_norm = torch.ones(kind.head_size, device=self._device) if kind.rotated else None
                read = reader(torch.float32, kind.head_size, kind.storage, kind.rotated, k_norm)
                queries = planner.queries(walk.pitch, n_heads, kind.head_size)
                tables = planner.inputs.view(f"table.{kind.name}").view(-1, planner.n_table[kind.name]).long()
                cache = planner.pools[kind.name][layer.index]
                evictions.choose(layer, cache, queries, tables, math.log(2), read)
        evictions.move(planner.pools)

    def decode(self, batch: Batch, tokens: Tensor | None) -> RowLogits:
        """The same of a row of each sequence, all wanted, by a graph: in place until the next call of this.

        tokens: int64 on the device, in place of the batch's.
        """
        n = len(batch.tokens)
        pitch = pad_rows(n)
        self._place(batch, pitch)
        if tokens is not None:
            self._planner.inputs.tokens[:n].copy_(tokens)
        replay, planes = self._decoder(pitch)
        replay()
        if self._logits is None:
            most = pad_rows(self._planner.plan.n_sequences)
            self._logits = torch.empty(most, self._planner.n_vocabulary, device=self._device)
        return RowLogits(planes.values, planes.n, planes.plane_stride, float(self._cap), self._logits[:n])

    def _decoder(self, pitch: int) -> tuple[Callable[[], None], Planes]:
        """A graph of the trunk and the head of all rows, captured when their number comes for the first time."""
        if pitch not in self._decoding:
            walk = self._trunk(pitch).walk
            head = walk.head(pitch)
            work = self._prepare([*walk.trunk, *head.launches])
            self._decoding[pitch] = capture(work, self._stream, self._device, self._pool), head.planes
        return self._decoding[pitch]

    def _trunk(self, pitch: int) -> _Trunk:
        """Planned when a number of rows comes for the first time."""
        if pitch not in self._trunks:
            walk = self._planner.walk(pitch)
            self._trunks[pitch] = _Trunk(walk, self._prepare(walk.trunk))
        return self._trunks[pitch]

    def _starts(self, steps: Sequence[RowStep]) -> list[Callable[[], None]]:
        handle = self._stream.cuda_stream
        return [
            self._kernels[step.kernel].prepare(handle, step.grid, step.arguments) if isinstance(step, Launch) else step
            for step in steps
        ]

    def _prepare(self, steps: Sequence[RowStep]) -> Callable[[], None]:
        """All of them, one after another."""
        starts = self._starts(steps)

        def work() -> None:
            for start in starts:
                start()

        return work

    def _head(self, walk: Walk, n_wanted: int) -> Tensor:
        """A chunk that wants no logits leaves the head, the largest matrix, unread."""
        if not n_wanted:
            return torch.empty(0, self._planner.n_vocabulary, device=self._device)
        head = walk.head(pad_rows(n_wanted))
        self._prepare(head.launches)()
        logits = _summed(head.planes)[:n_wanted]
        return torch.tanh(logits / self._cap) * self._cap if self._cap else logits

    def _place(self, batch: Batch, pitch: int) -> None:
        """Rows, pages and attention's items to where the kernels look for them. CapacityError where they do not fit."""
        inputs, plan, n = self._planner.inputs, self._planner.plan, len(batch.tokens)
        pin = self._device.type == "cuda"
        # Pinned memory of torch is given to nobody else before the copy has read it.
        tokens = torch.zeros(pitch, dtype=torch.int64, pin_memory=pin)
        tokens.numpy()[:n] = batch.tokens
        inputs.tokens[:pitch].copy_(tokens, non_blocking=True)
        values = torch.zeros(inputs.values.shape, dtype=torch.int32, pin_memory=pin)
        host = values.numpy()

        def put(name: str, numbers: npt.ArrayLike, size: int) -> None:
            start = inputs.starts[name]
            if size > inputs.sizes[name]:
                raise CapacityError(f"{name} of a batch: {size} numbers, there is room for {inputs.sizes[name]}")
            host[start : start + size] = numbers

        places = {"positions": batch.positions, "slots": batch.slots}
        runs = {name: runs_of(batch.sequence, numbers) for name, numbers in places.items()}
        for name, numbers in places.items():
            put(name, numbers, n)
        put("sequence", batch.sequence, n)
        padding = inputs.starts["sequence"]
        host[padding + n : padding + pitch] = PADDING_SEQUENCE
        put("wanted", batch.wanted, len(batch.wanted))
        for each in inputs.items:
            items, most = attention_items(runs[each.places], each.n_rows), inputs.n_items(pitch, each.n_rows, plan)
            if len(items) > most:  # attention has a block for each that there may be
                raise CapacityError(f"{n} rows in {len(items)} pieces of consecutive slots: there is room for {most}")
            put(each.name, np.array(items, np.int32).ravel(), 4 * len(items))
        for name, tables in batch.tables.items():
            rows = self._table_rows(name, tables)
            put(f"table.{name}", rows.ravel(), rows.size)
        inputs.values.copy_(values, non_blocking=True)

    def _table_rows(self, name: str, tables: Sequence[list[int]]) -> npt.NDArray[np.int32]:
        """Page tables as an array: those that have not changed since the last batch, nearly all, are not written again.

        CapacityError for more sequences than there may be.
        """
        shown, rows = self._shown[name], self._tables[name]
        if len(tables) > len(rows):
            raise CapacityError(f"tables of {len(tables)} sequences: there is room for {len(rows)}")
        for i, table in enumerate(tables):
            if shown[i] != table:
                rows[i] = table
                shown[i] = list(table)
        return rows[: len(tables)]


def runs_of(sequences: Sequence[int], slots: Sequence[int]) -> list[Item]:
    """Rows of one sequence whose slots follow each other: (first row, rows, slot of the first, sequence)."""
    runs: list[Item] = []
    first = 0
    for sequence, rows in groupby(sequences):
        end = first + len(list(rows))
        while first < end:
            # Slots ascend, so none is left out where the last is as far from the first as rows are.
            n = end - first
            if slots[end - 1] - slots[first] != n - 1:
                n = next(i for i in range(1, n) if slots[first + i] != slots[first] + i)
            runs.append((first, n, slots[first], sequence))
            first += n
    return runs


def _summed(planes: Planes) -> Tensor:
    """[rows, stride] of planes, added in order."""
    parts = planes.values.view(planes.n, -1, planes.stride)
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total
