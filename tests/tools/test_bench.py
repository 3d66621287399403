"""bench on a device of kernel twins: its rows, its bytes, and that it fails when a kernel is wrong."""

from __future__ import annotations

import csv
import json
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

import kernel_twins
from bytefloor.cli import app
from bytefloor.engine import device as device_module
from bytefloor.engine import loading, stream_limit
from bytefloor.engine.device import DeviceExecutor
from bytefloor.engine.reference import ReferenceExecutor
from bytefloor.engine.stream_limit import StreamLimit
from bytefloor.engine.synthetic import SHAPES, Shape
from bytefloor.errors import NumericalError, RequestError, UnsupportedError
from bytefloor.model import decoder
from bytefloor.tools import bench as bench_module
from bytefloor.tools import bench_rows
from bytefloor.tools.bench import BenchOptions, bench
from bytefloor.tools.bench_check import _compare
from bytefloor.tools.bench_rows import RowWriter
from tiny import build_tiny

LIMIT = StreamLimit(10.0)
OPTIONS = BenchOptions(n_prompt=(30,), n_gen=6, depths=(0, 40), repeats=2)
TINY = Shape("llama", 256, 512, 2, 8, 2, 64, 272, 256, False, {"rope.freq_base": 1e4})


@pytest.fixture
def twins(monkeypatch: pytest.MonkeyPatch) -> kernel_twins.TwinDevice:
    """A CPU that the executor takes for a device with kernels."""
    device = kernel_twins.TwinDevice()
    device.install(monkeypatch)
    monkeypatch.setitem(SHAPES, "tiny", TINY)

    def make(model, room, where, kv=None, **more):
        rounding = replace(loading.DEVICE_ROUNDING, cache=kv or "bf16")
        step = loading.build_step(model.config, model.weights, rounding)
        executor = DeviceExecutor(step, room.plan(loading.KERNEL_CHUNK), device="cpu")
        device.know(executor)
        return executor, ()

    monkeypatch.setattr(bench_module, "make_executor", make)
    monkeypatch.setattr(DeviceExecutor, "host_us", lambda self: 1.0)
    monkeypatch.setattr(bench_module, "measure_limit", lambda device: LIMIT)
    return device


def test_rows_say_what_was_measured(twins: kernel_twins.TwinDevice) -> None:
    rows = list(bench("synthetic:tiny/Q4_K_M", OPTIONS))
    assert [(row.verb, row.sampling, row.depth, row.n_prompt, row.n_gen) for row in rows] == [
        ("decode", "greedy", 0, 0, 6),
        ("decode", "sampled", 0, 0, 6),
        ("decode", "greedy", 40, 0, 6),
        ("decode", "sampled", 40, 0, 6),
        ("prompt", None, 0, 30, 0),
    ]
    first, sampled, deeper, _, prompt = rows
    # Two layers, 2 KV heads of 64, keys and values in bf16: 1,024 bytes a position.
    assert deeper.file_bytes - first.file_bytes == 40 * 1024
    assert first.share == pytest.approx(first.file_bytes * first.tok_s / 10e9, abs=1e-3)
    assert first.moved_bytes > first.file_bytes
    assert first.load_s > 0
    assert first.checksum not in (sampled.checksum, deeper.checksum)
    # What was not measured is not a number.
    assert (prompt.share, prompt.checksum, prompt.host_us, sampled.host_us) == (None, None, None, None)
    assert (first.first_start_s, first.device_memory_gb, first.clock_mhz) == (None, None, None)
    assert first.host_memory_gb == 0
    assert first.host_us == 1.0
    assert (first.executor, first.notes) == ("kernels", ())
    assert next(bench("synthetic:tiny/Q4_K_M", replace(OPTIONS, repeats=1))).tok_s_spread is None


def test_a_row_without_kernels_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "tiny", TINY)
    monkeypatch.setattr(bench_module, "measure_limit", lambda device: StreamLimit(10.0, "a limit of torch"))
    row = next(bench("synthetic:tiny/Q4_K_M", replace(OPTIONS, device="cpu", repeats=1)))
    assert (row.executor, row.notes) == ("reference", ("a limit of torch",))


