"""What ``inspect`` counts, against numbers counted by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from bytefloor.errors import RequestError
from bytefloor.files.checkpoint import open_checkpoint
from bytefloor.tools.inspect import Report, inspect, shorten
from bytefloor.tools.inspect_view import print_json, print_report
from files.container_bytes import TYPE_F32, entry, gguf_bytes, string
from tiny import TinyModel, build_tiny, own_tensors

F32, BF16 = 4, 2


def report_of(tiny: TinyModel, context: int | None) -> Report:
    return inspect(open_checkpoint(tiny.directory), context)


def stored_bytes(tiny: TinyModel) -> int:
    return sum(tensor.numel() * F32 for tensor in own_tensors(tiny.reference).values())


def test_one_row_of_an_embedding_is_read_and_all_else(tmp_path: Path) -> None:
    """Llama with a head of its own: 3 layers, 4 KV heads of 16, width 128, 283 tokens."""
    tiny = build_tiny("llama", tmp_path)
    report = report_of(tiny, 100)
    cache = 3 * 100 * 2 * 4 * 16 * BF16
    assert report.weight_bytes == stored_bytes(tiny)
    assert report.per_layer_bytes == 0
    assert report.cache_bytes == cache
    # The embedding's rows are gathered from the file.
    assert report.reference_bytes == stored_bytes(tiny) - 283 * 128 * F32 + cache * F32 // BF16
    assert report.token_bytes == stored_bytes(tiny) - (283 - 1) * 128 * F32 + cache


@pytest.mark.parametrize(("context", "in_window"), [(5, 5), (8, 8), (100, 8)])
def test_a_window_bounds_what_sliding_layers_read(tmp_path: Path, context: int, in_window: int) -> None:
    """Gemma 4 E: 5 sliding layers read K and V of 3, 3 full ones those of 2; one row of the per-layer embedding."""
    tiny = build_tiny("gemma4-e", tmp_path)
    report = report_of(tiny, context)
    sliding, full = 2 * 2 * 16 * BF16, 2 * 2 * 32 * BF16  # bytes of K and V at one position of one layer
    per_layer_rows, tied_row = (283 - 1) * 8 * 32 * F32, 128 * F32
    assert report.cache_bytes == 3 * sliding * in_window + 2 * full * context
    read = 5 * sliding * in_window + 3 * full * context
    assert report.token_bytes == stored_bytes(tiny) - per_layer_rows + tied_row + read
    assert report.per_layer_bytes == report.to_json(50)["per_layer_bytes"] == 283 * 8 * 32 * F32


@pytest.mark.parametrize(("name", "is_told"), [("gemma4-e", True), ("llama", False)])
def test_a_table_that_may_lie_in_host_memory_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, is_told: bool
) -> None:
    print_report(report_of(build_tiny(name, tmp_path), 100), 50, lists_tensors=False)
    words = "per-layer embeddings  0.00 GB of the weights, in pinned host memory where the device has no room for them"
    assert (" ".join(words.split()) in " ".join(capsys.readouterr().out.split())) == is_told


def test_the_floor_is_bandwidth_over_bytes(tmp_path: Path) -> None:
    report = report_of(build_tiny("llama-tied", tmp_path), 100)
    assert report.token_bytes is not None
    assert report.floor_tok_s(50) == pytest.approx(50e9 / report.token_bytes)
    body = report.to_json(50)
    assert body["floor_tok_s"] == report.floor_tok_s(50)
    assert body["bits_per_weight"] == 32
    assert [row["name"] for row in body["formats"]] == ["F32"]


def test_context_follows_the_rules_of_run(tmp_path: Path) -> None:
    tiny = build_tiny("gemma4-e", tmp_path)
    assert report_of(tiny, None).context == 512
    for context in (-5, 0, 513):
        with pytest.raises(RequestError, match=f"context {context} is out of range"):
            report_of(tiny, context)


@pytest.mark.parametrize(
    ("architecture", "kind", "refusal"), [("frob[bold]", TYPE_F32, "frob[bold]"), ("llama", 16, "")]
)
def test_what_cannot_be_run_is_listed_all_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], architecture: str, kind: int, refusal: str
) -> None:
    """An architecture nobody knows; a tensor type (IQ2_XXS) that is known by name only."""
    path = tmp_path / "odd.gguf"
    pairs = [string("general.architecture", architecture), string("general.name", b"caf\xe9 [bold]")]
    path.write_bytes(gguf_bytes(pairs, [entry("token_embd.weight", (256, 2), kind, 0)], bytes(2048)))
    report = inspect(open_checkpoint(path), 64)
    assert report.refusal is not None
    assert refusal in report.refusal
    assert report.token_bytes is None
    assert report.floor_tok_s(1000) is None
    print_report(report, 1000, True)
    text = capsys.readouterr().out
    assert f"cannot be run: {report.refusal}" in " ".join(text.split())
    assert "token_embd.weight" in text
    assert "caf\\udce9 [bold]" in text
    print_json(report, 1000)
    assert json.loads(capsys.readouterr().out)["refusal"] == report.refusal


def test_long_values_are_cut_and_say_so() -> None:
    assert shorten("x" * 100) == "x" * 60 + "... (100 characters)"
    assert shorten([1, 2, 3, 4]) == [1, 2, 3, 4]
    assert shorten(list(range(9))) == "[0, 1, 2] ... (9 values)"
    assert shorten(torch.arange(3).tolist()) == [0, 1, 2]
