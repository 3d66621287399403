"""Does it fit? Asked before anything is allocated, answered with numbers."""

from __future__ import annotations

from dataclasses import dataclass, replace
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
    kv: what the cache keeps, in words. table: of the weights, a table of per-layer embeddings. on_host: its bytes where
    it lies in pinned host memory instead, and is no part of the weights. budget: positions that layers without a window
    keep of a longer prompt once it is read; while it is read they have all, so the cache is no smaller for it.
    """

    device: torch.device
    weights: int
    cache: int
    scratch: int
    n_positions: int
    kv: str
    table: int = 0
    on_host: int = 0
    budget: int | None = None

    @property
    def needed(self) -> int:
        """All of it."""
        return self.weights + self.cache + self.scratch

    def __str__(self) -> str:
        budget = "" if self.budget is None else f", a prompt has {self.budget} of them once it is read"
        return (
            f"weights {gigabytes(self.weights)}, "
            f"cache {gigabytes(self.cache)} ({self.n_positions} positions, {self.kv}{budget}), "
            f"scratch {gigabytes(self.scratch)}"
        )


@dataclass(frozen=True)
class Advice:
    """What the user can do where memory is short, in the words of the command that runs.

    kernels: where the device executor refuses. reference: where the reference executor does.
    """

    kernels: str = ""
    reference: str = ""


def place_table(plan: MemoryPlan) -> MemoryPlan:
    """The plan with the table of per-layer embeddings in host memory, where all together do not fit on the device.

    A token reads one row of it, so that over the bus it costs little; what is streamed gets the device's memory.
    """
    if not plan.table or plan.needed <= available_bytes(plan.device):
        return plan
    return replace(plan, weights=plan.weights - plan.table, table=0, on_host=plan.table)


def check_memory(plan: MemoryPlan, progress: Progress, advice: str) -> None:
    """Show the plan; CapacityError with every number and the advice when it exceeds what is there."""
    available, ending = available_bytes(plan.device), f"; {advice}" if advice else ""
    table = f"per-layer embeddings: {gigabytes(plan.on_host)} in pinned host memory"
    beside = f"; {table}" if plan.on_host else ""
    if plan.needed > available:
        needed = f"need {gigabytes(plan.needed)}, {gigabytes(available)} available"
        raise CapacityError(f"does not fit on {plan.device}: {plan} {needed}{beside}{ending}")
    taken, room = pinned_bytes(plan.on_host), free_host_bytes()
    if taken > room:
        found = f"which takes {gigabytes(taken)}, {gigabytes(room)} available there"
        raise CapacityError(f"does not fit on {plan.device} as a whole, nor beside it: {table}, {found}{ending}")
    progress.note(f"{plan}: {plan.needed / 1e9:.2f} of {gigabytes(available)}{beside}")


def pinned_bytes(n_bytes: int) -> int:
    """What a pinned tensor takes: torch rounds it up to a power of two."""
    return 1 << (n_bytes - 1).bit_length() if n_bytes else 0


def available_bytes(device: torch.device) -> int:
    """Memory that can be taken on a device now; on the CPU a container's limit counts too."""
    if device.type == "cuda":
        # What torch holds without using it counts as taken to the driver, and is free to us.
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + unused
    return free_host_bytes()


def free_host_bytes() -> int:
    """Memory of the host that can be taken now."""
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
