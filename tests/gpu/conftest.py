"""Tests that need a GPU skip without one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bytefloor.engine.cache import CachePlan
from bytefloor.engine.device import DeviceExecutor
from bytefloor.model.step import Step
from device_rows import Make


@pytest.fixture(scope="session", autouse=True)
def device() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device", allow_module_level=True)
    return torch.device("cuda")


@pytest.fixture(autouse=True)
def _exact_reference() -> None:
    """Products of the reference executor are float32 ones."""
    torch.backends.cuda.matmul.allow_tf32 = False


@pytest.fixture
def card(device: torch.device) -> torch.device:
    return device


@pytest.fixture
def make() -> Make:
    """Makes a device executor whose buffers and pages hold NaN."""

    def make_executor(step: Step, plan: CachePlan, **settings: Any) -> DeviceExecutor:
        executor = DeviceExecutor(step, plan, **settings)
        executor.poison()
        return executor

    return make_executor
