"""Prompts on the device, plainly: the plain list, each matrix unpacked where a product needs it, then cuBLAS.

Products, attention's two among them, run in TF32 (ten bits of mantissa, float32 sums), all else in float32; keys and
values go to the same pages that the decode kernels read. Codes are decoded layer by layer, the sequence's pages alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from bytefloor.engine.batch import Batch
from bytefloor.engine.cache import CachePlan
from bytefloor.engine.kernels import Kernel, KernelSpec, spec
from bytefloor.engine.packed import PackedWeights
from bytefloor.engine.scratch import BLAS_WORKSPACE_BYTES, last_uses, step_bytes
from bytefloor.model.step import Buffer, OpCall, Step
from bytefloor.model.weights import Weight
from bytefloor.ops.op import ITEM_BYTES, Sizes

UNPACK_THREADS = 256
BLOCKS_A_MULTIPROCESSOR = 8
MOST_SCRATCH_FLOATS = 1 << 27
"""A head of 262,144 rows is unpacked and multiplied in parts of this size."""


def unpack_specs(step: Step, weights: PackedWeights) -> dict[int, KernelSpec]:
    """The kernel that unpacks each matrix of the list, by the identity of the weight."""
    matrices = (weight for call in step.calls for weight in call.weights if len(weight.shape) == 2)
    return {
        id(weight): spec("unpack", UNPACK_THREADS, FORM=weights.form_of(weight).name, K=weight.shape[1])
        for weight in matrices
    }


def prompt_bytes(step: Step, plan: CachePlan, device: torch.device) -> int:
    """The most that a chunk of a prompt takes beside weights and cache."""
    workspace = BLAS_WORKSPACE_BYTES if device.type == "cuda" else 0
    return workspace + step_bytes(step, plan, ITEM_BYTES["float32"], _unpacked_bytes)


def _unpacked_bytes(call: OpCall, sizes: Sizes) -> int:
    """Of the part of a matrix that a product has before it; embedding rows are as large as their result."""
    if call.op.name != "linear":
        return 0
    (weight,) = call.weights
    n, k = weight.shape
    return ITEM_BYTES["float32"] * k * min(n, most_rows(k))


def most_rows(k: int) -> int:
    """Rows of a matrix of k columns that are unpacked at a time."""
    return max(1, MOST_SCRATCH_FLOATS // k)


class PromptRunner:
    """Runs batches of many rows of one sequence on packed weights and the pages of a device executor.

    kernels: those of ``unpack_specs``, loaded.
    """

    def __init__(
        self, step: Step, weights: PackedWeights, pools: dict[str, Tensor], kernels: Mapping[int, Kernel]
    ) -> None:
        self._step, self._weights, self._pools, self._kernels = step, weights, pools, kernels
        self._device = weights.device
        n_multiprocessors = torch.cuda.get_device_properties(self._device).multi_processor_count
        self._n_blocks = n_multiprocessors * BLOCKS_A_MULTIPROCESSOR
        self._calls = [(call, *self._bind(call)) for call in step.calls]
        self._last_uses = last_uses(step)

    def _bind(self, call: OpCall) -> tuple[Callable[..., Any], dict[str, Any], list[tuple[str, int]]]:
        """The function of a call, what it always gets, and which buffers it reads."""
        constants: dict[str, Any] = dict(call.attributes)
        sources = [(name, operand.id) for name, operand in call.operands.items() if isinstance(operand, Buffer)]
        for name, operand in call.operands.items():
            if isinstance(operand, Weight):
                constants[name] = operand if len(operand.shape) == 2 else self._weights.vector(operand)
        if call.cache is not None:
            constants["cache"] = self._pools[call.cache.kind.name][call.cache.index]
        if "to" in constants:
            constants["to"] = "float32"  # activations need no codes where a product takes floats
        own: dict[str, Callable[..., Any]] = {"linear": self._linear, "embed": self._embed}
        return own.get(call.op.name, call.op.reference), constants, sources

    def _unpack(self, weight: Weight, n: int, rows: Tensor | None = None, first: int = 0) -> Tensor:
        """Float32 [n, K]: the listed rows, or n from ``first`` on."""
        packed, step, offset = self._weights.packed_rows(weight)
        out = torch.empty(n, weight.shape[1], device=self._device)
        stream = torch.cuda.current_stream(self._device).cuda_stream
        arguments = (packed, rows, step * first + offset, step, n, out)
        self._kernels[id(weight)].launch(stream, (self._n_blocks, 1), arguments)
        return out

    def _linear(self, x: Tensor, weight: Weight) -> Tensor:
        n, k = weight.shape
        if not x.shape[0]:
            return x.new_empty(0, n)  # a chunk that wants no logits leaves the head, the largest matrix, unread
        part = most_rows(k)
        parts = [x @ self._unpack(weight, min(part, n - first), first=first).T for first in range(0, n, part)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def _embed(self, tokens: Tensor, table: Weight, scale: float) -> Tensor:
        return self._unpack(table, tokens.shape[0], rows=tokens) * scale

    def run(self, batch: Batch) -> Tensor:
        """Logits float32 [R, V] of the wanted rows."""
        values = self._inputs(batch)
        with _tf32():
            for (call, function, constants, sources), ends in zip(self._calls, self._last_uses, strict=True):
                result = function(**constants, **{name: values[source] for name, source in sources})
                if call.output is not None:
                    values[call.output.id] = result
                for buffer_id in ends:
                    del values[buffer_id]
        return values[self._step.logits.id]

    def _inputs(self, batch: Batch) -> dict[int, Tensor]:
        device = self._device
        named = {**self._step.inputs, **{f"table.{name}": buffer for name, buffer in self._step.tables.items()}}
        lists = {name: getattr(batch, name) for name in self._step.inputs}
        lists |= {f"table.{name}": rows for name, rows in batch.tables.items()}
        return {
            buffer.id: torch.tensor(lists[name], dtype=torch.int64, device=device) for name, buffer in named.items()
        }


@contextmanager
def _tf32() -> Iterator[None]:
    """TF32 for products here and for nobody else."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
