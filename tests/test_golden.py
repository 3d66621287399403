"""Four trained checkpoints against values that another implementation computed in float32."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bytefloor.engine.cache import CachePlan
from bytefloor.engine.loading import open_tokenizer
from bytefloor.engine.reference import ReferenceExecutor
from bytefloor.engine.score import score_chunks
from bytefloor.files.checkpoint import open_checkpoint
from bytefloor.model.config import Rounding
from bytefloor.model.decoder import build_step
from bytefloor.model.families import load_model

NAMES = ("smollm2-135m-instruct-q4_1", "gemma-3-270m-q4_k_m", "gemma4-tiny", "gemma4-tiny-e")
CHUNK = 512
LOG_PROBABILITY_BOUND = 1e-3
MARGIN = 0.01
"""Where the best two logits lie closer than this, rounding may decide between them."""


class Checkpoint:
    """A trained checkpoint, opened once, and its recorded values."""

    def __init__(self, path: Path, golden: Path) -> None:
        checkpoint = open_checkpoint(path)
        model = load_model(checkpoint)
        step = build_step(model.config, model.weights, Rounding())
        self.tokenizer = open_tokenizer(checkpoint)
        self.executor = ReferenceExecutor(step, CachePlan(capacity=2304, chunk=CHUNK))
        self.prompts: list[dict[str, Any]] = json.loads(golden.read_text())["prompts"]


@pytest.fixture(scope="module", params=NAMES)
def checkpoint(request: pytest.FixtureRequest, shared_dir: Path) -> Checkpoint:
    fixture = {"smollm2-135m-instruct-q4_1": "smollm2_path", "gemma-3-270m-q4_k_m": "gemma3_270m_path"}.get(
        request.param
    )
    path = request.getfixturevalue(fixture) if fixture else shared_dir / "models" / request.param
    return Checkpoint(path, shared_dir / "golden" / f"{request.param}.json")


def test_token_ids_equal_the_recorded_ones(checkpoint: Checkpoint) -> None:
    for prompt in checkpoint.prompts:
        assert checkpoint.tokenizer.encode(prompt["text"]) == prompt["ids"]


def test_probabilities_and_greedy_tokens_equal_the_recorded_ones(checkpoint: Checkpoint) -> None:
    """Likelihood of every token, the 20 likeliest next tokens, and 32 greedy tokens, each forced in turn.

    The last prompt has about 2,000 tokens and crosses every window several times.
    """
    for prompt in checkpoint.prompts:
        ids, greedy = prompt["ids"], prompt["greedy"]
        targets = torch.tensor([*ids[1:], *greedy])
        best, found = [], []
        position = 0
        for logits in score_chunks(checkpoint.executor, [*ids, *greedy], CHUNK):
            log_probabilities = logits.double().log_softmax(-1)
            rows = targets[position : position + len(logits)]
            found.append(log_probabilities[: len(rows)].gather(1, rows[:, None])[:, 0])
            best += logits.argmax(-1).tolist()
            if position <= len(ids) - 1 < position + len(logits):
                check_last_row(log_probabilities[len(ids) - 1 - position], prompt)
            position += len(logits)
        nll = -torch.cat(found)[: len(ids) - 1]
        expected = torch.tensor(prompt["nll_per_token"], dtype=torch.float64)
        assert (nll - expected).abs().max().item() < LOG_PROBABILITY_BOUND
        for chosen, recorded, margin in zip(best[len(ids) - 1 :], greedy, prompt["top2_margin"], strict=False):
            assert chosen == recorded or margin <= MARGIN


def check_last_row(log_probabilities: torch.Tensor, prompt: dict[str, Any]) -> None:
    found = log_probabilities[prompt["last_top20_ids"]]
    expected = torch.tensor(prompt["last_top20_logprobs"], dtype=torch.float64)
    assert (found - expected).abs().max().item() < LOG_PROBABILITY_BOUND
