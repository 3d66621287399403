"""Does it fit? Asked before anything is allocated, answered with numbers."""

from __future__ import annotations

from pathlib import Path

import psutil
import torch

from bytefloor.errors import CapacityError

SCRATCH_BYTES = 256 << 20
"""Room for activations, the tensor being decoded and the interpreter, beyond weights and cache."""
CGROUP = Path("/sys/fs/cgroup")


def available_bytes(device: torch.device) -> int:
    """Memory that can be taken on a device now; on the CPU a container's limit counts too."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return min(int(psutil.virtual_memory().available), _container_bytes())


def _container_bytes() -> int:
    """What the cgroup still allows; unlimited where there is no limit to be read."""
    try:
        limit = (CGROUP / "memory.max").read_text().strip()
        used = int((CGROUP / "memory.current").read_text())
        return int(limit) - used
    except (OSError, ValueError):
        return 1 << 62


def check_memory(weight_bytes: int, cache_bytes: int, device: torch.device) -> None:
    """CapacityError with every number when weights, cache and scratch exceed what is there."""
    needed = weight_bytes + cache_bytes + SCRATCH_BYTES
    available = available_bytes(device)
    if needed > available:
        raise CapacityError(
            f"does not fit on {device}: needs {gigabytes(needed)} (weights {gigabytes(weight_bytes)}, "
            f"cache {gigabytes(cache_bytes)}, scratch {gigabytes(SCRATCH_BYTES)}), {gigabytes(available)} available; "
            "a shorter context (-c) or --weights bf16 needs less"
        )


def gigabytes(n_bytes: int) -> str:
    """10^9 bytes, two decimals."""
    return f"{n_bytes / 1e9:.2f} GB"
