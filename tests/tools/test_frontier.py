"""frontier: every recipe against quantising, scoring and timing by hand; what is kept, what fails, what is refused."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

import kernel_twins
from bytefloor.cli import app
from bytefloor.engine import loading
from bytefloor.engine.device import DeviceExecutor
from bytefloor.engine.stream_limit import StreamLimit
from bytefloor.errors import FileError, NumericalError, RequestError
from bytefloor.files.checkpoint import open_checkpoint
from bytefloor.quantize.recipes import choose_recipes
from bytefloor.tools import bench as bench_module
from bytefloor.tools import frontier as frontier_module
from bytefloor.tools import scoring
from bytefloor.tools.frontier import FrontierOptions, disk_bytes, frontier, token_bytes
from bytefloor.tools.frontier_rows import FrontierRow
from bytefloor.tools.frontier_tables import make_frontier_sections
from bytefloor.tools.perplexity import PerplexityOptions, measure
from quantized import quantize
from tiny import TinyModel, build_tiny

TEXT = "The quick brown fox jumps over the lazy dog, again and again, in the rain. " * 6
LIMIT = StreamLimit(10.0, "a limit of nobody")


def options(*recipes: str, **more: Any) -> FrontierOptions:
    return FrontierOptions(choose_recipes(recipes), 64, 3, n_tokens=4, repeats=2, device="cpu", **more)


@pytest.fixture(autouse=True)
def limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not measured here: it takes seconds."""
    monkeypatch.setattr(frontier_module, "measure_limit", lambda device: LIMIT)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return build_tiny("llama-wide", tmp_path_factory.mktemp("tiny"), torch.bfloat16)


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """No row is a multiple of 64 or 256."""
    return build_tiny("smollm2", tmp_path_factory.mktemp("narrow"))


def test_rows_are_those_of_quantising_scoring_and_timing_by_hand(tiny: TinyModel, tmp_path: Path) -> None:
    source = str(tiny.directory)
    first, *rows = frontier(source, TEXT, options("Q4_K_M", "mlp-4bit", depth=40))
    assert (first.recipe, first.state, first.divergence, first.source_formats) == ("source", "source", None, ("BF16",))
    asked = PerplexityOptions(64, n_windows=3, base=source, device="cpu")
    for row, out, recipe in zip(
        rows,
        (tmp_path / "a.gguf", tmp_path / "b"),
        (("Q4_K_M",), ("affine-8b", "*.mlp.*=affine-4b")),
        strict=True,
    ):
        job, losses = quantize(tiny.directory, out, *recipe)
        expected = measure(str(out), TEXT, asked)
        assert expected.divergence is not None
        assert row.divergence is not None
        # A saved base is a little less exact than one that runs beside.
        assert row.divergence.kl.value == pytest.approx(expected.divergence.kl.value, abs=1e-6)
        assert row.divergence.kl.error == pytest.approx(expected.divergence.kl.error, rel=1e-3)
        assert row.divergence.same_best == expected.divergence.same_best
        assert row.perplexity == expected.perplexity
        assert first.perplexity == expected.divergence.base_perplexity
        assert row.n_predictions == expected.n_predictions == 3 * 31
        assert row.disk_bytes == disk_bytes(out) > job.plan.n_bytes
        assert (row.n_bytes, row.bits_per_weight) == (job.plan.n_bytes, pytest.approx(job.plan.bits_per_weight, 1e-4))
        assert row.formats is not None
        assert sum(row.formats.values()) == row.n_bytes
        assert set(row.formats) == {planned.format_name for planned in job.plan.tensors}
        worst = max(loss.error for loss in losses.values())
        assert row.weight_error is not None
        assert 0 < row.weight_error < worst
        assert row.token_bytes == token_bytes(open_checkpoint(out))
        assert [speed.depth for speed in row.speeds] == [0, 40]
        shallow, deep = row.speeds
        assert shallow.n_gen == 4
        # Three layers, two KV heads of 64 float32, keys and values.
        assert deep.file_bytes - shallow.file_bytes == 40 * 3 * 2 * 64 * 4 * 2
        assert shallow.share == pytest.approx(shallow.file_bytes * shallow.tok_s / 10e9, abs=1e-4)
        assert (row.executor, row.card, row.substitutes) == ("reference", "cpu", ())
        assert LIMIT.notice in row.notes


