"""How fast this device's tensor cores multiply: measured in each run, since shares of prompts are shares of it."""

from __future__ import annotations

import torch

from bytefloor.engine.stream_limit import timed_us

SIZE = 8192
"""Rows and columns of what is multiplied: three matrices of 128 MiB, far beyond any cache."""
PRODUCTS = 8
"""One after another: a few milliseconds, in which clocks fall to what power allows."""
WARM_UP, REPEATS = 2, 5


def measure_tensor_peak(device: torch.device) -> float | None:
    """10^12 multiplications and additions a second of torch.matmul over bf16 matrices: the best of several passes. None
    on a CPU.

    Values are random: zeros take less power, and a card that is held back by its power multiplies them faster.
    """
    if device.type != "cuda":
        return None
    generator = torch.Generator(device).manual_seed(1)
    a, b = (torch.randn(SIZE, SIZE, generator=generator, device=device).to(torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)

    def multiply() -> None:
        for _ in range(PRODUCTS):
            torch.matmul(a, b, out=out)

    for _ in range(WARM_UP):
        multiply()
    best_us = min(timed_us(device, multiply) for _ in range(REPEATS))
    return tflops(PRODUCTS * 2 * SIZE**3, best_us)


def tflops(n_operations: int, us: float) -> float:
    """10^12 operations a second."""
    return n_operations / us / 1e6
