"""Logits of a checkpoint through the reference executor, for comparison with another implementation."""

from __future__ import annotations

from pathlib import Path

import torch

from bytefloor.engine.cache import CachePlan
from bytefloor.engine.reference import ReferenceExecutor
from bytefloor.engine.score import score_chunks
from bytefloor.files.checkpoint import open_checkpoint
from bytefloor.model.config import Rounding
from bytefloor.model.decoder import build_step
from bytefloor.model.families import load_model

TOLERANCE = 1e-4
PAGE = 4


def logits_of(path: Path, ids: list[int], chunk: int) -> torch.Tensor:
    model = load_model(open_checkpoint(path))
    step = build_step(model.config, model.weights, Rounding())
    plan = CachePlan(capacity=64, chunk=chunk, page_size=PAGE)
    executor = ReferenceExecutor(step, plan)
    executor.poison()
    return torch.cat(list(score_chunks(executor, ids, chunk)))


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    worst = (found - expected).abs().max().item()
    # Logits of the overflow variant are large; the bound is absolute where they are of ordinary size.
    bound = TOLERANCE * max(1.0, expected.abs().max().item() / 30)
    assert worst < bound, f"logits differ by {worst:.2e}, bound {bound:.0e}"
