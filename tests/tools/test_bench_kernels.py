"""bench kernels on a device of kernel twins: which launches it times, over what, and what it says of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import kernel_twins
from bytefloor.cli import app
from bytefloor.engine.device import DeviceExecutor
from bytefloor.engine.planner import Launch
from bytefloor.engine.stream_limit import StreamLimit
from bytefloor.engine.synthetic import SHAPES, Shape
from bytefloor.errors import RequestError, UnsupportedError
from bytefloor.formats import get
from bytefloor.tools import bench_kernels as module
from bytefloor.tools.bench_kernels import FORMATS, KernelOptions, bench_kernels, make_cases

PLAIN = Shape("llama", 256, 512, 2, 8, 2, 64, 2048, 4096, False, {"rope.freq_base": 1e4})
MIXED = Shape(
    "gemma4", 256, 512, 6, 4, 2, 64, 2048, 4096, True,
    {"attention.sliding_window": 40, "final_logit_softcapping": 30.0}, 6, 1, 128,
)  # fmt: skip
ROTATED = 600_000


@pytest.fixture
def twins(monkeypatch: pytest.MonkeyPatch) -> kernel_twins.TwinDevice:
    """A CPU taken for a card, and models small enough for it."""
    device = kernel_twins.TwinDevice()
    device.install(monkeypatch)

    def make(step, plan, *, device: torch.device) -> DeviceExecutor:
        executor = DeviceExecutor(step, plan, device=device)
        twin_device.know(executor)
        executor.poison()
        return executor

    twin_device = device
    monkeypatch.setattr(module, "DeviceExecutor", make)
    monkeypatch.setattr(module, "load_kernels", device.load_kernels)
    monkeypatch.setattr(module, "choose_card", lambda: torch.device("cpu"))
    monkeypatch.setattr(module, "measure_limit", lambda device: StreamLimit(10.0))
    monkeypatch.setitem(SHAPES, "plain", PLAIN)
    monkeypatch.setitem(SHAPES, "mixed", MIXED)
    monkeypatch.setattr(module, "MODELS", ("plain", "mixed"))
    monkeypatch.setattr(module, "SIZES_MB", (1,))
    monkeypatch.setattr(module, "ROTATED_BYTES", ROTATED)
    monkeypatch.setattr(module, "MOST_COPIES", 17)
    return device


@pytest.fixture
def timed(twins: kernel_twins.TwinDevice, monkeypatch: pytest.MonkeyPatch) -> list[list[Launch]]:
    """The launches of each row in turn; a launch takes 100, 150 or 120 us."""
    groups: list[list[Launch]] = []

    def time_launches(launches: Sequence[Launch], *rest: object) -> list[float]:
        groups.append(list(launches))
        return [100.0, 150.0, 120.0]

    monkeypatch.setattr(module, "time_launches", time_launches)
    return groups


def test_every_product_of_the_models_has_a_row(timed: list[list[Launch]]) -> None:
    rows = list(bench_kernels(KernelOptions(("Q4_K", "Q8_0"))))
    q4 = [(row.shape, row.n, row.k) for row in rows if row.format != "Q8_0"]
    assert q4 == [
        ("plain.qkv", 768, 256),
        ("plain.o", 256, 512),
        ("plain.gate_up", 1024, 256),
        ("plain.down", 256, 512),
        ("plain.head", 2048, 256),
        ("mixed.qkv.sliding", 512, 256),
        ("mixed.o.sliding", 256, 256),
        ("mixed.gate_up", 1024, 256),
        ("mixed.down", 256, 512),
        ("mixed.qkv.global", 640, 256),
        ("mixed.o.global", 256, 512),
        ("mixed.head", 2048, 256),
        ("1MB", 432, 4096),
    ]
    assert len(rows) == len(timed) == 2 * 13
    qkv = rows[0]
    assert qkv.file_bytes == 768 * 144
    assert qkv.moved_bytes == 48 * (2048 + 128 + 128 + 64)
    assert (qkv.us, qkv.us_spread) == (120.0, round(50 / 120, 4))
    assert qkv.gb_s == pytest.approx(768 * 144 / 120e-6 / 1e9, abs=0.05)
    assert qkv.share == pytest.approx(768 * 144 / 120e-6 / 10e9, abs=1e-4)
    assert qkv.stream_gb_s == 10.0


def test_launches_are_one_kernel_over_weights_that_differ(timed: list[list[Launch]]) -> None:
    rows = list(bench_kernels(KernelOptions(("Q4_K",))))
    for row, launches in zip(rows, timed, strict=True):
        assert {launch.kernel.name for launch in launches} == {"product"}
        assert len({launch.kernel for launch in launches}) == 1
        streamed = [max(tensors(launch), key=lambda tensor: tensor.nbytes) for launch in launches]
        assert len({tensor.data_ptr() for tensor in streamed}) == len(launches) == row.n_copies >= 2
        assert row.n_copies * row.file_bytes >= ROTATED
        packed = [tensor.nbytes for tensor in tensors(launches[0]) if tensor.dtype == torch.uint8]
        assert sum(packed) == row.moved_bytes
    by_shape = {row.shape: launches for row, launches in zip(rows, timed, strict=True)}
    constants = dict(by_shape["plain.qkv"][0].kernel.defines)
    assert constants["NORM"] == "1"
    assert int(constants["DELTA_PLANES"]) > 0


def tensors(launch: Launch) -> list[torch.Tensor]:
    return [argument for argument in launch.arguments if isinstance(argument, torch.Tensor)]


def test_launches_find_the_values_of_the_last_step(
    twins: kernel_twins.TwinDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel waits until what it reads carries its step's number: the device's count must be that of the token."""
    numbers: list[int] = []

    def time_launches(launches: Sequence[Launch], *rest: object) -> list[float]:
        states = [argument for launch in launches for argument in tensors(launch) if argument.shape == (4,)]
        numbers.extend(int(state[2]) for state in states)
        return [1.0]

    monkeypatch.setattr(module, "time_launches", time_launches)
    next(bench_kernels(KernelOptions(("Q4_K",), ("plain.down",))))
    assert set(numbers) == {1}


