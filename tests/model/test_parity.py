"""Every family variant, tiny and random, against transformers in float32: logits within 1e-4.

The prompt is longer than every window. From safetensors as Hugging Face writes them and from GGUF as its converter
does; in one piece, in chunks, and token by token.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from bytefloor.engine.cache import CachePlan
from bytefloor.engine.reference import ReferenceExecutor
from bytefloor.engine.score import score_chunks
from bytefloor.files.checkpoint import open_checkpoint
from bytefloor.model.config import Rounding
from bytefloor.model.decoder import build_step
from bytefloor.model.families import load_model
from tests.tiny import TINY_NAMES, TinyModel, build_tiny, prompt_ids, reference_logits
from tests.tiny_gguf import can_be_gguf, write_tiny_gguf

TOLERANCE = 1e-4
PAGE = 4


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], TinyModel]:
    root = tmp_path_factory.mktemp("tiny")
    made: dict[str, TinyModel] = {}

    def get(name: str) -> TinyModel:
        if name not in made:
            made[name] = build_tiny(name, root)
        return made[name]

    return get


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


@pytest.mark.parametrize("name", TINY_NAMES)
def test_safetensors_logits_equal_transformers(name: str, tiny: Callable[[str], TinyModel]) -> None:
    """R01-R08, N01, S02, S03: every special of every family, in one pass and however the prompt is cut."""
    model, ids = tiny(name), prompt_ids()
    expected = reference_logits(model, ids)
    for chunk in (64, 1, 3):
        assert_close(logits_of(model.directory, ids, chunk), expected)


@pytest.mark.parametrize("name", TINY_NAMES)
def test_gguf_logits_equal_transformers(name: str, tiny: Callable[[str], TinyModel], tmp_path: Path) -> None:
    """R05, R06: norms that hold the +1 and permuted q and k rows give the same model."""
    model, ids = tiny(name), prompt_ids()
    if not can_be_gguf(model):
        pytest.skip("no GGUF form of this variant")
    path = write_tiny_gguf(model, tmp_path / "model.gguf")
    expected = reference_logits(model, ids)
    for chunk in (64, 7):
        assert_close(logits_of(path, ids, chunk), expected)
