"""What opening a model shows: a bar that says what it is doing, and notes of one line."""

from __future__ import annotations

import io

from rich.console import Console

from bytefloor.engine.progress import COMPILING, LOADING
from bytefloor.tools.session import OpeningBar


def opening(is_terminal: bool) -> tuple[OpeningBar, io.StringIO]:
    said = io.StringIO()
    return OpeningBar(Console(file=said, width=60, force_terminal=is_terminal, highlight=False), "[m].gguf"), said


def test_the_bar_says_what_is_under_way_and_goes() -> None:
    bar, said = opening(is_terminal=True)
    with bar.bar:
        bar.bar.refresh()
        bar.advance(COMPILING, 12, 40)
        bar.bar.refresh()
        bar.advance(LOADING, 1_250_000_000, 7_520_000_000)
        bar.bar.refresh()
    shown = said.getvalue()
    places = [shown.index(text) for text in ("opening [m].gguf", "compiling kernels 12/40", "loading 1.25/7.52 GB")]
    assert places == sorted(places)
    assert shown.endswith("\x1b[2K")


def test_a_note_is_one_line_and_the_bar_is_for_terminals() -> None:
    bar, said = opening(is_terminal=False)
    line = "weights 7.52 GB, cache 1.23 GB (8192 positions), scratch 0.61 GB: 9.36 of 150.10 GB [bold]"
    with bar.bar:
        bar.advance(COMPILING, 12, 40)
        bar.note(line)
    assert said.getvalue().strip("\n") == f"note: {line}"
