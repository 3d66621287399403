"""Tokens that go from the device to the device, read by the host one step behind.

A step is the trunk's graph and behind it the sampler's, on one stream: the trunk finds token and position where the
step before has left them. So the next step can start before the host knows what this one chose; what it computes
is thrown away if the answer ended here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bytefloor.engine.batch import Batch
from bytefloor.engine.device_highest import Highest
from bytefloor.engine.device_sampler import DeviceSampler, is_adjusted, supports
from bytefloor.engine.planner import DeviceMemory
from bytefloor.engine.sampler import Sampled, Sampler
from bytefloor.engine.sampling_params import SamplingParams

N_AHEAD = 2
"""Steps that are under way at most: one that the host waits for, and one behind it, so that the device never waits."""


@dataclass(frozen=True)
class Trunk:
    """What the executor lends: ``show`` brings pages and tables of a batch to the device, ``place`` token, position and
    how many positions layers without a window have dropped, ``replay`` computes logits from them. All on one stream.
    banned_ids: those that the logits kernel never takes. highest: by a kernel, where there is one."""

    memory: DeviceMemory
    stream: torch.cuda.Stream
    banned_ids: frozenset[int]
    show: Callable[[Batch], None]
    place: Callable[[int, int, int], None]
    replay: Callable[[], None]
    highest: Highest


@dataclass(frozen=True)
class _Slot:
    """Where a step's record lands on the host, and the event that says it has."""

    row: Tensor
    event: torch.cuda.Event


class DecodeLoop:
    """The decoding of one sequence at a time: start, then launch and next by turns, stop.

    Whoever drives it keeps the books of the cache, and launches a step only where its position is writable.
    """

    def __init__(self, trunk: Trunk) -> None:
        self._trunk = trunk
        self._host: Sampler | None = None
        self._sampler: DeviceSampler | None = None
        self._banned = np.zeros(0, np.int64)
        self._sample: Callable[[], None] = lambda: None
        self._slots: list[_Slot] = []
        self._under_way: deque[_Slot] = deque()
        self._position = 0
        self._n_launched = 0

    @property
    def n_under_way(self) -> int:
        """Steps launched and not read."""
        return len(self._under_way)

    def can_serve(self, params: SamplingParams) -> bool:
        """Whether the device has these stages; the host samples otherwise."""
        return supports(params)

    @torch.inference_mode()
    def start(self, sampler: Sampler, ids: Sequence[int], n_prompt: int, dropped: int = 0) -> None:
        """Continue a sequence of known tokens, the first n_prompt of them its prompt, the last not computed yet.

        dropped: positions that layers without a window have no more.
        sampler: the request's own, at the end of ``ids``; it is kept at the end of what ``next`` returns.
        """
        with torch.cuda.stream(self._trunk.stream):
            # What a sequence before left under way still writes to the buffers.
            self._trunk.stream.synchronize()
            device_sampler = self._sampler_for(sampler)
            device_sampler.load(sampler, ids, n_prompt)
            self._trunk.place(ids[-1], len(ids) - 1, dropped)
        self._host, self._position = sampler, len(ids) - 1

    def _sampler_for(self, sampler: Sampler) -> DeviceSampler:
        """The one of the request before where it asked for the same: a seed is no part of the graph."""
        params, banned = replace(sampler.params, seed=None), sampler.banned_ids
        if self._sampler is not None and self._sampler.params == params and np.array_equal(self._banned, banned):
            return self._sampler
        memory = self._trunk.memory
        # Greedy, and nothing changes a logit: the logits kernel has the answer.
        takes_best = (
            params.is_greedy and not is_adjusted(params) and self._trunk.banned_ids == frozenset(banned.tolist())
        )
        made = DeviceSampler(params, banned, memory, takes_best, self._trunk.highest)
        self._trunk.place(0, 1, 0)
        sample = capture(made.step, self._trunk.stream, memory.device)
        pin = memory.device.type == "cuda"
        rows = [torch.zeros(made.n_record, dtype=torch.float64, pin_memory=pin) for _ in range(N_AHEAD + 1)]
        # Together and last: a capture that fails leaves the one before, or none.
        self._slots = [_Slot(row, torch.cuda.Event()) for row in rows]
        self._sampler, self._banned, self._sample = made, banned, sample
        return made

    @torch.inference_mode()
    def launch(self, shown: Batch | None) -> None:
        """Start the step after the last one. shown: pages and tables where they have changed."""
        assert self._sampler is not None
        slot = self._slots[self._n_launched % len(self._slots)]
        with torch.cuda.stream(self._trunk.stream):
            if shown is not None:
                self._trunk.show(shown)
            self._sampler.foresee(self._position)
            self._trunk.replay()
            self._sample()
            slot.row.copy_(self._sampler.record, non_blocking=True)
            slot.event.record(self._trunk.stream)
        self._under_way.append(slot)
        self._position += 1
        self._n_launched += 1

    def next(self) -> Sampled | None:
        """Wait for the oldest step under way. None where the device could not choose: the host has to look itself."""
        assert self._sampler is not None
        assert self._host is not None
        slot = self._under_way.popleft()
        slot.event.synchronize()
        row = slot.row.tolist()
        sampled = self._sampler.read(row)
        if sampled is not None:
            self._host.accept(sampled.id)
            self._host.mu = self._sampler.bound(row)
        return sampled

    def stop(self) -> None:
        """Forget what is under way. It may still run, but whatever comes later comes later on the same stream."""
        self._under_way.clear()
        self._host = None


def capture(
    work: Callable[[], None], stream: torch.cuda.Stream, device: torch.device, pool: Any = None
) -> Callable[[], None]:
    """``work`` as a graph that is replayed on the current stream. On a CPU, which has no graphs, the work itself.

    pool: as for ``record``.
    """
    if device.type != "cuda":
        return work
    # The first launch of a kernel loads its code, which must not happen while a graph is captured.
    work()
    stream.synchronize()
    return record(work, device, pool)


def record(work: Callable[[], None], device: torch.device, pool: Any = None) -> Callable[[], None]:
    """The same of work that has run before, without running it: for when requests are there, since it waits for nothing
    and looks for no garbage. On the current stream, which is none that other threads use.

    pool: of ``torch.cuda.graph_pool_handle``, shared by graphs none of which runs beside another or leaves anything in
    it: a graph keeps for good what its work took while it ran.
    """
    if device.type != "cuda":
        return work
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(pool=pool, capture_error_mode="thread_local")
    try:
        work()
    finally:
        graph.capture_end()
    return graph.replay
