"""The highest of many values by one kernel, where there is one: with torch's sorts it is half of the sampler's time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from bytefloor.engine.cache import ceil_div
from bytefloor.engine.device_cuts import GROUP, highest
from bytefloor.engine.kernels import KernelSpec, spec

Highest = Callable[[Tensor, int], tuple[Tensor, Tensor]]
"""``device_cuts.highest``, or what stands for it."""

MOST = 64
"""Values that the kernel finds at most."""
THREADS = 1024
VALUES = {torch.float32: "float", torch.float64: "double"}


class Launchable(Protocol):
    """A loaded kernel."""

    def launch(self, stream: int, grid: tuple[int, int], arguments: tuple[Any, ...]) -> None:
        """See ``kernels.Kernel``."""


def highest_specs(n_vocabulary: int) -> dict[torch.dtype, KernelSpec]:
    """The kernel for a vocabulary filled up to whole groups, for each type that its values may have."""
    n = ceil_div(n_vocabulary, GROUP) * GROUP
    return {
        dtype: spec(
            "highest",
            THREADS,
            MOST * GROUP * (dtype.itemsize + 4) + MOST * 4,
            VALUE=name,
            N=n,
            THREADS=THREADS,
            GROUP=GROUP,
            MOST=MOST,
        )
        for dtype, name in VALUES.items()
    }


class DeviceHighest:
    """``device_cuts.highest`` by ops/highest.cu, for n_values values; by torch for others, and for many of few."""

    def __init__(self, n_vocabulary: int, kernels: Mapping[torch.dtype, Launchable]) -> None:
        self._n_values, self._kernels = ceil_div(n_vocabulary, GROUP) * GROUP, kernels

    def __call__(self, values: Tensor, n: int) -> tuple[Tensor, Tensor]:
        """The n highest, descending, and their places; see ``device_cuts.highest``."""
        if values.shape != (self._n_values,) or n > min(MOST, self._n_values // GROUP):
            return highest(values, n)
        best = torch.empty(n, dtype=values.dtype, device=values.device)
        places = torch.empty(n, dtype=torch.int64, device=values.device)
        maxima = values.view(-1, GROUP).amax(1)
        stream = torch.cuda.current_stream(values.device).cuda_stream
        self._kernels[values.dtype].launch(stream, (1, 1), (values, maxima, best, places, n, self._n_values))
        return best, places
