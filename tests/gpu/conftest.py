"""Tests that need a GPU skip without one."""

from __future__ import annotations

import pytest
import torch

from bytefloor.engine import device as device_module


@pytest.fixture(scope="session", autouse=True)
def device() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device", allow_module_level=True)
    return torch.device("cuda")


@pytest.fixture(autouse=True)
def proving(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is refused until a card has run it is run here."""
    monkeypatch.setattr(device_module, "refuse_unproven", lambda *_: None)
