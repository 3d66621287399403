"""The table of per-layer embeddings in host memory: when it goes there, what is said of it, that it is read there."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from bytefloor.engine import memory as memory_module
from bytefloor.engine import packed as packed_module
from bytefloor.engine.cache import CachePlan
from bytefloor.engine.device import DeviceExecutor
from bytefloor.engine.memory import MemoryPlan, check_memory, pinned_bytes, place_table
from bytefloor.engine.packed import PackedWeights
from bytefloor.engine.progress import Silent
from bytefloor.engine.synthetic import Shape, checkpoint_of
from bytefloor.errors import CapacityError
from bytefloor.model.fuse import fuse_one_row
from bytefloor.model.step import Step
from device_rows import rows_of, step_of
from kernel_twins import TwinDevice

GB = 10**9
PLAN = MemoryPlan(torch.device("cpu"), 5 * GB, 1 * GB, 1 * GB, 8192, "bf16", table=3 * GB)
E_MODEL = Shape(
    "gemma4", 256, 512, 4, 4, 2, 64, 283, 4096, True,
    {"attention.sliding_window": 40, "final_logit_softcapping": 30.0}, 2, 2, 128, True, 2, 64,
)  # fmt: skip


class Notes(Silent):
    def __init__(self) -> None:
        self.said: list[str] = []

    def note(self, line: str) -> None:
        self.said.append(line)


def set_room(monkeypatch: pytest.MonkeyPatch, device: int, host: int = 1 << 40) -> None:
    monkeypatch.setattr(memory_module, "available_bytes", lambda _: device)
    monkeypatch.setattr(memory_module, "free_host_bytes", lambda: host)


@pytest.mark.parametrize(("room", "on_host"), [(7 * GB, 0), (7 * GB - 1, 3 * GB), (4 * GB, 3 * GB)])
def test_the_table_moves_where_the_whole_does_not_fit(monkeypatch: pytest.MonkeyPatch, room: int, on_host: int) -> None:
    set_room(monkeypatch, room)
    found, notes = place_table(PLAN), Notes()
    assert (found.on_host, found.needed) == (on_host, 7 * GB - on_host)
    check_memory(found, notes, "")
    says_so = notes.said[0].endswith("; per-layer embeddings: 3.00 GB in pinned host memory")
    assert says_so == bool(on_host)


def test_other_models_have_nothing_to_move(monkeypatch: pytest.MonkeyPatch) -> None:
    set_room(monkeypatch, 6 * GB)
    plain = replace(PLAN, table=0)
    assert place_table(plain) == plain


def test_what_fits_nowhere_is_refused_with_every_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the device even without the table; on the host, where pinning three takes four."""
    set_room(monkeypatch, 4 * GB - 1)
    words = (
        "does not fit on cpu: weights 2.00 GB, cache 1.00 GB (8192 positions, bf16), scratch 1.00 GB need 4.00 GB, "
        "4.00 GB available; per-layer embeddings: 3.00 GB in pinned host memory; shorter"
    )
    with pytest.raises(CapacityError, match=f"^{re.escape(words)}$"):
        check_memory(place_table(PLAN), Silent(), "shorter")
    set_room(monkeypatch, 5 * GB, host=pinned_bytes(3 * GB) - 1)
    words = (
        "does not fit on cpu as a whole, nor beside it: per-layer embeddings: 3.00 GB in pinned host memory, "
        "which takes 4.29 GB, 4.29 GB available there; shorter"
    )
    with pytest.raises(CapacityError, match=f"^{re.escape(words)}$"):
        check_memory(place_table(PLAN), Silent(), "shorter")
    set_room(monkeypatch, 5 * GB, host=pinned_bytes(3 * GB))
    check_memory(place_table(PLAN), Silent(), "shorter")


def test_pinned_memory_comes_in_powers_of_two() -> None:
    assert [pinned_bytes(n) for n in (0, 1, 4096, 4097, 3 * GB)] == [0, 1, 4096, 8192, 1 << 32]


def e_step() -> Step:
    return step_of(checkpoint_of("gemma4-e", E_MODEL, "Q4_K_M", "cpu"))


def test_only_the_table_is_taken_from_the_host_and_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the device is a card; torch is asked for memory here and gives the CPU's."""
    weights = PackedWeights(fuse_one_row(e_step()), torch.device("cuda"))
    asked: list[tuple[int, str, bool]] = []
    empty = torch.empty

    def take(n: int, *, dtype: torch.dtype, pin_memory: bool) -> Tensor:
        asked.append((n, "host", pin_memory))
        return empty(n, dtype=dtype)

    def take_like(like: Tensor, *, device: torch.device) -> Tensor:
        asked.append((like.numel(), device.type, False))
        return empty(like.numel(), dtype=like.dtype)

    monkeypatch.setattr(packed_module.torch, "empty", take)
    monkeypatch.setattr(packed_module.torch, "empty_like", take_like)
    monkeypatch.setattr(weights, "_others", [])
    weights.keep_table_on_host()
    weights.allocate()
    assert [request for request in asked if request[1] == "host"] == [(weights.table_bytes(), "host", True)]
    assert {place for _, place, _ in asked if place != "host"} == {"cuda"}
    assert len(asked) == len(weights._groups)


def test_memory_that_the_system_does_not_pin_is_refused_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = PackedWeights(fuse_one_row(e_step()), torch.device("cpu"))

    def refuse(*_: object, **__: object) -> Tensor:
        raise RuntimeError("CUDA error: out of memory")

    weights.keep_table_on_host()
    monkeypatch.setattr(packed_module.torch, "empty", refuse)
    n_bytes = weights.table_bytes()
    with pytest.raises(CapacityError, match=rf"{n_bytes} bytes cannot be pinned: CUDA error: out of memory"):
        weights.allocate()


def test_an_executor_without_room_for_it_runs_as_one_with_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows by the graph and prompts by the kernels of many rows; the bytes of the table are no longer the device's."""
    twins = TwinDevice()
    twins.install(monkeypatch)
    plan, ids = CachePlan(128, 64), [(5 + 7 * i) % 270 for i in range(60)]
    usual = DeviceExecutor(e_step(), plan, device="cpu")
    twins.know(usual)
    table = usual.weights.table_bytes()
    assert (usual.memory_plan.table, usual.memory_plan.on_host) == (table, 0)
    set_room(monkeypatch, usual.memory_plan.needed - 1)
    notes = Notes()
    moved = DeviceExecutor(e_step(), plan, device="cpu", progress=notes)
    twins.know(moved)
    assert moved.memory_plan == replace(usual.memory_plan, weights=usual.memory_plan.weights - table, table=0,
                                        on_host=table)  # fmt: skip
    assert "in pinned host memory" in notes.said[0]
    for chunk in (1, 60):
        assert torch.equal(rows_of(moved, ids, chunk), rows_of(usual, ids, chunk))
    packed = zip(moved.weights._packed.values(), usual.weights._packed.values(), strict=True)
    assert all(torch.equal(*pair) for pair in packed)
