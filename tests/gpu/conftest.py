"""Tests that need a GPU skip without one."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def device() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device", allow_module_level=True)
    return torch.device("cuda")
