"""How far a prompt has been read: what the engine says, what a terminal shows, and Ctrl-C meanwhile."""

from __future__ import annotations

import io
import re
import signal
import time
from pathlib import Path

import pytest
import torch
from rich.console import Console

from bytefloor.engine.engine import Engine
from bytefloor.engine.loading import EngineOptions, open_engine
from bytefloor.engine.request import Reading, Request
from bytefloor.engine.sampling_params import SamplingParams
from bytefloor.text.chat import ChatPrompt
from bytefloor.tools import reading as module
from bytefloor.tools.reading import ReadingBar
from bytefloor.tools.session import Answer, stream_answer
from tiny import build_tiny, prompt_ids

CPU = torch.device("cpu")
PROMPT = tuple(prompt_ids(35))
RAW = ChatPrompt("", [], is_thought_open=False, reasoning_tags=None, keep_special=frozenset())
GONE = "\x1b[2K"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny("qwen3", tmp_path_factory.mktemp("reading")).directory


@pytest.fixture
def engine(directory: Path) -> Engine:
    return open_engine(directory, EngineOptions(context=200, chunk=8, device="cpu")).engine


def ask(prompt: tuple[int, ...] = PROMPT, n_tokens: int = 2) -> Request:
    return Request(prompt, max_tokens=n_tokens, sampling=SamplingParams(temperature=0))


def terminal(is_one: bool = True) -> tuple[Console, io.StringIO]:
    said = io.StringIO()
    return Console(file=said, width=100, force_terminal=is_one, force_interactive=is_one, color_system=None), said


def shown(said: io.StringIO) -> list[str]:
    """What was said of the prompt, each once."""
    found = re.findall(r"reading the prompt \d+/\d+(?:, \d+ of them from the cache)?", said.getvalue())
    return list(dict.fromkeys(found))


def stream(engine: Engine, request: Request, console: Console, said: io.StringIO) -> Answer:
    return stream_answer(engine, request, RAW.splitter(), lambda channel, text: said.write(f"<{text}>"), console)


def test_the_engine_counts_rows_between_steps(engine: Engine) -> None:
    first = engine.add(ask())
    assert engine.reading(first) is None  # it has not begun
    seen = []
    while not engine.step():
        seen.append(engine.reading(first))
    assert seen == [Reading(n, 35, 0) for n in (8, 16, 24, 32)]
    assert engine.reading(first) is None
    engine.cancel(first)
    # The same beginning, and more: what is there already is done.
    second = engine.add(ask((*PROMPT, *prompt_ids(20))))
    assert engine.step() == []
    found = engine.reading(second)
    assert found is not None
    assert (found.n_prompt, found.n_done) == (55, found.n_cached + 8)
    assert found.n_cached >= 34
    engine.cancel(second)
    assert engine.reading(second) is None


def test_a_terminal_shows_it_and_takes_it_away_before_the_answer(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LOOK_S", 0.0)
    console, said = terminal()
    answer = stream(engine, ask(), console, said)
    assert shown(said) == [f"reading the prompt {n}/35" for n in (8, 16, 24, 32)]
    bar, text = said.getvalue().rsplit(GONE, 1)
    assert "<" not in bar
    assert text.replace("<", "").replace(">", "") == answer.text
    assert answer.finish.n_generated == 2
    again, said = terminal()
    stream(engine, ask((*PROMPT, *prompt_ids(30))), again, said)
    cached = re.search(r"(\d+)/65, (\d+) of them from the cache$", shown(said)[0])
    assert cached is not None
    assert int(cached[1]) == int(cached[2]) + 8


@pytest.mark.parametrize("is_terminal", [True, False])
def test_what_is_short_and_what_is_no_terminal_shows_nothing(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, is_terminal: bool
) -> None:
    monkeypatch.setattr(module, "LOOK_S", 0.0)
    console, said = terminal(is_terminal)
    answer = stream(engine, ask(PROMPT[:8] if is_terminal else PROMPT), console, said)
    assert said.getvalue().replace("<", "").replace(">", "") == answer.text


def test_nobody_is_asked_where_nobody_looks() -> None:
    bar = ReadingBar(terminal(False)[0], lambda: pytest.fail("asked"), CPU)
    with bar:
        bar.look()


def test_a_single_slow_step_is_shown_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "AFTER_S", 0.05)
    console, said = terminal()
    with ReadingBar(console, lambda: Reading(0, 512, 0), CPU):
        deadline = time.monotonic() + 20
        while not shown(said) and time.monotonic() < deadline:
            time.sleep(0.01)
    assert shown(said) == ["reading the prompt 0/512"]
    assert said.getvalue().endswith(GONE)


def test_a_bar_that_was_closed_does_not_come_back() -> None:
    console, said = terminal()
    bar = ReadingBar(console, lambda: Reading(8, 35, 0), CPU)
    with bar:
        bar.close()
        bar.look()
        bar._show()  # the timer, too late
    assert said.getvalue() == ""


def test_looks_at_a_device_are_some_time_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    clock = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])
    bar = ReadingBar(terminal()[0], lambda: Reading(8, 35, 0), torch.device("cuda"))
    for at in (0.01, 0.09, 0.11, 0.15, 0.22):
        clock[0] = at
        bar.look()
    bar.close()
    assert len(waited) == 2


@pytest.mark.parametrize("n_times", [1, 2])
def test_ctrl_c_while_a_prompt_is_read(engine: Engine, monkeypatch: pytest.MonkeyPatch, n_times: int) -> None:
    """One is heeded between two chunks and keeps what was read; a second does not wait."""
    monkeypatch.setattr(module, "LOOK_S", 0.0)
    console, said = terminal()
    run, n_chunks = engine.executor.run, []

    def pressed(batch):
        n_chunks.append(len(batch.tokens))
        if len(n_chunks) == 3:
            for _ in range(n_times):
                signal.raise_signal(signal.SIGINT)
        return run(batch)

    monkeypatch.setattr(engine.executor, "run", pressed)
    if n_times == 2:
        with pytest.raises(KeyboardInterrupt):
            stream(engine, ask(), console, said)
    else:
        answer = stream(engine, ask(), console, said)
        assert (answer.finish.reason, answer.finish.n_generated) == ("cancelled", 0)
    assert len(n_chunks) == 3
    assert said.getvalue().endswith(GONE)
    assert not engine.has_work
    monkeypatch.setattr(engine.executor, "run", run)
    assert stream(engine, ask(), *terminal()).finish.n_cached == (24 if n_times == 1 else 0)
