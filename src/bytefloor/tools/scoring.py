"""Windows through a model: log-probabilities of what counts, and beside them those of a base."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from rich.console import Console
from torch import Tensor

from bytefloor.engine.cache import Room
from bytefloor.engine.executor import Executor
from bytefloor.engine.loading import make_executor, open_tokenizer
from bytefloor.engine.memory import Advice
from bytefloor.engine.score import check_not_uniform, find_not_finite, score_rows, steps_of
from bytefloor.errors import NumericalError
from bytefloor.files.checkpoint import open_checkpoint
from bytefloor.model.families import Model, load_model
from bytefloor.text.chat import ChatTemplate
from bytefloor.text.tokenizer import Tokenizer
from bytefloor.tools.divergence import Rows, Values, compared, joined
from bytefloor.tools.models import find_model
from bytefloor.tools.saved_base import BaseReader, BaseRows, BaseWriter
from bytefloor.tools.session import OpeningBar
from bytefloor.tools.windows import Window, Windows

LOGITS_BYTES = 256 << 20
"""Logits of one step at most: of 262,144 tokens those are 256 rows."""
BLOCK = 64
"""Rows whose probabilities are worked out at once, in float64: those of 262,144 tokens take 128 MB a tensor."""
Show = Callable[[int, int, float], None]
"""Is told of each window its number, how many there are, and the perplexity up to it."""


@dataclass(frozen=True)
class Source:
    """A model before any weight is read. name: of its file."""

    name: str
    model: Model
    tokenizer: Tokenizer
    notices: tuple[str, ...]

    @property
    def n_vocabulary(self) -> int:
        """Rows of the vocabulary, padding included."""
        return self.model.config.vocabulary_size

    @property
    def bos_id(self) -> int | None:
        """What texts begin with; None for a model that wants none."""
        return self.tokenizer.bos_id if self.tokenizer.add_bos else None

    def template(self) -> ChatTemplate:
        """The file's, or a built-in one for its turn tokens. RequestError where there are none either."""
        config = self.model.config
        return ChatTemplate.for_tokenizer(self.tokenizer, config.family, bare_model_turn=config.per_layer_width > 0)


def open_source(name: str | None) -> Source:
    """A path, a pulled name, or None for the demo model."""
    path = find_model(name)
    checkpoint = open_checkpoint(path)
    tokenizer = open_tokenizer(checkpoint)
    return Source(path.name, load_model(checkpoint), tokenizer, (*checkpoint.notices, *tokenizer.notices))


@dataclass(frozen=True)
class Block:
    """Consecutive predictions: log-probabilities, float64 [n, V], and the right tokens, int64 [n]."""

    log_p: Tensor
    targets: Tensor

    def nll(self) -> Tensor:
        """Of the right tokens, nats, float64 [n]."""
        return -self.log_p.gather(1, self.targets[:, None])[:, 0]