@pytest.mark.parametrize("kv", ["float32", "bf16", "int8", "fp8"])
def test_several_sequences_without_kernels(monkeypatch: pytest.MonkeyPatch, kv: str) -> None:
    """A cache that rounds moves more than last bits between one row and several; any number of them share a step."""
    monkeypatch.setitem(SHAPES, "tiny", TINY)
    monkeypatch.setattr(bench_module, "measure_limit", lambda device: LIMIT)
    options = replace(OPTIONS, device="cpu", repeats=1, n_prompt=(), depths=(40,), batches=(1, 3, 20))
    rows = list(bench("synthetic:tiny/Q4_K_M", replace(options, kv=None if kv == "float32" else kv)))
    assert [(row.batch, row.sampling, row.kv) for row in rows] == [
        (1, "greedy", kv), (1, "sampled", kv), (3, "greedy", kv), (20, "greedy", kv)
    ]  # fmt: skip
    alone, _, three, _ = rows
    assert three.file_bytes - alone.file_bytes == 2 * (40 + 3 + 1) * 2 * 2 * 2 * {"float32": 256, "bf16": 128}.get(
        kv, 66
    )


def test_more_sequences_than_a_step_has_are_left_out_and_named(
    twins: kernel_twins.TwinDevice, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = list(bench("synthetic:tiny/Q4_K_M", replace(OPTIONS, repeats=1, n_prompt=(), depths=(0,), batches=(3, 17))))
    assert [row.batch for row in rows] == [3]
    assert rows[0].host_us is None
    assert "17 sequences together are left out: at most 16 share a step here" in capsys.readouterr().err
    monkeypatch.setattr(loading, "KERNEL_CHUNK", 5)
    with pytest.raises(RequestError, match="-n 6: expected at most 5 with several sequences"):
        list(bench("synthetic:tiny/Q4_K_M", replace(OPTIONS, depths=(0,), batches=(3,))))


def test_a_cache_of_coded_pages_is_filled_measured_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two layers, 2 KV heads of 64: 8 and 16 positions in bf16, the others in 60 bytes a head."""
    monkeypatch.setitem(SHAPES, "tiny", TINY)
    monkeypatch.setattr(bench_module, "measure_limit", lambda device: LIMIT)
    monkeypatch.setattr(decoder, "RECENT", 16)
    monkeypatch.setattr(decoder, "FIRST", 8)
    options = replace(OPTIONS, device="cpu", repeats=1, n_prompt=(), depths=(0, 40), kv="k4v2", batches=(1, 3))
    rows = {(row.depth, row.batch): row for row in bench("synthetic:tiny/Q4_K_M", options)}
    assert {(row.kv, row.executor) for row in rows.values()} == {("k4v2", "reference")}
    n = rows[40, 1].n_gen // 2 + 1
    codes, floats = (40 + n - 24) * 60, (24 - n) * 256
    assert rows[40, 1].file_bytes - rows[0, 1].file_bytes == 2 * 2 * (codes + floats)
    of_one = codes + 24 * 256
    assert rows[40, 3].file_bytes - rows[40, 1].file_bytes == 2 * 2 * 2 * of_one


@pytest.mark.parametrize("kv", ["int8", "fp8"])
def test_a_cache_of_codes_is_filled_measured_and_named(twins: kernel_twins.TwinDevice, kv: str) -> None:
    rows = list(bench("synthetic:tiny/Q4_K_M", replace(OPTIONS, kv=kv, repeats=1)))
    assert {row.kv for row in rows} == {kv}
    # Two layers, 2 KV heads of 64 codes and a scale, keys and values.
    assert rows[2].file_bytes - rows[0].file_bytes == 40 * 2 * 2 * 2 * 66


def test_sampled_tokens_repeat(twins: kernel_twins.TwinDevice) -> None:
    once, again = ([row.checksum for row in bench("synthetic:tiny/Q4_K_M", OPTIONS)] for _ in range(2))
    assert once == again


@pytest.mark.parametrize("output", ["md", "csv", "json"])
def test_each_row_is_shown_and_saved_as_it_is_measured(
    twins: kernel_twins.TwinDevice, capsys: pytest.CaptureFixture, tmp_path: Path, output: str
) -> None:
    rows = list(bench("synthetic:tiny/Q4_K_M", OPTIONS))
    writer = RowWriter(output, tmp_path / "rows.json")
    shown = []
    for n, row in enumerate(rows, 1):
        writer.add(row)
        shown.append(capsys.readouterr().out)
        assert len(json.loads((tmp_path / "rows.json").read_text())) == n
    writer.finish()
    end = capsys.readouterr().out
    if output == "json":
        assert shown == [""] * 5
        assert [row["share"] for row in json.loads(end)] == [row.share for row in rows]
        return
    assert end == ""
    n_header = 2 if output == "md" else 1
    assert [text.count("\n") for text in shown] == [1 + n_header, 1, 1, 1, 1]
    if output == "md":
        assert f"| {rows[0].share:.1%} |" in shown[0]
        assert shown[0].splitlines()[2].startswith("| tiny/Q4_K_M | Q4_K | greedy | 0 | 6 | 0 | 1 | bf16 |")
        assert shown[4].startswith("| tiny/Q4_K_M | Q4_K |  | 30 | 0 | 0 | 1 | bf16 |")
    else:
        header, *cells = (next(csv.reader([line])) for line in "".join(shown).splitlines())
        assert dict(zip(header, cells[0], strict=True))["share"] == str(rows[0].share)
        assert dict(zip(header, cells[4], strict=True))["share"] == ""


def test_a_start_that_compiles_is_timed_apart(
    twins: kernel_twins.TwinDevice, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    make, n_starts = bench_module.make_executor, []

    def compiling(*arguments, **more):
        n_starts.append(0)
        if len(n_starts) == 1:
            (tmp_path / "kernel.cubin").touch()
            time.sleep(0.5)
        return make(*arguments, **more)

    monkeypatch.setattr(bench_module, "make_executor", compiling)
    monkeypatch.setattr(bench_module, "cache_folder", lambda: tmp_path)
    row = next(bench("synthetic:tiny/Q4_K_M", OPTIONS))
    assert len(n_starts) == 2
    assert row.first_start_s is not None
    assert row.first_start_s > 0.5
    assert row.load_s < row.first_start_s
    assert next(bench("synthetic:tiny/Q4_K_M", OPTIONS)).first_start_s is None
    assert len(n_starts) == 3


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


def test_the_layer_behind_a_slightly_wrong_kernel_is_named(
    twins: kernel_twins.TwinDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of what attention gives is little beside the residual, and too much for any rounding."""
    right = kernel_twins.TwinKernel.attention_rows

    def wrong(self, *arguments):
        right(self, *arguments)
        arguments[5].mul_(0.5)

    monkeypatch.setattr(kernel_twins.TwinKernel, "attention_rows", wrong)
    with pytest.raises(NumericalError, match="keys and values of layer 1: rows one by one differ"):
        list(bench("synthetic:tiny/Q4_K_M", OPTIONS))


ROADS = {"rows one by one": 1, "9 rows at a time": 32, "72 rows at once": 128}


@pytest.mark.parametrize(("road", "pitch"), ROADS.items())
def test_the_road_whose_product_is_wrong_is_named(
    twins: kernel_twins.TwinDevice, monkeypatch: pytest.MonkeyPatch, road: str, pitch: int
) -> None:
    """Decoding, few rows and many have products of their own; two of three agree on what is right."""
    right, right_rows = kernel_twins.TwinKernel.product, kernel_twins.TwinKernel.product_rows
    seen = set()

    def wrong(self, *arguments):
        right(self, *arguments)
        if pitch == 1 and not self.n("GLU"):
            arguments[9].mul_(0.7)

    def wrong_rows(self, *arguments):
        right_rows(self, *arguments)
        out, found = arguments[7], arguments[9]
        seen.add(found)
        if found == pitch and not self.n("GLU"):
            out.mul_(0.7)

    monkeypatch.setattr(kernel_twins.TwinKernel, "product", wrong)
    monkeypatch.setattr(kernel_twins.TwinKernel, "product_rows", wrong_rows)
    others = " and ".join(name for name in ROADS if name != road)
    with pytest.raises(NumericalError, match=f"keys and values of layer 0: {road} differ from {others} by"):
        list(bench("synthetic:tiny/Q4_K_M", replace(OPTIONS, n_prompt=(100,))))
    assert seen >= {32, 128}


def test_roads_that_are_all_apart_are_no_excuse(
    twins: kernel_twins.TwinDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What reads garbage is apart from itself, too: attention of many rows, which few rows share."""
    right, numbers = kernel_twins.TwinKernel.attention_rows, torch.Generator().manual_seed(1)

    def wrong(self, *arguments):
        right(self, *arguments)
        arguments[5].copy_(torch.randn(arguments[5].shape, generator=numbers))

    monkeypatch.setattr(kernel_twins.TwinKernel, "attention_rows", wrong)
    with pytest.raises(NumericalError, match="keys and values of layer 1: "):
        list(bench("synthetic:tiny/Q4_K_M", replace(OPTIONS, n_prompt=(100,))))


def test_no_road_may_be_farther_off_than_four_times_what_roundings_explain() -> None:
    """However far the others are from each other: few rows may be 0.12 from many, which is no measure for decoding."""
    executor = DeviceExecutor.__new__(DeviceExecutor)
    executor.step = SimpleNamespace(storage="bf16")  # type: ignore[assignment]
    right, few, off = torch.eye(3)
    found = _compare(executor, {1: right + 0.25 * off, 9: right + 0.1 * few, 72: right}, 0, 0)
    assert found.error == pytest.approx(0.25)
    assert (found.road, found.bound, found.is_wrong) == ("rows one by one", pytest.approx(0.12), True)
    amplified = _compare(executor, {1: right + 0.11 * off, 9: right + 0.05 * few, 72: right}, 0, 0)
    assert not amplified.is_wrong
    assert _compare(executor, {1: right + 0.11 * off, 9: right + 0.001 * few, 72: right}, 0, 0).is_wrong


def test_lengths_that_do_not_fit_are_left_out_and_nothing_left_is_refused(twins: kernel_twins.TwinDevice) -> None:
    options = replace(OPTIONS, depths=(0, 5000), n_prompt=())
    assert [row.depth for row in bench("synthetic:tiny/Q4_K_M", options)] == [0, 0]
    with pytest.raises(RequestError, match="nothing to measure"):
        list(bench("synthetic:tiny/Q4_K_M", replace(options, depths=(5000,))))


@pytest.fixture
def cpu(monkeypatch: pytest.MonkeyPatch) -> BenchOptions:
    monkeypatch.setitem(SHAPES, "tiny", TINY)
    monkeypatch.setattr(bench_module, "measure_limit", lambda device: LIMIT)
    return replace(OPTIONS, device="cpu")


def test_cpu_rows_come_from_the_reference_executor(cpu: BenchOptions) -> None:
    rows = list(bench("synthetic:tiny/Q8_0", cpu))
    assert len(rows) == 5
    assert all(row.tok_s > 0 and row.card == "cpu" for row in rows)
    assert [row.host_us for row in rows] == [None] * 5
    assert torch.get_default_dtype() == torch.float32


def test_on_a_cpu_rows_one_by_one_are_compared_with_all_at_once(
    cpu: BenchOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = ReferenceExecutor.run

    def wrong(self, batch):
        logits = right(self, batch)
        return logits + 0.01 * logits.roll(1, -1) if len(batch.tokens) == 1 else logits

    monkeypatch.setattr(ReferenceExecutor, "run", wrong)
    with pytest.raises(NumericalError, match="rows one by one differ from 8 rows at once"):
        list(bench("synthetic:tiny/Q8_0", cpu))


def test_a_limit_that_no_kernel_measured_is_a_note(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def refuse(device):
        raise UnsupportedError("no CUDA compiler")

    monkeypatch.setattr(device_module, "device_architecture", refuse)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 20, 1 << 20))
    monkeypatch.setattr(bench_rows, "measure_stream_limit", stream_limit._measure_cuda)
    assert bench_rows.measure_limit(torch.device("cpu")).gb_s > 0
    assert "note: no CUDA compiler; the stream limit is that of torch's sum" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("-d nonsense", "-d nonsense: 'nonsense': expected a number such as 4096 or 32k"),
        ("-p 512,much", "-p 512,much: 'much': expected a number"),
        ("-p 0", "-p 0: expected numbers from 1"),
        ("-d 4,-1", "-d 4,-1: expected numbers from 0"),
        ("-n 0", "-n 0: expected at least 1"),
        ("-r 0", "-r 0: expected at least 1"),
        ("-o xml", "-o xml: expected md, json or csv"),
        ("--save no/such/folder/rows.json", "no/such/folder/rows.json: cannot be written: there is no folder"),
        ("-m no.gguf", "no.gguf: no such file"),
        ("-n 4 kernels", "-n: stands before kernels; see bytefloor bench kernels -h"),
        ("kernels -r 0", "-r 0: expected at least 1"),
        ("frob", "No such command 'frob': a model goes behind -m; see bytefloor bench --help"),
    ],
)
def test_wrong_arguments_are_named(args: str, message: str) -> None:
    result = CliRunner().invoke(app, ["bench", *args.split()])
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("bytefloor: error: ")
    assert message in result.stderr


def test_a_file_of_rows_is_kept_when_nothing_is_measured(tmp_path: Path) -> None:
    saved = tmp_path / "rows.json"
    saved.write_text("[1]")
    assert CliRunner().invoke(app, ["bench", "-m", "no.gguf", "--save", str(saved)]).exit_code == 2
    assert saved.read_text() == "[1]"


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
    assert [(row["n_prompt"], row["n_gen"]) for row in rows] == [(0, 2), (0, 2), (2, 0)]
    assert result.stdout.count("qwen3") >= 2
