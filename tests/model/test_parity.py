"""Every family variant, tiny and random, against transformers in float32: logits within 1e-4.

The prompt is longer than every window. From safetensors as Hugging Face writes them and from GGUF as its converter
does; in one piece, in chunks, and token by token.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from parity import assert_close, logits_of
from tiny import TINY_NAMES, TinyModel, build_tiny, prompt_ids, reference_logits
from tiny_gguf import can_be_gguf, write_tiny_gguf


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], TinyModel]:
    root = tmp_path_factory.mktemp("tiny")
    made: dict[str, TinyModel] = {}

    def get(name: str) -> TinyModel:
        if name not in made:
            made[name] = build_tiny(name, root)
        return made[name]

    return get


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
