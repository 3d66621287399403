"""The verb ``profile`` from flags to files, on a tiny model and the reference executor."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from click.testing import Result
from torch import Tensor
from typer.testing import CliRunner

import kernel_twins
from bytefloor.cli import app
from bytefloor.engine import loading, stamps
from bytefloor.engine.cache import CachePlan
from bytefloor.engine.device import DeviceExecutor
from bytefloor.engine.kernels import KernelSpec
from bytefloor.engine.stamps import Times
from bytefloor.engine.stream_limit import StreamLimit
from bytefloor.engine.synthetic import SHAPES, Shape
from bytefloor.errors import RequestError
from bytefloor.tools import profile as profile_module
from bytefloor.tools import profile_device
from bytefloor.tools.profile import ProfileOptions, measure_chunk, measure_token, profile
from bytefloor.tools.profile_data import read_profile, write_profile
from bytefloor.tools.profile_spans import Rows
from made_profiles import made_profile

TINY = Shape("llama", 256, 512, 2, 8, 2, 64, 272, 256, False, {"rope.freq_base": 1e4})
NAME = "synthetic:tiny/Q4_K_M"


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "tiny", TINY)
    monkeypatch.setattr(profile_module, "measure_limit", lambda device: StreamLimit(10.0, "a limit of torch"))


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["profile", *map(str, arguments)])


def complaint(*arguments: object) -> str:
    """The one line about a command that is refused."""
    found = run(*arguments)
    assert found.exit_code == 2
    assert found.stdout == ""
    assert found.stderr.startswith("bytefloor: error: ")
    assert found.stderr.count("\n") == 1
    return found.stderr.removeprefix("bytefloor: error: ").rstrip("\n")


def test_what_is_measured_is_shown_and_kept(tmp_path: Path) -> None:
    saved, trace, page = (tmp_path / name for name in ("a.json", "trace.json", "a.html"))
    flags = ("-m", NAME, "-d", "0,40", "-p", "30", "-r", 2, "--device", "cpu")
    found = run(*flags, "--save", saved, "--trace", trace, "--html", page)
    assert found.exit_code == 0, found.output
    profile = read_profile(saved)
    assert [step.title for step in profile.steps] == [
        "token at depth 0",
        "token at depth 40",
        "chunk of 30 rows at depth 0",
    ]
    assert (profile.executor, profile.card, profile.kv, profile.peak_tflops) == ("reference", "cpu", "float32", None)
    assert (profile.context, profile.capacity, profile.n_layers, profile.n_gqa) == (256, 41, 2, 4)
    assert (profile.format, profile.stream_gb_s, profile.family) == ("Q4_K", 10.0, "llama")
    assert profile.notes == ("a limit of torch",)
    assert len(profile.matrices) == 2 * 7 + 2
    assert len(json.loads(trace.read_text())["traceEvents"]) > 100
    assert "<svg" in page.read_text()
    for words in ("token at depth 40", "gate_up", "attention", "what would change it", "Q8_0", "time against depth"):
        assert words in found.stdout
    assert f"{1e6 / profile.tokens[0].wall_us:,.1f} tok/s"[:3] in found.stdout

    again = run("--report", saved, "--html", tmp_path / "b.html", "--trace", tmp_path / "b.json")
    assert again.exit_code == 0
    assert again.stdout == found.stdout
    assert (tmp_path / "b.html").read_text() == page.read_text()
    assert (tmp_path / "b.json").read_text() == trace.read_text()

    beside = run("--compare", saved, saved)
    assert beside.exit_code == 0
    assert "token at depth 40" in beside.stdout
    assert "difference" in beside.stdout


def test_a_cache_of_codes_and_tokens_alone() -> None:
    found = profile(NAME, ProfileOptions((0, 64), (), 1, "cpu", "int8"))
    assert found.kv == "int8"
    assert found.chunks == ()
    shallow, deep = found.tokens
    # Two layers, two heads of 64 codes and a scale, keys and values.
    assert deep.needed_bytes - shallow.needed_bytes == 64 * 2 * 2 * 2 * 66


def test_lengths_that_do_not_fit_are_named_and_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    found = profile(NAME, ProfileOptions((0, 256, 255), (64, 2048), 1, "cpu"))
    assert [token.depth for token in found.tokens] == [0, 255]
    assert [chunk.rows for chunk in found.chunks] == [64]
    told = capsys.readouterr().err
    assert "256 positions do not fit in the context and are left out" in told
    assert "2048 positions do not fit" in told
    with pytest.raises(RequestError, match="nothing to profile: 256 positions are all this model was made for"):
        profile(NAME, ProfileOptions((256,), (257,), 1, "cpu"))


def test_a_prompt_longer_than_a_chunk_is_profiled_by_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(loading, "REFERENCE_CHUNK", 32)
    found = profile(NAME, ProfileOptions((), (16, 100, 200), 1, "cpu"))
    assert [chunk.rows for chunk in found.chunks] == [16, 32]
    assert "a prompt of 200 is read in chunks of 32 rows here: one of them is profiled" in capsys.readouterr().err


class Clock:
    """Of a card on which every launch takes 5 us: its first block is there 1 us late and has its inputs 1 us later."""

    def __init__(self) -> None:
        self.us = 100

    def load_kernels(self, twins: kernel_twins.TwinDevice, specs: Sequence[KernelSpec]) -> dict[KernelSpec, object]:
        return {kernel: Stamping(self, kernel_twins.TwinKernel(twins, kernel)) for kernel in specs}


class Stamping:
    def __init__(self, clock: Clock, twin: kernel_twins.TwinKernel) -> None:
        self.clock, self.twin = clock, twin
        assert twin.d["STAMPED"] == "1"

    def prepare(self, stream: int, grid: tuple[int, int], arguments: Sequence[object]) -> Callable[[], None]:
        *own, stamps = arguments
        assert isinstance(stamps, Tensor)
        assert len(stamps) == 3 * math.prod(grid)

        def launch() -> None:
            self.twin.launch(stream, grid, own)
            times = torch.tensor([1, 2, 5])[:, None] + self.clock.us
            stamps.view(3, -1).copy_(times * 1000)
            self.clock.us += 5

        return launch


class Event:
    """A look at the host's clock."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.us = 0.0

    def record(self, stream: object = None) -> None:
        self.us = time.perf_counter() * 1e6

    def synchronize(self) -> None: ...

    def elapsed_time(self, other: Event) -> float:
        return (other.us - self.us) / 1e3


