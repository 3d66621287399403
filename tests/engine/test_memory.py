"""What a model will take: computed before it is taken, shown, refused with advice that helps, and true."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bytefloor.engine import memory as memory_module
from bytefloor.engine.batch import Batch
from bytefloor.engine.cache import CachePlan, SequenceCache, make_pools
from bytefloor.engine.device import DeviceExecutor
from bytefloor.engine.device_sampler import sampler_bytes
from bytefloor.engine.loading import DEVICE_ROUNDING, EngineOptions, open_engine
from bytefloor.engine.memory import MemoryPlan, available_bytes, check_memory
from bytefloor.engine.progress import Silent
from bytefloor.engine.reference import Precision, ReferenceExecutor, refuse_not_finite
from bytefloor.engine.scratch import Rehearsal, step_bytes
from bytefloor.engine.synthetic import SHAPES, Shape, checkpoint_of
from bytefloor.errors import CapacityError, FileError
from bytefloor.model.config import Rounding
from bytefloor.model.decoder import build_step
from bytefloor.model.families import Model, load_model
from bytefloor.model.step import Step
from bytefloor.model.weights import Weight
from bytefloor.tools.bench import BenchOptions, bench
from kernel_twins import TwinDevice, TwinKernel
from live_bytes import LiveBytes
from tiny import build_tiny

CPU = torch.device("cpu")
PLAN = MemoryPlan(CPU, 7_520_000_000, 1_230_000_000, 610_000_000, 8192, "int8")
LLAMA = Shape("llama", 256, 512, 2, 8, 2, 64, 4096, 4096, False, {"rope.freq_base": 1e4})
GEMMA = Shape(
    "gemma4", 256, 512, 4, 4, 2, 64, 1024, 4096, True,
    {"attention.sliding_window": 200, "final_logit_softcapping": 30.0}, 2, 1, 128,
)  # fmt: skip
GEMMA_E = Shape(
    "gemma4", 256, 512, 4, 4, 2, 64, 1024, 4096, True,
    {"attention.sliding_window": 200, "final_logit_softcapping": 30.0}, 2, 2, 128, True, 2, 128,
)  # fmt: skip
MODELS = {"llama": LLAMA, "gemma4": GEMMA}
PROMPT_MODELS = {**MODELS, "gemma4-e": GEMMA_E}


class Notes(Silent):
    def __init__(self) -> None:
        self.said: list[str] = []

    def note(self, line: str) -> None:
        self.said.append(line)


def model_of(name: str) -> Model:
    return load_model(checkpoint_of(name, PROMPT_MODELS[name], "Q4_K_M", "cpu"))


# --- the plan


def test_the_plan_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_module, "available_bytes", lambda device: 150_100_000_000)
    notes = Notes()
    check_memory(PLAN, notes, "")
    assert notes.said == ["weights 7.52 GB, cache 1.23 GB (8192 positions, int8), scratch 0.61 GB: 9.36 of 150.10 GB"]


def test_what_does_not_fit_is_refused_with_every_number_and_only_then(monkeypatch: pytest.MonkeyPatch) -> None:
    notes = Notes()
    monkeypatch.setattr(memory_module, "available_bytes", lambda device: PLAN.needed - 1)
    with pytest.raises(CapacityError) as caught:
        check_memory(PLAN, notes, "less needs less")
    assert str(caught.value) == (
        "does not fit on cpu: weights 7.52 GB, cache 1.23 GB (8192 positions, int8), scratch 0.61 GB need 9.36 GB, "
        "9.36 GB available; less needs less"
    )
    assert notes.said == []
    monkeypatch.setattr(memory_module, "available_bytes", lambda device: PLAN.needed)
    check_memory(PLAN, notes, "less needs less")


def test_advice_names_what_helps_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing is allocated before: the reference executor has no weights to narrow twice, bench has other flags."""
    monkeypatch.setattr(memory_module, "available_bytes", lambda device: 1_000_000)
    directory = build_tiny("qwen3", tmp_path).directory
    for weights, words in (("float32", r"\(-c\) or --weights bf16 needs less"), ("bf16", r"context \(-c\) needs less")):
        with pytest.raises(CapacityError, match=rf"0\.00 GB available; a shorter .*{words}$"):
            open_engine(directory, EngineOptions(device="cpu", weights=weights))
    options = BenchOptions((5,), 4, (0,), 1, "cpu")
    for capacity, words in ((None, "smaller -d or -p need less"), (64, r"a shorter context \(-c\) needs less")):
        with pytest.raises(CapacityError, match=rf"available; {words}$"):
            list(bench(str(directory), replace(options, capacity=capacity)))


