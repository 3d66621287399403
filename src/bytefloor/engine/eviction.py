"""Eviction while a step is walked: what each layer without a window keeps, and the move when all have read it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from bytefloor.engine.batch import Batch
from bytefloor.engine.cache import CachePlan
from bytefloor.model.step import CacheLayer, OpCall
from bytefloor.ops.attention import Read, gather_band
from bytefloor.ops.eviction import OBSERVED, kept_slots, move_to_front


def deciding_calls(calls: Mapping[int, OpCall]) -> dict[int, CacheLayer]:
    """Of calls of attention by any key, those whose queries choose: of each cache layer without a window the first.

    That is the layer whose keys they are. Later layers that share them (E models) read what it has kept.
    """
    first: dict[CacheLayer, int] = {}
    for key, call in calls.items():
        if call.cache is not None and call.cache.kind.window is None:
            first.setdefault(call.cache, key)
    return {key: layer for layer, key in first.items()}


class Evictions:
    """Of one step. Layers may be read until its end, so what they keep is moved there."""

    def __init__(self, batch: Batch, plan: CachePlan) -> None:
        self._n_kept = plan.budget or 0
        ends = [first + n for first, n in batch.spans]
        self._ends = [(sequence, ends[sequence], batch.slots[ends[sequence] - 1] + 1) for sequence in batch.evicting]
        self._chosen: list[tuple[CacheLayer, Tensor, Tensor, int]] = []

    def choose(self, layer: CacheLayer, cache: Tensor, q: Tensor, tables: Tensor, scale: float, read: Read) -> None:
        """cache: the layer's pages. q [T, H, E]: queries of all rows, any float. tables int64 [B, n_table]. read: see
        ``ops/attention.py``; it gives keys in the dtype that votes are to be counted in."""
        n_kv, group = cache.shape[2], q.shape[1] // cache.shape[2]
        keys_of = cache if layer.kind.rotated else cache[:, :1]
        for sequence, end, n_slots in self._ends:
            kept, table = [], tables[sequence]
            for j in range(n_kv):  # one by one: scores of all heads may be more than there is room for
                keys = gather_band(keys_of[:, :, j : j + 1], table, 0, n_slots, q.shape[-1], read)[0]
                rows = q[end - OBSERVED : end, j * group : (j + 1) * group].to(keys.dtype)
                kept.append(kept_slots(rows, keys, scale, self._n_kept))
            self._chosen.append((layer, table, torch.cat(kept), q.shape[-1]))

    def move(self, pools: Mapping[str, Tensor]) -> None:
        """Every layer's, once no call is to read it any more."""
        for layer, table, kept, head_size in self._chosen:
            move_to_front(pools[layer.kind.name][layer.index], table, kept, head_size)