@pytest.fixture
def clocked(monkeypatch: pytest.MonkeyPatch) -> DeviceExecutor:
    twins, clock = kernel_twins.TwinDevice(), Clock()
    twins.install(monkeypatch)
    monkeypatch.setattr(stamps, "load_kernels", lambda specs, architecture: clock.load_kernels(twins, specs))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    model = profile_module.open_model(NAME, profile_module.choose_device("cpu"))
    step = loading.build_step(model.config, model.weights, loading.DEVICE_ROUNDING)
    executor = DeviceExecutor(step, CachePlan(64, 32), device="cpu")
    twins.know(executor)
    return executor


def test_launches_of_a_token_have_the_times_of_their_stamps(clocked: DeviceExecutor) -> None:
    found = measure_token(clocked, 20, 2)
    assert (found.kind, found.rows, found.depth, found.n_repeats) == ("token", 1, 20, 2)
    assert len(found.spans) == len(clocked.launches)
    assert [span.start_us for span in found.spans] == [5.0 * i for i in range(len(found.spans))]
    assert {round(span.ready_us - span.start_us, 6) for span in found.spans} == {1.0}
    assert [link.us for link in found.links] == [4.0] + [5.0] * (len(found.spans) - 1)
    assert found.needed_bytes == sum(clocked.step.token_bytes(20))
    assert found.sampling_us is not None


