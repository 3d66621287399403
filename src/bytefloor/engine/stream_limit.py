"""How fast this device reads memory: measured in each run, since every share is a share of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from bytefloor.engine.kernels import KernelSpec, current, load_kernels, spec
from bytefloor.errors import UnsupportedError

MOST_BYTES = 8 << 30
CPU_BYTES = 1 << 30
SLOT_BYTES = 16384
SLOTS = 5
BLOCKS_A_MULTIPROCESSOR = 2
"""With five slots each they fit in 164 KB of shared memory; where there is less, one is there at a time."""
REPEATS = 7


@dataclass(frozen=True)
class StreamLimit:
    """gb_s: 10^9 bytes a second. notice: what the user should be told where it is not what the kernels could read."""

    gb_s: float
    notice: str | None = None


def read_spec() -> KernelSpec:
    """The kernel that reads."""
    return spec("read", 32, SLOTS * (SLOT_BYTES + 8), SLOT=SLOT_BYTES, SLOTS=SLOTS)


def measure_stream_limit(device: torch.device) -> StreamLimit:
    """The best of several passes over a buffer far larger than any cache."""
    if device.type == "cuda":
        return _measure_cuda(device)
    words = torch.ones(CPU_BYTES // 8, dtype=torch.int64)
    return StreamLimit(max(CPU_BYTES / timed_us(device, words.sum) / 1e3 for _ in range(3)))


def _measure_cuda(device: torch.device) -> StreamLimit:
    from bytefloor.engine.device import device_architecture

    free, _ = torch.cuda.mem_get_info(device)
    n_bytes = min(MOST_BYTES, free // 2) // SLOT_BYTES * SLOT_BYTES
    words = torch.ones(n_bytes // 4, dtype=torch.int32, device=device)
    out = torch.zeros(1, dtype=torch.int32, device=device)
    kernel = read_spec()
    try:
        with current(device):
            loaded = load_kernels([kernel], device_architecture(device))[kernel]
    except UnsupportedError as error:
        notice = f"{error}; the stream limit is that of torch's sum, which may be low, so shares may be high"
        return StreamLimit(_best_gb_s(device, n_bytes, words.sum), notice)
    n_blocks = torch.cuda.get_device_properties(device).multi_processor_count * BLOCKS_A_MULTIPROCESSOR
    stream = torch.cuda.current_stream(device).cuda_stream
    arguments = (words, n_bytes // SLOT_BYTES, out)
    return StreamLimit(_best_gb_s(device, n_bytes, lambda: loaded.launch(stream, (n_blocks, 1), arguments)))


def _best_gb_s(device: torch.device, n_bytes: int, work: Callable[[], object]) -> float:
    return max(n_bytes / timed_us(device, work) / 1e3 for _ in range(REPEATS))


def timed_us(device: torch.device, work: Callable[[], object]) -> float:
    """Microseconds that work takes: on a GPU the device's own, of what work puts on the current stream."""
    if device.type != "cuda":
        before = time.perf_counter()
        work()
        return (time.perf_counter() - before) * 1e6
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    work()
    end.record()
    torch.cuda.synchronize(device)
    return start.elapsed_time(end) * 1e3
