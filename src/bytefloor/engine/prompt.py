"""Prompts on the device, plainly: the plain list, each matrix unpacked where a product needs it, then cuBLAS.

Products, attention's two among them, run in TF32 (ten bits of mantissa, float32 sums), all else in float32; keys and
values go to the same bf16 pages that the decode kernels read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from bytefloor.engine.batch import Batch
from bytefloor.engine.kernels import Kernel, load_kernels, spec
from bytefloor.engine.packed import PackedWeights
from bytefloor.engine.reference import last_uses
from bytefloor.model.step import Buffer, OpCall, Step
from bytefloor.model.weights import Weight

UNPACK_THREADS = 256
BLOCKS_A_MULTIPROCESSOR = 8
MOST_SCRATCH_FLOATS = 1 << 27
"""A head of 262,144 rows is unpacked and multiplied in parts of this size."""


class PromptRunner:
    """Runs batches of many rows of one sequence on packed weights and the pages of a device executor."""

    def __init__(self, step: Step, weights: PackedWeights, pools: dict[str, Tensor], architecture: str) -> None:
        self._step, self._weights, self._pools = step, weights, pools
        self._device = weights.device
        self._kernels = self._load(architecture)
        n_multiprocessors = torch.cuda.get_device_properties(self._device).multi_processor_count
        self._n_blocks = n_multiprocessors * BLOCKS_A_MULTIPROCESSOR
        self._calls = [(call, *self._bind(call)) for call in step.calls]
        self._last_uses = last_uses(step)

    def _matrices(self) -> list[Weight]:
        weights = (weight for call in self._step.calls for weight in call.weights if len(weight.shape) == 2)
        return list({id(weight): weight for weight in weights}.values())

    def _load(self, architecture: str) -> dict[int, Kernel]:
        specs = {
            id(weight): spec("unpack", UNPACK_THREADS, FORM=self._weights.form_of(weight).name, K=weight.shape[1])
            for weight in self._matrices()
        }
        loaded = load_kernels(list(specs.values()), architecture)
        return {key: loaded[kernel] for key, kernel in specs.items()}

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
        part = max(1, MOST_SCRATCH_FLOATS // k)
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