def test_what_torch_does_in_a_chunk_lasts_until_the_next_launch_is_ready(clocked: DeviceExecutor) -> None:
    found = measure_chunk(clocked, 32, 0, 1)
    assert (found.kind, found.rows, found.spread) == ("chunk", 32, None)
    assert {span.kind for span in found.spans} == {
        "embedding", "norm", "qkv", "attention", "o", "gate_up", "down", "head",
    }  # fmt: skip
    spans = found.spans
    measured = profile_device._Measured([50.0], [51.0], [[Times(0, 1000, 5000), Times(6000, 9000, 12000)]])
    three = measured.profile("chunk", Rows(32, 0), spans[:3], [clocked.launches[0], print, clocked.launches[0]])
    assert [(span.start_us, span.ready_us, span.end_us) for span in three.spans] == [
        (0.0, 1.0, 5.0), (5.0, 5.0, 9.0), (6.0, 9.0, 12.0),
    ]  # fmt: skip
    assert three.overhead == pytest.approx(0.02)


def test_files_are_refused_before_anything_is_measured(tmp_path: Path) -> None:
    away = tmp_path / "nowhere" / "a.json"
    for flag in ("--save", "--trace", "--html"):
        assert complaint("-m", NAME, flag, away) == f"{flag} {away}: there is no folder {away.parent}"


@pytest.mark.parametrize("flag", ["--save", "--trace", "--html"])
def test_what_is_something_else_is_not_overwritten(tmp_path: Path, flag: str) -> None:
    model = tmp_path / "model.gguf"
    model.write_bytes(b"GGUF and what comes then")
    assert "is not overwritten" in complaint("-m", NAME, flag, model, "--device", "cpu")
    assert model.read_bytes() == b"GGUF and what comes then"


def test_flags_that_are_wrong_are_refused() -> None:
    assert complaint("-m", NAME, "-r", 0) == "-r 0: expected at least 1"
    assert complaint("-m", NAME, "-d", "-1") == "-d -1: expected numbers from 0"
    assert complaint("-m", NAME, "-p", "x").startswith("-p x: 'x': expected a number")
    assert complaint("-m", NAME, "--kv", "int4").startswith("--kv int4: expected bf16")
    assert "synthetic:nothing" in complaint("-m", "synthetic:nothing/Q8_0", "--device", "cpu")


def test_saved_files_that_are_none_are_refused(tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_text("[]")
    words = "expected an object with a version, as bytefloor profile --save writes it"
    assert complaint("--report", tmp_path / "rows.json").endswith(words)
    assert complaint("--report", tmp_path / "no.json") == f"{tmp_path / 'no.json'}: No such file or directory"
    assert complaint("--compare", tmp_path / "rows.json", tmp_path / "rows.json").endswith(words)


def test_flags_that_would_have_no_effect_are_refused(tmp_path: Path) -> None:
    saved = tmp_path / "a.json"
    write_profile(made_profile("synthetic:smollm2-135m/Q8_0", (0,), ()), saved)
    assert complaint("--report", saved, "-m", NAME) == "-m: has no effect beside --report, which measures nothing"
    assert complaint("--report", saved, "--save", saved).startswith("--save: has no effect beside --report")
    assert complaint("--compare", saved, saved, "-d", "0").startswith("-d: has no effect beside --compare")
    assert complaint("--compare", saved, saved, "--html", tmp_path / "a.html").startswith("--compare: goes without")
    assert "requires 2 arguments" in complaint("--compare", saved)
    assert run("--report", saved).exit_code == 0


def test_comparing_different_models_is_refused(tmp_path: Path) -> None:
    a, b = tmp_path / "a.json", tmp_path / "b.json"
    write_profile(made_profile("synthetic:smollm2-135m/Q8_0", (0,), ()), a)
    write_profile(made_profile("synthetic:gemma3-270m/Q8_0", (0,), ()), b)
    assert "are different models: embedding is 49152 x 576 here, 262144 x 640 there" in complaint("--compare", a, b)


def test_comparing_formats_says_how_good_the_prediction_is(tmp_path: Path) -> None:
    a, b = tmp_path / "a.json", tmp_path / "b.json"
    write_profile(made_profile("synthetic:llama31-8b/Q4_K_M", (0,), ()), a)
    write_profile(made_profile("synthetic:llama31-8b/Q8_0", (0,), ()), b)
    found = run("--compare", a, b)
    assert found.exit_code == 0
    assert "A's model says" in found.stdout
    assert "beside what was measured" in found.stdout
