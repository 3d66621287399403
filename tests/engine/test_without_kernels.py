"""Where there are no kernels for a model, another way is taken, and said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from bytefloor.engine import loading
from bytefloor.engine.cache import Room
from bytefloor.errors import CapacityError, UnsupportedError
from bytefloor.files.checkpoint import open_checkpoint
from bytefloor.model.families import load_model
from tiny import build_tiny

CUDA = torch.device("cuda")


def test_what_has_no_kernels_says_why_and_what_runs_instead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """F02, M09: the reason names the thing; an error of any other kind is one."""
    model = load_model(open_checkpoint(build_tiny("qwen3", tmp_path).directory))
    error: Exception = UnsupportedError("layers.0.mlp: gate and up have different formats: Q4_K, Q6_K")

    def refuse(*_: Any, **__: Any) -> None:
        raise error

    devices: list[torch.device] = []

    def run(*_: Any, device: torch.device, **__: Any) -> str:
        devices.append(device)
        return "reference"

    monkeypatch.setattr(loading, "DeviceExecutor", refuse)
    monkeypatch.setattr(loading, "ReferenceExecutor", run)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    found, notices = loading.make_executor(model, Room(64, 16), CUDA)
    assert (found, devices) == ("reference", [CUDA])
    assert notices == (f"{error}; running the reference executor on the GPU instead, which is slow",)
    error = CapacityError("does not fit")
    with pytest.raises(CapacityError, match="does not fit"):
        loading.make_executor(model, Room(64, 16), CUDA)
    assert loading.make_executor(model, Room(64, 16), torch.device("cpu"))[1] == ()
