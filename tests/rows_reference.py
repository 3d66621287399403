"""What the kernels of many rows have to say: the plain list with their roundings in place of those of codes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bytefloor.engine.batch import Batch
from bytefloor.engine.cache import CachePlan, SequenceCache, make_pools
from bytefloor.engine.device import MOST_ROWS_ONE_BY_ONE
from bytefloor.engine.reference import ReferenceExecutor
from bytefloor.engine.row_products import FEW_ROWS, pad_rows
from bytefloor.model.step import OpCall, Step
from bytefloor.model.weights import Weight
from bytefloor.ops import OPS
from bytefloor.ops.round_to import round_to
from few_rows import multiples


def as_rows(step: Step, n_rows: int | None = None, device: torch.device | str = "cuda") -> Step:
    """Activations and matrices of products, and queries as scores take them, in bf16; all else as the step has it.

    Shares of attention, which a card rounds to bf16 as well, are left as they are. n_rows: of a batch on a card, where
    few have weights of their own; without it, and by twins of kernels, weights are rounded as they are for many.
    """
    is_card = torch.device(device).type == "cuda"
    is_few = is_card and n_rows is not None and pad_rows(n_rows) <= FEW_ROWS
    return replace(step, calls=tuple(_rounded(call, is_few) for call in step.calls))


def _rounded(call: OpCall, is_few: bool) -> OpCall:
    if is_few and call.op.name == "linear":
        weight = call.operands["weight"]
        assert isinstance(weight, Weight)
        return replace(call, op=replace(call.op, reference=partial(_linear_of, multiples(weight))))
    references = {"linear": linear, "attention": attention}
    if call.op.name in references:
        return replace(call, op=replace(call.op, reference=references[call.op.name]))
    if call.op.name == "round_to":
        return replace(call, attributes={**call.attributes, "to": "bf16"})
    return call


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """Sums stay float32."""
    return OPS["linear"].reference(x, round_to(weight, "bf16"))


def _linear_of(known: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    return OPS["linear"].reference(x, known.to(x.device))


def attention(q: Tensor, scale: float, rotated: int = 0, k_norm: Tensor | None = None, **others: Any) -> Tensor:
    """A query holds the scale, log2(e) and, where keys are made of values, the norm of the lanes that do not turn."""
    factor = torch.full_like(q[0, 0], scale * math.log2(math.e))
    if k_norm is not None:
        e = q.shape[-1]
        stands = torch.arange(e, device=q.device) % (e // 2) >= rotated // 2
        factor = torch.where(stands & (k_norm != 0), factor * k_norm, factor)
    held = round_to(q * factor, "bf16") / factor
    return OPS["attention"].reference(q=held, scale=scale, rotated=rotated, k_norm=k_norm, **others)


class DeviceReference:
    """Two reference executors over the same keys and values: rows by themselves as the graph of one token rounds,
    rows together as the kernels of many rows do."""

    def __init__(self, step: Step, capacity: int, device: torch.device | str = "cpu") -> None:
        plan = CachePlan(max(128, capacity), max(1, capacity))
        self._alone = ReferenceExecutor(step, plan, device=device)
        self._rows = ReferenceExecutor(as_rows(step), plan, device=device)
        self._few = ReferenceExecutor(as_rows(step, 1, device), plan, device=device)
        self.cache = SequenceCache(plan, step.kinds, make_pools(plan, step.kinds))

    def run(self, ids: Sequence[int]) -> Tensor:
        """Logits float32 [T, V] of the sequence's next rows, in one batch."""
        is_alone = len(ids) <= MOST_ROWS_ONE_BY_ONE
        is_few = pad_rows(len(ids)) <= FEW_ROWS
        executor = self._alone if is_alone else self._few if is_few else self._rows
        batch = Batch()
        self.cache.append_rows(batch, ids, range(len(ids)))
        logits = executor.run(batch).float()
        for other in {self._alone, self._few, self._rows} - {executor}:
            for name, pool in executor.pools.items():
                other.pools[name].copy_(pool)
        self.cache.commit(len(ids))
        return logits


def expected_rows(step: Step, ids: Sequence[int], chunk: int, device: torch.device | str = "cpu") -> Tensor:
    """Logits of all tokens of a sequence that is run so many at a time."""
    reference = DeviceReference(step, len(ids), device)
    return torch.cat([reference.run(ids[start : start + chunk]) for start in range(0, len(ids), chunk)])
