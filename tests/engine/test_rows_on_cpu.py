"""tests/gpu/test_rows.py with the kernels themselves, compiled for the CPU."""

from __future__ import annotations

import shutil

import pytest
import torch

from blocks_on_cpu import BlockRunner
from gpu.test_rows import *  # noqa: F403
from gpu.test_rows import Launch


@pytest.fixture
def card() -> torch.device:
    return torch.device("cpu")


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> BlockRunner:
    if shutil.which("g++") is None:
        pytest.skip("no C++ compiler")
    return BlockRunner(tmp_path_factory.mktemp("blocks"))


@pytest.fixture
def launched(runner: BlockRunner) -> Launch:
    return runner.run
