"""What the graphs of decoding read and write beside weights, on the device."""

from __future__ import annotations

import torch
from torch import Tensor

from bytefloor.engine.cache import CachePlan
from bytefloor.engine.planner import DeviceMemory
from bytefloor.model.step import CacheKind, Step
from bytefloor.ops.pages import page_shape


def allocate(step: Step, plan: CachePlan, device: torch.device, banned_ids: frozenset[int]) -> DeviceMemory:
    """Of one token; its pages are everybody's."""
    v = step.logits.shape[-1]
    assert isinstance(v, int)
    banned = torch.zeros(v, dtype=torch.uint8, device=device)
    banned[sorted(banned_ids)] = 1
    return DeviceMemory(
        plan=plan,
        device=device,
        pools={kind.name: _pool(kind, step, plan, device) for kind in step.kinds},
        tables={kind.name: _ints(device, plan.n_table(kind)) for kind in step.kinds},
        state=torch.tensor([0, 0, 1, 0], dtype=torch.int32, device=device),
        history=_ints(device, plan.capacity + 1),
        banned=banned,
        logits=torch.zeros(v, device=device),
    )


def for_tokens(memory: DeviceMemory, n_tokens: int) -> DeviceMemory:
    """The same pages for several tokens at once; all else of their own."""
    device = memory.device
    return DeviceMemory(
        plan=memory.plan,
        device=device,
        pools=memory.pools,
        tables={name: _ints(device, n_tokens, table.shape[0]) for name, table in memory.tables.items()},
        state=torch.tensor([0, 0, 1, 0], dtype=torch.int32, device=device).repeat(n_tokens, 1),
        history=_ints(device, n_tokens, memory.plan.capacity + 1),
        banned=memory.banned,
        logits=torch.zeros(n_tokens, memory.logits.shape[0], device=device),
        n_tokens=n_tokens,
    )


def _ints(device: torch.device, *shape: int) -> Tensor:
    return torch.zeros(*shape, dtype=torch.int32, device=device)


def _pool(kind: CacheKind, step: Step, plan: CachePlan, device: torch.device) -> Tensor:
    page, dtype = page_shape(kind.storage, kind.n_kv_heads, plan.page_size, kind.head_size, kind.rotated)
    shape = (step.n_cache_layers[kind.name], plan.n_pages(kind), *page)
    return torch.empty(shape, dtype=dtype, device=device)
