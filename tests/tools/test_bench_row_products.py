"""bench kernels --rows on a device of kernel twins: both routes multiply the same, and are counted alike."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

import kernel_twins
from bytefloor.cli import app
from bytefloor.engine.cache import CachePlan
from bytefloor.engine.device import DeviceExecutor
from bytefloor.engine.kernels import compile_kernel, spec
from bytefloor.engine.planner import Launch
from bytefloor.engine.row_products import pad_rows
from bytefloor.engine.stream_limit import StreamLimit
from bytefloor.engine.synthetic import SHAPES, Shape
from bytefloor.errors import RequestError, UnsupportedError
from bytefloor.ops import OPS
from bytefloor.ops.row_tiles import from_row_tiles, tiles_shape
from bytefloor.tools import bench_kernels
from bytefloor.tools import bench_row_products as module
from bytefloor.tools.bench_kernels import Case, KernelOptions, make_cases, step_of
from bytefloor.tools.bench_row_products import (
    Matrices,
    bench_row_products,
    fused_launches,
    fused_starts,
    open_products,
    unpack_launches,
)

PLAIN = Shape("llama", 256, 512, 2, 8, 2, 64, 2048, 4096, False, {"rope.freq_base": 1e4})
CPU = torch.device("cpu")
PEAK = 400.0


@pytest.fixture
def twins(monkeypatch: pytest.MonkeyPatch) -> kernel_twins.TwinDevice:
    """A CPU taken for a card, and models small enough for it."""
    device = kernel_twins.TwinDevice()
    device.install(monkeypatch)
    packed = module.PackedWeights

    class Known(packed):
        """Its matrices are known to the twins once they are packed."""

        def pack(self, progress: object) -> None:
            super().pack(progress)
            device.know(SimpleNamespace(weights=self))

    monkeypatch.setattr(module, "PackedWeights", Known)
    monkeypatch.setattr(bench_kernels, "load_kernels", device.load_kernels)
    monkeypatch.setattr(module, "device_architecture", lambda device: "sm_90a")
    monkeypatch.setattr(module, "choose_card", lambda: CPU)
    monkeypatch.setattr(module, "measure_limit", lambda device: StreamLimit(10.0))
    monkeypatch.setattr(module, "measure_peak", lambda device: PEAK)
    monkeypatch.setitem(SHAPES, "plain", PLAIN)
    monkeypatch.setattr(bench_kernels, "MODELS", ("plain",))
    monkeypatch.setattr(bench_kernels, "SIZES_MB", (1,))
    monkeypatch.setattr(bench_kernels, "ROTATED_BYTES", 400_000)
    monkeypatch.setattr(bench_kernels, "MOST_COPIES", 4)
    return device


@pytest.fixture
def timed(twins: kernel_twins.TwinDevice, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(copies, least launches of a graph) of each row in turn; a product takes 100, 150 or 120 us."""
    found: list[tuple[int, int]] = []

    def time_graph(starts: Sequence[Callable[[], None]], device: object, repeats: int, n_least: int) -> list[float]:
        for start in starts:
            start()
        found.append((len(starts), n_least))
        return [100.0, 150.0, 120.0]

    monkeypatch.setattr(module, "time_graph", time_graph)
    return found


