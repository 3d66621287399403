"""The reference executor: walks a step and runs each op's reference. The oracle, and the CPU back end."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from bytefloor.engine.batch import Batch
from bytefloor.engine.cache import CachePlan
from bytefloor.engine.eviction import Evictions, deciding_calls
from bytefloor.engine.memory import MemoryPlan, check_memory
from bytefloor.engine.progress import LOADING, Progress, Silent
from bytefloor.engine.scratch import BLAS_WORKSPACE_BYTES, dense_weights, kept_bytes, last_uses, n_values, step_bytes
from bytefloor.engine.speculation import MOST_ROWS
from bytefloor.errors import FileError
from bytefloor.model.step import Buffer, CacheKind, OpCall, Step
from bytefloor.model.weights import Weight
from bytefloor.ops.attention import reader
from bytefloor.ops.page_codes import CODED
from bytefloor.ops.pages import page_shape

Observer = Callable[[OpCall, Tensor], None]


@dataclass(frozen=True)
class Precision:
    """How exactly to compute.

    compute: dtype of activations and cache, float32 or float64. weights: dtype of matrices; bfloat16 halves the bytes
    a token reads on a CPU, and rounds activations to bfloat16 at every product. rounds: whether the roundings that
    the list carries take place.
    """

    compute: torch.dtype = torch.float32
    weights: torch.dtype = torch.float32
    rounds: bool = True


class StoredRows:
    """A table left in the file: indexing it decodes just the rows asked for."""

    def __init__(self, weight: Weight, compute: torch.dtype, device: torch.device) -> None:
        self._stored, self._compute, self._device = weight.stored, compute, device

    def __getitem__(self, ids: Tensor) -> Tensor:
        return self._stored.rows(ids.cpu()).to(device=self._device, dtype=self._compute)


class DenseRows:
    """A table that a product needs as a matrix anyway; rows come out in the dtype of activations."""

    def __init__(self, table: Tensor, compute: torch.dtype) -> None:
        self._table, self._compute = table, compute

    def __getitem__(self, ids: Tensor) -> Tensor:
        return self._table[ids].to(self._compute)


class ReferenceExecutor:
    """Runs a step on a torch device.

    step: the list. plan: how much cache to allocate. progress: shows the memory it will take, and loading.
    CapacityError with all numbers, and ``advice``, when weights, cache and scratch do not fit in memory.
    """

    def __init__(
        self,
        step: Step,
        plan: CachePlan,
        *,
        device: str | torch.device = "cpu",
        precision: Precision | None = None,
        progress: Progress | None = None,
        advice: str = "",
    ) -> None:
        self.step = step
        self.plan = plan
        self.precision = precision or Precision()
        self.device = torch.device(device)
        progress = progress or Silent()
        memory = MemoryPlan(
            self.device, self.weight_bytes(), self.cache_bytes(), self.scratch_bytes(), plan.most_positions, self._kv(),
            budget=plan.budget,
        )  # fmt: skip
        check_memory(memory, progress, advice)
        self._tensors = self._load(progress)
        self.pools = {kind.name: self._allocate(kind) for kind in step.kinds}
        self._calls = [self._bind(call) for call in step.calls]
        self._last_use = last_uses(step)
        self._deciding = deciding_calls({id(call): call for call in step.calls if call.op.reads_cache})

    # --- what it takes

    @property
    def most_draft_rows(self) -> int:
        """Rows of one sequence that get the tokens which each gets alone: MOST_ROWS, or 1 where values are rounded.

        The order of a sum depends on the number of rows. In float32 that is a last bit, which matters where two tokens
        are as close as that; what rounds to less makes a step of it, and then texts would depend on the drafts.
        """
        keeps_all = self.precision.weights.itemsize >= 4 and self._kv() in ("float32", "float64")
        return MOST_ROWS if keeps_all else 1

    def weight_bytes(self) -> int:
        """Bytes of the decoded weights that are kept in memory."""
        return sum(self._kept_bytes(weight) for weight in dense_weights(self.step))

    def moved_bytes(self) -> int:
        """Bytes of weights that one token really reads: all that are kept."""
        return self.weight_bytes()

    def cache_bytes(self) -> int:
        """Bytes of the page pools."""
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in map(self._pool_shape, self.step.kinds))

    def scratch_bytes(self) -> int:
        """The most that is taken beside weights and cache: while a tensor is decoded, or while a chunk runs."""
        # Float32 values are kept as they are decoded; another dtype is a second tensor.
        narrowed = [4 * n_values(weight) for weight in dense_weights(self.step) if self._dtype(weight) != torch.float32]
        workspace = BLAS_WORKSPACE_BYTES if self.device.type == "cuda" else 0
        item_bytes = self.precision.compute.itemsize
        running = max(step_bytes(self.step, self.plan, item_bytes, n_rows) for n_rows in (None, self.most_draft_rows))
        kept = kept_bytes(self.step.kinds, self.step.n_cache_layers, self.plan)
        return max(workspace + running + kept, *narrowed, 0)

    def _kv(self) -> str:
        """What the cache keeps: rounded values stand in the dtype of activations, unless pages are coded."""
        compute, kept = str(self.precision.compute).removeprefix("torch."), self.step.storage
        if kept == "float32" or not self.precision.rounds:
            return compute
        return f"{kept}, recent and first ones bf16" if self._is_coded else f"{kept} values in {compute}"

    @property
    def _is_coded(self) -> bool:
        """Whether pages are what a device would keep, bytes and bf16: coded pages are no rounded values."""
        return self.precision.rounds and self.step.storage == CODED

    def _dtype(self, weight: Weight) -> torch.dtype:
        return self.precision.weights if len(weight.shape) == 2 else self.precision.compute

    def _kept_bytes(self, weight: Weight) -> int:
        return n_values(weight) * self._dtype(weight).itemsize

    # --- loading

    def _load(self, progress: Progress) -> dict[int, Any]:
        dense = dense_weights(self.step)
        total = sum(weight.n_bytes for weight in dense)
        tensors: dict[int, Any] = {}
        done = 0
        for weight in dense:
            values = weight.load()
            refuse_not_finite(weight, values)
            tensors[id(weight)] = values.to(device=self.device, dtype=self._dtype(weight))
            done += weight.n_bytes
            progress.advance(LOADING, done, total)
        return tensors

    def _pool_shape(self, kind: CacheKind) -> tuple[tuple[int, ...], torch.dtype]:
        storage = kind.storage if self._is_coded else "float32"
        page, dtype = page_shape(storage, kind.n_kv_heads, self.plan.page_size, kind.head_size, kind.rotated)
        shape = (self.step.n_cache_layers[kind.name], self.plan.n_pages(kind), *page)
        return shape, dtype if self._is_coded else self.precision.compute

    def _allocate(self, kind: CacheKind) -> Tensor:
        shape, dtype = self._pool_shape(kind)
        return torch.empty(shape, dtype=dtype, device=self.device)

    # --- binding: everything that does not change from step to step is looked up once

    def _bind(self, call: OpCall) -> tuple[OpCall, dict[str, Any], list[tuple[str, int]]]:
        constants: dict[str, Any] = dict(call.attributes)
        sources: list[tuple[str, int]] = []
        for name, operand in call.operands.items():
            if isinstance(operand, Buffer):
                sources.append((name, operand.id))
            elif call.op.name == "embed":
                constants[name] = self._rows(operand)
            else:
                constants[name] = self._tensors[id(operand)]
        if call.cache is not None:
            kinds = {"cache": call.cache.kind, **call.cache.kind.beside}
            constants |= {name: self.pools[kind.name][call.cache.index] for name, kind in kinds.items()}
        if not self.precision.rounds:
            constants.update({key: "float32" for key in ("to", "storage") if key in constants})
        return call, constants, sources

    def _rows(self, weight: Weight) -> StoredRows | DenseRows:
        dense = self._tensors.get(id(weight))
        if dense is None:
            return StoredRows(weight, self.precision.compute, self.device)
        return DenseRows(dense, self.precision.compute)

    # --- running

    def make_batch_loop(self) -> None:
        """None: there is nothing to run ahead of."""

    def make_loop(self) -> None:
        """None: sampling is the host's here."""

    @torch.inference_mode()
    def run(self, batch: Batch, observe: Observer | None = None) -> Tensor:
        """Logits [R, V] in the compute dtype. observe: sees every call's output as it is made."""
        return self._walk(batch, self.step.logits, observe)

    @torch.inference_mode()
    def sum_hidden(self, batch: Batch) -> Tensor:
        """Float64 [B, D]: of each sequence the sum over its rows of what the head would get, see ``Step.hidden``."""
        hidden = self._walk(replace(batch, wanted=list(range(len(batch.tokens)))), self.step.hidden)
        return torch.stack([hidden[first : first + n].sum(0, dtype=torch.float64) for first, n in batch.spans])

    def _walk(self, batch: Batch, goal: Buffer, observe: Observer | None = None) -> Tensor:
        """The value of a buffer; calls behind the one that makes it are not run."""
        for copy in batch.copies:
            self.pools[copy.kind][:, copy.target] = self.pools[copy.kind][:, copy.source]
        values = self._inputs(batch)
        evictions = Evictions(batch, self.plan)
        for (call, constants, sources), ends in zip(self._calls, self._last_use, strict=True):
            given = {**constants, **{name: values[source] for name, source in sources}}
            result = call.op.reference(**given)
            if batch.evicting and id(call) in self._deciding:
                layer, q, how = self._deciding[id(call)], given["q"], (given["storage"], given["rotated"])
                read = reader(q.dtype, q.shape[-1], *how, given.get("k_norm"))
                evictions.choose(layer, given["cache"], q, given["table"], given["scale"], read)
            if call.output is not None:
                values[call.output.id] = result
                if observe is not None:
                    observe(call, result)
                if call.output is goal:
                    break
            for buffer_id in ends:
                values.pop(buffer_id, None)
        evictions.move(self.pools)
        return values[goal.id]

    def _inputs(self, batch: Batch) -> dict[int, Tensor]:
        values = {
            buffer.id: torch.tensor(getattr(batch, name), dtype=torch.int64, device=self.device)
            for name, buffer in self.step.inputs.items()
        }
        for name, buffer in self.step.tables.items():
            values[buffer.id] = torch.tensor(batch.tables[name], dtype=torch.int64, device=self.device)
        return values

    def poison(self) -> None:
        """Fill the whole cache with NaN: a test's way to see that nothing outside the live band is read."""
        for pool in self.pools.values():
            pool.view(torch.uint8).fill_(0xFF)


def refuse_not_finite(weight: Weight, values: Tensor) -> None:
    """FileError that names the tensor."""
    # Its extremes say it, NaN among them, and take no memory, where isfinite takes that of the tensor again.
    if not bool(torch.isfinite(torch.stack(values.aminmax())).all()):
        raise FileError(f"tensor {weight.stored.name} holds values that are not finite")
