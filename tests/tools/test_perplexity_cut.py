"""perplexity of a model whose prompts are cut: against the emulation, and beside bases of both kinds."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from bytefloor.cli import app
from bytefloor.errors import RequestError
from bytefloor.model.config import Rounding
from bytefloor.model.decoder import build_step
from bytefloor.tools.perplexity import PerplexityOptions, measure
from bytefloor.tools.perplexity_view import lines_of
from bytefloor.tools.scoring import open_source
from bytefloor.tools.tables import make_quality_table
from bytefloor.tools.windows import cut_with_stride
from cut_prompts import Emulation
from tiny import build_tiny

TEXT = "The quick brown fox jumps over the lazy dog, again and again, in the rain. " * 2
BUDGET, CONTEXT, STRIDE = 40, 80, 12
CUT = PerplexityOptions(context=CONTEXT, stride=STRIDE, n_windows=2, kv_budget=BUDGET, device="cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(build_tiny("qwen3", tmp_path_factory.mktemp("tiny")).directory)


@pytest.fixture(scope="module")
def expected(model: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities [n, V] of all predictions, after the cut and without."""
    source = open_source(model)
    ids = source.tokenizer.encode(TEXT)
    step = build_step(source.model.config, source.model.weights, Rounding())
    windows = list(cut_with_stride(ids, CONTEXT, STRIDE, source.bos_id))[:2]
    found = []
    for budget in (BUDGET, None):
        logits = [Emulation(step, list(w.ids), CONTEXT - STRIDE, budget).logits() for w in windows]
        found.append(torch.cat([each[CONTEXT - STRIDE - 1 : -1].log_softmax(-1) for each in logits]))
    return found[0], found[1]


@pytest.mark.parametrize("by", ["chunk", "token"])
def test_the_divergence_is_that_of_the_mask_from_all(
    model: str, expected: tuple[torch.Tensor, torch.Tensor], by: str
) -> None:
    cut, whole = expected
    row = measure(model, TEXT, replace(CUT, by=by, base=model))
    assert row.kv_budget == BUDGET
    assert row.divergence is not None
    by_hand = (whole.exp() * (whole - cut)).sum(-1)
    assert row.n_predictions == len(by_hand) == 2 * STRIDE
    assert row.divergence.kl.value == pytest.approx(float(by_hand.mean()), rel=1e-3)
    assert row.divergence.kl_largest == pytest.approx(float(by_hand.max()), rel=1e-3)
    assert by_hand[[0, STRIDE]].max() < 1e-9  # the prompt's last row has seen all of it
    assert by_hand.mean() > 1e-4


def test_a_saved_base_tells_the_same(model: str, tmp_path: Path) -> None:
    beside = measure(model, TEXT, replace(CUT, base=model)).divergence
    saved = tmp_path / "base"
    measure(model, TEXT, replace(CUT, kv_budget=None, save_base=saved))
    found = measure(model, TEXT, replace(CUT, base=str(saved))).divergence
    assert beside is not None
    assert found is not None
    assert found.kl.value == pytest.approx(beside.kl.value, rel=1e-3)


def test_a_budget_that_cuts_nothing_and_conversations_are_refused(model: str) -> None:
    with pytest.raises(RequestError, match="--kv-budget 68: windows have 68 tokens before the first that counts"):
        measure(model, TEXT, replace(CUT, kv_budget=CONTEXT - STRIDE))
    with pytest.raises(RequestError, match="--kv-budget says nothing to --chat"):
        measure(model, TEXT, PerplexityOptions(is_chat=True, kv_budget=BUDGET))
    with pytest.raises(RequestError, match="--kv-budget 32: expected more than 32"):
        measure(model, TEXT, replace(CUT, kv_budget=32))


def test_the_command_says_what_was_kept(model: str, tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text(TEXT)
    asked = [
        "perplexity",
        "-m",
        model,
        "-f",
        str(text),
        "-c",
        "80",
        "--stride",
        "12",
        "--kv-budget",
        "40",
        "--device",
        "cpu",
    ]
    result = CliRunner().invoke(app, [*asked, "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["kv_budget"] == BUDGET
    assert "a prompt has 40 of them once it is read" in result.stderr
    row = measure(model, TEXT, CUT)
    assert "cache float32, of which 40 positions of what goes before are kept" in lines_of(row)[1]


def test_tables_tell_cut_prompts_from_whole_ones(model: str) -> None:
    rows = [json.loads(json.dumps(asdict(measure(model, TEXT, replace(CUT, kv_budget=n))))) for n in (None, BUDGET)]
    lines = make_quality_table(rows).splitlines()
    assert len(lines) == 4
    assert "| float32, prompts cut to 40 |" in lines[3]