def test_the_source_is_scored_once_and_nothing_is_left(
    tiny: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    seen: list[tuple[str, bool]] = []
    held: list[list[str]] = []

    def watched(name: str, text: str, asked: PerplexityOptions) -> Any:
        seen.append((Path(name).name, asked.save_base is not None))
        held.append(sorted(path.name for path in tmp_path.glob("*/*")))
        return measure(name, text, asked)

    monkeypatch.setattr(frontier_module, "measure", watched)
    rows = list(frontier(str(tiny.directory), TEXT, options("Q8_0", "all-4bit", "FP4")))
    assert [row.state for row in rows] == ["source", "measured", "measured", "measured"]
    assert seen == [(tiny.directory.name, True), ("Q8_0.gguf", False), ("all-4bit", False), ("FP4", False)]
    assert held == [[], ["Q8_0.gguf", "base"], ["all-4bit", "base"], ["FP4", "base"]]
    assert list(tmp_path.iterdir()) == []
    kl = [row.divergence.kl.value for row in rows if row.divergence is not None]
    assert 0 < kl[0] < kl[1]


def test_what_is_kept_is_what_quantize_writes(tiny: TinyModel, tmp_path: Path) -> None:
    list(frontier(str(tiny.directory), TEXT, options("Q8_0", "FP4", keep=tmp_path / "out")))
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["FP4", "Q8_0.gguf"]
    quantize(tiny.directory, tmp_path / "by-hand.gguf", "Q8_0")
    assert (tmp_path / "out/Q8_0.gguf").read_bytes() == (tmp_path / "by-hand.gguf").read_bytes()
    # The second time it is refused before anything is measured.
    with pytest.raises(FileError, match=r"--keep-files: .*Q8_0.gguf: there is something already"):
        next(frontier(str(tiny.directory), TEXT, options("all-4bit", "Q8_0", keep=tmp_path / "out")))


def test_a_slip_in_a_recipe_is_told_before_the_source_is_scored(tiny: TinyModel) -> None:
    with pytest.raises(RequestError, match=r"recipe typo: --match \*.nothing: fits no matrix"):
        next(frontier(str(tiny.directory), TEXT, options("Q8_0", "typo=Q8_0 *.nothing=Q4_0")))


def test_recipes_that_do_not_fit_are_rows_with_their_reason(narrow: TinyModel) -> None:
    rows = {
        row.recipe: row for row in frontier(str(narrow.directory), TEXT, options("FP4", "Q4_K_M", "kept=Q8_0 *=keep"))
    }
    assert list(rows) == ["source", "FP4", "Q4_K_M", "kept"]
    row = rows["FP4"]
    assert (row.state, row.perplexity, row.divergence, row.speeds, row.bits_per_weight) == (
        "refused", None, None, (), None
    )  # fmt: skip
    assert row.reason is not None
    assert "288 columns are no multiple of 128" in row.reason
    assert row.cells() == ("FP4", *[""] * 8, f"refused: {row.reason}")
    assert rows["Q4_K_M"].state == "measured"
    assert "288 columns are no multiple of 256" in rows["Q4_K_M"].cells()[-1]
    kept = rows["kept"].divergence
    assert kept is not None
    assert 0 <= kept.kl.value < 1e-7


@pytest.mark.parametrize("error", [NumericalError("a number is none"), OSError("a number is none")])
@pytest.mark.parametrize("part", ["carry_out", "measure", "bench"])
def test_a_recipe_that_fails_is_a_row_and_the_others_go_on(
    tiny: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str, error: Exception
) -> None:
    real, calls = getattr(frontier_module, part), iter(range(9))
    broken = 0 if part == "carry_out" else 1  # the source's own call comes first

    def sometimes(*args: Any) -> Any:
        if next(calls) == broken:
            raise error
        return real(*args)

    monkeypatch.setattr(frontier_module, part, sometimes)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    rows = list(frontier(str(tiny.directory), TEXT, options("all-4bit", "Q8_0")))
    assert [(row.recipe, row.state) for row in rows[1:]] == [("all-4bit", "failed"), ("Q8_0", "measured")]
    assert rows[1].reason == "a number is none"
    # A wrong speed takes nothing from what was scored before it, nor a wrong score from what was written.
    assert (rows[1].weight_error is not None) == (rows[1].quantise_s is not None) == (part != "carry_out")
    assert (rows[1].perplexity is not None, rows[1].speeds) == (part == "bench", ())
    assert rows[1].cells()[-1] == "failed: a number is none"
    assert (rows[1].cells()[4] != "") == (part == "bench")
    assert list(tmp_path.iterdir()) == []


def test_a_source_that_fails_is_no_row(tiny: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FileError, match="no such file"):
        next(frontier("nofile.gguf", TEXT, options("Q8_0")))

    def broken(*args: Any) -> Any:
        raise NumericalError("a number is none")

    monkeypatch.setattr(frontier_module, "measure", broken)
    with pytest.raises(NumericalError):
        next(frontier(str(tiny.directory), TEXT, options("Q8_0")))


def test_a_source_that_cannot_be_timed_is_compared_with_all_the_same(
    tiny: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = frontier_module.bench, iter(range(9))

    def sometimes(*args: Any) -> Any:
        if next(calls) == 0:
            raise NumericalError("a kernel is wrong")
        return real(*args)

    monkeypatch.setattr(frontier_module, "bench", sometimes)
    first, row = frontier(str(tiny.directory), TEXT, options("Q8_0"))
    assert (first.state, first.reason, first.speeds) == ("failed", "a kernel is wrong", ())
    assert first.perplexity is not None
    assert row.state == "measured"
    table = make_frontier_sections({"x": [asdict(first), asdict(row)]})
    assert "| failed: a kernel is wrong" in table


def test_on_kernels_speeds_are_theirs(tiny: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU that the executor takes for a device; what kernels refuse runs the reference executor and says so."""
    device = kernel_twins.TwinDevice()
    device.install(monkeypatch)

    def make(model: Any, room: Any, where: Any, kv: str | None = None, **more: Any) -> Any:
        if any(tensor.format_name == "FP4-E2M1-g128" for tensor in model.checkpoint.tensors.values()):
            step = loading.build_step(model.config, model.weights, loading.Rounding())
            return loading.ReferenceExecutor(step, room.plan(64)), ("no kernels for it",)
        step = loading.build_step(model.config, model.weights, loading.DEVICE_ROUNDING)
        executor = DeviceExecutor(step, room.plan(loading.KERNEL_CHUNK), device="cpu")
        device.know(executor)
        return executor, ()

    model = build_tiny("llama-wide", tiny.directory.parent / "sixteens", torch.bfloat16)
    for module in (bench_module, scoring):
        monkeypatch.setattr(module, "make_executor", make)
    monkeypatch.setattr(DeviceExecutor, "host_us", lambda self: 1.0)
    asked = replace(options("Q8_0", "FP4"), context=16, n_windows=2)
    rows = {row.recipe: row for row in frontier(str(model.directory), TEXT, asked)}
    assert [row.executor for row in rows.values()] == ["kernels", "kernels", "reference"]
    assert rows["Q8_0"].kv == "bf16"
    assert rows["Q8_0"].speeds[0].moved_bytes > 0
    assert "no kernels for it" in rows["FP4"].cells()[-1]
    assert "(reference)" in rows["FP4"].cells()[7]
    assert "(reference)" not in rows["Q8_0"].cells()[7]


# --- the command line


def bytefloor(*args: str, input: str = "") -> Result:
    return CliRunner().invoke(app, ["frontier", *args], input=input)


def test_rows_are_printed_saved_and_drawn(tiny: TinyModel, tmp_path: Path) -> None:
    (tmp_path / "text").write_text(TEXT)
    result = bytefloor(
        "-m", str(tiny.directory), "-f", str(tmp_path / "text"), "-c", "64", "--chunks", "2", "-n", "2", "-r", "1",
        "--recipe", "Q8_0", "--recipe", "mine=affine-4b *down*=affine-8b", "--device", "cpu",
        "--save", str(tmp_path / "rows.json"), "--plot", str(tmp_path / "plot.svg"),
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0] == "| " + " | ".join(FrontierRow.COLUMNS) + " |"
    assert [line.split(" | ")[0] for line in lines[2:5]] == ["| source", "| Q8_0", "| mine"]
    assert f"KL is to {tiny.directory.name} (BF16)" in lines
    assert "on the front of KL and bytes of weights that a token reads: Q8_0, mine" in lines
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [(row["recipe"], row["words"]) for row in rows] == [
        ("source", ""), ("Q8_0", "Q8_0"), ("mine", "affine-4b *down*=affine-8b")
    ]  # fmt: skip
    assert ET.parse(tmp_path / "plot.svg").getroot().tag.endswith("svg")


def test_a_failure_is_seen_in_the_status(tiny: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any) -> Any:
        raise NumericalError("a number is none")

    monkeypatch.setattr(frontier_module, "carry_out", broken)
    where = ("-m", str(tiny.directory), "-c", "64", "--chunks", "1", "-n", "1", "-r", "1", "--device", "cpu")
    result = bytefloor(*where, "--recipe", "Q8_0", input=TEXT)
    assert result.exit_code == 1, result.output
    assert "failed: a number is none" in result.stdout


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--plot", "plot.png"), "--plot plot.png: expected a name that ends in .svg"),
        (("--plot", "none/plot.svg"), "there is no folder none"),
        (("-d", "0"), "-d 0: expected at least 1"),
        (("--recipe", "Q9"), "--recipe Q9: expected NAME="),
        (("--chunks", "0"), "--chunks 0: expected at least 1"),
        (("--save", "none/rows.json"), "none/rows.json"),
        (("-f", "nofile"), "nofile: cannot be read"),
        (("-n", "0"), "-n"),
        (("--device", "tpu"), "--device tpu: expected auto, cpu or cuda"),
    ],
)
def test_what_is_refused_is_one_line(tiny: TinyModel, args: tuple[str, ...], words: str) -> None:
    result = bytefloor("-m", str(tiny.directory), "-c", "64", *args, input=TEXT)
    assert result.exit_code != 0
    assert result.stdout == ""
    assert words in (result.stderr.splitlines() or [str(result.exception)])[-1]


def test_a_row_says_nothing_of_what_was_not_measured(tiny: TinyModel) -> None:
    (first, *_) = frontier(str(tiny.directory), TEXT, options("Q8_0"))
    fields = asdict(first)
    assert [name for name, value in fields.items() if value is None] == [
        "reason", "weight_error", "divergence", "quantise_s", "clock_mhz"
    ]  # fmt: skip
