"""bench on a device of kernel twins: its rows, its bytes, and that it fails when a kernel is wrong."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import kernel_twins
from bytefloor.cli import app
from bytefloor.engine import loading
from bytefloor.engine.device import DeviceExecutor
from bytefloor.engine.synthetic import SHAPES, Shape
from bytefloor.errors import NumericalError, RequestError
from bytefloor.tools import bench as bench_module
from bytefloor.tools.bench import BenchOptions, bench, print_rows
from tiny import build_tiny

OPTIONS = BenchOptions(n_prompt=(30,), n_gen=6, depths=(0, 40), repeats=2)
TINY = Shape("llama", 256, 512, 2, 8, 2, 64, 272, 256, False, {"rope.freq_base": 1e4})


@pytest.fixture
def twins(monkeypatch: pytest.MonkeyPatch) -> kernel_twins.TwinDevice:
    """A CPU that the executor takes for a device with kernels."""
    device = kernel_twins.TwinDevice()
    device.install(monkeypatch)
    monkeypatch.setitem(SHAPES, "tiny", TINY)

    def make(model, plan, where, **more):
        step = loading.build_step(model.config, model.weights, loading.DEVICE_ROUNDING)
        executor = DeviceExecutor(step, plan, device="cpu")
        device.know(executor)
        return executor, ()

    monkeypatch.setattr(bench_module, "make_executor", make)
    monkeypatch.setattr(DeviceExecutor, "host_us", lambda self: 1.0)
    monkeypatch.setattr(bench_module, "measure_stream_gb_s", lambda device: 10.0)
    return device


def test_rows_say_what_was_measured(twins: kernel_twins.TwinDevice, capsys: pytest.CaptureFixture) -> None:
    rows = list(bench("synthetic:tiny/Q4_K_M", OPTIONS))
    assert [(row.verb, row.depth, row.n_prompt) for row in rows] == [
        ("decode", 0, 0),
        ("decode", 40, 0),
        ("prompt", 0, 30),
    ]
    first, deeper = rows[0], rows[1]
    # Two layers, 2 KV heads of 64, keys and values in bf16: 1,024 bytes a position.
    assert deeper.file_bytes - first.file_bytes == 40 * 1024
    assert first.share == pytest.approx(first.file_bytes * first.tok_s / 10e9, abs=1e-3)
    assert first.moved_bytes > first.file_bytes
    print_rows(rows, "md")
    assert "| tiny/Q4_K_M | Q4_K |" in capsys.readouterr().out


@pytest.mark.parametrize("factor", [0.0, 0.5, float("nan")])
def test_a_broken_kernel_fails_the_bench(
    twins: kernel_twins.TwinDevice, monkeypatch: pytest.MonkeyPatch, factor: float
) -> None:
    """S15: a wrong product is fast too, and the same wrong tokens every time."""
    right = kernel_twins.TwinKernel.product

    def wrong(self, *arguments):
        right(self, *arguments)
        if not self.n("GLU"):
            arguments[9][: arguments[9].shape[0] // 2] *= factor

    monkeypatch.setattr(kernel_twins.TwinKernel, "product", wrong)
    with pytest.raises(NumericalError, match="a kernel is wrong"):
        list(bench("synthetic:tiny/Q4_K_M", OPTIONS))


def test_lengths_that_do_not_fit_are_left_out_and_nothing_left_is_refused(twins: kernel_twins.TwinDevice) -> None:
    options = replace(OPTIONS, depths=(0, 5000), n_prompt=())
    assert [row.depth for row in bench("synthetic:tiny/Q4_K_M", options)] == [0]
    with pytest.raises(RequestError, match="nothing to measure"):
        list(bench("synthetic:tiny/Q4_K_M", replace(options, depths=(5000,))))


def test_cpu_rows_come_from_the_reference_executor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "tiny", TINY)
    monkeypatch.setattr(bench_module, "measure_stream_gb_s", lambda device: 10.0)
    rows = list(bench("synthetic:tiny/Q8_0", replace(OPTIONS, device="cpu")))
    assert len(rows) == 3
    assert all(row.tok_s > 0 and row.card == "cpu" for row in rows)
    assert torch.get_default_dtype() == torch.float32


def test_rows_measured_before_an_error_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    saved, broken = tmp_path / "rows.json", tmp_path / "nothing"
    model = str(build_tiny("qwen3", tmp_path).directory)
    arguments = [
        "bench",
        "-m",
        model,
        "-m",
        str(broken),
        "-p",
        "2",
        "-d",
        "0",
        "-n",
        "2",
        "-r",
        "1",
        "--save",
        str(saved),
    ]
    result = CliRunner().invoke(app, [*arguments, "-o", "csv"])
    assert result.exit_code == 2
    assert str(broken) in result.output
    rows = json.loads(saved.read_text())
    assert [(row["n_prompt"], row["n_gen"]) for row in rows] == [(0, 2), (2, 0)]
    assert result.stdout.count("qwen3") >= 2
