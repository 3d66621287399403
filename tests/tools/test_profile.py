"""The verb ``profile`` from flags to files, on a tiny model and the reference executor."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

import kernel_twins
from bytefloor.cli import app
from bytefloor.engine import loading
from bytefloor.engine.cache import CachePlan
from bytefloor.engine.device import DeviceExecutor
from bytefloor.engine.stream_limit import StreamLimit
from bytefloor.engine.synthetic import SHAPES, Shape
from bytefloor.errors import RequestError, UnsupportedError
from bytefloor.tools import profile as profile_module
from bytefloor.tools.profile import ProfileOptions, measure_chunk, measure_token, profile
from bytefloor.tools.profile_data import read_profile, write_profile
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


def test_kernels_are_not_profiled_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    twins = kernel_twins.TwinDevice()
    twins.install(monkeypatch)
    model = profile_module.open_model(NAME, profile_module.choose_device("cpu"))
    step = loading.build_step(model.config, model.weights, loading.DEVICE_ROUNDING)
    executor = DeviceExecutor(step, CachePlan(64, 32), device="cpu")
    for measure in (lambda: measure_token(executor, 0, 1), lambda: measure_chunk(executor, 32, 0, 1)):
        with pytest.raises(UnsupportedError, match="not on cuda yet"):
            measure()


def test_files_are_refused_before_anything_is_measured(tmp_path: Path) -> None:
    away = tmp_path / "nowhere" / "a.json"
    for flag in ("--save", "--trace", "--html"):
        assert complaint("-m", NAME, flag, away) == f"{flag} {away}: there is no folder {away.parent}"


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
