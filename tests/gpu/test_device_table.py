"""An E model with its table of per-layer embeddings on the device and in mapped host memory: the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from bytefloor.engine import memory as memory_module
from bytefloor.engine.batch import Batch
from bytefloor.engine.cache import CachePlan, SequenceCache, make_pools
from bytefloor.engine.device import DeviceExecutor
from bytefloor.engine.loading import DEVICE_ROUNDING
from bytefloor.engine.synthetic import Shape, checkpoint_of
from bytefloor.files.checkpoint import open_checkpoint
from bytefloor.model.decoder import build_step
from bytefloor.model.families import load_model
from bytefloor.model.step import Step

SHAPE = Shape(
    "gemma4", 256, 512, 4, 4, 2, 64, 315, 4096, True,
    {"attention.sliding_window": 40, "final_logit_softcapping": 30.0}, 2, 2, 128, True, 2, 64,
)  # fmt: skip
PLAN = CachePlan(256, 128)
IDS = [(5 + 7 * i) % 300 for i in range(100)]


@pytest.fixture(params=["gemma4-tiny-e", "Q4_K_M", "Q8_0"])
def step(request: pytest.FixtureRequest) -> Step:
    if request.param == "gemma4-tiny-e":
        shared: Path = request.getfixturevalue("shared_dir")
        path = shared / "models" / request.param
        if not path.is_dir():
            pytest.skip(f"{request.param} is not here")
        model = load_model(open_checkpoint(path))
    else:
        model = load_model(checkpoint_of("gemma4-e", SHAPE, request.param, "cuda"))
    return build_step(model.config, model.weights, DEVICE_ROUNDING)


def rows_of(executor: DeviceExecutor, chunk: int, is_eager: bool = False) -> Tensor:
    executor.poison()
    cache = SequenceCache(executor.plan, executor.step.kinds, make_pools(executor.plan, executor.step.kinds))
    found = []
    for start in range(0, len(IDS), chunk):
        rows, batch = IDS[start : start + chunk], Batch()
        cache.append_rows(batch, rows, range(len(rows)))
        found.append(executor.run(batch, is_eager))
        cache.commit(len(rows))
    return torch.cat(found)


def greedy(executor: DeviceExecutor) -> list[int]:
    cache, batch = SequenceCache(PLAN, executor.step.kinds, make_pools(PLAN, executor.step.kinds)), Batch()
    cache.append_rows(batch, [5], [0], n_reserved=100)
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
        assert torch.equal(rows_of(moved, chunk, is_eager), rows_of(usual, chunk, is_eager))
    assert greedy(moved) == greedy(usual)
