"""Prompt rows of bench: what is run, what is counted, and which launches are called attention's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

import kernel_twins
from bytefloor.engine import loading
from bytefloor.engine.batch import Batch
from bytefloor.engine.cache import CachePlan
from bytefloor.engine.device import DeviceExecutor
from bytefloor.engine.reference import ReferenceExecutor
from bytefloor.engine.stream_limit import StreamLimit
from bytefloor.engine.synthetic import SHAPES, Shape
from bytefloor.engine.tensor_peak import measure_tensor_peak, tflops
from bytefloor.model.config import Rounding
from bytefloor.model.decoder import build_step
from bytefloor.model.step import Step
from bytefloor.tools import bench as bench_module
from bytefloor.tools import bench_prompt as module
from bytefloor.tools.bench import BenchOptions, bench, open_model
from bytefloor.tools.bench_prompt import attention_launches, measure_prompt, prompt_flops, visible_positions
from bytefloor.tools.bench_rows import Row

PLAIN = Shape("llama", 256, 512, 2, 8, 2, 64, 272, 256, False, {"rope.freq_base": 1e4})
MIXED = Shape(
    "gemma4", 256, 512, 6, 4, 2, 64, 272, 4096, True,
    {"attention.sliding_window": 40, "final_logit_softcapping": 30.0}, 6, 1, 128,
)  # fmt: skip
CPU = torch.device("cpu")
PEAK = 0.5


@pytest.fixture(autouse=True)
def shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "plain", PLAIN)
    monkeypatch.setitem(SHAPES, "mixed", MIXED)
    monkeypatch.setattr(bench_module, "measure_limit", lambda device: StreamLimit(10.0))


def step_of(name: str, rounding: Rounding | None = None) -> Step:
    model = open_model(f"synthetic:{name}/Q8_0", CPU)
    return build_step(model.config, model.weights, rounding or Rounding())


@pytest.mark.parametrize("window", [None, 1, 7, 20, 21])
@pytest.mark.parametrize("n", [1, 6, 7, 8, 20])
def test_positions_that_rows_see_are_counted_one_by_one(n: int, window: int | None) -> None:
    seen = sum(1 for row in range(n) for at in range(row + 1) if window is None or at > row - window)
    assert visible_positions(n, window) == seen


@pytest.mark.parametrize("n", [1, 40, 100])
def test_arithmetic_of_a_prompt(n: int) -> None:
    """The plain model by hand; the other has a window of 40 in five of its six layers."""
    layer = 256 * (8 + 2 + 2) * 64 + 512 * 256 + 2 * 256 * 512 + 512 * 256
    pairs = n * (n + 1) // 2
    products = 2 * (2 * layer * n + 256 * 272)
    assert prompt_flops(step_of("plain"), n) == products + 2 * 4 * 8 * 64 * pairs
    in_window = sum(min(row + 1, 40) for row in range(n))
    sliding = 256 * (4 + 2 + 2) * 64 + 256 * 256
    whole = 256 * (4 + 1) * 128 + 512 * 256
    mlps = 6 * 3 * 256 * 512
    products = 2 * ((5 * sliding + whole + mlps) * n + 256 * 272)
    attention = 4 * (5 * 4 * 64 * in_window + 4 * 128 * pairs)
    assert prompt_flops(step_of("mixed"), n) == products + attention


def test_every_repeat_reads_the_whole_prompt_and_asks_for_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    executor, seen = ReferenceExecutor(step_of("plain"), CachePlan(64, 16)), list[Batch]()
    run = executor.run

    def watched(batch: Batch) -> torch.Tensor:
        seen.append(batch)
        return run(batch)

    monkeypatch.setattr(executor, "run", watched)
    speed = measure_prompt(executor, 40, 3, None)
    assert len(speed.rates) == 3
    assert [(batch.slots[0], len(batch.tokens), batch.wanted) for batch in seen] == 4 * [
        (0, 16, []), (16, 16, []), (32, 8, [7])
    ]  # fmt: skip
    assert len({token for batch in seen for token in batch.tokens}) == 40
    assert (speed.tflops, speed.share_of_peak, speed.attention_share) == (None, None, None)


def test_the_clock_runs_from_the_first_chunk_until_all_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second passes at each look at the clock and at each chunk; the warm-up's second is not counted."""
    executor, ticks = ReferenceExecutor(step_of("plain"), CachePlan(64, 16)), [0.0]
    run = executor.run

    def now(device: torch.device) -> float:
        ticks[0] += 1
        return ticks[0]

    def slow(batch: Batch) -> torch.Tensor:
        ticks[0] += 1
        return run(batch)

    monkeypatch.setattr(module, "now", now)
    monkeypatch.setattr(executor, "run", slow)
    assert measure_prompt(executor, 40, 2, None).rates == [10.0, 10.0]


