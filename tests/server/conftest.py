"""Servers that several tests ask."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bytefloor.engine.loading import EngineOptions, Opened, open_engine
from server.live import Live, Scripted, chatty, live, scripted
from text.small_chats import QWEN3_TEMPLATE
from tools.test_conversation import TEMPLATE


@pytest.fixture(scope="package")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sliding and global layers, a padded vocabulary."""
    return chatty(tmp_path_factory.mktemp("serve"), "gemma4-unified", TEMPLATE)


@pytest.fixture(scope="package")
def opened(directory: Path) -> Opened:
    """For tests that ask the engine itself, or replace it."""
    return open_engine(directory, EngineOptions(context=128))


@pytest.fixture(scope="package")
def server(directory: Path) -> Iterator[Live]:
    """The tiny model, six at once."""
    with live(open_engine(directory, EngineOptions(context=128, n_sequences=6, chunk=32))) as running:
        yield running


@pytest.fixture
def stage(opened: Opened) -> Iterator[tuple[Live, Scripted]]:
    """A server with an executor that follows a script, two at once."""
    engine, executor = scripted(opened)
    with live(engine) as running:
        yield running, executor
        executor.gate.set()


@pytest.fixture(scope="package")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A template with tools and thoughts."""
    return chatty(tmp_path_factory.mktemp("qwen"), "qwen3", QWEN3_TEMPLATE)


@pytest.fixture
def caller(qwen: Path) -> Iterator[tuple[Live, Scripted]]:
    """The same as `stage`, with that template."""
    engine, executor = scripted(open_engine(qwen, EngineOptions(context=64)), capacity=2048)
    with live(engine) as running:
        yield running, executor
        executor.gate.set()
