"""Checkpoints of tiny models, each written once for all the cases."""

from __future__ import annotations

from functools import cache

import pytest
from checkpoints import Open

from bytefloor.files.checkpoint import open_checkpoint
from bytefloor.files.stored import Checkpoint
from tiny import build_tiny
from tiny_gguf import write_tiny_gguf


@pytest.fixture(scope="session")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Open:
    """A tiny model's checkpoint by name and container, written once."""
    root = tmp_path_factory.mktemp("tiny")

    @cache
    def get(name: str, container: str) -> Checkpoint:
        model = build_tiny(name, root)
        if container == "safetensors":
            return open_checkpoint(model.directory)
        return open_checkpoint(write_tiny_gguf(model, root / f"{name}.gguf"))

    return get
