"""What ``run`` and ``chat`` share: opening a model with a progress bar, streaming an answer, the line at its end."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from bytefloor.engine.engine import Engine
from bytefloor.engine.loading import EngineOptions, Look, Opened, choose_device, open_engine
from bytefloor.engine.progress import LOADING
from bytefloor.engine.request import Delta, Finish, Request
from bytefloor.engine.sampler import Sampled
from bytefloor.engine.synthetic import is_synthetic, make_checkpoint, with_tokenizer
from bytefloor.errors import RequestError
from bytefloor.files.stored import Checkpoint
from bytefloor.text.reasoning import Channel, ReasoningSplitter
from bytefloor.tools import interrupt
from bytefloor.tools.models import find_model
from bytefloor.tools.reading import ReadingBar

Show = Callable[[Channel, str], None]


@dataclass(frozen=True)
class Answer:
    """A finished reply, thought and answer apart."""

    text: str
    reasoning: str
    ids: tuple[int, ...]
    sampled: tuple[Sampled, ...]
    finish: Finish


class OpeningBar:
    """How far opening a model has come: a bar on a terminal, which goes when all is done, and notes that stay."""

    def __init__(self, console: Console, name: str) -> None:
        self._console = console
        columns = (TextColumn("{task.description} {task.fields[amount]}", markup=False), BarColumn())
        self.bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self.bar.add_task("opening", total=None, amount=name)

    def note(self, line: str) -> None:
        """One line, however narrow the terminal is."""
        self._console.print(f"note: {line}", markup=False, soft_wrap=True)

    def advance(self, stage: str, done: int, total: int) -> None:
        """``loading 1.25/7.52 GB`` or ``compiling kernels 12/40``."""
        amount = f"{done / 1e9:.2f}/{total / 1e9:.2f} GB" if stage == LOADING else f"{done}/{total}"
        self.bar.update(self._task, description=stage, amount=amount, completed=done, total=total)


def open_with_progress(name: str | None, options: EngineOptions, look: Look | None = None) -> Opened:
    """Notices and the bar go to standard error, so that standard output is the answer alone. look: as `open_engine`."""
    source: Path | Checkpoint
    if is_synthetic(name):
        assert name is not None
        source, shown = with_tokenizer(make_checkpoint(name, choose_device(options.device))), name
    else:
        source = find_model(name)
        shown = source.name
    opening = OpeningBar(Console(stderr=True, highlight=False), shown)
    with opening.bar:
        opened = open_engine(source, options, opening, look)
    for notice in opened.notices:
        opening.note(notice)
    return opened


def count_tokens(n: int) -> int | None:
    """-n as a request has it: -1 is without limit."""
    if n == -1:
        return None
    if n < 1:
        raise RequestError(f"-n {n}: expected at least 1, or -1 for no limit")
    return n


def stream_answer(
    engine: Engine, request: Request, splitter: ReasoningSplitter, show: Show, console: Console | None = None
) -> Answer:
    """Serve a request, showing each piece as it comes. Ctrl-C ends the answer, not the program.

    It is heeded between two steps, which keeps what was computed; a second Ctrl-C does not wait for that.
    console: where the reading of a long prompt is shown, if that is a terminal; None: standard error.
    """
    texts: dict[Channel, list[str]] = {"content": [], "reasoning": []}
    sampled: list[Sampled] = []

    def take(pieces: Sequence[tuple[Channel, str]]) -> None:
        for channel, text in pieces:
            texts[channel].append(text)
            show(channel, text)

    console = console or Console(stderr=True, highlight=False)
    request_id = engine.add(request)
    finish: Finish | None = None
    try:
        with interrupt.between_steps() as is_pressed:
            with ReadingBar(console, lambda: engine.reading(request_id), engine.executor.device) as bar:
                while finish is None:
                    deltas = engine.step()
                    bar.look()
                    for delta in deltas:
                        finish = _take_delta(delta, sampled, splitter, take)
                    if is_pressed():
                        finish = finish or engine.cancel(request_id)
            take(splitter.finish())
    finally:
        engine.cancel(request_id)
    ids = tuple(each.id for each in sampled)
    return Answer("".join(texts["content"]), "".join(texts["reasoning"]), ids, tuple(sampled), finish)


def _take_delta(delta: Delta, sampled: list[Sampled], splitter: ReasoningSplitter, take: Callable) -> Finish | None:
    if delta.sampled is not None:
        sampled.append(delta.sampled)
    take(splitter.push(delta.text))
    return delta.finish


def summary(finish: Finish, opened: Opened) -> str:
    """One line: how it ended and how fast it was."""
    cached = f", {finish.n_cached} of them from the cache" if finish.n_cached else ""
    kept = f", cut to {finish.n_prompt - finish.n_dropped}" if finish.n_dropped else ""
    drafts = f", {finish.n_draft_accepted} of {finish.n_draft} drafts right" if finish.n_draft else ""
    return (
        f"[{finish.detail}] prompt {counted(finish.n_prompt)}{cached}{kept}{_at(finish.prompt_tok_s)}; "
        f"answer {counted(finish.n_generated)}{_at(finish.decode_tok_s)}{drafts}; "
        f"context {opened.engine.capacity}, cache {opened.kv}; {opened.device}; seed {finish.seed}"
    )


def counted(n: int) -> str:
    """Tokens."""
    return f"{n} token{'' if n == 1 else 's'}"


def _at(tok_s: float | None) -> str:
    return "" if tok_s is None else f": {tok_s:.1f} tok/s"


def as_text(read: bytes, source: str) -> str:
    """What was given as a prompt. Bytes that are no text are refused: the model would be asked something else."""
    try:
        return read.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"{source}: not UTF-8 text (byte {error.start} is 0x{read[error.start]:02x})") from None


def check_texts(**arguments: str | Sequence[str] | None) -> None:
    """RequestError for an argument that is no text, by its flag: its bytes would be replaced silently."""
    for name, given in arguments.items():
        for text in [given] if isinstance(given, str) else given or ():
            as_text(os.fsencode(text), f"--{name.replace('_', '-')}")


def write(text: str, stream: TextIO | None = None) -> None:
    """To standard output, at once."""
    stream = stream or sys.stdout
    stream.write(text)
    stream.flush()
