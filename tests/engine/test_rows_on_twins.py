"""tests/gpu/test_rows.py with a Python twin in place of every kernel: the twins, and the tests themselves."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bytefloor.engine.kernels import KernelSpec
from gpu.test_rows import *  # noqa: F403
from gpu.test_rows import Launch
from kernel_twins import TwinDevice, TwinKernel


@pytest.fixture
def card() -> torch.device:
    return torch.device("cpu")


@pytest.fixture
def launched() -> Launch:
    def run(kernel: KernelSpec, grid: tuple[int, int], *arguments: Any) -> None:
        TwinKernel(TwinDevice(), kernel).launch(0, grid, arguments)

    return run
