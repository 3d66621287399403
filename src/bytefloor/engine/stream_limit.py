"""How fast this device reads memory: measured in each run, since every share is a share of it."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from bytefloor.engine.kernels import load_kernels, spec
from bytefloor.errors import UnsupportedError

MOST_BYTES = 8 << 30
CPU_BYTES = 1 << 30
THREADS = 512
BLOCKS_A_MULTIPROCESSOR = 4
REPEATS = 7


def measure_stream_gb_s(device: torch.device) -> float:
    """10^9 bytes a second of the best of several passes over a buffer far larger than any cache."""
    if device.type == "cuda":
        return _measure_cuda(device)
    words = torch.ones(CPU_BYTES // 8, dtype=torch.int64)
    best = 0.0
    for _ in range(3):
        start = time.perf_counter()
        words.sum()
        best = max(best, CPU_BYTES / (time.perf_counter() - start) / 1e9)
    return best


def _measure_cuda(device: torch.device) -> float:
    from bytefloor.engine.device import device_architecture

    free, _ = torch.cuda.mem_get_info(device)
    n_bytes = min(MOST_BYTES, free // 2) // 16384 * 16384
    words = torch.ones(n_bytes // 4, dtype=torch.int32, device=device)
    out = torch.zeros(1, dtype=torch.int32, device=device)
    kernel = spec("read", THREADS, THREADS=THREADS)
    try:
        loaded = load_kernels([kernel], device_architecture(device))[kernel]
    except UnsupportedError:
        return max(_timed(device, lambda: words.sum(), n_bytes) for _ in range(REPEATS))
    n_blocks = torch.cuda.get_device_properties(device).multi_processor_count * BLOCKS_A_MULTIPROCESSOR
    stream = torch.cuda.current_stream(device).cuda_stream
    arguments = (words, n_bytes // 16384, out)
    return max(_timed(device, lambda: loaded.launch(stream, (n_blocks, 1), arguments), n_bytes) for _ in range(REPEATS))


def _timed(device: torch.device, work: Callable[[], object], n_bytes: int) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    work()
    end.record()
    torch.cuda.synchronize(device)
    return n_bytes / start.elapsed_time(end) / 1e6
