"""The cases of tests/gpu with a Python twin in place of every kernel: their wiring, and the tests themselves."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bytefloor.engine.cache import CachePlan
from bytefloor.engine.device import DeviceExecutor
from bytefloor.model.step import Step
from device_rows import Make
from gpu.test_case_files import *  # noqa: F403
from gpu.test_cases import *  # noqa: F403
from kernel_twins import TwinDevice


@pytest.fixture
def card() -> torch.device:
    return torch.device("cpu")


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Make:
    twins = TwinDevice()
    twins.install(monkeypatch)

    def make_executor(step: Step, plan: CachePlan, **settings: Any) -> DeviceExecutor:
        executor = DeviceExecutor(step, plan, device="cpu", **settings)
        twins.know(executor)
        executor.poison()
        return executor

    return make_executor