def test_a_cpu_has_no_peak() -> None:
    assert measure_tensor_peak(CPU) is None
    assert tflops(3 * 10**12, 1e6) == 3.0
    options = BenchOptions(n_prompt=(20,), n_gen=2, depths=(), repeats=1, device="cpu")
    (row,) = bench("synthetic:plain/Q8_0", options)
    assert (row.tflops, row.peak_tflops, row.share_of_peak, row.attention_share) == (None, None, None, None)


@pytest.fixture
def twins(monkeypatch: pytest.MonkeyPatch) -> kernel_twins.TwinDevice:
    device = kernel_twins.TwinDevice()
    device.install(monkeypatch)
    monkeypatch.setattr(DeviceExecutor, "host_us", lambda self: 1.0)
    return device


def rows_on(twins: kernel_twins.TwinDevice, monkeypatch: pytest.MonkeyPatch, options: BenchOptions) -> list[Row]:
    """Of a CPU that is taken for a device with a peak."""

    def make(model, room, where, kv=None, **more):
        step = build_step(model.config, model.weights, loading.DEVICE_ROUNDING)
        executor = DeviceExecutor(step, room.plan(loading.KERNEL_CHUNK), device="cpu")
        twins.know(executor)
        return executor, ()

    monkeypatch.setattr(bench_module, "make_executor", make)
    monkeypatch.setattr(bench_module, "measure_peak", lambda device: PEAK)
    return list(bench("synthetic:plain/Q8_0", options))


def test_a_row_says_what_share_of_the_peak_it_is(
    twins: kernel_twins.TwinDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = BenchOptions(n_prompt=(30, 70), n_gen=2, depths=(0,), repeats=2)
    decode, _, *prompts = rows_on(twins, monkeypatch, options)
    assert (decode.tflops, decode.peak_tflops, decode.share_of_peak, decode.attention_share) == (None, None, None, None)
    assert decode.share is not None
    for row, n in zip(prompts, (30, 70), strict=True):
        expected = prompt_flops(step_of("plain"), n) * row.tok_s / n / 1e12
        assert (row.n_prompt, row.peak_tflops, row.share) == (n, PEAK, None)
        assert row.share_of_peak == pytest.approx(expected / PEAK, abs=1e-4)
        assert row.tflops == pytest.approx(expected, abs=0.006)
        assert row.attention_share is not None
        assert 0 < row.attention_share < 1


def test_without_prompts_no_peak_is_measured(twins: kernel_twins.TwinDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    options = BenchOptions(n_prompt=(), n_gen=2, depths=(0,), repeats=1)
    monkeypatch.setattr(bench_module, "measure_peak", lambda device: pytest.fail("nobody asked"))
    monkeypatch.setattr(bench_module, "choose_device", lambda name: CPU)
    assert len(list(bench("synthetic:plain/Q8_0", replace(options, device="cpu")))) == 2


def test_a_prompt_may_fill_the_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """256 positions: a depth needs room for its tokens beside it, a prompt does not."""
    options = BenchOptions(n_prompt=(256, 257), n_gen=4, depths=(), repeats=1, device="cpu")
    assert [(row.n_prompt, row.capacity) for row in bench("synthetic:plain/Q8_0", options)] == [(256, 256)]


def test_attention_is_timed_after_each_chunk_and_changes_nothing(
    twins: kernel_twins.TwinDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = step_of("mixed", loading.DEVICE_ROUNDING)
    executor = DeviceExecutor(step, CachePlan(256, 64), device="cpu")
    twins.know(executor)
    replayed: list[list[str]] = []

    def timed_us(device: torch.device, replay) -> float:
        before = {name: pool.clone() for name, pool in executor.pools.items()}
        replay()
        replayed.append([run.__name__ for run, _ in replay.__self__.launches])
        assert all(torch.equal(pool, before[name]) for name, pool in executor.pools.items())
        return 10.0 ** len(replayed)

    monkeypatch.setattr(module, "timed_us", timed_us)
    for pool in executor.pools.values():
        pool.zero_()
    ids: Sequence[int] = module.prompt_ids(executor, 129)  # 64, 64 and one, which decodes
    assert module.attention_us(executor, ids) == 10 + 100
    assert replayed == 2 * [6 * ["attention_rows"]]
    parts = [launch.part for launch in attention_launches(executor, 64)]
    assert parts == [f"layers.{i}.attention" for i in range(6)]
