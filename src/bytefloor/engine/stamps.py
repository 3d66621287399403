"""When each launch of a step was there, had its inputs and was done, by the card's own clock: see ops/stamps.cuh.

The step's kernels are compiled once more, with stamps, and recorded as a graph of their own, over the same buffers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import torch

from bytefloor.engine.decode_loop import record
from bytefloor.engine.kernels import KernelSpec, current, load_kernels
from bytefloor.engine.planner import Launch

N_STAMPS = 3
"""Of a block: there, ready, done."""
Work: TypeAlias = Launch | Callable[[], None]


@dataclass(frozen=True)
class Times:
    """Of a launch, nanoseconds of the card's clock: its first block was there, had its inputs; its last was done."""

    there: int
    ready: int
    done: int


def stamped(kernel: KernelSpec) -> KernelSpec:
    """The variant with stamps, which takes one more argument: 64-bit words [3, blocks]."""
    return replace(kernel, defines=(*kernel.defines, ("STAMPED", "1")))


class StampedGraph:
    """Launches, and what torch does between them, as a graph that leaves the times of the launches behind.

    stream: where it is recorded and replayed. What the launches write is what they write without stamps.
    """

    def __init__(
        self, work: Sequence[Work], architecture: str, stream: torch.cuda.Stream, device: torch.device
    ) -> None:
        launches = [each for each in work if isinstance(each, Launch)]
        with current(device):
            kernels = load_kernels([stamped(launch.kernel) for launch in launches], architecture)
        sizes = [N_STAMPS * math.prod(launch.grid) for launch in launches]
        self._stamps = torch.zeros(sum(sizes), dtype=torch.int64, device=device)
        self._parts = self._stamps.split(sizes)
        parts = iter(self._parts)
        starts = [
            kernels[stamped(each.kernel)].prepare(stream.cuda_stream, each.grid, (*each.arguments, next(parts)))
            if isinstance(each, Launch)
            else each
            for each in work
        ]

        def run() -> None:
            for start in starts:
                start()

        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream), torch.inference_mode():
            run()  # loads the kernels, which must not happen while a graph is recorded
            self.replay = record(run, device)

    def times(self) -> list[Times]:
        """Of each launch, of the last replay; waits for it."""
        torch.cuda.synchronize(self._stamps.device)
        whole = self._stamps.cpu().numpy()
        bounds = np.cumsum([len(part) for part in self._parts])[:-1]
        return [_times(part.reshape(N_STAMPS, -1)) for part in np.split(whole, bounds)]


def _times(stamps: np.ndarray) -> Times:
    """A block without work leaves no more than that it was there, or what a step before has left."""
    there, ready, done = stamps
    in_time = ready[ready >= there]
    first = int(there.min())
    return Times(first, int(in_time.min()) if len(in_time) else first, max(int(done.max()), first))
