"""An E model with its table of per-layer embeddings on the device and in mapped host memory: the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from bytefloor.engine import memory as memory_module
from bytefloor.engine.batch import Batch
from bytefloor.engine.cache import CachePlan
from bytefloor.engine.device import DeviceExecutor
from bytefloor.engine.synthetic import checkpoint_of
from bytefloor.files.checkpoint import open_checkpoint
from bytefloor.model.step import Step
from device_rows import empty_cache, rows_of, step_of
from gpu.test_device_executor import SHAPES

PLAN = CachePlan(256, 128)
IDS = [(5 + 7 * i) % 300 for i in range(100)]


@pytest.fixture(params=["gemma4-tiny-e", "Q4_K_M", "Q8_0"])
def step(request: pytest.FixtureRequest) -> Step:
    if request.param == "gemma4-tiny-e":
        shared: Path = request.getfixturevalue("shared_dir")
        path = shared / "models" / request.param
        if not path.is_dir():
            pytest.skip(f"{request.param} is not here")
        return step_of(open_checkpoint(path))
    return step_of(checkpoint_of("gemma4-e", SHAPES["gemma4-e"], request.param, "cuda"))


def rows(executor: DeviceExecutor, chunk: int, is_eager: bool) -> Tensor:
    executor.poison()
    return rows_of(executor, IDS, chunk, is_eager=is_eager)


def greedy(executor: DeviceExecutor) -> list[int]:
    batch = Batch()
    empty_cache(executor).append_rows(batch, [5], [0], n_reserved=100)
    return executor.decode_greedy(batch, 90).tolist()


def test_the_table_in_host_memory_gives_the_same_bits(step: Step, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the graph, launched one by one, as a prompt, and fed back on the device."""
    usual = DeviceExecutor(step, PLAN)
    room = usual.memory_plan.needed - 1
    monkeypatch.setattr(memory_module, "available_bytes", lambda device: room)
    moved = DeviceExecutor(step, PLAN)
    assert moved.memory_plan.on_host == usual.memory_plan.table > 0
    places = [[t.device.type for t in executor.weights._packed.values()] for executor in (usual, moved)]
    assert [place.count("cpu") for place in places] == [0, 1]
    (table,) = (t for t in moved.weights._packed.values() if t.device.type == "cpu")
    assert table.is_pinned()
    assert table.numel() == moved.memory_plan.on_host
    for chunk, is_eager in ((1, False), (24, True), (50, False)):
        assert torch.equal(rows(moved, chunk, is_eager), rows(usual, chunk, is_eager))
    assert greedy(moved) == greedy(usual)
