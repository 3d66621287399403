"""What Ctrl-C does besides raising KeyboardInterrupt wherever the program happens to be."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

STATUS = 130
"""Exit status of a program that Ctrl-C ended: 128 and the signal's number, as shells count."""


@contextmanager
def at_once() -> Iterator[None]:
    """Ends the process without unwinding: a half-imported library or a pool of downloads would turn that into noise."""

    def leave(_number: int, _frame: FrameType | None) -> None:
        os._exit(STATUS)

    with _calling(leave):
        yield


@contextmanager
def between_steps() -> Iterator[Callable[[], bool]]:
    """Gives a function that tells whether Ctrl-C was pressed. A second press raises KeyboardInterrupt at once."""
    is_pressed = False

    def note(_number: int, _frame: FrameType | None) -> None:
        nonlocal is_pressed
        if is_pressed:
            raise KeyboardInterrupt
        is_pressed = True

    with _calling(note):
        yield lambda: is_pressed


@contextmanager
def _calling(act: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    previous = signal.getsignal(signal.SIGINT)
    if previous is signal.SIG_IGN:  # a background job of a script: Ctrl-C is meant for others
        yield
        return
    signal.signal(signal.SIGINT, act)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
