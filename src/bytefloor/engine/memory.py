"""Does it fit? Asked before anything is allocated, answered with numbers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from bytefloor.engine.progress import Progress
from bytefloor.errors import CapacityError

CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes that a model will take on a device.

    weights, cache: kept, the cache for n_positions. scratch: the most that is taken beside them at any time.
    kv: what the cache keeps, in words.
    """

    device: torch.device
    weights: int
    cache: int
    scratch: int
    n_positions: int
    kv: str

    @property
    def needed(self) -> int:
        """All of it."""
        return self.weights + self.cache + self.scratch

    def __str__(self) -> str:
        return (
            f"weights {gigabytes(self.weights)}, "
            f"cache {gigabytes(self.cache)} ({self.n_positions} positions, {self.kv}), "
            f"scratch {gigabytes(self.scratch)}"
        )


@dataclass(frozen=True)
class Advice:
    """What the user can do where memory is short, in the words of the command that runs.

    kernels: where the device executor refuses. reference: where the reference executor does.
    """

    kernels: str = ""
    reference: str = ""


def check_memory(plan: MemoryPlan, progress: Progress, advice: str) -> None:
    """Show the plan; CapacityError with every number and the advice when it exceeds what is there."""
    available = available_bytes(plan.device)
    if plan.needed > available:
        raise CapacityError(
            f"does not fit on {plan.device}: {plan} need {gigabytes(plan.needed)}, {gigabytes(available)} available"
            + (f"; {advice}" if advice else "")
        )
    progress.note(f"{plan}: {plan.needed / 1e9:.2f} of {gigabytes(available)}")


def available_bytes(device: torch.device) -> int:
    """Memory that can be taken on a device now; on the CPU a container's limit counts too."""
    if device.type == "cuda":
        # What torch holds without using it counts as taken to the driver, and is free to us.
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + unused
    return min(int(psutil.virtual_memory().available), _container_bytes())


def _container_bytes() -> int:
    """What the cgroup still allows; unlimited where there is no limit to be read.

    ``memory.current`` counts the page cache, a model file that was read before among it, which gives way by itself:
    its idle part is free.
    """
    try:
        limit = (CGROUP / "memory.max").read_text().strip()
        used = int((CGROUP / "memory.current").read_text())
        return int(limit) - used + _idle_file_bytes()
    except (OSError, ValueError):
        return 1 << 62


def _idle_file_bytes() -> int:
    """``inactive_file`` of the cgroup; 0 where it is not told."""
    try:
        lines = (CGROUP / "memory.stat").read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith("inactive_file "))
    except (OSError, ValueError):
        return 0


def gigabytes(n_bytes: int) -> str:
    """10^9 bytes, two decimals."""
    return f"{n_bytes / 1e9:.2f} GB"
