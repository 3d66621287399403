"""The command: what it prints, what it refuses, and that a dry run writes nothing."""

from __future__ import annotations

import json
import re

import pytest

from bytefloor.cli import main
from bytefloor.files.checkpoint import open_checkpoint
from tiny import build_tiny


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return build_tiny("llama-wide", tmp_path_factory.mktemp("tiny")).directory


@pytest.fixture
def run(monkeypatch, capsys):
    def call(*arguments):
        monkeypatch.setattr("sys.argv", ["bytefloor", "quantize", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            main()
        out, err = capsys.readouterr()
        return caught.value.code or 0, out, err

    return call


def test_dry_run_prints_the_plan_and_writes_nothing(run, source, tmp_path):
    status, out, _ = run("-m", source, "-f", "Q4_K_M", "--dry-run", tmp_path / "out.gguf")
    assert status == 0
    assert "blk.0.ffn_down.weight" in out
    assert "bits per weight" in out
    assert not list(tmp_path.iterdir())


def test_a_plan_needs_no_name_and_a_file_does(run, source, tmp_path):
    status, out, _ = run("-m", source, "-f", "Q4_K_M", "--dry-run", "--json")
    assert status == 0
    assert json.loads(out)["out"] is None
    status, out, err = run("-m", source, "-f", "Q4_K_M")
    assert (status, out) == (2, "")
    assert "what to write is missing: expected FILE.gguf or a directory's name, or --dry-run" in err
    status, _, err = run("-m", source, "-f", "Q4_K_M", "--dry-run", tmp_path / "out")
    assert status == 2
    assert "expected a name that ends in .gguf" in err


def test_a_source_that_has_lost_something_and_a_file_that_is_no_smaller_are_told(run, source, tmp_path):
    assert "note: " not in run("-m", source, "-f", "q8_0", tmp_path / "q8.gguf")[1]
    _, out, _ = run("-m", tmp_path / "q8.gguf", "-f", "affine-8b", "--target-group-size", "32", "--dry-run")
    assert "note: the source is quantised itself (Q8_0): losses are against it, not the original" in out
    assert "note: what is written is no smaller: " in out
    _, out, _ = run("-m", tmp_path / "q8.gguf", "-f", "Q4_0", "--dry-run")
    assert "no smaller" not in out


def test_written_file_is_reported_with_its_losses(run, source, tmp_path):
    status, out, _ = run("-m", source, "-f", "Q8_0", "--match", "*attn_v*=Q6_K", tmp_path / "out.gguf")
    assert status == 0
    assert "relative error" in out
    assert "written:" in out
    assert open_checkpoint(tmp_path / "out.gguf").tensors["blk.1.attn_v.weight"].format_name == "Q6_K"


def test_json_holds_plan_substitutions_and_losses(run, source, tmp_path):
    status, out, _ = run("-m", source, "-f", "affine-4b", "--target-group-size", "128", "--json", tmp_path / "out")
    found = json.loads(out)
    assert status == 0
    assert found["substitutions"] == []
    assert 4.2 < found["bits_per_weight"] < 4.5
    rows = {row["name"]: row for row in found["tensors"]}
    assert rows["model.layers.0.mlp.up_proj.weight"]["format"] == "affine-4b-g128"
    assert 0.02 < rows["model.layers.0.mlp.up_proj.weight"]["error"] < 0.2
    matrices = [row["error"] for row in found["tensors"] if row["format"] == "affine-4b-g128"]
    assert min(matrices) < found["error"] < max(matrices)
    assert found["n_bytes"] == sum(row["n_bytes"] for row in found["tensors"])


def test_substitutions_are_printed_and_can_be_forbidden(run, tmp_path):
    narrow = build_tiny("llama", tmp_path / "tiny").directory
    status, out, _ = run("-m", narrow, "-f", "Q4_K_M", "--dry-run", tmp_path / "out.gguf")
    assert status == 0
    assert "substituted: blk.0.attn_q.weight: Q5_0 for Q4_K: 128 columns are no multiple of 256" in out
    _, out, _ = run("-m", narrow, "-f", "Q4_K_M", tmp_path / "written.gguf")
    assert "substituted: blk" not in out
    assert re.search(r"substituted: Q5_0 for Q4_K in \d+ of \d+ tensors, .*: 128 columns are no multiple of 256", out)
    status, _, err = run("-m", narrow, "-f", "Q4_K_M", "--no-fallback", tmp_path / "out.gguf")
    assert status == 2
    assert "128 columns are no multiple of 256, as Q4_K needs" in err
    assert not (tmp_path / "out.gguf").exists()


def test_calibration_text_changes_the_file(run, source, tmp_path):
    (tmp_path / "text").write_text("the other thing in an area is read on the train again and again")
    status, _, _ = run("-m", source, "-f", "Q2_K", "--calibrate", tmp_path / "text", tmp_path / "a.gguf")
    assert status == 0
    assert run("-m", source, "-f", "Q2_K", tmp_path / "b.gguf")[0] == 0
    a, b = ((tmp_path / name).read_bytes() for name in ("a.gguf", "b.gguf"))
    assert len(a) == len(b)
    assert a != b


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("-f", "Q4_K_X", "out.gguf"), "format Q4_K_X cannot be written"),
        (("-f", "q4_k_m", "--match", "*=AFFINE-4B", "out.gguf"), "a file of Q4_K_M cannot hold it"),
        (("-f", "Q4_K_M", "out"), "expected a name that ends in .gguf"),
        (("-f", "Q4_K_M", "--match", "nothing=Q8_0", "out.gguf"), "--match nothing: fits no matrix"),
        (("-f", "Q4_K_M", "--device", "tpu", "out.gguf"), "--device tpu: expected auto, cpu or cuda"),
        (("-f", "Q4_K_M", "--calibrate", "none.txt", "out.gguf"), "none.txt: No such file or directory"),
        (("out.gguf",), "Missing option"),
    ],
)
def test_refusals_are_one_line_and_status_2(arguments, words, run, source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, _, err = run("-m", source, *arguments)
    assert status == 2
    assert words in err
    assert len(err.strip().splitlines()) == 1
    assert not list(tmp_path.iterdir())
