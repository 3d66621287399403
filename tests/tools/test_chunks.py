"""How many rows a step may have: one rule, asked when it is known who computes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bytefloor.engine import loading
from bytefloor.engine.cache import CachePlan, Room, SequenceCache, make_pools
from bytefloor.engine.loading import EngineOptions, make_executor, open_engine
from bytefloor.errors import RequestError, UnsupportedError
from bytefloor.files.checkpoint import open_checkpoint
from bytefloor.model.families import Model, load_model
from bytefloor.model.step import CacheKind
from tiny import build_tiny

SLIDING = CacheKind("sliding", 1, 64, 1024, "bf16")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny("qwen3", tmp_path_factory.mktemp("chunks")).directory


@pytest.fixture(scope="module")
def model(directory: Path) -> Model:
    return load_model(open_checkpoint(directory))


def test_a_room_leaves_the_chunk_open_or_not() -> None:
    assert Room(8192).plan(2048) == CachePlan(8192, 2048)
    assert Room(8192, n_sequences=3).plan(512) == CachePlan(8192, 512, 3)
    assert Room(8192, 1).plan(2048) == CachePlan(8192, 1)
    assert Room(8192, 4000).plan(512) == CachePlan(8192, 4000)
    # More rows than a sequence has positions are never there.
    assert Room(300).plan(2048) == CachePlan(300, 300)
    for chunk in (0, -1):
        with pytest.raises(RequestError, match=f"chunks of {chunk} rows: expected at least 1"):
            Room(300, chunk).plan(2048)


def test_the_reference_executor_takes_its_own(model: Model) -> None:
    def chunk_of(room: Room) -> int:
        return make_executor(model, room, torch.device("cpu"))[0].plan.chunk

    assert chunk_of(Room(2048)) == loading.REFERENCE_CHUNK == 512
    assert chunk_of(Room(100)) == 100
    assert chunk_of(Room(2048, 700)) == 700


@pytest.mark.parametrize(("asked", "expected"), [(None, 2048), (37, 37)])
def test_kernels_take_their_own(
    model: Model, monkeypatch: pytest.MonkeyPatch, asked: int | None, expected: int
) -> None:
    monkeypatch.setattr(loading, "DeviceExecutor", lambda step, plan, **more: SimpleNamespace(plan=plan))
    executor, _ = make_executor(model, Room(4096, asked), torch.device("cuda"))
    assert executor.plan == CachePlan(4096, expected)


def test_who_stands_in_for_the_kernels_plans_anew(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    plans = []

    def refuse(step: object, plan: CachePlan, **more: object) -> None:
        plans.append(plan)
        raise UnsupportedError("no kernel")

    monkeypatch.setattr(loading, "DeviceExecutor", refuse)
    monkeypatch.setattr(loading, "ReferenceExecutor", lambda step, plan, **more: SimpleNamespace(plan=plan))
    executor, notices = make_executor(model, Room(4096), torch.device("cuda"))
    assert (plans, executor.plan) == ([CachePlan(4096, 2048)], CachePlan(4096, 512))
    assert "no kernel; running the reference executor" in notices[0]


def test_an_engine_reads_prompts_in_the_chunk_that_was_asked_for(directory: Path) -> None:
    engine = open_engine(directory, EngineOptions(context=200, device="cpu", chunk=3)).engine
    assert engine.executor.plan.chunk == 3
    assert open_engine(directory, EngineOptions(context=200, device="cpu")).engine.executor.plan.chunk == 200
    with pytest.raises(RequestError, match="chunks of 0 rows"):
        open_engine(directory, EngineOptions(device="cpu", chunk=0))


@pytest.mark.parametrize("chunk", [1, 512, 2048])
def test_prefixes_hold_windows_and_no_chunks(chunk: int) -> None:
    """A long chunk is paid for once, not once more for each sequence and for each prefix that is kept."""
    plan = CachePlan(32768, chunk, n_sequences=2)
    window_pages = 1023 // 64 + 2
    # A window each on any page border, and one chunk that all share; or a table each, where that is less.
    live = min(2 * plan.n_table(SLIDING), 2 * (window_pages + 1) + -(-chunk // 64))
    assert plan.n_pages(SLIDING) == live + 4 * window_pages + 1
    # As many prefixes as there may be, at the worst alignment, beside sequences that write whole chunks.
    pools = make_pools(plan, [SLIDING])
    prefixes = []
    for _ in range(plan.n_snapshots):
        cache = SequenceCache(plan, [SLIDING], pools)
        for n_rows in [chunk] * (4097 // chunk) + [4097 % chunk]:
            cache.reserve(n_rows)
            cache.commit(n_rows)
        prefixes.append(cache)
    assert pools["sliding"].n_free >= live
    for _ in range(plan.n_sequences):
        cache = SequenceCache(plan, [SLIDING], pools)
        for _ in range(3):
            cache.reserve(chunk)
            cache.commit(chunk)