@pytest.fixture
def twins(monkeypatch: pytest.MonkeyPatch) -> TwinDevice:
    device = TwinDevice()
    device.install(monkeypatch)
    return device


def test_the_device_executor_refuses_before_it_allocates_or_compiles(
    twins: TwinDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a model of 12B: there is no room here for its weights, let alone its cache at this length."""
    monkeypatch.setattr(memory_module, "available_bytes", lambda device: 1_000_000_000)
    monkeypatch.setattr("bytefloor.engine.device.load_kernels", None)
    model = load_model(checkpoint_of("gemma4-12b", SHAPES["gemma4-12b"], "Q4_K_M", "cpu"))
    step = build_step(model.config, model.weights, DEVICE_ROUNDING)
    with LiveBytes() as live, pytest.raises(CapacityError, match=r"weights 7\.5\d GB, cache .*; shorter$"):
        DeviceExecutor(step, CachePlan(131072, 512), device="cpu", advice="shorter")
    assert live.most < 1_000_000


def test_kernels_are_loaded_once_and_before_the_weights(twins: TwinDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that does not compile ends the start before a weight is read, the broken one here among them."""
    told: list[tuple[str, int, int]] = []
    calls = []

    def load(specs, architecture, progress):
        calls.append(len(set(specs)))
        progress(1, 2)
        return twins.load_kernels(specs, architecture)

    monkeypatch.setattr("bytefloor.engine.device.load_kernels", load)
    progress = Silent()
    monkeypatch.setattr(progress, "advance", lambda *step: told.append(step))
    model = model_of("gemma4")
    step = build_step(model.config, model.weights, DEVICE_ROUNDING)
    executor = DeviceExecutor(step, CachePlan(64, 32), device="cpu", progress=progress)
    assert len(calls) == 1
    assert calls[0] > len({launch.kernel for launch in executor.launches})
    assert told[0] == ("compiling kernels", 1, 2)
    assert {stage for stage, _, _ in told[1:]} == {"loading"}

    def fail(specs, architecture, progress):
        raise RuntimeError("no such instruction")

    def read():
        raise FileError("a weight was read")

    monkeypatch.setattr("bytefloor.engine.device.load_kernels", fail)
    tensors = {name: replace(tensor, read=read) for name, tensor in model.checkpoint.tensors.items()}
    kept = {name: model.checkpoint.tensors[name] for name in ("rope_freqs.weight",)}
    unread = load_model(replace(model.checkpoint, tensors=tensors | kept))
    with pytest.raises(RuntimeError, match="no such instruction"):
        DeviceExecutor(build_step(unread.config, unread.weights, DEVICE_ROUNDING), CachePlan(64, 32), device="cpu")


# --- and what is really taken


def run_to_the_end(
    executor: DeviceExecutor | ReferenceExecutor, n: int, chunk: int, wants: bool = True, sums: bool = False
) -> None:
    """Chunks up to the end of the cache, the last of them whole. wants: logits of the last row of each. sums: of what
    the head gets, in place of logits."""
    cache = SequenceCache(executor.plan, executor.step.kinds, make_pools(executor.plan, executor.step.kinds))
    for start in range(0, n, chunk):
        batch = Batch()
        rows = list(range(5, 5 + min(chunk, n - start)))
        cache.append_rows(batch, rows, [len(rows) - 1] if wants else [])
        executor.sum_hidden(batch) if sums else executor.run(batch)
        cache.commit(len(rows))


def planned_scratch(step: Step, plan: CachePlan) -> tuple[int, int, int]:
    """What the executor says: weights, cache, scratch."""
    notes, plans = Notes(), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bytefloor.engine.device.check_memory", lambda memory, progress, advice: plans.append(memory))
        DeviceExecutor(step, plan, device="cpu", progress=notes)
    return plans[0].weights, plans[0].cache, plans[0].scratch


@pytest.mark.parametrize("name", list(PROMPT_MODELS))
@pytest.mark.parametrize(("n", "chunk", "n_sequences"), [(512, 64, 1), (256, 256, 1), (2048, 32, 1), (128, 64, 40)])
def test_a_prompt_on_the_device_takes_what_was_planned(
    twins: TwinDevice, monkeypatch: pytest.MonkeyPatch, name: str, n: int, chunk: int, n_sequences: int
) -> None:
    """Beside its buffers, which the next test counts. No more than planned with and without wanted rows and where what
    the head gets is summed, and no less than half of it with whichever is largest: the head of a row, per-layer
    inputs, or rows unpacked for their sum.

    Where each of many sequences may want a row, all of them do.
    """
    model = model_of(name)
    step, plan = build_step(model.config, model.weights, DEVICE_ROUNDING), CachePlan(n, chunk, n_sequences)
    executor = DeviceExecutor(step, plan, device="cpu")
    # A twin computes in memory of its own; a kernel has none but its buffers.
    monkeypatch.setattr(TwinKernel, "launch", lambda self, stream, grid, arguments: None)
    planned, most = executor._prompts._planner.running_bytes(), []
    for wants, sums in ((False, False), (True, False), (False, True)):
        with LiveBytes() as live:
            if n_sequences == 1 or sums:
                run_to_the_end(executor, n, chunk, wants, sums)
            else:
                run_rows_of_all(executor, n_sequences, wants)
        most.append(live.most)
    assert planned / 2 < max(most) <= planned


def run_rows_of_all(executor: DeviceExecutor, n_sequences: int, wants: bool) -> None:
    """A chunk with a row of each sequence."""
    pools, batch = make_pools(executor.plan, executor.step.kinds), Batch()
    for token in range(n_sequences):
        cache = SequenceCache(executor.plan, executor.step.kinds, pools)
        cache.append_rows(batch, [token], [0] if wants else [])
    executor.run(batch)


@pytest.mark.parametrize("name", list(PROMPT_MODELS))
def test_all_that_the_device_executor_keeps_was_planned(twins: TwinDevice, name: str) -> None:
    model = model_of(name)
    step, plan = build_step(model.config, model.weights, DEVICE_ROUNDING), CachePlan(1024, 64)
    weights, cache, scratch = planned_scratch(step, plan)
    model = model_of(name)  # another, whose vectors nobody has read
    step = build_step(model.config, model.weights, DEVICE_ROUNDING)
    with LiveBytes() as live:
        executor = DeviceExecutor(step, plan, device="cpu")
    rows = executor._prompts._planner
    running = rows.running_bytes() + sampler_bytes(step.logits.shape[-1], plan.capacity)
    beside = scratch - max(running, executor.weights.packing_bytes())
    assert cache == sum(pool.nbytes for pool in executor.pools.values())
    assert weights == executor.weights.n_bytes()
    buffers = sum(room.nbytes for room in rows._rooms.values())
    assert buffers > 0
    assert beside > buffers + sum(buffer.nbytes for buffer in executor._written)
    kept = weights + cache + beside
    assert live.now == pytest.approx(kept, rel=1e-3)


@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.parametrize(("n", "chunk"), [(512, 64), (256, 256), (2048, 32), (64, 32)])
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
def test_a_prompt_of_the_reference_executor_takes_what_was_planned(
    name: str, n: int, chunk: int, weights: torch.dtype
) -> None:
    model = model_of(name)
    step, plan = build_step(model.config, model.weights, Rounding()), CachePlan(n, chunk)
    executor = ReferenceExecutor(step, plan, precision=Precision(weights=weights))
    planned = step_bytes(step, plan, 4)
    with LiveBytes() as live:
        run_to_the_end(executor, n, chunk)
    assert planned / 2 < live.most <= planned
    assert executor.scratch_bytes() >= planned


@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.parametrize(("n", "chunk"), [(512, 64), (256, 256), (2048, 32)])
def test_a_prompt_with_coded_pages_takes_what_was_planned(name: str, n: int, chunk: int) -> None:
    model = model_of(name)
    step, plan = build_step(model.config, model.weights, Rounding(cache="k4v2")), CachePlan(n, chunk)
    executor, planned = ReferenceExecutor(step, plan), step_bytes(step, plan, 4)
    with LiveBytes() as live:
        run_to_the_end(executor, n, chunk)
    assert planned / 2 < live.most <= planned


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
def test_loading_the_reference_executor_takes_what_was_planned(weights: torch.dtype, tmp_path: Path) -> None:
    """bf16 has one tensor in float32 beside those it keeps; float32 keeps what it decodes."""
    model = model_of("llama")
    step, plan = build_step(model.config, model.weights, Rounding()), CachePlan(32, 8)
    notes = Notes()
    with LiveBytes() as live:
        executor = ReferenceExecutor(step, plan, precision=Precision(weights=weights), progress=notes)
    needed = executor.weight_bytes() + executor.cache_bytes() + executor.scratch_bytes()
    largest = max(tensor.n_bytes for tensor in model.checkpoint.tensors.values())  # made while it is read, here
    assert live.most <= needed + 2 * largest
    assert executor.scratch_bytes() > 0
    if weights == torch.bfloat16:
        assert executor.scratch_bytes() >= 4 * 4096 * 256
    assert notes.said[0].startswith("weights ")


def test_a_rehearsal_counts_and_takes_nothing() -> None:
    with Rehearsal() as rehearsal:
        made = torch.zeros(1000, dtype=torch.int16, device="cpu")
        table = torch.tensor([1.0, 2.0], dtype=torch.float64, device=CPU)
        views = made[10:], table + 1
    assert rehearsal.n_bytes == 2016
    assert all(tensor.device.type == "meta" for tensor in (made, table, *views))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_looking_for_values_that_are_not_finite_takes_no_memory(value: float) -> None:
    (stored,) = (tensor for name, tensor in model_of("llama").checkpoint.tensors.items() if name == "output.weight")
    values = torch.full((300, 400), 3e38)
    with LiveBytes() as live:
        refuse_not_finite(Weight("head", stored), values)
    assert live.most < 1000
    values[170, 333] = value
    with pytest.raises(FileError, match=r"tensor output\.weight holds values that are not finite"):
        refuse_not_finite(Weight("head", stored), values)


# --- what there is


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"memory.max": "1000\n", "memory.current": "900\n", "memory.stat": "anon 300\ninactive_file 550\n"}, 650),
        ({"memory.max": "1000\n", "memory.current": "900\n"}, 100),
        ({"memory.max": "1000\n", "memory.current": "900\n", "memory.stat": "active_file 550\n"}, 100),
        ({"memory.max": "max\n", "memory.current": "900\n", "memory.stat": "inactive_file 550\n"}, 7000),
        ({"memory.max": "9000\n", "memory.current": "900\n", "memory.stat": "inactive_file 550\n"}, 7000),
        ({}, 7000),
    ],
)
def test_a_container_has_its_limit_less_what_cannot_give_way(
    files: dict[str, str], expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page cache of a file that was just read counts as used there, and is free all the same."""
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(memory_module, "CGROUP", tmp_path)
    monkeypatch.setattr(memory_module.psutil, "virtual_memory", lambda: SimpleNamespace(available=7000))
    assert available_bytes(CPU) == expected
