"""Files that verbs write: what is there already and is not theirs stays."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bytefloor.cli import app
from tiny import build_tiny

TEXT = "once upon a time " * 40


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny("llama-tied", tmp_path_factory.mktemp("tiny")).directory


VERBS = {
    "bench": ("bench", "-p", "2", "-n", "2", "-r", "1", "--save"),
    "verify": ("verify", "-p", "x", "--ops", "0..1", "--save"),
    "perplexity": ("perplexity", "-c", "32", "--chunks", "1", "--save"),
    "a base": ("perplexity", "-c", "32", "--chunks", "1", "--save-base"),
}


@pytest.mark.parametrize("verb", VERBS)
def test_a_model_is_not_overwritten_with_results(verb: str, model: Path, tmp_path: Path) -> None:
    taken = tmp_path / "model.gguf"
    taken.write_bytes(b"GGUF and seven gigabytes")
    result = CliRunner().invoke(app, [*VERBS[verb], str(taken), "-m", str(model)], input=TEXT)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "model.gguf: there is something else than" in result.stderr
    assert taken.read_bytes() == b"GGUF and seven gigabytes"


@pytest.mark.parametrize("verb", VERBS)
def test_earlier_results_are_replaced_when_there_are_new_ones(verb: str, model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = [*VERBS[verb], str(out), "-m", str(model)]
    assert CliRunner().invoke(app, command, input=TEXT).exit_code == 0
    first = out.read_bytes()
    assert CliRunner().invoke(app, command, input=TEXT).exit_code == 0
    second = out.read_bytes()
    assert second[:1] == first[:1]
    if verb != "a base":
        assert len(json.loads(second)) == len(json.loads(first)) > 0
    command[-1] = str(tmp_path / "nothing")
    assert CliRunner().invoke(app, command, input=TEXT).exit_code == 2
    assert out.read_bytes() == second


def test_what_is_no_file_is_not_replaced_by_one(model: Path, tmp_path: Path) -> None:
    """A base is moved to its place when it is whole: a device would be gone."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    result = CliRunner().invoke(app, [*VERBS["a base"], str(pipe), "-m", str(model)], input=TEXT)
    assert result.exit_code == 2
    assert pipe.is_fifo()


def full(model: Path, *words: str, n_bytes: int) -> str:
    """What a verb says whose files may not be longer."""
    done = subprocess.run(
        [sys.executable, "-m", "bytefloor.cli", *words, "-m", model],
        input=TEXT.encode(),
        capture_output=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, n_bytes)),
        timeout=120,
    )
    assert done.returncode == 2, done.stderr
    return done.stderr.decode().splitlines()[-1]


@pytest.mark.parametrize("verb", VERBS)
def test_a_disk_that_is_full_is_told_and_keeps_what_was_there(verb: str, model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert CliRunner().invoke(app, [*VERBS[verb], str(out), "-m", str(model)], input=TEXT).exit_code == 0
    before = out.read_bytes()
    said = full(model, *VERBS[verb], str(out), n_bytes=150)
    assert said == f"bytefloor: error: {out}: cannot be written: File too large"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert out.read_bytes() == before


@pytest.mark.parametrize(("name", "out"), [("Q8_0", "out.gguf"), ("affine-8b", "out")])
def test_a_model_that_no_disk_holds_leaves_nothing(name: str, out: str, model: Path, tmp_path: Path) -> None:
    said = full(model, "quantize", "-f", name, str(tmp_path / out), n_bytes=300_000)
    assert said == f"bytefloor: error: {tmp_path / out}: cannot be written: File too large"
    assert list(tmp_path.iterdir()) == []
