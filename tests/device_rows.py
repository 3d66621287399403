"""Rows through an executor, and how far they are from another's: what tests of whole models on the device share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from bytefloor.engine.batch import Batch
from bytefloor.engine.cache import CachePlan, SequenceCache, make_pools
from bytefloor.engine.device import DeviceExecutor
from bytefloor.engine.loading import DEVICE_ROUNDING
from bytefloor.engine.reference import Precision, ReferenceExecutor
from bytefloor.engine.score import score_chunks
from bytefloor.files.stored import Checkpoint, StoredTensor
from bytefloor.formats import get
from bytefloor.model.config import Rounding
from bytefloor.model.decoder import build_step
from bytefloor.model.families import load_model
from bytefloor.model.step import OpCall, Step

Executor = DeviceExecutor | ReferenceExecutor
Make = Callable[..., DeviceExecutor]
"""(step, plan, more settings) -> a device executor whose buffers and pages hold NaN."""


def step_of(checkpoint: Checkpoint, rounding: Rounding = DEVICE_ROUNDING) -> Step:
    model = load_model(checkpoint)
    return build_step(model.config, model.weights, rounding)


def empty_cache(executor: Executor) -> SequenceCache:
    return SequenceCache(executor.plan, executor.step.kinds, make_pools(executor.plan, executor.step.kinds))


def settle(device: torch.device) -> None:
    """Wait for all that the device was given: executors run on streams of their own."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def rows_of(
    executor: Executor, ids: Sequence[int], chunk: int, cache: SequenceCache | None = None, is_eager: bool = False
) -> Tensor:
    """Logits of every token, so many at a time, on top of what the cache holds. is_eager: launched one by one."""
    cache, found = empty_cache(executor) if cache is None else cache, []
    for start in range(0, len(ids), chunk):
        rows, batch = ids[start : start + chunk], Batch()
        cache.append_rows(batch, rows, range(len(rows)))
        logits = executor.run(batch, is_eager=True) if is_eager else executor.run(batch)
        found.append(logits.float().clone())
        cache.commit(len(rows))
    return torch.cat(found)


def reference_rows(step: Step, ids: Sequence[int], device: torch.device, rounds: bool = True) -> Tensor:
    """Of the reference executor, all in one pass; with the roundings of the list, or with none."""
    plan = CachePlan(max(256, len(ids)), len(ids))
    executor = ReferenceExecutor(step, plan, device=device, precision=Precision(rounds=rounds))
    return torch.cat(list(score_chunks(executor, ids, len(ids)))).float()


def cache_at(executor: Executor, depth: int) -> SequenceCache:
    """A cache of that length; what its pages hold is the caller's to say."""
    cache = empty_cache(executor)
    while cache.length < depth:
        n = min(64, depth - cache.length)
        cache.reserve(n)
        cache.commit(n)
    return cache


def rows_at(executors: Sequence[Executor], depth: int, ids: Sequence[int], chunk: int) -> list[Tensor]:
    """The same tokens after the same random keys and values: logits of each executor."""
    generator = torch.Generator(executors[0].device).manual_seed(depth)
    for name, pool in executors[0].pools.items():
        pool.normal_(generator=generator)
        for other in executors[1:]:
            other.pools[name].copy_(pool)
    settle(executors[0].device)
    return [rows_of(executor, ids, chunk, cache_at(executor, depth)) for executor in executors]


def difference(found: Tensor, expected: Tensor) -> float:
    """Relative, over all rows; NaN where anything is."""
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()


def worst_row(found: Tensor, expected: Tensor) -> float:
    """The same of the row that is farthest off; NaN where any is."""
    return ((found - expected).norm(dim=-1) / expected.norm(dim=-1)).max().item()


def assert_same_choice(chosen: Tensor, expected: Tensor, margin: float = 0.25) -> None:
    """chosen: the token of each row; the best of the expected logits wherever the two best differ by that share of
    the logits' root mean square.
    """
    best = expected.topk(2).values
    is_clear = best[:, 0] - best[:, 1] > margin * expected.square().mean(-1).sqrt()
    assert is_clear.float().mean() > 0.2, "too few rows say anything clearly"
    assert torch.equal(chosen[is_clear], expected.argmax(-1)[is_clear])


def stored_as(name: str, tensor: StoredTensor, parts: Mapping[str, Tensor]) -> StoredTensor:
    """A tensor of the same name and shape with other contents."""
    n_bytes = sum(part.nbytes for part in parts.values())
    return StoredTensor(tensor.name, tensor.shape, name, get(name), n_bytes, lambda: dict(parts))


def with_frequencies(step: Step, change: Callable[[tuple[float, ...]], tuple[float, ...]]) -> Step:
    """The step with other tables of RoPE: what a mistake there would do."""

    def changed(call: OpCall) -> OpCall:
        if call.op.name != "rope":
            return call
        table = change(call.attributes["inverse_frequencies"])
        return replace(call, attributes={**call.attributes, "inverse_frequencies": table})

    return replace(step, calls=tuple(changed(call) for call in step.calls))


def times(checkpoint: Checkpoint, factors: Mapping[str, float]) -> Checkpoint:
    """Tensors of plain values multiplied, by the ends of their names."""

    def scaled(tensor: StoredTensor, factor: float) -> StoredTensor:
        parts = {key: (part.float() * factor).to(part.dtype) for key, part in tensor.read().items()}
        return stored_as(tensor.format_name, tensor, parts)

    tensors = dict(checkpoint.tensors)
    for end, factor in factors.items():
        chosen = [name for name in tensors if name.endswith(end)]
        assert chosen, end
        tensors |= {name: scaled(tensors[name], factor) for name in chosen}
    return replace(checkpoint, tensors=tensors)