class Runner:
    """A model with its weights, ready to score windows. advice: ends the error where memory does not do. kv, budget: as
    in ``EngineOptions``; what goes before the first token that counts is a window's prompt."""

    def __init__(
        self,
        source: Source,
        windows: Windows,
        device: torch.device,
        advice: str,
        kv: str | None = None,
        budget: int | None = None,
    ) -> None:
        self.source = source
        opening = OpeningBar(Console(stderr=True, highlight=False), source.name)
        room = Room(max(2, *(len(window.ids) for window in windows)), n_snapshots=0, budget=budget)
        told = Advice(advice, advice)
        with opening.bar:
            executor, notices = make_executor(source.model, room, device, progress=opening, advice=told, kv=kv)
        self.executor: Executor = executor
        self.notices = (*source.notices, *notices)
        for notice in self.notices:
            opening.note(notice)
        self._is_checked = False

    @property
    def kv(self) -> str:
        """What the cache keeps."""
        return self.executor.step.storage

    @property
    def budget(self) -> int | None:
        """Positions that a prompt keeps in layers without a window."""
        return self.executor.plan.budget

    @property
    def chunk(self) -> int:
        """Rows of a step."""
        return max(1, min(self.executor.plan.chunk, LOGITS_BYTES // (4 * self.source.n_vocabulary)))

    def score(self, window: Window, steps: Sequence[range]) -> Iterator[Block]:
        """BLOCK predictions at a time, fewer at the end of a step."""
        ids, rows = window.ids[: window.targets[-1]], [target - 1 for target in window.targets]
        for found, logits in score_rows(self.executor, ids, steps, rows, n_prompt=window.targets[0]):
            self._check(window, found, logits)
            for start in range(0, len(found), BLOCK):
                right = [window.ids[row + 1] for row in found[start : start + BLOCK]]
                log_p = logits[start : start + BLOCK].double().log_softmax(-1)
                yield Block(log_p, torch.tensor(right, device=logits.device))

    def blocks(self, window: Window, steps: Sequence[range]) -> Iterator[BaseRows]:
        """The same, as a base says it."""
        for block in self.score(window, steps):
            yield BaseRows(block.log_p, block.nll(), block.log_p.argmax(-1))

    def _check(self, window: Window, rows: Sequence[int], logits: Tensor) -> None:
        bad = find_not_finite(logits)
        if bad is not None:
            position = rows[bad[0]]
            token, tokenizer = window.ids[position], self.source.tokenizer
            shown = tokenizer.token_text(token) if token < tokenizer.n_tokens else ""
            raise NumericalError(
                f"{self.source.name}: {window.name}, position {position}, token {token} {shown!r}: "
                f"the logits hold {bad[1]}, expected finite numbers"
            )
        if not self._is_checked:
            check_not_uniform(logits)
            self._is_checked = True


class Base(Protocol):
    """Whom a model is compared with."""

    def blocks(self, window: Window, steps: Sequence[range]) -> Iterator[BaseRows]:
        """What it says of a window, in the blocks in which a model is scored."""
        ...


class SavedBase:
    """A saved one. Its windows come in the order in which they were written, each once."""

    def __init__(self, reader: BaseReader, device: torch.device) -> None:
        self._reader, self._device = reader, device

    def blocks(self, window: Window, steps: Sequence[range]) -> Iterator[BaseRows]:
        """Read as they are asked for."""
        for step in steps:
            # The row before a target predicts it.
            first, end = (bisect_left(window.targets, at + 1) for at in (step.start, step.stop))
            for at in range(first, end, BLOCK):
                yield self._reader.read(min(BLOCK, end - at), self._device)


@dataclass(frozen=True)
class Scores:
    """nll: of all targets in order, nats. running: perplexity after each window. rows: beside a base's, or None."""

    nll: Values
    running: tuple[float, ...]
    rows: Rows | None


def score(
    runner: Runner,
    windows: Windows,
    chunk: int,
    base: Base | None = None,
    writer: BaseWriter | None = None,
    show: Show | None = None,
) -> Scores:
    """All windows, so many rows a step. NumericalError where logits are not finite."""
    nll: list[float] = []
    running: list[float] = []
    parts: list[Rows] = []
    total = 0.0
    for number, window in enumerate(windows, 1):
        # Rows are those of the same steps in both, since their number moves the last bits of sums.
        steps = steps_of(window.targets[-1], chunk, window.targets[0] if runner.budget is not None else 0)
        before, said = len(nll), base.blocks(window, steps) if base is not None else None
        for block in runner.score(window, steps):
            if said is not None:
                expected = next(said)
                parts.append(compared(expected.log_p, expected.best, expected.nll, block.log_p, block.targets))
            if writer is not None:
                writer.add(block.log_p, block.targets)
            nll += block.nll().tolist()
        total += sum(nll[before:])
        running.append(math.exp(total / len(nll)))
        if show is not None:
            show(number, len(windows), running[-1])
    return Scores(np.array(nll), tuple(running), joined(parts) if parts else None)
