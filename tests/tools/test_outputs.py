"""Files that verbs write: what is there already and is not theirs stays."""

from __future__ import annotations

import json
import os
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