def test_a_time_is_the_graphs_over_its_launches(
    twins: kernel_twins.TwinDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs: list[int] = []

    def timed_us(device: torch.device, replay) -> float:
        graphs.append(len(replay.__self__.launches))
        replay()
        return 1000.0 * (1 + len(graphs))

    monkeypatch.setattr(module, "timed_us", timed_us)
    row = next(bench_kernels(KernelOptions(("Q8_0",), ("plain.down",), repeats=3)))
    assert row.n_copies > 2
    n_launches = graphs[0]
    assert n_launches >= module.LEAST_LAUNCHES
    assert n_launches % row.n_copies == 0
    assert graphs == [n_launches] * 3
    assert row.us == pytest.approx(3000 / n_launches, abs=1e-3)


def test_rows_are_of_what_was_asked_for(timed: list[list[Launch]]) -> None:
    def shapes(*words: str) -> list[str]:
        return [row.shape for row in bench_kernels(KernelOptions(("Q6_K",), words))]

    assert shapes("plain.down", "1MB") == ["plain.down", "1MB"]
    assert shapes("head") == ["plain.head", "mixed.head"]
    assert shapes("qkv.global", "o") == ["plain.o", "mixed.o.sliding", "mixed.qkv.global", "mixed.o.global"]
    with pytest.raises(RequestError, match=r"-s plai: no such shape; there are 1MB, mixed\.down, .*"):
        shapes("1MB", "plai")
    with pytest.raises(RequestError, match="-f Q4_K_M: expected Q4_K, Q5_K"):
        list(bench_kernels(KernelOptions(("Q4_K_M",))))


@pytest.mark.parametrize("kind", FORMATS)
def test_sizes_are_what_they_are_called(kind: str) -> None:
    sizes = {case.name: case for case in make_cases() if case.size_mb is not None}
    assert list(sizes) == ["30MB", "75MB", "500MB"]
    for name, case in sizes.items():
        shape = case.shape_for(kind)
        n_bytes = shape.vocabulary * shape.width * get(kind).bits_per_weight / 8
        assert shape.width == 4096
        assert shape.vocabulary % 16 == 0
        assert n_bytes / 1e6 == pytest.approx(float(name.removesuffix("MB")), rel=0.005)


def test_the_command_shows_rows(twins: kernel_twins.TwinDevice, tmp_path: Path) -> None:
    saved = tmp_path / "kernels.json"
    result = CliRunner().invoke(
        app, ["bench", "kernels", "-f", "Q4_0, BF16", "-s", "plain.o", "-r", "2", "--save", str(saved)]
    )
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].startswith("| shape | n | k |")
    assert [line.split("|")[1].strip() for line in lines[2:]] == ["plain.o", "plain.o"]
    share, issued = lines[2].rstrip(" |").split("|")[-2:]
    assert share.strip().endswith("%")
    assert 0 < float(issued) < 0.2
    assert [row["format"] for row in json.loads(saved.read_text())] == ["Q4_0", "BF16"]


def test_without_a_card_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UnsupportedError, match="bench kernels needs a CUDA device"):
        list(bench_kernels(KernelOptions()))
