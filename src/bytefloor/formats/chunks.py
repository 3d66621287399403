"""Decoding a large tensor piece by piece, and saying where a scale is not a number.

A decoder is written for a handful of *units* (a GGUF block, a group of columns, a row); this module walks the tensor.
Pieces keep scratch small whatever the tensor's size, and keep it in cache on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Barrier, Lock

import torch
from torch import Tensor

from bytefloor.errors import FileError

# Weights a piece. On the CPU: small enough for a core's cache, large enough that Python's share of the time is small.
CPU_PIECE = 1 << 19
# A tensor too small for threads is walked in pieces on which torch starts no threads of its own either: their barrier
# at every op costs milliseconds when another process holds one of the cores.
SMALL_PIECE = 1 << 15
# On a device a piece only has to bound the scratch (a few bytes a weight).
DEVICE_PIECE = 1 << 26

Unpack = Callable[..., None]


class NotFiniteError(Exception):
    """A scale or code that is NaN or infinite, by its place in the piece; ``fill`` turns it into a FileError.

    index counts through the piece, per_unit such values a unit; axis is what a row of them is called.
    """

    def __init__(self, label: str, index: int, per_unit: int, axis: str = "group") -> None:
        super().__init__(label)
        self.label, self.index, self.per_unit, self.axis = label, index, per_unit, axis


def finite(scales: Tensor, label: str) -> Tensor:
    """The scales [units, ...] unchanged, or NotFiniteError for the first that is NaN or infinite."""
    if (scales - scales).any():  # x - x is 0 for every finite x and NaN otherwise
        index = int(torch.isfinite(scales).flatten().logical_not().nonzero()[0])
        raise NotFiniteError(label, index, scales[0].numel())
    return scales


def fill(
    name: str, out: Tensor, unit: int, operands: tuple[Tensor, ...], unpack: Unpack, piece: int | None = None
) -> Tensor:
    """Fills ``out`` [N, K] by calling ``unpack(out piece [units, unit], *operand pieces)`` over all N * K / unit units.

    Every operand has one entry a unit along its first axis. piece: elements of ``out`` a call on the CPU, for work
    that takes far more scratch than decoding does. Returns ``out``.
    """
    if out.numel() == 0:
        return out
    units = out.view(-1, unit)
    units_per_row = out.shape[1] // unit
    if piece is not None and out.device.type == "cpu":
        n_threads = max(1, min(torch.get_num_threads(), out.numel() // piece))
    else:
        n_threads = _threads_for(out)
        piece = _piece(out, n_threads)
    step = max(1, piece // unit)

    def run(start: int) -> None:
        stop = start + step
        try:
            unpack(units[start:stop], *(operand[start:stop] for operand in operands))
        except NotFiniteError as found:
            row, place = divmod(start * found.per_unit + found.index, units_per_row * found.per_unit)
            raise FileError(f"{name}: {found.label} is NaN or infinite at row {row}, {found.axis} {place}") from None

    starts = range(0, units.shape[0], step)
    if n_threads == 1:
        for start in starts:
            run(start)
    else:
        with _serial_workers(n_threads) as pool:
            for _ in pool.map(run, starts):  # in order, so that the error raised is the first in the tensor
                pass
    return out


def _threads_for(out: Tensor) -> int:
    if out.device.type != "cpu":
        return 1
    return max(1, min(torch.get_num_threads(), out.numel() // CPU_PIECE))


def _piece(out: Tensor, n_threads: int) -> int:
    if out.device.type != "cpu":
        return DEVICE_PIECE
    return SMALL_PIECE if n_threads == 1 else CPU_PIECE


_starting_workers = Lock()


@contextmanager
def _serial_workers(n_threads: int) -> Iterator[ThreadPoolExecutor]:
    """A pool in whose threads torch runs every op on the calling thread, so that pieces run side by side.

    torch keeps its thread count for each thread, but a call also changes what threads started later begin with:
    that default is put back before any work starts, and the lock keeps two decodes from seeing each other's.
    """
    with ThreadPoolExecutor(n_threads) as pool:
        with _starting_workers:
            default = torch.get_num_threads()
            started = Barrier(n_threads)  # one task a thread: none finishes before all have begun

            def start() -> None:
                started.wait()
                torch.set_num_threads(1)

            for worker in [pool.submit(start) for _ in range(n_threads)]:
                worker.result()
            torch.set_num_threads(default)
        yield pool