def test_each_shape_and_number_of_rows_has_both_routes(
    timed: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LEAST_OPERATIONS", 10**9)
    rows = list(bench_row_products(KernelOptions(("Q4_K",), rows=(17, 300))))
    shapes = [("qkv", 768, 256), ("o", 256, 512), ("gate_up", 1024, 256), ("down", 256, 512), ("head", 2048, 256)]
    assert [(row.shape, row.n, row.k, row.rows, row.route) for row in rows] == [
        (name, n, k, n_rows, route)
        for name, n, k in [*((f"plain.{name}", n, k) for name, n, k in shapes), ("1MB", 432, 4096)]
        for n_rows in (17, 300)
        for route in ("fused", "unpack+cublas")
    ]
    first = rows[0]
    assert (first.verb, first.us, first.us_spread) == ("kernel_rows", 120.0, round(50 / 120, 4))
    assert first.file_bytes == 768 * 144
    assert first.gb_s == pytest.approx(768 * 144 / 120e-6 / 1e9, abs=0.05)
    big = rows[2]
    assert big.tflops == pytest.approx(2 * 768 * 256 * 300 / 120e-6 / 1e12, abs=0.005)
    assert big.share_of_peak == pytest.approx(2 * 768 * 256 * 300 / 120e-6 / 1e12 / PEAK, abs=1e-4)
    # Matrices by turns, as many as no cache holds. Few rows take more launches: starting a graph must not count.
    assert [n for n, _ in timed] == [row.n_copies for row in rows]
    assert all(row.n_copies == 4 or row.n_copies * row.file_bytes >= 400_000 for row in rows)
    assert (timed[0][1], timed[2][1]) == (-(-(10**9) // (2 * 768 * 256 * 17)), -(-(10**9) // (2 * 768 * 256 * 300)))
    assert timed[0][1] <= bench_kernels.LEAST_LAUNCHES


def products_of(kind: str) -> list[tuple[str, Matrices]]:
    found = []
    for case in make_cases()[:2]:
        pairs = open_products(case, step_of(case.shape_for(kind), kind, CPU), CPU)
        found += [(timed.shape.removeprefix("plain."), own) for timed, own in pairs]
    return found


@pytest.mark.parametrize("n_rows", [17, 100])
def test_both_routes_give_the_same_products(
    twins: kernel_twins.TwinDevice, monkeypatch: pytest.MonkeyPatch, n_rows: int
) -> None:
    multiplied: list[tuple[torch.Tensor, torch.Tensor]] = []
    mm = torch.mm

    def watched(x: torch.Tensor, w: torch.Tensor, out: torch.Tensor) -> None:
        mm(x, w, out=out)
        multiplied.append((x.float(), w.float()))

    monkeypatch.setattr(module.torch, "mm", watched)
    names = []
    for name, own in products_of("Q8_0"):
        multiplied.clear()
        (start,) = module.cublas_starts([own], n_rows, CPU)
        start()
        x, w = multiplied[-1]
        dense = torch.cat([twins.matrices[each.data_ptr()][:n] for each, n in zip(own.packed, own.sizes, strict=True)])
        assert torch.equal(w.T, dense.to(torch.bfloat16).float())
        assert x.shape == (n_rows, own.k)
        (launch,) = fused_launches([own], n_rows, CPU)
        (start,) = fused_starts([own], n_rows, CPU)
        start()
        _run(twins, launch)
        pitch, n = pad_rows(n_rows), sum(own.sizes)
        found, rows = launch.arguments[7], from_row_tiles(launch.arguments[0], pitch, own.k)
        y = rows @ dense.to(torch.bfloat16).float().T
        if own.activation:
            found = from_row_tiles(found[: pitch * n // 2].view(tiles_shape(n // 2, pitch)), pitch, n // 2)
            y = OPS["glu"].reference(y[:, 0::2], y[:, 1::2], own.activation)
        else:
            found = found.view(-1, pitch, n).sum(0)
        assert float((found - y).norm() / y.norm()) < 0.01
        names.append(name)
    assert {"qkv", "o", "gate_up", "down", "head"} == set(names)


def _run(twins: kernel_twins.TwinDevice, launch: Launch) -> None:
    twins.load_kernels([launch.kernel], "sm_90a")[launch.kernel].launch(0, launch.grid, launch.arguments)


@pytest.mark.parametrize("n_rows", [32, 64, 100, 300])
def test_launches_are_those_of_a_chunk(twins: kernel_twins.TwinDevice, n_rows: int) -> None:
    """Kernel, grid and numbers of RowPlanner's own launches, but for where things lie, and whether the residual
    takes outputs up."""
    case: Case = make_cases()[0]
    step = step_of(case.shape_for("Q4_K"), "Q4_K", CPU)
    executor = DeviceExecutor(step, CachePlan(512, n_rows), device="cpu")
    walk = executor._prompts._planner.walk(pad_rows(n_rows))
    planned = [each for each in walk.trunk if isinstance(each, Launch) and each.kernel.name == "product_rows"]
    own = [fused_launches([matrices], n_rows, CPU)[0] for _, matrices in open_products(case, step, CPU)]
    assert len(own) == len(planned) == 4
    for mine, launch in zip(own, planned, strict=True):
        assert (mine.kernel, mine.grid) == (launch.kernel, launch.grid)
        assert _shapes(mine) == _shapes(launch)


def _shapes(launch: Launch) -> list[object]:
    *arguments, _ = launch.arguments
    return [type(each) if isinstance(each, torch.Tensor) else each for each in arguments]


def test_a_product_without_a_kernel_keeps_its_other_route(
    timed: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> None:
        raise UnsupportedError("no room for two slots")

    monkeypatch.setattr(module.RowProduct, "kernel", refuse)
    rows = list(bench_row_products(KernelOptions(("Q8_0",), ("plain.o",), rows=(32,))))
    assert [row.route for row in rows] == ["unpack+cublas"]
    assert "note: plain.o, Q8_0, 32 rows: no room for two slots" in capsys.readouterr().err


def test_the_command_shows_and_saves_rows(twins: kernel_twins.TwinDevice, tmp_path: Path) -> None:
    saved = tmp_path / "kernels-rows.json"
    words = ["bench", "kernels", "--rows", "32, 64", "-f", "Q4_0", "-s", "plain.o", "-r", "2", "--save", str(saved)]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].startswith("| shape | n | k | format | rows | route | us |")
    cells = [[cell.strip() for cell in line.split("|")] for line in lines[2:]]
    assert [(each[5], each[6]) for each in cells] == [
        ("32", "fused"), ("32", "unpack+cublas"), ("64", "fused"), ("64", "unpack+cublas")
    ]  # fmt: skip
    assert all(each[10].endswith("%") for each in cells)
    assert [row["verb"] for row in json.loads(saved.read_text())] == 4 * ["kernel_rows"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--rows 0", "--rows 0: expected numbers from 1"),
        ("--rows many", "--rows many: 'many': expected a number"),
        ("--rows 32 -f Q4_K_M", "-f Q4_K_M: expected Q4_K, Q5_K"),
    ],
)
def test_wrong_rows_are_refused(words: str, message: str) -> None:
    result = CliRunner().invoke(app, ["bench", "kernels", *words.split()])
    assert result.exit_code == 2
    assert message in result.stderr


def test_shapes_are_those_of_the_other_table(twins: kernel_twins.TwinDevice) -> None:
    with pytest.raises(RequestError, match="-s plai: no such shape; there are 1MB"):
        list(bench_row_products(KernelOptions(("Q4_K",), ("plai",), rows=(32,))))


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90a", "sm_120a"])
def test_unpacking_to_bf16_compiles(architecture: str) -> None:
    pytest.importorskip("cuda.core")
    _, report = compile_kernel(spec("unpack_bf16", 256, FORM="Q4_K", K=512), architecture)
    assert re.findall(r"(\d+) bytes spill stores", report) == ["0"]


def test_what_is_unpacked_lies_one_matrix_after_another(twins: kernel_twins.TwinDevice) -> None:
    (own,) = (own for name, own in products_of("Q8_0")[:4] if name == "qkv")
    scratch = torch.empty(768, 256, dtype=torch.bfloat16)
    launches = unpack_launches(own, scratch)
    assert [launch.arguments[1] for launch in launches] == [512, 128, 128]
    starts = [(launch.arguments[2].data_ptr() - scratch.data_ptr()) // 512 for launch in launches]
    assert starts == [0, 512, 640]
